"""Tests of ``tracer.read.rotations``: pairs, angles and the order of norm and rotation, from values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tracer.read.grids import round_to
from tracer.read.matched import MatchedRows
from tracer.read.rotations import find_rotation, norm_order, rotation_shape

F64 = npt.NDArray[np.float64]
HEAD, HEADS = 16, 4


def inputs(rows: int = 60, heads: int = HEADS) -> F64:
    return np.random.default_rng(0).standard_normal((rows, heads * HEAD))


def positions(rows: int = 60) -> npt.NDArray[np.int64]:
    return np.arange(1, rows + 1)


def turned(
    x_NC: F64, *, adjacent: bool = False, factor: float = 1.0, base: float = 1e4, columns: int = HEAD, dtype: str = "float32"
) -> F64:
    """Rotary positions over the first columns of every head."""
    x = x_NC.reshape(len(x_NC), -1, HEAD).copy()
    angle = positions(len(x_NC))[:, None] * factor * base ** (-np.arange(columns // 2) * 2 / columns)
    first, second = (slice(0, columns, 2), slice(1, columns, 2)) if adjacent else (slice(0, columns // 2), slice(columns // 2, columns))
    a, b = x[..., first].copy(), x[..., second].copy()
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x[..., first], x[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return round_to(x.reshape(x_NC.shape), dtype)


def rows(a_NC: F64, b_NC: F64, dtype: str = "float32") -> MatchedRows:
    place = positions(len(a_NC))
    return MatchedRows(
        name="layers.0.attn.q_rope", dtype_a=dtype, dtype_b=dtype, a_NC=a_NC, b_NC=b_NC, squares_a_N=(a_NC**2).sum(1),
        squares_b_N=(b_NC**2).sum(1), exact=True, source="dumps", token_N=place, position_N=place, total=len(a_NC), head=HEAD,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_pairs_are_named(dtype: str) -> None:
    """Neighbours against halves, and how much of the head is turned."""
    x = inputs()
    found = rotation_shape(rows(turned(x, dtype=dtype), turned(x, adjacent=True, dtype=dtype), dtype), x, "q")
    assert found is not None
    assert found.text == "A rotates pairs (i, i+8) of every 16 columns, B pairs (2i, 2i+1)"
    found = rotation_shape(rows(turned(x, dtype=dtype), turned(x, columns=8, dtype=dtype), dtype), x, "q")
    assert found is not None
    assert "B pairs (i, i+4) of the first 8" in found.text


@pytest.mark.parametrize(("factor", "said"), [(0.25, "angle of B is the angle of A / 4,"), (1.5, "angle of A is the angle of B / 1.5,")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_positions_give_their_factor(dtype: str, factor: float, said: str) -> None:
    """One factor at every pair, whole or not."""
    x = inputs()
    found = rotation_shape(rows(turned(x, dtype=dtype), turned(x, factor=factor, dtype=dtype), dtype), x, "q")
    assert found is not None
    assert said in found.text


def test_another_base_is_told_from_a_factor() -> None:
    """Frequencies that part more and more from pair to pair are another base."""
    x = inputs()
    found = rotation_shape(rows(turned(x), turned(x, base=5e5)), x, "q")
    assert found is not None
    assert found.parameters["base_a"] == pytest.approx(1e4, rel=0.2)
    assert found.parameters["base_b"] == pytest.approx(5e5, rel=0.2)


def test_a_side_that_does_not_rotate_is_named() -> None:
    """One side gives its input."""
    x = inputs()
    found = rotation_shape(rows(turned(x), x), x, "layers.0.attn.q_norm")
    assert found is not None
    assert found.text == "A rotates pairs (i, i+8) of every 16 columns, B gives layers.0.attn.q_norm unchanged"


def test_rounding_and_noise_are_no_rotation() -> None:
    """The same angles rounded otherwise are no finding; other values, heads turned each by its own angle, and single heads fit nothing."""
    x = inputs()
    exact = turned(x)
    assert rotation_shape(rows(round_to(exact, "bfloat16"), round_to(exact * (1 + 2.0**-9), "bfloat16"), "bfloat16"), x, "q") is None
    assert find_rotation(x, np.random.default_rng(1).standard_normal(x.shape), HEAD, 2.0**-24) is None
    apart = np.concatenate([turned(x[:, :HEAD]), turned(x[:, HEAD:], factor=2)], axis=1)
    assert find_rotation(x, apart, HEAD, 2.0**-24) is None
    assert find_rotation(x[:, :HEAD], turned(x[:, :HEAD]), HEAD, 2.0**-24) is None


def test_the_order_of_norm_and_rotation() -> None:
    """The side that rotates first is named; norms with other weights alone are not that."""
    x = inputs()
    weight = np.tile(1 + 0.2 * np.random.default_rng(2).standard_normal(HEAD), HEADS)

    def norm(values: F64) -> F64:
        blocks = values.reshape(len(values), -1, HEAD)
        return np.asarray((blocks / np.sqrt((blocks**2).mean(axis=2, keepdims=True))).reshape(values.shape) * weight)

    found = norm_order(rows(norm(turned(x)), norm(x)), x, "layers.0.attn.q")
    assert found is not None
    assert found.text.startswith("the sides order the norm and the rotation differently: B norms layers.0.attn.q, A norms it after")
    assert norm_order(rows(norm(x), norm(x) * 1.1), x, "q") is None
