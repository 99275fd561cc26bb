"""Values on the grid of a coarser dtype, with and without a scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.material import matched, random_rows
from tracer.format.dtypes import float8_values
from tracer.read.findings import Shape
from tracer.read.grids import grid_shape, round_to


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_that_of_torch(dtype: str) -> None:
    """Nearest, ties to even, as torch rounds."""
    values = np.concatenate([random_rows(8).reshape(-1), float8_values("float8_e4m3fn")[:120].astype(np.float64), np.arange(-33, 33) / 16])
    expected = torch.from_numpy(values).to(torch.float32).to(getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(round_to(values.astype(np.float32), dtype), expected)


def test_one_rounding_between_two_dtypes() -> None:
    """A in bfloat16, B in float32: A is B rounded once."""
    b = random_rows()
    found = grid_shape(matched(round_to(b, "bfloat16"), b, dtype="bfloat16", dtype_b="float32"))
    assert found is not None
    assert (found.shape, found.text) == (Shape.GRID, "A is B rounded once to bfloat16")
    assert grid_shape(matched(random_rows(seed=1, dtype="bfloat16"), b, dtype="bfloat16", dtype_b="float32")) is None


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0), ("int8", 127.0)])
@pytest.mark.parametrize("per", ["tensor", "row", "column"])
def test_scaled_grids_are_found(storage: str, dtype: str, most: float, per: str) -> None:
    """Fake quantisation with a scale per tensor, row or column is told apart from the values it came from."""
    a = random_rows(96, 96, dtype=storage)
    axis = {"tensor": None, "row": 1, "column": 0}[per]
    scale = np.abs(a).max(axis=axis, keepdims=True) / most
    coded = np.rint(a / scale) if dtype == "int8" else round_to(a / scale, dtype)
    found = grid_shape(matched(a, round_to(coded * scale, storage), dtype=storage))
    if dtype == "int8" and storage == "bfloat16":
        assert found is None or found.parameters["dtype"] == "int8"  # nearly as coarse as its storage: few values tell
        return
    assert found is not None
    assert found.parameters["side"] == "b"
    assert f"one scale per {per}" in found.text
    assert found.parameters["dtype"] == dtype


def test_plain_noise_is_on_no_grid() -> None:
    """Other values of the same dtype lie on no grid."""
    a = random_rows(96, 96, dtype="bfloat16")
    assert grid_shape(matched(a, random_rows(96, 96, seed=2, dtype="bfloat16"), dtype="bfloat16")) is None
    assert grid_shape(matched(a[:2, :4], a[:2, :4] + 1, dtype="bfloat16")) is None
