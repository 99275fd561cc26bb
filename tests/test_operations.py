"""Tests of ``tracer.read.operations``: what each side computes, tried on values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tracer.read.grids import round_to
from tracer.read.matched import MatchedRows
from tracer.read.operations import ACTIVATIONS, activation, exchanged_weights, weighted_sum

F64 = npt.NDArray[np.float64]
RANDOM = np.random.default_rng(0)


def rows(a_NC: F64, b_NC: F64, dtype: str = "float32") -> MatchedRows:
    a_NC, b_NC = round_to(a_NC, dtype), round_to(b_NC, dtype)
    place = np.arange(len(a_NC))
    return MatchedRows(
        name="layers.0.mlp.act", dtype_a=dtype, dtype_b=dtype, a_NC=a_NC, b_NC=b_NC, squares_a_N=(a_NC**2).sum(1),
        squares_b_N=(b_NC**2).sum(1), exact=True, source="dumps", token_N=place, position_N=place, total=len(a_NC),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("a", "b"), [("silu", "exact GELU"), ("exact GELU", "quick GELU"), ("ReLU", "squared ReLU")])
def test_activations_are_told_by_their_values(a: str, b: str, dtype: str) -> None:
    """Each side's activation is named, in float32 and bfloat16."""
    x = round_to(RANDOM.standard_normal((24, 96)), dtype)
    gate, up = x[:, :48], x[:, 48:]
    found = activation(rows(ACTIVATIONS[a](gate) * up, ACTIVATIONS[b](gate) * up, dtype), x)
    assert found is not None
    assert found.text == f"another activation: A computes {a} of gate times up, B {b} of gate times up"


def test_exchanged_halves_are_told() -> None:
    """Gate and up in each other's place."""
    x = round_to(RANDOM.standard_normal((24, 96)), "float32")
    silu = ACTIVATIONS["silu"]
    found = activation(rows(silu(x[:, :48]) * x[:, 48:], silu(x[:, 48:]) * x[:, :48]), x)
    assert found is not None
    assert found.text.endswith("A computes silu of gate times up, B silu of up times gate")


def test_what_is_no_known_activation_is_not_named() -> None:
    """The same on both sides, an unknown one, and approximations that bfloat16 cannot tell apart are no finding."""
    x = RANDOM.standard_normal((24, 96))
    gate, up = x[:, :48], x[:, 48:]
    silu = ACTIVATIONS["silu"](gate) * up
    assert activation(rows(silu, silu * 1.0001), x) is None
    assert activation(rows(silu, np.sin(gate) * up), x) is None
    coarse = [ACTIVATIONS[name](gate) * up for name in ("exact GELU", "tanh GELU")]
    found = activation(rows(coarse[0], coarse[0] * (1 + 2.0**-9), "bfloat16"), round_to(x, "bfloat16"))
    assert found is None


def test_factors_of_a_sum_are_named() -> None:
    """One number, or one per row and the scalar it comes from."""
    routed, shared, gate = RANDOM.standard_normal((40, 64)), RANDOM.standard_normal((40, 64)), RANDOM.standard_normal(40)
    sigmoid = 1 / (1 + np.exp(-gate))
    found = weighted_sum(
        rows(routed + sigmoid[:, None] * shared, routed + 2 * shared), {"routed": routed, "shared": shared}, {"moe.shared_gate": gate}
    )
    assert found is not None
    assert found.text == (
        "the same rows added with other factors: shared: A adds it times one number per row, the sigmoid of moe.shared_gate, B times 2"
    )
    assert weighted_sum(rows(routed + shared, routed + shared * (1 + 1e-7)), {"routed": routed, "shared": shared}, {}) is None
    assert weighted_sum(rows(routed + shared, routed * shared), {"routed": routed, "shared": shared}, {}) is None


def test_exchanged_weights_are_told_by_size_and_said_to_be() -> None:
    """Two weights in each other's place; noise of one size, and a ratio, are not that."""
    one, two = RANDOM.standard_normal((40, 64)), RANDOM.standard_normal((40, 64))
    weight = RANDOM.dirichlet((1.0, 1.0), 40)
    a = weight[:, :1] * one + weight[:, 1:] * two
    found = exchanged_weights(rows(a, weight[:, 1:] * one + weight[:, :1] * two), weight)
    assert found is not None
    assert "as exchanging them makes it in 40 rows; what the experts gave is not known here" in found.text
    assert exchanged_weights(rows(a, a + 0.1 * RANDOM.standard_normal(a.shape)), weight) is None
    assert exchanged_weights(rows(a, 1.1 * a), weight) is None
