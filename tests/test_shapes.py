"""Shapes of values: each is found with its parameters and held up on rows not used to find it; rounding has none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.material import F64, matched, random_rows
from tracer.read.findings import Shape
from tracer.read.grids import round_to
from tracer.read.shapes import kept_length, one_sided, some_columns, spans_text, value_shape


def rank_three(a: F64) -> F64:
    random = np.random.default_rng(5)
    return a + 0.3 * a @ random.standard_normal((64, 3)) @ random.standard_normal((3, 64)) / 8


def row_ratios(a: F64) -> F64:
    return a * np.random.default_rng(1).uniform(0.99, 0.999, (len(a), 1))


PLANTED: dict[str, tuple[Callable[[F64], F64], Shape, str, str]] = {
    "zero": (lambda a: 0 * a, Shape.ZERO, "B is all zero", "both"),
    "sign": (lambda a: -a, Shape.SIGN, "sign flipped", "both"),
    "ratio": (lambda a: 1.25 * a, Shape.CONSTANT_RATIO, "B is A times 1.25", "both"),
    "vector": (lambda a: a + np.linspace(-1, 1, 64), Shape.CONSTANT_VECTOR, "one constant vector", "both"),
    "offset": (lambda a: a + 0.5, Shape.CONSTANT_VECTOR, "B is A plus 0.5", "exact"),
    "row ratio": (row_ratios, Shape.ROW_RATIO, "always below 1", "both"),
    "column ratio": (lambda a: a * np.linspace(0.5, 2, 64), Shape.COLUMN_RATIO, "one ratio per column: 0.5 to 2", "exact"),
    "few columns": (lambda a: a * np.where(np.arange(64) // 16 == 2, 1.5, 1), Shape.COLUMN_RATIO, "ratio 1.5 in columns 32..47", "exact"),
    "signs": (lambda a: a * np.where(np.arange(64) < 8, -1, 1), Shape.SIGN, "sign flipped in columns 0..7", "exact"),
    "low rank": (rank_three, Shape.LOW_RANK, "the difference has rank 3", "both"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planted_shapes_are_found(name: str, dtype: str) -> None:
    """Every shape is found in values and, being linear, in sketches, through the rounding of the dtype too."""
    plant, shape, words, where = PLANTED[name]
    a = random_rows(dtype=dtype)
    b = round_to(plant(a), dtype)
    if name == "row ratio" and dtype == "bfloat16":  # within a few roundings of 1
        assert value_shape(matched(a, b, dtype=dtype)) is None
        return
    for exact in (True, False) if where == "both" else (True,):
        found = value_shape(matched(a, b, dtype=dtype, exact=exact))
        assert found is not None
        assert found.shape is shape
        assert words in found.text
        assert found.tested > 0
        assert found.fitted + found.tested <= 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exact", [True, False])
def test_rounding_has_no_shape(dtype: str, exact: bool) -> None:
    """Noise of the size of the last bits, up and down, fits nothing; neither does an unrelated row."""
    a = random_rows(64, dtype=dtype)
    b = round_to(a * (1 + np.random.default_rng(3).uniform(-1, 1, a.shape) * (2.0**-8 if dtype == "bfloat16" else 2.0**-22)), dtype)
    for other in (b, random_rows(64, seed=9, dtype=dtype)):
        rows = matched(a, other, dtype=dtype, exact=exact)
        assert value_shape(rows) is None
        assert one_sided(rows) is None
        assert some_columns(rows) is None
    assert kept_length(matched(a, b, dtype=dtype, exact=exact)) is None


def test_a_shape_must_hold_on_the_rows_that_did_not_find_it() -> None:
    """Rows that follow a ratio only where it was fitted are no ratio, and a vanishing side is no small ratio of the other."""
    a = random_rows()
    b = 1.25 * a
    b[1::2] = random_rows(seed=4)[1::2]
    assert value_shape(matched(a, b)) is None
    assert value_shape(matched(a, 0.01 * random_rows(seed=4))) is None


def test_a_single_row_is_tested_on_its_other_columns() -> None:
    """One row gives a ratio, held up on half of its columns, and no shape with a parameter per row or column."""
    a = random_rows(1)
    found = value_shape(matched(a, 3 * a))
    assert found is not None
    assert (found.shape, found.tested) == (Shape.CONSTANT_RATIO, 1)
    assert value_shape(matched(a, a * np.linspace(1, 2, 64))) is None


def test_two_columns_need_many_rows_for_a_ratio_per_row() -> None:
    """Routing weights that no longer sum to one: a ratio per row out of two columns, and which side sums to one."""
    a = np.abs(random_rows(40, 2)) + 0.1
    a /= a.sum(axis=1, keepdims=True)
    b = a * np.random.default_rng(2).uniform(0.3, 0.8, (40, 1))
    found = value_shape(matched(a, b))
    assert found is not None
    assert found.shape is Shape.ROW_RATIO
    assert "rows of A sum to 1" in found.text
    assert value_shape(matched(a[:8], b[:8])) is None


def test_one_sided_rounding() -> None:
    """A constant rounded on one side makes no element larger; sketches tell it by the lengths of the rows."""
    w = random_rows(96, 48, dtype="bfloat16")
    a, b = round_to(w * 6.9375, "bfloat16"), round_to(w * 48**0.5, "bfloat16")
    found = one_sided(matched(a, b, dtype="bfloat16"))
    assert found is not None
    assert "no element of B is larger in magnitude" in found.text
    assert found.parameters["mean_ratio"] == pytest.approx(0.9987, abs=3e-4)
    found = one_sided(matched(a, b, dtype="bfloat16", exact=False))
    assert found is not None
    assert "rows of B are shorter by 0.1" in found.text
    assert one_sided(matched(a, 2 * b, dtype="bfloat16")) is None, "a large difference is not told by its side"


def test_rotations_keep_the_length_of_heads() -> None:
    """Rows turned within blocks keep the norm of every block; the smallest such block is named."""
    a = random_rows()
    angle = np.linspace(0.3, 3, 32)[:, None, None]
    pairs = a.reshape(32, 4, 2, 8)
    turned = np.stack([pairs[:, :, 0] * np.cos(angle) - pairs[:, :, 1] * np.sin(angle),
                       pairs[:, :, 1] * np.cos(angle) + pairs[:, :, 0] * np.sin(angle)], axis=2).reshape(32, 64)  # fmt: skip
    found = kept_length(matched(a, turned))
    assert found is not None
    assert "every block of 16 columns keeps its norm" in found.text
    assert kept_length(matched(a, turned, exact=False)) is not None
    assert kept_length(matched(a, 1.1 * turned)) is None


def test_differences_confined_to_columns() -> None:
    """A half, a head or a single column; scattered columns are no shape."""
    a = random_rows(dtype="bfloat16")
    for moved, words in ((slice(32, 64), "the second half"), (slice(16, 32), "only columns 16..31 of 64"), ([5], "only columns 5 of 64")):
        b = a.copy()
        b[:, moved] += 1
        found = some_columns(matched(a, b, dtype="bfloat16"))
        assert found is not None
        assert words in found.text
    b = a.copy()
    b[:, ::7] += 1
    assert some_columns(matched(a, b, dtype="bfloat16")) is None
    assert spans_text(np.array([1, 2, 3, 7, 9, 10])) == "1..3, 7, 9..10"
