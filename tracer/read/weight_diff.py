"""Weights of two sides by semantic name: which differ, which are missing, and which nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracer.format.schema import Boundary, Weight
from tracer.read.findings import Finding, FindingCode, Kind, Side
from tracer.read.logical import LogicalTrace
from tracer.read.wording import count

__all__ = ["WeightComparison", "WeightDifference", "compare_weights", "mode_findings", "side_names", "weight_findings"]


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
    if weights.recorded_a != weights.recorded_b:
        lacking = Side.B if weights.recorded_a else Side.A
        findings.append(
            Finding(
                code=FindingCode.WEIGHT_MISSING,
                kind=Kind.ABSENCE,
                side=lacking,
                text=f"{lacking.value.upper()} recorded no weights, the other side did: they were not compared",
                remedy="trace both sides with weights, or both with weights=False",
            )
        )
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
            text=f"no fingerprint on {side_names(side)}: {reason}",
        )
        for name, side, reason in weights.unknown
    ]
    findings += mode_findings(weights, a, b)
    for side, trace in ((Side.A, a), (Side.B, b)):
        changed = [name for name, weight in trace.weights.items() if weight.after is not None]
        if changed or any(manifest.weights_after == "changed" for manifest in trace.manifests):
            which = f": {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}" if changed else ""
            changes = f"weights of {side.value.upper()} changed while it was recorded ({count(len(changed), 'weight')}{which})"
            text = f"{changes}; compared as they were at the start"
            findings.append(Finding(code=FindingCode.CONDITION_DIFFERS, kind=Kind.INFORMATION, boundary="", side=side, text=text))
    return findings


def mode_findings(weights: WeightComparison, a: LogicalTrace, b: LogicalTrace) -> list[Finding]:
    """That only one side kept every row of its weights, so that no row can be named."""
    modes = [trace.manifest.weights_mode for trace in (a, b)] if weights.compared else []
    if sorted(modes) != ["digest", "rows"]:
        return []
    kept, other = ("A", "B") if modes[0] == "rows" else ("B", "A")
    text = f"{kept} recorded every row of its weights, {other} one digest each: compared by digest"
    return [Finding(code=FindingCode.NOTE, kind=Kind.INFORMATION, text=text, remedy='record both sides with weights="rows" to name rows')]


def side_names(side: Side) -> str:
    """``A``, ``B`` or ``both sides``."""
    return "both sides" if side is Side.BOTH else side.value.upper()
