"""Discrete boundaries that differ: what was flipped, by how much it was decided, and whether it is a cause.

Scores come back exactly from the sketch where the scoring row has at most 16 columns: each column then has a bucket
of its own. Shape suffixes: D differing rows, C ids per row, E scores per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint_plan import GROUP, sketch_buckets, sketch_signs
from tracer.read.compare import Comparison
from tracer.read.logical import LogicalBoundary
from tracer.read.wording import count

__all__ = ["TOP_K", "ChoiceReport", "describe_choices", "scores_of_rows", "ulps_between"]

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

TOP_K = "top_k"
"""What the number of choices per row is called."""

_CHUNK = 4096
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Of the dtypes whose scores a float32 sketch holds exactly, coarse first."""
_SMALLEST_EXPONENT = {"bfloat16": -126, "float16": -14, "float32": -126}


@dataclass(frozen=True)
class ChoiceReport:
    """What is known about the rows of a choice that differ.

    ``tokens``: rows with another set of ids. ``reordered``: rows whose sets are equal. ``ties``: rows decided by a gap of
    exactly 0 on both sides. ``largest_gap_ulps``: of the other rows, on the side where it was closer, in the coarser of the two
    dtypes; None where no gap is known. ``unknown``: why not.
    ``not_top_a``, ``not_top_b``: rows whose ids are not the highest of their own side's scores.
    ``widths``: ids per row on A and on B, where they are not as many; ``tokens`` are then those in which the fewer ids are not
    among the more."""

    tokens: int
    reordered: int = 0
    ties: int = 0
    largest_gap_ulps: float | None = None
    unknown: str = ""
    not_top_a: int = 0
    not_top_b: int = 0
    widths: tuple[int, int] | None = None

    def text(self) -> str:
        """One clause per fact: ``1 token flipped, a tie (gap 0 ulps)``."""
        if self.widths is not None:
            among = f"not so in {count(self.tokens, 'token')}" if self.tokens else "in every token"
            return f"{TOP_K}: {self.widths[0]} against {self.widths[1]}, the fewer ids among the more {among}"
        parts = [f"{count(self.tokens, 'token')} flipped"] if self.tokens or not self.reordered else []
        if self.reordered:
            parts.append(f"{count(self.reordered, 'token')} with the same ids in another order")
        if self.tokens and self.ties == self.tokens:
            parts.append("a tie (score gap 0 ulps): both choices are valid")
        elif self.ties:
            parts.append(f"{self.ties} of them ties (score gap 0 ulps)")
        if self.largest_gap_ulps is not None:
            parts.append(f"largest score gap {self.largest_gap_ulps:.3g} ulps")
        if self.unknown:
            parts.append(f"score gap unknown ({self.unknown})")
        for side, wrong in (("A", self.not_top_a), ("B", self.not_top_b)):
            if wrong:
                parts.append(f"on {side} {count(wrong, 'token')} did not choose the highest of {side}'s own scores")
        return ", ".join(parts)


def scores_of_rows(boundary: LogicalBoundary, rows: I64) -> F32 | None:
    """The scores themselves, (D, E) float32, as far as the sketch gives them back: at most 16 columns, all finite."""
    statistics = boundary.load_statistics() if boundary.width <= GROUP and not boundary.partial_axis else None
    if statistics is None or statistics.nonfinite_R[rows].any():
        return None
    columns = np.arange(boundary.width)
    scores: F32 = statistics.sketch_R16[rows][:, sketch_buckets(columns)] * sketch_signs(columns)
    return scores


def ulps_between(x: F64, y: F64, dtype: str) -> F64:
    """``x - y`` in units in the last place of the larger of the two, as that dtype has them; exact where they are neighbours."""
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(x), np.abs(y))))
    unit = np.exp2(np.maximum(exponent, _SMALLEST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype])
    ulps: F64 = (x - y) / unit
    return ulps


