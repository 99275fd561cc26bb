"""What a side's own findings mean in a comparison: which are covered by a floor, and which come before everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from tracer.format.schema import Boundary
from tracer.read.compare import Comparison, partial_rounding
from tracer.read.findings import Finding, FindingCode, Kind, Side
from tracer.read.floor import Floors
from tracer.read.logical import LogicalTrace

__all__ = ["covered", "first_noise", "sided", "without_replaced"]


def sided(trace: LogicalTrace, side: Side) -> list[Finding]:
    """The side's own findings, told which side it is, and what was done to it on purpose."""
    findings = [msgspec.structs.replace(finding, side=side) for finding in trace.findings]
    for intervention in dict.fromkeys(name for manifest in trace.manifests for name in manifest.interventions):
        text = f"INTERVENTION: {side.value.upper()} was recorded with {intervention}: diagnosis, not a fix"
        remedy = "compare runs without interventions to see whether they agree"
        findings.append(Finding(code=FindingCode.INTERVENTION, kind=Kind.ABSENCE, side=side, text=text, remedy=remedy))
    return findings


def without_replaced(catalogue: Sequence[Boundary], a: LogicalTrace, b: LogicalTrace) -> list[Boundary]:
    """The catalogue with every input left out that one side was given by the other (``feed=``): whatever was recorded of it, what
    follows was computed from equal values."""
    given = [
        {name for manifest in own.manifests for name, run_id in manifest.replaced.items() if run_id == other.manifest.run_id}
        for own, other in ((a, b), (b, a))
        if other.manifests
    ]
    replaced = set().union(*given)
    return [
        msgspec.structs.replace(info, inputs=tuple(name for name in info.inputs if name not in replaced)) if replaced else info
        for info in catalogue
    ]


def covered(finding: Finding, own: LogicalTrace, floors: Floors, comparison: Comparison | None) -> Finding:
    """The finding as it counts here: siblings and repeats within the floor are information, and copies that add up to the
    other side's value come with that hint. ``comparison``: of the finding's boundary with the other side."""
    match finding.code:
        case FindingCode.SIBLINGS_DISAGREE | FindingCode.REPEATS_DISAGREE:
            if floors.covers_noise(finding.boundary, own.noise.get(finding.boundary)):
                return msgspec.structs.replace(finding, kind=Kind.INFORMATION, text=f"{finding.text}; within the floor")
        case FindingCode.NOT_REPRODUCIBLE if floors.given:
            return msgspec.structs.replace(finding, kind=Kind.INFORMATION, text=f"{finding.text}; a floor was given")
        case FindingCode.REPLICAS_DISAGREE:
            if comparison is not None and _adds_up(comparison, finding.side):
                other = "A" if finding.side is Side.B else "B"
                return msgspec.structs.replace(
                    finding,
                    text=f"{finding.text}; the copies add up to {other}'s value by sketch",
                    remedy="declare it partial over that axis in the map: the copies are partial sums",
                )
        case _:
            pass
    return finding


def _adds_up(comparison: Comparison, side: Side) -> bool:
    """Whether the sum of a side's copies is the other side's value, as far as sketches and rounding go."""
    copies, whole = (comparison.a, comparison.b) if side is Side.A else (comparison.b, comparison.a)
    if copies.load_sum_of_copies is None or copies.width != whole.width or whole.partial_axis or not len(comparison):
        return False
    summed = replace(copies, load_statistics=copies.load_sum_of_copies)
    probe = replace(comparison, a=summed) if side is Side.A else replace(comparison, b=summed)
    if probe.statistics is None:
        return False
    distance = probe.distances(np.arange(len(probe)))
    return bool(np.isfinite(distance).all() and distance.max() <= partial_rounding(copies, whole) * copies.copies)


def first_noise(findings: Sequence[Finding], codes: frozenset[FindingCode], catalogue: Sequence[Boundary]) -> tuple[Finding | None, float]:
    """The earliest disagreement of a side with itself, and its place in the causal order; infinity where there is none."""
    place: Mapping[str, float] = {boundary.name: float(at) for at, boundary in enumerate(catalogue)}
    weight_place = {name: at - 0.5 for at, boundary in reversed(list(enumerate(catalogue))) for name in boundary.weights}
    noisy = [
        (place.get(finding.boundary, weight_place.get(finding.boundary, -1.0)), number, finding)
        for number, finding in enumerate(findings)
        if finding.code in codes and finding.kind is Kind.DIFFERENCE
    ]
    if not noisy:
        return None, float("inf")
    at, _, first = min(noisy, key=lambda entry: entry[:2])
    return first, at
