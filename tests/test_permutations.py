"""The same numbers in another place."""

from __future__ import annotations

import numpy as np
import pytest

from tests.material import matched, random_rows
from tests.sides import Side
from tracer.read.compare import compare_boundary
from tracer.read.findings import Shape
from tracer.read.grids import round_to
from tracer.read.pairing import pair_sides
from tracer.read.permutations import column_permutation, row_permutation
from tracer.read.shapes import Found

HEADS = np.arange(64).reshape(4, 16)
HALVES = (np.arange(64) // 16 * 16) + (np.arange(64) + 8) % 16
PAIRS = np.arange(64) // 16 * 16 + np.tile(np.arange(16) // 2 + np.arange(16) % 2 * 8, 4)


@pytest.mark.parametrize(
    ("order", "name", "words"),
    [
        (HEADS[[1, 0, 3, 2]].reshape(-1), "layers.0.attn.k", "KV heads permuted: B holds A's [1, 0, 3, 2] (blocks of 16 columns)"),
        (HEADS[[2, 3, 0, 1]].reshape(-1), "layers.0.attn.v", "[1, 0] (blocks of 32 columns)"),
        (HALVES, "layers.0.attn.q_rope", "within every block of 16: its halves are exchanged"),
        (PAIRS, "layers.0.attn.q_rope", "B interleaves what A keeps in halves"),
        (np.arange(64)[::-1], "layers.0.mlp.act", "columns permuted: B holds A's 64 of 64 moved"),
    ],
)
def test_columns_are_found_in_their_largest_blocks(order: np.ndarray, name: str, words: str) -> None:
    """Heads, halves within heads, single columns: told by their values, tested on the other rows."""
    a = random_rows(dtype="bfloat16")
    found = column_permutation(matched(a, a[:, order], dtype="bfloat16", name=name, head=16))
    assert found is not None
    assert words in found.text
    assert found.tested == 16


def test_columns_are_found_through_rounding() -> None:
    """Permuted products that were rounded in another order are still told, by correlation; experts by their name."""
    a = random_rows(40, 8, dtype="bfloat16")
    order = [3, 0, 5, 1, 7, 2, 4, 6]
    b = round_to(a[:, order] * (1 + 2.0**-9 * np.random.default_rng(1).uniform(-1, 1, (40, 8))), "bfloat16")
    found = column_permutation(matched(a, b, dtype="bfloat16", name="layers.1.moe.router_logits"))
    assert found is not None
    assert found.text == f"experts permuted: B holds A's {order}"
    assert column_permutation(matched(a, random_rows(40, 8, seed=2), dtype="bfloat16")) is None
    assert column_permutation(matched(a, a * 2, dtype="bfloat16")) is None


def moved(change: Side) -> Found | None:
    """The row permutation of layer 1's attention output."""
    x, y = Side().trace(), change.trace()
    comparison = compare_boundary(x.boundaries["layers.1.attn.out"], y.boundaries["layers.1.attn.out"], pair_sides(x, y).tokens)
    return row_permutation(comparison, comparison.differing, x.tokens)


def test_a_shift_by_one_token_is_told_by_digests() -> None:
    """B's row at t is A's at t - 1, in both sequences, bit for bit."""
    b = Side()
    rows = b.values["layers.1.attn.out"].rows.copy()
    rows[1:7], rows[8:12] = rows[0:6].copy(), rows[7:11].copy()
    b.values["layers.1.attn.out"].rows = rows
    found = moved(b)
    assert found is not None
    assert (found.shape, found.parameters["shift"]) == (Shape.TOKEN_SHIFT, 1)
    assert "A's at t - 1" in found.text


def test_exchanged_sequences_and_scattered_rows() -> None:
    """Rows of the other sequence at the same position, rows in any other order; single changed rows are none of it."""
    b = Side()
    rows = b.values["layers.1.attn.out"].rows.copy()
    rows[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]] = rows[[7, 8, 9, 10, 11, 0, 1, 2, 3, 4]]
    b.values["layers.1.attn.out"].rows = rows
    found = moved(b)
    assert found is not None
    assert "sequences exchanged" in found.text
    b = Side()
    b.values["layers.1.attn.out"].rows = b.values["layers.1.attn.out"].rows[[4, 1, 2, 9, 0, 5, 6, 7, 8, 3, 10, 11]]
    found = moved(b)
    assert found is not None
    assert found.shape is Shape.ROWS_PERMUTED
    b = Side()
    b.change("layers.1.attn.out", "s0:1", "s0:2", "s0:3")
    assert moved(b) is None