def describe_choices(choice: Comparison, scores: Comparison | None) -> ChoiceReport | None:
    """Describe the rows of a discrete boundary that differ; None where it keeps no ids. ``scores``: the comparison of the
    boundary they were chosen by, None where it was not compared."""
    if choice.values is None:
        return None
    ids_a, ids_b = choice.values
    kept_a, kept_b = _members(ids_a, ids_b), _members(ids_b, ids_a)
    if ids_a.shape != ids_b.shape:
        fewer = kept_a if ids_a.shape[1] < ids_b.shape[1] else kept_b
        return ChoiceReport(int((~fewer.all(axis=1)).sum()), widths=(ids_a.shape[1], ids_b.shape[1]))
    flipped = np.logical_not(kept_a.all(axis=1) & kept_b.all(axis=1))
    tokens = int(flipped.sum())
    report = ChoiceReport(tokens, reordered=len(flipped) - tokens)
    if not tokens:
        return report
    if scores is None:
        return _unknown(report, "the scores were not recorded")
    if scores.a.width > GROUP:
        return _unknown(report, f"{scores.a.width} scores per row: more than a sketch tells apart")
    token_F = choice.token_R[choice.differing[flipped]]
    at = np.minimum(np.searchsorted(scores.token_R, token_F), max(len(scores) - 1, 0))
    if not len(scores) or (scores.token_R[at] != token_F).any():
        return _unknown(report, "the scores of these tokens were not compared")
    rows_a, rows_b = scores.sides(at)
    dtype = next((name for name in _MANTISSA_BITS if name in (scores.a.dtype, scores.b.dtype)), "")
    gap_a = _gaps(scores.a, rows_a, dtype, ids_a[flipped], ids_b[flipped], kept_a[flipped], kept_b[flipped])
    gap_b = _gaps(scores.b, rows_b, dtype, ids_b[flipped], ids_a[flipped], kept_b[flipped], kept_a[flipped])
    if gap_a is None or gap_b is None:
        return _unknown(report, "scores that are not finite, or of a dtype without ulps")
    if (gap_a < 0).any() and (gap_b < 0).any():
        return _unknown(report, "the recorded scores alone do not decide: a bias or groups do")
    tie = (gap_a == 0) & (gap_b == 0)
    wide = np.minimum(np.abs(gap_a), np.abs(gap_b))[~tie]
    return ChoiceReport(
        tokens,
        report.reordered,
        int(tie.sum()),
        float(wide.max()) if len(wide) else None,
        not_top_a=int((gap_a < 0).sum()),
        not_top_b=int((gap_b < 0).sum()),
    )


def _unknown(report: ChoiceReport, why: str) -> ChoiceReport:
    return ChoiceReport(report.tokens, report.reordered, unknown=why)


def _members(ids: I64, others: I64) -> Bools:
    """Which ids of each row are in the other row too, (D, C)."""
    found = np.empty(ids.shape, np.bool_)
    for start in range(0, len(ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        found[part] = (ids[part, :, None] == others[part, None, :]).any(axis=2)
    return found


def _gaps(boundary: LogicalBoundary, rows: I64, dtype: str, own: I64, other: I64, own_kept: Bools, other_kept: Bools) -> F64 | None:
    """Per row, in ulps of ``dtype``: the lowest score of what only this side chose, less the highest of what only the other
    did. Negative where this side did not choose its highest scores."""
    scores = scores_of_rows(boundary, rows) if dtype and boundary.dtype in _MANTISSA_BITS else None
    if scores is None or min(own.min(initial=0), other.min(initial=0)) < 0:
        return None
    if max(own.max(initial=0), other.max(initial=0)) >= boundary.width:
        return None
    exact = scores.astype(np.float64)
    chosen = np.where(own_kept, np.inf, np.take_along_axis(exact, own, axis=1)).min(axis=1)
    passed = np.where(other_kept, -np.inf, np.take_along_axis(exact, other, axis=1)).max(axis=1)
    return ulps_between(chosen, passed, dtype)
