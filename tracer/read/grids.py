"""Values that lie on the grid of a coarser dtype: rounded once, or quantised with a scale per tensor, row or column.

Shape suffixes: N rows, C columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import float8_values
from tracer.read.findings import Shape
from tracer.read.matched import EPSILON, MatchedRows
from tracer.read.shapes import Found

__all__ = ["grid_shape", "round_to"]

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ON = 0.98
"""Share of values that must lie on the grid, of the tested rows."""
_OFF = 0.6
"""Share of the other side's values that may lie on it by chance."""
_FEW = 64
_LOWEST = 2.0**-9
"""Values smaller than this times the largest lie where a small float's grid becomes uniform, or where storage rounds; not looked at."""


def grid_shape(rows: MatchedRows) -> Found | None:
    """One side is the other rounded to a coarser dtype, or lies on the grid of one times a scale. Exact rows only."""
    if not rows.exact or rows.a_NC.size < _FEW or len(rows) < 2:
        return None
    return _rounded(rows) or _scaled(rows) or _both(rows)


def round_to(values: npt.NDArray[Any], dtype: str) -> F64:
    """Values rounded to nearest even in a dtype, as float64; beyond its range they saturate. Not for subnormal float16."""
    exact: F64 = values.astype(np.float64)
    if dtype in ("bfloat16", "float32"):
        bits = exact.astype(np.float32).view(np.uint32)
        if dtype == "bfloat16":
            bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.asarray(bits.view(np.float32), np.float64)
    if dtype == "float16":
        return np.asarray(np.clip(exact, -65504, 65504).astype(np.float16), np.float64)
    return _nearest(exact, _grid(dtype))


def _rounded(rows: MatchedRows) -> Found | None:
    for coarse in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        if EPSILON[coarse] < rows.epsilon:
            continue
        for side, image, source in (("B", rows.b_NC, rows.a_NC), ("A", rows.a_NC, rows.b_NC)):
            same = image == round_to(source, coarse)
            already = (source == round_to(source, coarse)).mean()
            if same[::2].mean() >= _ON and same[1::2].mean() >= _ON and already <= _OFF:
                other = "A" if side == "B" else "B"
                text = f"{side} is {other} rounded once to {coarse}"
                tested = len(rows) // 2
                share = float(1 - same[1::2].mean())
                return Found(Shape.GRID, text, len(rows) - tested, tested, share, {"dtype": coarse, "side": side.lower(), "scale": "none"})
    return None


def _scaled(rows: MatchedRows) -> Found | None:
    for dtype in ("float8_e5m2", "float8_e4m3fn", "int8"):  # coarse first: its grid lies in the finer one
        for side, image, source in (("B", rows.b_NC, rows.a_NC), ("A", rows.a_NC, rows.b_NC)):
            for per in ("tensor", "row", "column"):
                tested = _on_grid(image, source, dtype, per, rows.epsilon)
                if tested is not None:
                    share, count = tested
                    near = _near(image, source, dtype, per, rows.epsilon)
                    text = f"{side} lies on the {dtype.removeprefix('float8_').removesuffix('fn')} grid times one scale per {per}"
                    if near < _ON:
                        text += f", but only {near:.0%} of its values are what rounding the other side's to it gives"
                    parameters = {"dtype": dtype, "side": side.lower(), "scale": per, "near": near}
                    return Found(Shape.GRID, text, len(rows) - count, count, 1 - share, parameters)
    return None


def _both(rows: MatchedRows) -> Found | None:
    """Both sides lie on one grid with one scale per tensor, and part by a few of its steps: quantised from other values."""
    tested = len(rows) // 2
    for dtype in ("float8_e5m2", "float8_e4m3fn", "int8"):
        fit = np.concatenate([rows.a_NC[::2], rows.b_NC[::2]]).reshape(1, -1)
        scales = _scales(fit, dtype, rows.epsilon)
        if scales is None:
            continue
        sides = [_share(side[1::2].reshape(1, -1), scales, dtype, rows.epsilon) for side in (rows.a_NC, rows.b_NC)]
        if any(on < _ON or looked < _FEW for on, looked in sides) or _by_chance(rows, scales, dtype):
            continue
        grid = _grid(dtype)
        codes = [np.searchsorted(grid, _nearest(side / scales, grid)) for side in (rows.a_NC, rows.b_NC)]
        steps = np.abs(codes[0] - codes[1])
        moved = float((steps > 0).mean())
        most = int(steps.max(initial=0))
        short = dtype.removeprefix("float8_").removesuffix("fn")
        text = f"both sides lie on the {short} grid times one scale; {moved:.1%} of the codes differ in these rows, by at most {most} step"
        parameters = {"dtype": dtype, "side": "both", "scale": "tensor", "codes": moved, "steps": most}
        return Found(Shape.GRID, text + ("s" if most != 1 else ""), len(rows) - tested, tested, 1 - min(on for on, _ in sides), parameters)
    return None


def _by_chance(rows: MatchedRows, scales: F64, dtype: str) -> bool:
    """Whether values like these lie on the grid whatever their scale is."""
    values = rows.a_NC[1::2].reshape(1, -1)
    return all(_share(values, scales * other, dtype, rows.epsilon)[0] > _OFF for other in (1.1, 1.3))


