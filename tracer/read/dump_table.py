"""The table of dumps: raw values of both sides, row by row, in the numbers that people compare tensors by.

Shape suffixes: N matched rows, C columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import decode_to_float32
from tracer.read.choices import MANTISSA_BITS, ulps_between
from tracer.read.dumped import DumpedBoundary, DumpedWeight, Dumps
from tracer.read.findings import DumpLine
from tracer.read.pairing import TokenMatch

__all__ = ["dump_lines", "dump_ulps", "weight_lines"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_Dumped = DumpedBoundary | DumpedWeight

_CHUNK_VALUES = 1 << 22
_LOGITS = re.compile(r"lm_head(\.raw)?(#\d+)?")
_EXPERTS = 1 << 20


def dump_lines(a: Dumps, b: Dumps, tokens: TokenMatch) -> tuple[DumpLine, ...]:
    """One line per boundary that both sides dumped, in A's causal order."""
    roles = _roles(a) | _roles(b)
    weights = (_weight_line(dumped, b.weights[name]) for name, dumped in a.weights.items() if name in b.weights)
    return *weights, *(
        _line(dumped, b.boundaries[name], tokens, roles.get(name, "asked for"))
        for name, dumped in a.boundaries.items()
        if name in b.boundaries
    )


def _roles(dumps: Dumps) -> dict[str, str]:
    plan = dumps.plan
    return {} if plan is None else {entry.boundary: "output" if entry.output else "input" for entry in plan.boundaries}


def matching(a: DumpedBoundary, b: DumpedBoundary, tokens: TokenMatch) -> tuple[I64, I64]:
    """Lines of both dumps that are the same (token, expert)."""
    experts_a = np.zeros(len(a), np.int64) if a.expert_R is None else a.expert_R + 1
    experts_b = np.zeros(len(b), np.int64) if b.expert_R is None else b.expert_R + 1
    token = tokens.b_of_a[a.token_R]
    code_a, code_b = token * _EXPERTS + experts_a, b.token_R * _EXPERTS + experts_b
    if not len(code_b) or not len(code_a):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    at = np.minimum(np.searchsorted(code_b, code_a), len(code_b) - 1)
    hit = np.flatnonzero((code_b[at] == code_a) & (token >= 0) & ~a.altered_R & ~b.altered_R[at])
    return hit, at[hit]


def weight_lines(a: DumpedWeight, b: DumpedWeight) -> tuple[I64, I64]:
    """Lines of both dumps that are the same row of a weight."""
    _, lines_a, lines_b = np.intersect1d(a.row_R, b.row_R, return_indices=True)
    good = ~a.altered_R[lines_a] & ~b.altered_R[lines_b]
    return lines_a[good], lines_b[good]


def _weight_line(a: DumpedWeight, b: DumpedWeight) -> DumpLine:
    lines_a, lines_b = weight_lines(a, b)
    found, first = _figures(a, b, lines_a, lines_b, "weight")
    if first is not None:
        found = _with(found, first_request="row", first_position=int(a.row_R[lines_a[first[0]]]), first_column=first[1])
    return found


def _line(a: DumpedBoundary, b: DumpedBoundary, tokens: TokenMatch, role: str) -> DumpLine:
    lines_a, lines_b = matching(a, b, tokens)
    found, first = _figures(a, b, lines_a, lines_b, role)
    if first is not None:
        row, column = first
        request, position = a.label(int(lines_a[row]))
        expert = None if a.expert_R is None else int(a.expert_R[lines_a[row]])
        found = _with(found, first_request=request, first_position=position, first_expert=expert, first_column=column)
    return found


