"""What became of every boundary of a comparison: measured, judged against the floor, and put into words.

Shape suffixes: R matched rows, D differing rows among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import DTYPES
from tracer.format.schema import RowScope
from tracer.read.causes import Cells
from tracer.read.choices import ChoiceReport, describe_choices
from tracer.read.compare import SKETCH_RESOLUTION, Comparison, Method, compare_boundary, partial_rounding
from tracer.read.dumped import DumpedBoundary
from tracer.read.findings import BoundaryOutcome, BoundaryResult, Distance, Finding, FindingCode, Flip, Kind
from tracer.read.floor import Floors
from tracer.read.logical import LogicalTrace
from tracer.read.pairing import Pairing
from tracer.read.wording import short, token_name, token_profile

__all__ = ["Judged", "cells_of", "compare_all", "judge", "result_of"]

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_EXACT_COLUMNS = 16
_FLIPS = 16
_EXACT_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Judged:
    """One boundary of both sides, measured. ``above_D``: differing rows above floor and tolerance. ``settled``: nothing
    about it is left open (partial sums may be). ``text``: what else is worth saying."""

    comparison: Comparison
    above_D: Bools
    outcome: BoundaryOutcome
    distance: Distance | None = None
    settled: bool = True
    text: str = ""
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    choice: ChoiceReport | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """The boundary's name."""
        return self.comparison.name

    @property
    def above(self) -> I64:
        """Pairs above the floor, as indices into the matched rows."""
        return self.comparison.differing[self.above_D]

    @property
    def shift(self) -> int:
        """1 where rows speak of the next token, so that their own position is one less than the token's."""
        return int(self.comparison.a.info.rows is RowScope.NEXT)


def compare_all(a: LogicalTrace, b: LogicalTrace, pairing: Pairing, names: Iterable[str]) -> Mapping[str, Comparison]:
    """Compare every boundary that both sides recorded."""
    return {
        name: compare_boundary(a.boundaries[name], b.boundaries[name], pairing.tokens)
        for name in names
        if name in a.boundaries and name in b.boundaries
    }


def judge(
    comparison: Comparison,
    floors: Floors,
    scores: Comparison | None = None,
    dumped_scores: tuple[DumpedBoundary, DumpedBoundary] | None = None,
) -> Judged:
    """Measure the rows that differ and hold them against the floor. ``scores``: of a choice, what it was chosen by;
    ``dumped_scores``: the raw values of these on both sides."""
    if comparison.method is Method.NONE:
        return Judged(comparison, np.zeros(0, np.bool_), BoundaryOutcome.INCOMPARABLE, settled=False, text=comparison.reason)
    above_D = floors.above(comparison)
    judged = Judged(comparison, above_D, BoundaryOutcome.IDENTICAL)
    if len(comparison.differing):
        outcome = BoundaryOutcome.DIFFERS if above_D.any() else BoundaryOutcome.WITHIN_FLOOR
        judged = replace(judged, outcome=outcome, distance=_distance(comparison, above_D), text=_what_differs(comparison, above_D))
        if comparison.a.info.discrete or comparison.b.info.discrete:
            judged = replace(judged, choice=describe_choices(comparison, scores, dumped_scores))
    if comparison.method is Method.SKETCH:
        judged = _dtype(judged, floors) if comparison.dtype_differs else _partial(judged, floors)
    elif comparison.method is Method.PARTS:
        judged = replace(judged, text="; ".join(text for text in (comparison.reason, judged.text) if text))
    nonfinite_a, nonfinite_b = _nonfinite(comparison)
    if nonfinite_a != nonfinite_b:
        said = f"{nonfinite_a} non-finite values on A, {nonfinite_b} on B"
        judged = replace(judged, text="; ".join(text for text in (judged.text, said) if text))
    if scores is not None:
        scores.release()
    comparison.release()
    return replace(judged, nonfinite_a=nonfinite_a, nonfinite_b=nonfinite_b)


def _distance(comparison: Comparison, above_D: Bools) -> Distance | None:
    if comparison.values is not None:
        return None
    distance = comparison.distance_D[above_D] if above_D.any() else comparison.distance_D
    known = distance[np.isfinite(distance)]
    if not len(known):
        return Distance()
    if not known.any():
        return Distance(largest=0.0, median=0.0, below_resolution=True)
    return Distance(largest=float(known.max()), median=float(np.median(known)))


