"""``tracer weights``: every weight of two traces by name, with rows where rows were recorded."""

from __future__ import annotations

from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import Fingerprints, row_distance
from tracer.read.causes import merge_catalogues
from tracer.read.findings import Distance, Finding, Kind, Side, SideSummary, Verdict
from tracer.read.logical import LogicalTrace
from tracer.read.opening import Progress, TraceLike, opened, summarize
from tracer.read.weight_diff import WeightComparison, WeightDifference, compare_weights, mode_findings, side_names
from tracer.read.wording import count, short

__all__ = ["WeightLine", "WeightResult", "WeightState", "diff_weights", "rows_text"]

I64 = npt.NDArray[np.int64]
_ROWS_NAMED = 8


class WeightState(str, Enum):
    """What became of one parameter or buffer."""

    IDENTICAL = "identical"
    DIFFERS = "differs"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """At least one side has no trustworthy fingerprint of it. Never equal."""


class WeightLine(msgspec.Struct, frozen=True, kw_only=True):
    """One weight of both sides."""

    name: str
    state: WeightState
    buffer: bool = False
    text: str = ""
    rows: int = 0
    rows_differing: int | None = None
    """None where a side did not record rows (``weights="rows"``)."""
    first_rows: tuple[int, ...] = ()
    distance: Distance | None = None


class WeightResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tracer weights A B`` found."""

    version: int = 1
    exit: int
    verdict: Verdict
    headline: str
    weights: tuple[WeightLine, ...]
    findings: tuple[Finding, ...] = ()
    a: SideSummary
    b: SideSummary


def diff_weights(a: TraceLike, b: TraceLike, *, progress: Progress | None = None) -> WeightResult:
    """Compare all weights of two traces, row by row where both recorded rows. Raises what ``open_trace`` raises."""
    a, b = opened(a, "A", progress), opened(b, "B", progress)
    weights = compare_weights(a, b, merge_catalogues(a.catalogue, b.catalogue))
    findings = [
        msgspec.structs.replace(finding, side=side)
        for side, trace in ((Side.A, a), (Side.B, b))
        for finding in trace.findings
        if finding.kind is Kind.UNREADABLE or finding.boundary in trace.weights
    ]
    findings += mode_findings(weights, a, b)
    unreadable = any(finding.kind is Kind.UNREADABLE for finding in findings)
    lines: dict[str, WeightLine] = {}
    for weight in weights.differing:
        lines[weight.name] = _line(weight, a, b)
    for name, side, buffer in weights.missing:
        lines[name] = WeightLine(name=name, state=WeightState.MISSING, buffer=buffer, text=f"only in {'B' if side is Side.A else 'A'}")
    for name, side, reason in weights.unknown:
        lines[name] = WeightLine(name=name, state=WeightState.UNKNOWN, text=f"{side_names(side)}: {reason}")
    if weights.recorded_a and weights.recorded_b:
        for name, weight_a in a.weights.items():
            lines.setdefault(name, WeightLine(name=name, state=WeightState.IDENTICAL, buffer=weight_a.buffer, rows=weight_a.rows))
    disagree = any(finding.kind is Kind.DIFFERENCE for finding in findings)
    if unreadable or not weights.compared:
        verdict = Verdict.COULD_NOT_TELL
    elif weights.differing or disagree:
        verdict = Verdict.DIFFERENT
    elif weights.unknown or any(not buffer for _, _, buffer in weights.missing):
        verdict = Verdict.COULD_NOT_TELL
    else:
        verdict = Verdict.SAME
    return WeightResult(
        exit=verdict.exit_code, verdict=verdict, headline=_headline(verdict, weights, unreadable), weights=tuple(lines.values()),
        findings=tuple(findings), a=summarize(a), b=summarize(b),
    )  # fmt: skip


def _line(weight: WeightDifference, a: LogicalTrace, b: LogicalTrace) -> WeightLine:
    x, y = a.weights[weight.name], b.weights[weight.name]
    line = WeightLine(name=weight.name, state=WeightState.DIFFERS, buffer=weight.buffer, text=weight.text, rows=x.rows)
    if (x.rows, x.columns) != (y.rows, y.columns):
        return line
    rows_a, rows_b = a.load_weight_rows(weight.name), b.load_weight_rows(weight.name)
    if rows_a is None or rows_b is None:
        return line
    apart = np.flatnonzero((rows_a.digest_N2 != rows_b.digest_N2).any(axis=1))
    distance = _row_distances(rows_a, rows_b, apart)
    text = line.text
    same_rows = np.array_equal(np.sort(rows_a.digest_N2, axis=0), np.sort(rows_b.digest_N2, axis=0)) if x.dtype == y.dtype else False
    if same_rows and len(apart):
        text += "; the same rows in another order"
    return msgspec.structs.replace(
        line, text=text, rows_differing=len(apart), first_rows=tuple(int(row) for row in apart[:_ROWS_NAMED]), distance=distance
    )


def _row_distances(a: Fingerprints, b: Fingerprints, rows: I64) -> Distance | None:
    if not len(rows) or a.sketch_N16 is None or b.sketch_N16 is None:
        return None
    distance = row_distance(a.take(rows), b.take(rows))
    known = distance[np.isfinite(distance)]
    if not len(known):
        return Distance()
    if not known.any():
        return Distance(largest=0.0, median=0.0, below_resolution=True)
    return Distance(largest=float(known.max()), median=float(np.median(known)))


def _headline(verdict: Verdict, weights: WeightComparison, unreadable: bool) -> str:
    if unreadable:
        return "Could not tell: a trace cannot be read as a whole"
    if not weights.recorded_a or not weights.recorded_b:
        sides = [side for side, recorded in (("A", weights.recorded_a), ("B", weights.recorded_b)) if not recorded]
        return f"Could not tell: {' and '.join(sides)} recorded no weights"
    if verdict is Verdict.DIFFERENT and weights.differing:
        return f"Different: {weights.summary()}, the first is {weights.differing[0].name}"
    extra = [count(len(weights.missing), "weight") + " on one side only"] if weights.missing else []
    extra += [count(len(weights.unknown), "weight") + " without a fingerprint"] if weights.unknown else []
    tail = f" ({', '.join(extra)})" if extra else ""
    if verdict is Verdict.DIFFERENT:
        return f"Different: copies of one side disagree{tail}"
    if verdict is Verdict.SAME:
        return f"Same: {count(weights.compared, 'weight')} identical{tail}"
    return (
        f"Could not tell: {count(weights.compared, 'weight')} identical{tail}"
        if weights.compared
        else "Could not tell: no weight in common"
    )


def rows_text(line: WeightLine) -> str:
    """Which rows differ: ``3 of 512 rows (0, 1, 7)``."""
    if line.rows_differing is None:
        return ""
    shown = ", ".join(map(str, line.first_rows)) + (", ..." if line.rows_differing > len(line.first_rows) else "")
    size = "" if line.distance is None or line.distance.largest is None else f", largest distance {short(line.distance.largest)}"
    return f"{line.rows_differing} of {count(line.rows, 'row')} ({shown}){size}"