def _figures(a: _Dumped, b: _Dumped, lines_a: I64, lines_b: I64, role: str) -> tuple[DumpLine, tuple[int, int] | None]:
    """A line without the name of its first bad place, and that place among the matched rows, (row, column)."""
    line = DumpLine(boundary=a.name, role=role, rows=len(lines_a), columns=a.width, dtype_a=a.dtype, dtype_b=b.dtype)
    if a.width != b.width:
        return _with(line, text=f"width {a.width} against {b.width}"), None
    if not len(lines_a):
        return _with(line, text="no row of one side was dumped by the other"), None
    try:
        sums = _Sums(coarser(a.dtype, b.dtype), bool(_LOGITS.fullmatch(a.name)))
        step = max(1, _CHUNK_VALUES // max(a.width, 1))
        for start in range(0, len(lines_a), step):
            part = slice(start, start + step)
            sums.add(_values(a, lines_a[part]), _values(b, lines_b[part]), start)
    except ValueError:
        return _with(line, text="packed: bytes without values of their own"), None
    bytewise = a.dtype == b.dtype  # else by value: another dtype is told apart
    differing = int((a.raw_RB[lines_a] != b.raw_RB[lines_b]).any(axis=1).sum()) if bytewise else sums.rows_differing
    return _with(line, rows_differing=differing, **sums.figures()), sums.first


def _with(line: DumpLine, **fields: object) -> DumpLine:
    return msgspec.structs.replace(line, **fields)


def _values(dumped: _Dumped, lines: I64) -> F64:
    return decode_to_float32(dumped.raw_RB[lines], dumped.dtype).reshape(len(lines), dumped.width).astype(np.float64)


def coarser(dtype_a: str, dtype_b: str) -> str:
    """The coarser of two float dtypes, empty where either has no ulps."""
    names = list(MANTISSA_BITS)
    if dtype_a not in names or dtype_b not in names:
        return ""
    return min(dtype_a, dtype_b, key=lambda dtype: MANTISSA_BITS[dtype])


class _Sums:
    """Running figures over chunks of rows."""

    def __init__(self, ulps_dtype: str, logits: bool) -> None:
        self.ulps_dtype, self.logits = ulps_dtype, logits
        self.count = self.finite_a = self.finite_b = self.both = self.rows_differing = 0
        self.max_abs = self.sum_abs = self.squares = self.squares_a = self.squares_b = self.product = 0.0
        self.differing = self.above = self.argmax = 0
        self.ulps = self.log_softmax = self.variation = 0.0
        self.first: tuple[int, int] | None = None

    def add(self, x: F64, y: F64, start: int) -> None:
        """Some rows of both sides, (N, C); ``start``: index of the first."""
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        both = finite_x & finite_y
        self.count += x.size
        self.finite_a += int(finite_x.sum())
        self.finite_b += int(finite_y.sum())
        self.both += int(both.sum())
        apart = (x != y) & ~(np.isnan(x) & np.isnan(y))
        self.rows_differing += int(apart.any(axis=1).sum())
        if self.first is None and apart.any():
            row = int(apart.any(axis=1).argmax())
            self.first = start + row, int(apart[row].argmax())
        x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        difference = y - x
        size = np.abs(difference)
        self.max_abs = max(self.max_abs, float(size.max(initial=0.0)))
        self.sum_abs += float(size.sum())
        self.squares += float((difference**2).sum())
        self.squares_a += float((x**2).sum())
        self.squares_b += float((y**2).sum())
        self.product += float((x * y).sum())
        self.differing += int((difference != 0).sum())
        self.above += int((difference > 0).sum())
        if self.ulps_dtype and (difference != 0).any():
            moved = difference != 0
            self.ulps = max(self.ulps, float(np.abs(ulps_between(y[moved], x[moved], self.ulps_dtype)).max()))
        if self.logits and both.all():
            log_x, log_y = _log_softmax(x), _log_softmax(y)
            self.log_softmax = max(self.log_softmax, float(np.abs(log_x - log_y).max()))
            self.variation = max(self.variation, float(np.abs(np.exp(log_x) - np.exp(log_y)).sum(axis=1).max() / 2))
            self.argmax += int((x.argmax(axis=1) != y.argmax(axis=1)).sum())

    def figures(self) -> dict[str, object]:
        """Fields of a ``DumpLine``. What has a zero norm below it is None."""
        larger = max(self.squares_a, self.squares_b)
        norms = np.sqrt(self.squares_a * self.squares_b)
        found: dict[str, object] = {
            "finite_a": self.finite_a / max(self.count, 1),
            "finite_b": self.finite_b / max(self.count, 1),
            "max_abs": self.max_abs if self.both else None,
            "mae": self.sum_abs / self.both if self.both else None,
            "relative_l2": float(np.sqrt(self.squares / larger)) if larger > 0 else None,
            "cosine": float(np.clip(self.product / norms, -1, 1)) if norms > 0 else None,
            "ulps": self.ulps if self.ulps_dtype else None,
            "b_above": self.above / self.differing if self.differing else None,
        }
        if self.logits:
            found |= {"log_softmax": self.log_softmax, "total_variation": self.variation, "argmax_differs": self.argmax}
        return found


def _log_softmax(logits: F64) -> F64:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def dump_ulps(a: DumpedBoundary, b: DumpedBoundary, tokens: TokenMatch) -> Mapping[tuple[int, int], float]:
    """(token of A, expert or -1) -> largest difference of the row in ulps of the coarser dtype; inf where a value is not finite
    on one side only, or where the dtype has no ulps."""
    lines_a, lines_b = matching(a, b, tokens)
    dtype = coarser(a.dtype, b.dtype)
    if a.width != b.width or not dtype:
        return {}
    found: dict[tuple[int, int], float] = {}
    step = max(1, _CHUNK_VALUES // max(a.width, 1))
    for start in range(0, len(lines_a), step):
        part = slice(start, start + step)
        x, y = _values(a, lines_a[part]), _values(b, lines_b[part])
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        with np.errstate(invalid="ignore"):
            ulps = np.where(
                same, 0.0, np.where(finite, np.abs(ulps_between(np.where(finite, y, 1.0), np.where(finite, x, 1.0), dtype)), np.inf)
            )
        tokens_N = a.token_R[lines_a[part]].tolist()
        experts_N = [-1] * len(tokens_N) if a.expert_R is None else a.expert_R[lines_a[part]].tolist()
        found |= dict(zip(zip(tokens_N, experts_N, strict=True), ulps.max(axis=1, initial=0.0).tolist(), strict=True))
    return found
