"""Where two sides part: inputs, weights and boundaries as candidates in one causal order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.format.schema import Boundary, RowScope
from tracer.read.causes import Causes, Graph
from tracer.read.compare import Method
from tracer.read.conditions import Lead
from tracer.read.findings import Class, Finding, FindingCode, Kind, Place, Root
from tracer.read.logical import LogicalTrace
from tracer.read.outcomes import Judged
from tracer.read.pairing import IDS, Pairing
from tracer.read.weight_diff import WeightComparison, WeightDifference
from tracer.read.wording import count, row_text, sequence_name, token_name, token_profile

__all__ = ["Candidate", "Scene", "boundary_findings", "find_candidates", "first_bitwise"]

Bools = npt.NDArray[np.bool_]

_WEIGHT_ROOTS = 8
"""Weights that differ before more boundaries than this are one cause, not many."""


@dataclass(frozen=True)
class Scene:
    """Everything about two readable sides that was compared. ``a`` names the rows."""

    a: LogicalTrace
    pairing: Pairing
    weights: WeightComparison
    graph: Graph
    judged: Mapping[str, Judged]
    causes: Causes
    leads: Sequence[Lead]


@dataclass(frozen=True)
class Candidate:
    """A place where the sides part. ``order``: in the causal order; a weight stands half a step before its boundary.
    ``root``: None where it is no cause of anything (it heals, or only its dtype differs)."""

    order: float
    place: Place
    root: Root | None = None
    weight: bool = False


def find_candidates(scene: Scene) -> list[Candidate]:
    """Every place where the sides part, in causal order."""
    candidates = [*_inputs(scene), *_weights(scene)]
    for order, info in enumerate(scene.graph.boundaries):
        judged = scene.judged.get(info.name)
        if judged is None:
            continue
        cells = scene.causes.cells.get(info.name)
        if cells is not None and cells.root_K.any():
            place = _first_place(scene, judged, cells.root_K)
            harmless = info.name in scene.causes.harmless
            candidates.append(Candidate(order, place, None if harmless else _root(scene, info, judged, place)))
        elif cells is None and any(finding.kind is Kind.DIFFERENCE for finding in judged.findings):
            candidates.append(Candidate(order, Place(boundary=info.name)))
    return sorted(candidates, key=lambda candidate: candidate.order)


def first_bitwise(scene: Scene) -> Place | None:
    """Where the sides first part in bits, whatever the floor."""
    candidates = [*_inputs(scene), *_weights(scene)]
    for order, info in enumerate(scene.graph.boundaries):
        judged = scene.judged.get(info.name)
        if judged is not None and len(judged.comparison.differing):
            token = int(judged.comparison.token_R[judged.comparison.differing].min())
            request, position = token_name(scene.a, token, judged.shift)
            candidates.append(Candidate(order, Place(boundary=info.name, request=request, position=position)))
            break
    return min(candidates, key=lambda candidate: candidate.order).place if candidates else None


def _first_place(scene: Scene, judged: Judged, among_K: Bools | None = None) -> Place:
    """The first row above the floor, among some tokens of A."""
    comparison, pairs = judged.comparison, judged.above
    if among_K is not None:
        pairs = pairs[among_K[comparison.token_R[pairs]]]
    request, position = token_name(scene.a, int(comparison.token_R[pairs[0]]), judged.shift)
    expert_R = comparison.a.expert_R
    expert = None if expert_R is None else int(expert_R[comparison.sides(pairs[:1])[0][0]])
    return Place(boundary=judged.name, request=request, position=position, expert=expert)


def _inputs(scene: Scene) -> list[Candidate]:
    """Sequences that part: one candidate per input."""
    candidates = []
    pairing = scene.pairing
    for name in dict.fromkeys(parting.boundary for parting in pairing.partings):
        partings = [parting for parting in pairing.partings if parting.boundary == name]
        first = partings[0]
        request = sequence_name(scene.a, first.sequence_a)
        place = Place(boundary=name, request=request, position=first.position_a)
        root = Root(
            place=place,
            rows=sum(len(parting.behind_a) for parting in partings),
            rows_compared=int(np.count_nonzero(pairing.fed_a)),
            tokens=f"from {row_text(request, first.position_a)}" if len(partings) == 1 else f"of {count(len(partings), 'sequence')}",
            klass=Class.INPUT,
            text=first.text + (f"; {count(len(partings) - 1, 'more sequence')} part as well" if len(partings) > 1 else ""),
        )
        candidates.append(Candidate(float(scene.graph.index.get(name, -1 if name == IDS else -0.5)), place, root))
    return candidates


def _weights(scene: Scene) -> list[Candidate]:
    """Weights that differ, one candidate per boundary they stand before; a single one where they stand everywhere."""
    groups: dict[int, list[WeightDifference]] = {}
    for weight in scene.weights.differing:
        groups.setdefault(weight.at, []).append(weight)
    everywhere = len(groups) > _WEIGHT_ROOTS
    candidates = []
    for at, group in list(groups.items())[: 1 if everywhere else None]:
        text = group[0].text if len(group) == 1 else f"{count(len(group), 'weight')} of {scene.graph.boundaries[at].name}"
        if everywhere:
            text = f"{scene.weights.summary()}; no single boundary is to blame"
        place = Place(boundary=group[0].name)
        root = Root(place=place, rows=0, rows_compared=0, tokens="", klass=Class.WEIGHT, text=text)
        candidates.append(Candidate(at - 0.5, place, root, weight=True))
    return candidates


def _root(scene: Scene, info: Boundary, judged: Judged, place: Place) -> Root:
    cells, comparison = scene.causes.cells[info.name], judged.comparison
    token = comparison.token_R[judged.above]
    token = token[cells.root_K[token]]
    text, klass = judged.text, Class.UNLOCALIZED
    if info.name.startswith("input."):
        klass = Class.INPUT
    elif info.discrete:
        klass = Class.DISCRETE
        text = _choice_text(scene, judged, cells.inherited_K)
    else:
        for lead in scene.leads:
            if lead.klass is not None:
                klass = lead.klass
                text = "; ".join(part for part in (text, lead.text) if part)
    healed = scene.causes.healed.get(info.name)
    if healed:
        text = "; ".join(part for part in (text, f"equal again at {healed}") if part)
    if cells.unobserved:
        text = "; ".join(part for part in (text, "nothing it is computed from was compared") if part)
    return Root(
        place=place,
        rows=len(token),
        rows_compared=len(comparison),
        tokens=token_profile(scene.a, comparison.token_R, token, judged.shift),
        distance=judged.distance,
        between=cells.between,
        klass=klass,
        text=text,
    )


def _choice_text(scene: Scene, judged: Judged, inherited_K: Bools) -> str:
    parts = [judged.choice.text()] if judged.choice is not None else []
    if inherited_K.any():
        parts.append(f"in {count(int(inherited_K.sum()), 'more token')} it follows from an earlier difference")
    scores = scene.judged.get(judged.comparison.a.info.scores)
    if scores is not None and not inherited_K.any():
        token = judged.comparison.token_R[judged.above]
        rounded = int(np.isin(token, scores.comparison.token_R[scores.comparison.differing]).sum())
        parts.append(f"the scores differ within the floor in {rounded} of these tokens" if rounded else "the scores are equal")
    return "; ".join(part for part in (*parts, judged.text) if part)


def boundary_findings(scene: Scene, candidates: Sequence[Candidate], until: float) -> dict[str, list[Finding]]:
    """Findings per boundary. ``until``: place in the causal order from which on a side cannot be trusted, so that nothing
    there is called a cause."""
    places = {candidate.place.boundary: candidate for candidate in candidates if not candidate.weight}
    findings: dict[str, list[Finding]] = {}
    for info in scene.graph.boundaries:
        judged = scene.judged.get(info.name)
        if judged is None:
            continue
        own = list(judged.findings)
        if judged.comparison.method is Method.NONE:
            own.append(_incomparable(scene, info, judged))
        elif judged.above_D.any():
            finding = _value_finding(scene, info, judged, places.get(info.name), until)
            if finding is not None:
                own.append(finding)
        if own:
            findings[info.name] = own
    return findings


def _incomparable(scene: Scene, info: Boundary, judged: Judged) -> Finding:
    """Why no value of a boundary was judged: an absence, unless it follows from another number of choices."""
    a, b = judged.comparison.a, judged.comparison.b
    kind, text = Kind.ABSENCE, judged.text
    if (a.info.rows is RowScope.NEXT) != (b.info.rows is RowScope.NEXT):
        code = FindingCode.BOUNDARY_MISSING
    elif a.width == b.width:
        code = FindingCode.PARTIAL_COPIES_IDENTICAL
    else:
        code = FindingCode.WIDTH_DIFFERS
        chosen = [name for name in info.inputs if name in scene.judged and scene.judged[name].comparison.method is Method.CHOICES]
        if chosen:
            kind, text = Kind.INFORMATION, f"{text}: follows from {chosen[0]}"
    return Finding(code=code, kind=kind, boundary=info.name, text=text)


def _value_finding(scene: Scene, info: Boundary, judged: Judged, candidate: Candidate | None, until: float) -> Finding | None:
    """Roots and what heals, and every choice that differs; other consequences stand in the table of boundaries."""
    caused = candidate is not None and scene.graph.index[info.name] < until
    if not caused and not info.discrete:
        return None
    place = candidate.place if candidate is not None and candidate.place.position is not None else _first_place(scene, judged)
    code, text = FindingCode.VALUE_DIFFERS, judged.text
    if info.name.startswith("input."):
        code = FindingCode.INPUT_DIFFERS
    elif info.discrete:
        code = FindingCode.CHOICE_DIFFERS
        text = judged.choice.text() if judged.choice is not None else text
        text += (
            "; a cause: pin the routing before looking further in these tokens" if caused else "; a consequence of an earlier difference"
        )
    healed = scene.causes.harmless.get(info.name) or scene.causes.healed.get(info.name)
    if healed:
        text = "; ".join(part for part in (f"equal again at {healed}", text) if part)
    first = row_text(place.request, place.position, place.expert)
    text = f"{len(judged.above)} of {count(len(judged.comparison), 'row')} differ, first {first}" + (f"; {text}" if text else "")
    return Finding(
        code=code,
        kind=Kind.DIFFERENCE if caused else Kind.INFORMATION,
        boundary=info.name,
        rows=len(judged.above),
        request=place.request,
        position=place.position,
        text=text,
    )
