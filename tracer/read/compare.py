"""One boundary, two sides: which rows belong together, which differ, and how far apart they are.

Nothing but digests is touched where nothing differs. Shape suffixes: R matched rows, D differing rows among them,
C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import DTYPES
from tracer.format.fingerprint import row_distance
from tracer.format.schema import RowScope
from tracer.read.logical import LogicalBoundary, Statistics
from tracer.read.pairing import TokenMatch
from tracer.read.wording import count

__all__ = ["SKETCH_RESOLUTION", "Comparison", "Method", "compare_boundary", "partial_rounding"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
_T = TypeVar("_T")

SKETCH_RESOLUTION = 2.0**-20
"""Relative distance below which float32 sketches of equal values may differ: their sums run in another order on
another column split."""

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3}
_CHUNK = 1 << 16


def _no_rows() -> I64:
    return np.empty(0, np.int64)


class Method(str, Enum):
    """How two rows were told apart."""

    DIGEST = "digest"
    """Bitwise, every column."""
    PARTS = "parts"
    """Partial sums of the same split: bitwise, coordinate by coordinate."""
    SKETCH = "sketch"
    """No comparable digest exists (other dtype, partial sums); distances only."""
    CHOICES = "choices"
    """Another number of choices per row: every row differs."""
    NONE = "none"
    """Not comparable at all; ``reason`` says why."""


@dataclass(frozen=True)
class Comparison:
    """Rows of one boundary on both sides. ``rows_a``, ``rows_b``: (R,) row indices of the pairs, in A's row order;
    None where they are all rows in their own order. ``only_a``, ``only_b``: rows without a partner. ``differing``:
    (D,) indices into the pairs, ascending: other digests, or with ``Method.SKETCH`` a distance beyond the resolution.
    ``reason``: why the method is not ``DIGEST``; ``dtype_differs``: a finding of its own."""

    a: LogicalBoundary
    b: LogicalBoundary
    method: Method
    differing: I64
    rows_a: I64 | None = None
    rows_b: I64 | None = None
    only_a: I64 = field(default_factory=_no_rows)
    only_b: I64 = field(default_factory=_no_rows)
    reason: str = ""
    dtype_differs: bool = False

    @property
    def name(self) -> str:
        """The boundary's name."""
        return self.a.info.name

    def __len__(self) -> int:
        return len(self.a) if self.rows_a is None else len(self.rows_a)

    @cached_property
    def token_R(self) -> I64:
        """A's token index of every pair, int64 (R,)."""
        return self.a.token_R if self.rows_a is None else self.a.token_R[self.rows_a]

    def sides(self, pairs: I64) -> tuple[I64, I64]:
        """Row indices on A and on B of some pairs."""
        return (pairs if self.rows_a is None else self.rows_a[pairs], pairs if self.rows_b is None else self.rows_b[pairs])

    @cached_property
    def statistics(self) -> tuple[Statistics, Statistics] | None:
        """Float statistics of both sides' rows, whole; None where a side keeps none."""
        a, b = self.a.load_statistics(), self.b.load_statistics()
        return None if a is None or b is None else (a, b)

    @cached_property
    def values(self) -> tuple[I64, I64] | None:
        """Raw integers of the differing pairs, (D, C) each, with ``Method.CHOICES`` of another C; None where a side keeps none."""
        a, b = self.a.load_values(), self.b.load_values()
        if a is None or b is None:
            return None
        rows_a, rows_b = self.sides(self.differing)
        return a[rows_a], b[rows_b]

    @cached_property
    def distance_D(self) -> F64:
        """Relative distance of the differing pairs, float64 (D,): 0 is below the sketch's resolution, NaN undefined.
        Integer rows have no distance: 1 stands for "another value"."""
        return self.distances(self.differing)

    def distances(self, pairs: I64) -> F64:
        """Relative distance of any pairs, as ``distance_D``."""
        if self.values is not None:
            return np.ones(len(pairs))
        if self.statistics is None:
            return np.full(len(pairs), np.nan)
        a, b = self.statistics
        out = np.empty(len(pairs))
        for start in range(0, len(pairs), _CHUNK):
            rows_a, rows_b = self.sides(pairs[start : start + _CHUNK])
            x, y = _Taken(a.sketch_R16[rows_a], a.sum_squares_R[rows_a]), _Taken(b.sketch_R16[rows_b], b.sum_squares_R[rows_b])
            found = row_distance(x, y)
            same = (x.sketch_R16 == y.sketch_R16).all(axis=1)
            same &= np.isfinite(x.sum_squares_R) & np.isfinite(y.sum_squares_R)
            found[same] = 0.0  # two zero rows that differ in the sign of zero have no norm to divide by
            out[start : start + _CHUNK] = found
        return out

    def release(self) -> None:
        """Let go of what was loaded beyond digests; distances that were asked for stay."""
        for loaded in ("statistics", "values"):
            self.__dict__.pop(loaded, None)

    @cached_property
    def nonfinite_differs_D(self) -> Bools:
        """Differing pairs with another number of non-finite values, of which no distance speaks."""
        if self.statistics is None:
            return np.zeros(len(self.differing), np.bool_)
        rows_a, rows_b = self.sides(self.differing)
        differs: Bools = self.statistics[0].nonfinite_R[rows_a] != self.statistics[1].nonfinite_R[rows_b]
        return differs

    def holds_nonfinite(self, pairs: I64) -> Bools:
        """Which pairs have a row with non-finite values, of which a fingerprint keeps the number alone. ``False`` where no
        statistics are kept."""
        if self.statistics is None:
            return np.zeros(len(pairs), np.bool_)
        rows_a, rows_b = self.sides(pairs)
        held: Bools = (self.statistics[0].nonfinite_R[rows_a] > 0) | (self.statistics[1].nonfinite_R[rows_b] > 0)
        return held

    def of_rows(self, pairs: I64, known: Mapping[tuple[int, int], _T], default: _T) -> list[_T]:
        """What is ``known`` of some pairs by (token of A, expert or -1), as dumps list their rows."""
        token = self.token_R[pairs].tolist()
        expert_R = self.a.expert_R
        expert = [-1] * len(token) if expert_R is None else expert_R[self.sides(pairs)[0]].tolist()
        return [known.get(row, default) for row in zip(token, expert, strict=True)]