def _nonfinite(comparison: Comparison) -> tuple[int, int]:
    """Non-finite values in the matched rows of both sides."""
    if DTYPES.get(comparison.a.dtype) is not None and DTYPES[comparison.a.dtype].is_narrow(comparison.a.width):
        return 0, 0
    counted_a, counted_b = comparison.a.load_nonfinite(), comparison.b.load_nonfinite()
    if counted_a is None or counted_b is None:
        return 0, 0
    if comparison.rows_a is not None and comparison.rows_b is not None:
        counted_a, counted_b = counted_a[comparison.rows_a], counted_b[comparison.rows_b]
    return int(counted_a.sum(dtype=np.int64)), int(counted_b.sum(dtype=np.int64))


def _what_differs(comparison: Comparison, above_D: Bools) -> str:
    """Integers themselves, or what a digest says that a sketch does not show."""
    chosen = np.flatnonzero(above_D) if above_D.any() else np.arange(len(comparison.differing))
    if comparison.values is not None:
        return _integers(comparison, chosen)
    if comparison.statistics is None:
        return "no distance is kept for this dtype"
    distance = comparison.distance_D[chosen]
    if (distance != 0).any() or comparison.nonfinite_differs_D[chosen].any() or comparison.method is Method.SKETCH:
        return ""
    a, b = comparison.statistics
    rows_a, rows_b = comparison.sides(comparison.differing[chosen])
    nonfinite = a.nonfinite_R[rows_a] > 0
    same = (a.sum_squares_R[rows_a] == b.sum_squares_R[rows_b]) & (a.abs_max_R[rows_a] == b.abs_max_R[rows_b])
    text = "below the sketch's resolution"
    if same.all() and nonfinite.all():
        return f"{text}: NaN bits only (only the bits of non-finite values differ)"
    if same.all() and not nonfinite.any():
        exact = comparison.a.width <= _EXACT_COLUMNS and comparison.a.dtype in _EXACT_DTYPES
        return f"{text}: sign of zero" + ("" if exact else ", or a change smaller than the sketch can show")
    return text


def _integers(comparison: Comparison, chosen: I64) -> str:
    assert comparison.values is not None
    values_a, values_b = comparison.values
    x, y = values_a[chosen[0]], values_b[chosen[0]]
    if len(x) != len(y):
        return f"A {x.tolist()}, B {y.tolist()} at the first"
    columns = np.flatnonzero(x != y)
    if len(x) == 1:
        text = f"A {x[0]}, B {y[0]}"
        shift = values_b[chosen, 0] - values_a[chosen, 0]
        if len(chosen) > 1 and (shift == shift[0]).all():
            text += f"; B is A {shift[0]:+d} in all {len(chosen)} rows"
        return text
    if len(x) <= 16:
        return f"A {x.tolist()}, B {y.tolist()}"
    at = int(columns[0])
    return f"A {x[at]}, B {y[at]} in column {at}" + (f" and {len(columns) - 1} more columns" if len(columns) > 1 else "")


def _dtype(judged: Judged, floors: Floors) -> Judged:
    """Another dtype: proven different without a floor; with one, judged by distance like any value."""
    comparison = judged.comparison
    kinds = {DTYPES[dtype].kind if dtype in DTYPES else dtype for dtype in (comparison.a.dtype, comparison.b.dtype)}
    distances = comparison.distances(np.arange(len(comparison)))
    known = distances[np.isfinite(distances)]
    size = (
        "no distance"
        if not len(known)
        else "below the sketch's resolution"
        if known.max() <= SKETCH_RESOLUTION
        else f"{short(known.max())}"
    )
    text = f"{comparison.reason}, sketch distance {size}"
    within = floors.given and len(kinds) == 1 and not judged.above_D.any()
    finding = Finding(
        code=FindingCode.DTYPE_DIFFERS, kind=Kind.INFORMATION if within else Kind.DIFFERENCE, boundary=judged.name, rows=len(comparison),
        text=f"other dtype, within floor: {text}" if within else text,
    )  # fmt: skip
    if within:
        outcome = BoundaryOutcome.WITHIN_FLOOR
    elif judged.above_D.any():
        outcome = BoundaryOutcome.DIFFERS
    else:
        outcome = BoundaryOutcome.IDENTICAL  # the values are, as far as a sketch can tell; the finding speaks of the dtype
    distance = judged.distance
    if distance is None and len(known):
        distance = Distance(largest=0.0, median=0.0, below_resolution=True)
    return replace(judged, outcome=outcome, distance=distance, findings=(finding,), text=finding.text)


