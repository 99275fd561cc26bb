"""Discrete boundaries that differ: what was flipped, by how much it was decided, and whether it is a cause.

Scores come from dumps, or exactly from the sketch where the scoring row has at most 16 columns: each column then has a
bucket of its own. Shape suffixes: D differing rows, C ids per row, E scores per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import decode_to_float32
from tracer.format.fingerprint_plan import GROUP
from tracer.read.compare import Comparison
from tracer.read.dumped import DumpedBoundary
from tracer.read.logical import LogicalBoundary
from tracer.read.matched import dumped_lines, exact_scores
from tracer.read.wording import count

__all__ = ["MANTISSA_BITS", "TOP_K", "ChoiceReport", "describe_choices", "scores_of_rows", "ulps_between"]

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

TOP_K = "top_k"
"""What the number of choices per row is called."""

_CHUNK = 4096
MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Of the dtypes whose scores a float32 sketch holds exactly, coarse first."""
_SMALLEST_EXPONENT = {"bfloat16": -126, "float16": -14, "float32": -126}


@dataclass(frozen=True)
class ChoiceReport:
    """What is known about the rows of a choice that differ.

    ``tokens``: rows with another set of ids. ``reordered``: rows whose sets are equal. ``ties``: rows decided by a gap of
    exactly 0 on both sides. ``largest_gap_ulps``: of the other rows, on the side where it was closer, in the coarser of the two
    dtypes; None where no gap is known. ``unknown``: why not, or of how many tokens. ``largest_change_ulps``: how far the scores
    involved differ between the sides: a gap within it is a choice that follows from the scores.
    ``not_top_a``, ``not_top_b``: rows whose ids are not the highest of their own side's scores.
    ``widths``: ids per row on A and on B, where they are not as many; ``tokens`` are then those in which the fewer ids are not
    among the more."""

    tokens: int
    reordered: int = 0
    ties: int = 0
    largest_gap_ulps: float | None = None
    unknown: str = ""
    largest_change_ulps: float | None = None
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
        if self.largest_change_ulps:
            parts.append(f"scores differ by up to {self.largest_change_ulps:.3g} ulps between the sides")
        if self.unknown:
            parts.append(f"score gap unknown ({self.unknown})")
        for side, wrong in (("A", self.not_top_a), ("B", self.not_top_b)):
            if wrong:
                parts.append(f"on {side} {count(wrong, 'token')} did not choose the highest of {side}'s own scores")
        return ", ".join(parts)


def scores_of_rows(boundary: LogicalBoundary, rows: I64, dumped: DumpedBoundary | None = None) -> F32 | None:
    """The scores themselves, (D, E) float32: out of the sketch where that holds them (at most 16 columns), else as dumped, NaN in
    rows that were not. None where nothing holds them, or where any is not finite."""
    if boundary.width <= GROUP:
        statistics = boundary.load_statistics()
        return None if statistics is None or statistics.nonfinite_R[rows].any() else exact_scores(boundary, statistics, rows)
    if dumped is None or dumped.width != boundary.width:
        return None
    lines = dumped_lines(dumped, boundary, rows)
    scores = np.full((len(rows), boundary.width), np.nan, np.float32)
    held = lines >= 0
    scores[held] = decode_to_float32(dumped.raw_RB[lines[held]], dumped.dtype).reshape(-1, boundary.width)
    return scores if np.isfinite(scores[held]).all() else None


def ulps_between(x: F64, y: F64, dtype: str) -> F64:
    """``x - y`` in units in the last place of the larger of the two, as that dtype has them; exact where they are neighbours."""
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(x), np.abs(y))))
    unit = np.exp2(np.maximum(exponent, _SMALLEST_EXPONENT[dtype]) - MANTISSA_BITS[dtype])
    ulps: F64 = (x - y) / unit
    return ulps


def describe_choices(
    choice: Comparison, scores: Comparison | None, dumps: tuple[DumpedBoundary, DumpedBoundary] | None = None
) -> ChoiceReport | None:
    """Describe the rows of a discrete boundary that differ; None where it keeps no ids. ``scores``: the comparison of the
    boundary they were chosen by, None where it was not compared. ``dumps``: its raw values on both sides."""
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
    if scores.a.width > GROUP and dumps is None:
        return _unknown(report, f"{scores.a.width} scores per row: more than a sketch tells apart")
    token_F = choice.token_R[choice.differing[flipped]]
    at = np.minimum(np.searchsorted(scores.token_R, token_F), max(len(scores) - 1, 0))
    if not len(scores) or (scores.token_R[at] != token_F).any():
        return _unknown(report, "the scores of these tokens were not compared")
    rows_a, rows_b = scores.sides(at)
    dtype = next((name for name in MANTISSA_BITS if name in (scores.a.dtype, scores.b.dtype)), "")
    held = dumps or (None, None)
    scores_a = scores_of_rows(scores.a, rows_a, held[0]) if dtype else None
    scores_b = scores_of_rows(scores.b, rows_b, held[1]) if dtype else None
    ids_a, ids_b, kept_a, kept_b = ids_a[flipped], ids_b[flipped], kept_a[flipped], kept_b[flipped]
    missing = ""
    if scores_a is not None and scores_b is not None:
        known = ~(np.isnan(scores_a).any(axis=1) | np.isnan(scores_b).any(axis=1))
        if not known.any():
            return _unknown(report, "the scores of these tokens were not dumped")
        if not known.all():
            missing = f"of {int((~known).sum())} tokens, whose scores were not dumped"
            scores_a, scores_b = scores_a[known], scores_b[known]
            ids_a, ids_b, kept_a, kept_b = ids_a[known], ids_b[known], kept_a[known], kept_b[known]
    gap_a = _gaps(scores_a, dtype, ids_a, ids_b, kept_a, kept_b)
    gap_b = _gaps(scores_b, dtype, ids_b, ids_a, kept_b, kept_a)
    if gap_a is None or gap_b is None or scores_a is None or scores_b is None:
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
        missing,
        _change(scores_a, scores_b, np.concatenate([ids_a, ids_b], axis=1), dtype),
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


def _change(scores_a: F32, scores_b: F32, ids: I64, dtype: str) -> float:
    """How far the scores of the ids that either side chose differ between the sides, in ulps."""
    x, y = (np.take_along_axis(scores.astype(np.float64), ids, axis=1) for scores in (scores_a, scores_b))
    moved = x != y
    return float(np.abs(ulps_between(y[moved], x[moved], dtype)).max(initial=0.0))


def _gaps(scores: F32 | None, dtype: str, own: I64, other: I64, own_kept: Bools, other_kept: Bools) -> F64 | None:
    """Per row, in ulps of ``dtype``: the lowest score of what only this side chose, less the highest of what only the other
    did. Negative where this side did not choose its highest scores."""
    if scores is None or min(own.min(initial=0), other.min(initial=0)) < 0:
        return None
    if max(own.max(initial=0), other.max(initial=0)) >= scores.shape[1]:
        return None
    exact = scores.astype(np.float64)
    chosen = np.where(own_kept, np.inf, np.take_along_axis(exact, own, axis=1)).min(axis=1)
    passed = np.where(other_kept, -np.inf, np.take_along_axis(exact, other, axis=1)).max(axis=1)
    return ulps_between(chosen, passed, dtype)