def _on_grid(image_NC: F64, source_NC: F64, dtype: str, per: str, epsilon: float) -> tuple[float, int] | None:
    """Share of the tested values on the grid, and how many rows were tested; None where it is none of their grid."""
    if per == "column":
        image_NC, source_NC = image_NC.T, source_NC.T
    if image_NC.shape[0] < 2 or (per != "tensor" and image_NC.shape[1] < _FEW // 2):
        return None
    if per == "tensor":  # the scale is found on half of the rows and tested on the others
        fit, test, other = image_NC[::2].reshape(1, -1), image_NC[1::2].reshape(1, -1), source_NC[1::2].reshape(1, -1)
    else:  # the scale of a row is found on half of its columns
        fit, test, other = image_NC[:, ::2], image_NC[:, 1::2], source_NC[:, 1::2]
    scales = _scales(fit, dtype, epsilon)
    if scales is None:
        return None
    on, looked = _share(test, scales, dtype, epsilon)
    if looked < _FEW or on < _ON or _share(other, scales, dtype, epsilon)[0] > _OFF:
        return None
    return on, image_NC.shape[1] // 2 if per == "column" else len(image_NC) // 2


def _near(image_NC: F64, source_NC: F64, dtype: str, per: str, epsilon: float) -> float:
    """Share of the values on the grid that are the nearest to the other side's, up to the rounding of their own dtype; what lies
    beyond the grid's end counts where it was clipped to it."""
    if per == "column":
        image_NC, source_NC = image_NC.T, source_NC.T
    lines, others = (side.reshape(1, -1) if per == "tensor" else side for side in (image_NC, source_NC))
    scales = _scales(lines, dtype, epsilon)
    if scales is None:
        return 0.0
    code, wanted = lines / scales, np.clip(others / scales, _grid(dtype)[0], _grid(dtype)[-1])
    half_step = _spacing(np.maximum(np.abs(code), np.abs(wanted)), dtype) / 2
    return float((np.abs(code - wanted) <= half_step + 4 * epsilon * np.abs(wanted) + 1e-12).mean())


def _scales(fit_NC: F64, dtype: str, epsilon: float) -> F64 | None:
    """Per line the scale on whose grid most of its values lie, (N, 1)."""
    largest = np.abs(fit_NC).max(axis=1, keepdims=True)
    if not (largest > 0).all():
        return None
    grid = _grid(dtype)
    tops = grid[grid > grid[-1] / 2]  # the largest value may be any of the top binade
    shares, offs = [], []
    for top in tops:
        on, telling = _on(fit_NC, largest / top, dtype, 2 * epsilon)  # the largest value was rounded itself
        looked = np.maximum(telling.sum(axis=1), 1)
        code = fit_NC / (largest / top)
        shares.append((on & telling).sum(axis=1) / looked)
        offs.append((np.abs(code - _nearest(code, grid)) / _spacing(np.abs(code), dtype) * telling).sum(axis=1) / looked)
    best_NT = np.stack(shares, axis=1)
    if np.median(best_NT.max(axis=1)) < _ON:
        return None
    near_NT = np.where(best_NT >= best_NT.max(axis=1, keepdims=True) - 0.02, np.stack(offs, axis=1), np.inf)  # several fit: the closest
    scales = largest / tops[near_NT.argmin(axis=1)][:, None]
    telling = _on(fit_NC, scales, dtype, 2 * epsilon)[1]
    code = np.where(telling, _nearest(fit_NC / scales, grid), 0.0)
    refined: F64 = (fit_NC * code).sum(axis=1, keepdims=True) / np.maximum((code**2).sum(axis=1, keepdims=True), 1e-300)
    return refined


def _share(values_NC: F64, scales_N1: F64, dtype: str, epsilon: float) -> tuple[float, int]:
    """Share of values that lie on the grid up to the rounding of their own dtype, and how many could tell."""
    on, telling = _on(values_NC, scales_N1, dtype, epsilon)
    return (float(on[telling].mean()) if telling.any() else 0.0), int(telling.sum())


def _on(values_NC: F64, scales_N1: F64, dtype: str, epsilon: float) -> tuple[Bools, Bools]:
    """Which values lie on the grid, and which are large enough, and of a grid coarse enough there, to tell."""
    grid = _grid(dtype)
    code = values_NC / scales_N1
    size = np.abs(code)
    allowed = np.maximum(1.5 * epsilon, 1e-6) * size
    telling = (size > grid[-1] * _LOWEST) & (allowed < _spacing(size, dtype) / 8)
    return np.asarray(np.abs(code - _nearest(code, grid)) <= allowed), np.asarray(telling)


def _spacing(size: F64, dtype: str) -> F64:
    if dtype == "int8":
        return np.ones_like(size)
    bits = 3 if dtype == "float8_e4m3fn" else 2
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-6))) - bits))


@cache
def _grid(dtype: str) -> F64:
    """All finite values of a small dtype, ascending."""
    if dtype == "int8":
        return np.arange(-127, 128, dtype=np.float64)
    values = float8_values(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def _nearest(values: F64, grid: F64) -> F64:
    """The nearest grid value, ties to the one whose last bit is even, as rounding has it."""
    at = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    below, above = grid[at - 1], grid[at]
    middle = (below + above) / 2
    even_below = (len(grid) // 2 - (at - 1)) % 2 == 0
    lower = (values < middle) | ((values == middle) & even_below)
    return np.asarray(np.where(lower, below, above))