def _partial(judged: Judged, floors: Floors) -> Judged:
    """Partial sums against another split: by sketch, and never identical."""
    comparison = judged.comparison
    distance = comparison.distances(np.arange(len(comparison)))
    known = distance[np.isfinite(distance)]
    largest = float(known.max()) if len(known) else float("nan")
    rounding = partial_rounding(comparison.a, comparison.b)
    measured = Distance(largest=largest, median=float(np.median(known)), below_resolution=not known.any()) if len(known) else Distance()
    size = "undefined" if not len(known) else "below the sketch's resolution" if largest <= SKETCH_RESOLUTION else short(largest)
    text = (
        f"{comparison.reason}: by sketch only, distance {size} (rounding explains {short(rounding)}, resolution {short(SKETCH_RESOLUTION)})"
    )
    if judged.above_D.any():
        return replace(judged, distance=measured, text=text)
    settled = floors.given and len(known) > 0 and largest <= max(floors.limit(judged.name), SKETCH_RESOLUTION)
    findings: tuple[Finding, ...] = ()
    if not settled:
        finding = Finding(
            code=FindingCode.ONLY_BY_SKETCH, kind=Kind.ABSENCE, boundary=judged.name, rows=len(comparison), text=text,
            remedy="give a tolerance or a floor, or record the boundary after its reduction",
        )  # fmt: skip
        findings = (finding,)
    return replace(judged, outcome=BoundaryOutcome.BY_SKETCH, distance=measured, settled=settled, text=text, findings=findings)


# ---------------------------------------------------------------- views


def cells_of(judged: Judged, tokens: int) -> Cells | None:
    """The boundary as the search for causes sees it; None where it tells nothing."""
    comparison = judged.comparison
    if comparison.method is Method.NONE or not len(comparison):
        return None
    seen_K = np.zeros(tokens, np.bool_)
    seen_K[comparison.token_R] = True
    seen_K[comparison.a.token_R[comparison.only_a]] = False
    compared_K: Bools | None = None if seen_K.all() else seen_K
    differs_K: Bools | None = None
    if judged.above_D.any():
        differs_K = np.zeros(tokens, np.bool_)
        differs_K[comparison.token_R[judged.above]] = True
    if comparison.method is Method.SKETCH and not comparison.dtype_differs:
        # what rounding may explain is not known to be equal
        return None if differs_K is None else Cells(differs_K, differs_K)
    within = comparison.differing[~judged.above_D]
    within_K: Bools | None = None
    if len(within):
        within_K = np.zeros(tokens, np.bool_)
        within_K[comparison.token_R[within]] = True
        within_K = within_K if differs_K is None else within_K & ~differs_K
    return Cells(compared_K, differs_K, within_K)


def result_of(judged: Judged, a: LogicalTrace, floors: Floors, *, root: bool, healed_at: str) -> BoundaryResult:
    """The boundary as the result lists it."""
    comparison, above = judged.comparison, judged.above
    shown = above if len(above) else comparison.differing
    first_request, first_position, tokens = "", None, ""
    if len(shown):
        token = comparison.token_R[shown]
        first_request, first_position = token_name(a, int(token.min()), judged.shift)
        tokens = token_profile(a, comparison.token_R, token, judged.shift)
    outcome, text = judged.outcome, judged.text
    if healed_at and outcome is BoundaryOutcome.DIFFERS:
        outcome = BoundaryOutcome.HEALS
        text = "; ".join(part for part in (f"equal again at {healed_at}", text) if part)
    if judged.choice is not None:
        text = "; ".join(part for part in (text, judged.choice.text()) if part)
    return BoundaryResult(
        name=judged.name,
        outcome=outcome,
        level=comparison.a.info.level,
        rows_compared=len(comparison),
        rows_differing=len(comparison.differing),
        rows_above_floor=len(above),
        tokens=tokens,
        first_request=first_request,
        first_position=first_position,
        distance=judged.distance,
        floor=floors.stated(judged.name),
        dtype_a=comparison.a.dtype,
        dtype_b=comparison.b.dtype,
        copies_a=comparison.a.copies,
        copies_b=comparison.b.copies,
        executions_a=comparison.a.executions,
        executions_b=comparison.b.executions,
        nonfinite_a=judged.nonfinite_a,
        nonfinite_b=judged.nonfinite_b,
        root=root,
        flips=() if judged.choice is None else _flips(judged, a),
        text=text,
    )


def _flips(judged: Judged, a: LogicalTrace) -> tuple[Flip, ...]:
    """The first tokens in which the sides chose differently."""
    comparison, values = judged.comparison, judged.comparison.values
    if values is None:
        return ()
    chosen = np.flatnonzero(judged.above_D) if judged.above_D.any() else np.arange(len(comparison.differing))
    token_D = comparison.token_R[comparison.differing[chosen]]
    first = chosen[np.argsort(token_D, kind="stable")[:_FLIPS]]
    flips = []
    for line in first:
        request, position = token_name(a, int(comparison.token_R[comparison.differing[line]]), judged.shift)
        flips.append(Flip(request=request, position=position, a=tuple(values[0][line].tolist()), b=tuple(values[1][line].tolist())))
    comparison.release()
    return tuple(flips)
