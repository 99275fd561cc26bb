"""Weights of two sides by semantic name: which differ, which are missing, and which nobody can tell.

Shape suffixes: R rows of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import Fingerprints, row_distance
from tracer.format.schema import Boundary, Weight
from tracer.read.findings import Distance, Finding, FindingCode, Kind, Side, SideSummary, Verdict
from tracer.read.logical import LogicalTrace
from tracer.read.wording import count, short

__all__ = ["WeightComparison", "WeightDifference", "WeightResult", "WeightState", "compare_weights", "diff_weights", "weight_findings"]

I64 = npt.NDArray[np.int64]
_ROWS_NAMED = 8


class WeightState(str, Enum):
    """What became of one parameter or buffer."""

    IDENTICAL = "identical"
    DIFFERS = "differs"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """At least one side has no trustworthy fingerprint of it. Never equal."""


@dataclass(frozen=True)
class WeightDifference:
    """A weight that differs. ``at``: index of the first boundary computed with it, in the merged catalogue."""

    name: str
    at: int
    buffer: bool
    text: str


@dataclass(frozen=True)
class WeightComparison:
    """All weights of two sides. ``recorded_a``, ``recorded_b``: the side fingerprinted its weights at all."""

    recorded_a: bool
    recorded_b: bool
    compared: int
    parameters: int
    """Compared weights that are no buffers."""
    differing: tuple[WeightDifference, ...]
    """In causal order."""
    missing: tuple[tuple[str, Side, bool], ...]
    """Name, the side that lacks it, whether it is a buffer."""
    unknown: tuple[tuple[str, Side, str], ...]
    """Name, the side that cannot tell, its reason."""

    @property
    def differing_parameters(self) -> int:
        """Weights that differ and are no buffers."""
        return sum(not weight.buffer for weight in self.differing)

    def summary(self) -> str:
        """``7 of 311 weights differ``, or that nothing can be said."""
        if not self.compared:
            return "no weight was compared"
        if self.differing_parameters == self.parameters and self.parameters > 1:
            return f"{self.parameters} of {self.parameters} trainable tensors differ"
        return f"{len(self.differing)} of {count(self.compared, 'weight')} differ"


def compare_weights(a: LogicalTrace, b: LogicalTrace, catalogue: Sequence[Boundary]) -> WeightComparison:
    """Compare the weights of two sides as they were when recording began. ``catalogue``: merged, in causal order."""
    recorded_a, recorded_b = bool(a.weights), bool(b.weights)
    if not (recorded_a and recorded_b):
        return WeightComparison(recorded_a, recorded_b, 0, 0, (), (), ())
    place = _places(catalogue)
    differing: list[WeightDifference] = []
    missing: list[tuple[str, Side, bool]] = []
    unknown: list[tuple[str, Side, str]] = []
    compared = parameters = 0
    for name in dict.fromkeys((*a.weights, *b.weights)):
        x, y = a.weights.get(name), b.weights.get(name)
        if x is None or y is None:
            present = x or y
            assert present is not None
            missing.append((name, Side.A if x is None else Side.B, present.buffer))
        elif x.unknown or y.unknown:
            unknown.append((name, _which(x, y), x.unknown or y.unknown))
        else:
            compared += 1
            parameters += not (x.buffer and y.buffer)
            text = _difference(x, y)
            if text:
                differing.append(WeightDifference(name, place(name), x.buffer and y.buffer, text))
    differing.sort(key=lambda weight: weight.at)
    return WeightComparison(True, True, compared, parameters, tuple(differing), tuple(missing), tuple(unknown))


def _which(x: Weight, y: Weight) -> Side:
    if x.unknown and y.unknown:
        return Side.BOTH
    return Side.A if x.unknown else Side.B


def _difference(x: Weight, y: Weight) -> str:
    if (x.rows, x.columns) != (y.rows, y.columns):
        return f"shape {x.rows} x {x.columns} against {y.rows} x {y.columns}"
    if x.dtype != y.dtype:
        return f"dtype {x.dtype} against {y.dtype}"
    return "" if x.digest == y.digest else f"other bytes, {x.rows} x {x.columns} {x.dtype}"


def _places(catalogue: Sequence[Boundary]) -> Callable[[str], int]:
    """Weight name -> index of the first boundary computed with it; by the name itself where no boundary lists it."""
    listed: dict[str, int] = {}
    prefixes: dict[str, int] = {}
    for at, boundary in enumerate(catalogue):
        for weight in boundary.weights:
            listed.setdefault(weight, at)
        parts = boundary.name.split(".")
        for length in range(1, len(parts) + 1):
            prefixes.setdefault(".".join(parts[:length]), at)

    def place(name: str) -> int:
        if name in listed:
            return listed[name]
        while "." in name:
            name = name.rpartition(".")[0]
            if name in prefixes:
                return prefixes[name]
        return 0

    return place


def weight_findings(weights: WeightComparison, a: LogicalTrace, b: LogicalTrace) -> list[Finding]:
    """Findings about the weights, in causal order. A missing parameter is an absence, a missing buffer is information:
    programs build different tables for themselves."""
    findings = [
        Finding(code=FindingCode.WEIGHT_DIFFERS, kind=Kind.DIFFERENCE, boundary=weight.name, text=weight.text)
        for weight in weights.differing
    ]
    findings += [
        Finding(
            code=FindingCode.WEIGHT_MISSING,
            kind=Kind.INFORMATION if buffer else Kind.ABSENCE,
            boundary=name,
            side=side,
            text=f"{side.value.upper()} has no such {'buffer' if buffer else 'parameter'}",
        )
        for name, side, buffer in weights.missing
    ]
    findings += [
        Finding(
            code=FindingCode.WEIGHT_UNKNOWN,
            kind=Kind.INFORMATION,
            boundary=name,
            side=side,
            text=f"no fingerprint on {_sides(side)}: {reason}",
        )
        for name, side, reason in weights.unknown
    ]
    for side, trace in ((Side.A, a), (Side.B, b)):
        changed = [name for name, weight in trace.weights.items() if weight.after is not None]
        if changed or any(manifest.weights_after == "changed" for manifest in trace.manifests):
            which = f": {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}" if changed else ""
            changes = f"weights of {side.value.upper()} changed while it was recorded ({count(len(changed), 'weight')}{which})"
            text = f"{changes}; compared as they were at the start"
            findings.append(Finding(code=FindingCode.CONDITION_DIFFERS, kind=Kind.INFORMATION, boundary="", side=side, text=text))
    return findings


def _sides(side: Side) -> str:
    return "both sides" if side is Side.BOTH else side.value.upper()


# ---------------------------------------------------------------- tracer weights


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


def diff_weights(
    a: LogicalTrace, b: LogicalTrace, summaries: tuple[SideSummary, SideSummary], catalogue: Sequence[Boundary]
) -> WeightResult:
    """Compare all weights of two traces, row by row where both recorded rows."""
    weights = compare_weights(a, b, catalogue)
    findings = [
        msgspec.structs.replace(finding, side=side)
        for side, trace in ((Side.A, a), (Side.B, b))
        for finding in trace.findings
        if finding.kind is Kind.UNREADABLE or finding.boundary in trace.weights
    ]
    unreadable = any(finding.kind is Kind.UNREADABLE for finding in findings)
    lines: dict[str, WeightLine] = {}
    for weight in weights.differing:
        lines[weight.name] = _line(weight, a, b)
    for name, side, buffer in weights.missing:
        lines[name] = WeightLine(name=name, state=WeightState.MISSING, buffer=buffer, text=f"only in {'B' if side is Side.A else 'A'}")
    for name, side, reason in weights.unknown:
        lines[name] = WeightLine(name=name, state=WeightState.UNKNOWN, text=f"{_sides(side)}: {reason}")
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
        findings=tuple(findings), a=summaries[0], b=summaries[1],
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


def weight_roots(weights: WeightComparison) -> Mapping[int, tuple[WeightDifference, ...]]:
    """Differing weights by the boundary they stand before."""
    grouped: dict[int, list[WeightDifference]] = {}
    for weight in weights.differing:
        grouped.setdefault(weight.at, []).append(weight)
    return {at: tuple(group) for at, group in grouped.items()}


def rows_text(line: WeightLine) -> str:
    """Which rows differ: ``3 of 512 rows (0, 1, 7)``."""
    if line.rows_differing is None:
        return ""
    shown = ", ".join(map(str, line.first_rows)) + (", ..." if line.rows_differing > len(line.first_rows) else "")
    size = "" if line.distance is None or line.distance.largest is None else f", largest distance {short(line.distance.largest)}"
    return f"{line.rows_differing} of {count(line.rows, 'row')} ({shown}){size}"