@dataclass(frozen=True)
class _Taken:
    """Some rows of statistics, as ``row_distance`` wants them."""

    sketch_R16: npt.NDArray[np.float32]
    sum_squares_R: F64


def partial_rounding(a: LogicalBoundary, b: LogicalBoundary) -> float:
    """Relative distance that rounding alone may put between a reduced row and the sum of its parts."""
    parts = max(len(a.parts), len(b.parts), 1)
    coarsest = max(_EPSILON.get(a.dtype, 2.0**-23), _EPSILON.get(b.dtype, 2.0**-23))
    return SKETCH_RESOLUTION + (parts + 1) * coarsest


def compare_boundary(a: LogicalBoundary, b: LogicalBoundary, tokens: TokenMatch) -> Comparison:
    """Compare one boundary of two sides. Structure first: another width or kind of data is never judged by value. Another
    number of choices is a difference by itself."""
    empty = _no_rows()
    if a.width != b.width and (a.info.discrete or b.info.discrete) and _narrow(a) and _narrow(b):
        rows_a, rows_b, only_a, only_b = _align(a, b, tokens)
        every = np.arange(len(a) if rows_a is None else len(rows_a))
        return Comparison(a, b, Method.CHOICES, every, rows_a, rows_b, only_a, only_b, f"{a.width} choices per row against {b.width}")
    if (a.info.rows is RowScope.NEXT) != (b.info.rows is RowScope.NEXT):
        reason = "rows speak of their own token on one side and of the next on the other"
        return Comparison(a, b, Method.NONE, empty, empty, empty, reason=reason)
    if a.width != b.width:
        return Comparison(a, b, Method.NONE, empty, empty, empty, reason=f"width {a.width} against {b.width}")
    for side, boundary in (("A", a), ("B", b)):
        if _falsely_partial(boundary):
            reason = f"declared partial on {side}, but all {len(boundary.parts)} copies are identical"
            return Comparison(a, b, Method.NONE, empty, empty, empty, reason=reason)
    rows_a, rows_b, only_a, only_b = _align(a, b, tokens)

    def compared(method: Method, differing: I64, reason: str = "", dtype_differs: bool = False) -> Comparison:
        return Comparison(a, b, method, differing, rows_a, rows_b, only_a, only_b, reason, dtype_differs)

    if a.partial_axis or b.partial_axis:
        if _same_split(a, b):
            pairs = zip(sorted(a.parts, key=lambda part: part.coordinate), sorted(b.parts, key=lambda part: part.coordinate), strict=True)
            apart = [_apart(x.digest_R2, y.digest_R2, rows_a, rows_b) for x, y in pairs]
            differing = np.unique(np.concatenate(apart)) if apart else empty
            how = "coordinate by coordinate"
            if len(differing):
                left = differing[_other_parts(a, b, *compared(Method.PARTS, differing).sides(differing))]
                moved = len(differing) - len(left)
                how += f" (in {count(moved, 'row')} the same parts on other coordinates)" if moved else ""
                differing = left
            return compared(Method.PARTS, differing, f"partial sums over {a.partial_axis}, compared {how}")
        reason = "partial sums over " + " and ".join(sorted({axis for axis in (a.partial_axis, b.partial_axis) if axis}))
        return _beyond(compared(Method.SKETCH, empty, reason), partial_rounding(a, b))
    if not _same_dtype(a, b):
        probe = compared(Method.SKETCH, empty, f"dtype {a.dtype} against {b.dtype}", dtype_differs=True)
        return _beyond(probe, SKETCH_RESOLUTION)
    return compared(Method.DIGEST, _apart(a.digest_R2, b.digest_R2, rows_a, rows_b))


def _beyond(probe: Comparison, resolution: float) -> Comparison:
    """The same comparison with its differing pairs found by distance. Undefined distances differ."""
    pairs = np.arange(len(probe))
    distance = probe.distances(pairs)
    differs = ~(distance <= resolution)
    if probe.statistics is not None:
        rows_a, rows_b = probe.sides(pairs)
        differs |= probe.statistics[0].nonfinite_R[rows_a] != probe.statistics[1].nonfinite_R[rows_b]
    return replace(probe, differing=np.flatnonzero(differs))


def _same_dtype(a: LogicalBoundary, b: LogicalBoundary) -> bool:
    """Equal dtypes; narrow integers are int64 whatever they were."""
    return a.dtype == b.dtype or (_narrow(a) and _narrow(b))


def _narrow(boundary: LogicalBoundary) -> bool:
    """Integers that keep their raw values."""
    return boundary.dtype in DTYPES and DTYPES[boundary.dtype].is_narrow(boundary.width)


def _falsely_partial(boundary: LogicalBoundary) -> bool:
    """Declared partial, yet every coordinate holds the same rows."""
    parts = boundary.parts
    if len(parts) < 2 or not parts[0].digest_R2.any():
        return False  # zeros are identical on every coordinate and still a sum
    return all(np.array_equal(parts[0].digest_R2, part.digest_R2) for part in parts[1:])


def _same_split(a: LogicalBoundary, b: LogicalBoundary) -> bool:
    """Both sides hold the same parts of the same sum, in the same dtype."""
    return (
        a.partial_axis == b.partial_axis
        and a.dtype == b.dtype
        and sorted((part.coordinate, part.size) for part in a.parts) == sorted((part.coordinate, part.size) for part in b.parts)
    )


def _other_parts(a: LogicalBoundary, b: LogicalBoundary, rows_a: I64, rows_b: I64) -> Bools:
    """Rows whose parts are not the same ones, on whatever coordinates: (D,)."""
    held = []
    for boundary, rows in ((a, rows_a), (b, rows_b)):
        lanes_DP = np.stack([np.ascontiguousarray(part.digest_R2[rows]).view("u8,u8")[:, 0] for part in boundary.parts], axis=1)
        held.append(np.sort(lanes_DP, axis=1))
    other: Bools = (held[0] != held[1]).any(axis=1)
    return other


def _apart(digest_a: U64, digest_b: U64, rows_a: I64 | None, rows_b: I64 | None) -> I64:
    """Indices of the pairs whose digests differ."""
    if rows_a is None or rows_b is None:
        if np.array_equal(digest_a, digest_b):
            return _no_rows()
        apart = (digest_a != digest_b).any(axis=1)
    else:
        apart = (digest_a[rows_a] != digest_b[rows_b]).any(axis=1)
    return np.flatnonzero(apart)


def _align(a: LogicalBoundary, b: LogicalBoundary, tokens: TokenMatch) -> tuple[I64 | None, I64 | None, I64, I64]:
    """Pairs of rows by (token, expert), and the rows of each side that have none."""
    empty = _no_rows()
    if tokens.identity and np.array_equal(a.token_R, b.token_R) and _same_experts(a, b):
        return None, None, empty, empty
    code = _row_code(a, b)
    code_a, code_b = code(tokens.b_of_a[a.token_R], a.expert_R), code(b.token_R, b.expert_R)
    if not len(code_b) or not len(code_a):
        return empty, empty, np.arange(len(a)), np.arange(len(b))
    at = np.minimum(np.searchsorted(code_b, code_a), len(code_b) - 1)
    hit = (code_b[at] == code_a) & (tokens.b_of_a[a.token_R] >= 0)
    rows_a, rows_b = np.flatnonzero(hit), at[hit]
    alone_b = np.ones(len(b), np.bool_)
    alone_b[rows_b] = False
    return rows_a, rows_b, np.flatnonzero(~hit), np.flatnonzero(alone_b)


def _same_experts(a: LogicalBoundary, b: LogicalBoundary) -> bool:
    if a.expert_R is None or b.expert_R is None:
        return a.expert_R is b.expert_R
    return np.array_equal(a.expert_R, b.expert_R)


def _row_code(a: LogicalBoundary, b: LogicalBoundary) -> Callable[[I64, I64 | None], I64]:
    """One number per (token, expert) that sorts as they do."""
    most = max((int(side.expert_R.max()) for side in (a, b) if side.expert_R is not None and len(side.expert_R)), default=-1)
    stride = most + 2

    def code(token: I64, expert: I64 | None) -> I64:
        return token * stride + (0 if expert is None else expert + 1)

    return code
