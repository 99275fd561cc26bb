"""The class of a comparison as a whole, and exactly one thing to do next."""

from __future__ import annotations

import msgspec

from tracer.read.choices import TOP_K
from tracer.read.findings import BoundaryOutcome, Class, Classification, Confidence, Finding, FindingCode, Kind, Shape, Side, Verdict
from tracer.read.logical import LogicalTrace
from tracer.read.pairing import IDS, MASK, POSITIONS, mask_unseen
from tracer.read.verdict import Facts, names_text, noise_line
from tracer.read.wording import short

__all__ = ["classification", "next_step"]

_PRECISION = (
    "Ablate precision in this order: run the rollout in high precision once; if the mismatch matters, train with quantization-aware"
    " training that matches the serving rules; only then train in low precision"
)


def classification(facts: Facts) -> Classification | None:
    """The class of the earliest root with what carries it; None where nothing differs."""
    if facts.verdict is not Verdict.DIFFERENT:
        return None
    if facts.noise is not None:
        leads = [lead for lead in facts.leads if lead.klass is not None]
        klass = next((lead.klass for lead in leads if lead.klass is not None), Class.UNLOCALIZED)
        found = Classification(
            klass=klass,
            confidence=Confidence.MEDIUM if leads else Confidence.LOW,
            evidence=(noise_line(facts.noise), *(lead.text for lead in facts.leads)),
            not_proven=("anything about the other side: this side is not reproducible here",),
        )
    elif facts.classified is not None and facts.root is not None:
        found = facts.classified
        if found.klass is Class.UNLOCALIZED and not facts.floors.given:
            found = msgspec.structs.replace(found, not_proven=("that this is more than noise: no floor was given", *found.not_proven))
        if not facts.weights.compared and found.klass in (Class.UNLOCALIZED, Class.DISCRETE):
            lacking = "that the weights are equal: they were not recorded on both sides"
            found = msgspec.structs.replace(found, not_proven=(*found.not_proven, lacking))
    else:
        found = Classification(evidence=tuple(lead.text for lead in facts.leads), not_proven=("whether it is an error or rounding",))
    return msgspec.structs.replace(found, next_step=next_step(facts, found))


def next_step(facts: Facts, classified: Classification | None = None) -> str:
    """Exactly one thing to do now."""
    if facts.verdict is Verdict.SAME:
        return ""
    if facts.verdict is Verdict.COULD_NOT_TELL:
        absent = facts.of_kind(Kind.ABSENCE)
        if not absent:
            return "Record both sides again"
        return _absence_step(facts, absent[0])
    if facts.noise is not None:
        return _noise_step(facts, facts.noise)
    where = facts.first.boundary if facts.first is not None else "the boundary"
    match classified.klass if classified is not None else Class.UNLOCALIZED:
        case Class.INPUT:
            if where.startswith("input."):
                return f"Feed both sides the same {_input_words(where)}, then trace again"
            return "Put both sides in the same mode (eval, no dropout), then trace again"
        case Class.WEIGHT:
            return f"Run: tracer weights {facts.a.path} {facts.b.path}; then load the same weights on both sides and trace again"
        case Class.DISCRETE if facts.root is not None and facts.root.text.startswith(f"{TOP_K}:"):
            return f"Give both sides the same {TOP_K}, then trace again"
        case Class.DISCRETE:
            pin = f'trace(..., pin={{"{where}": "{facts.a.path}"}})'
            behind = "to search behind the choice; what comes later in these tokens follows from it"
            return f"Pin the routing: trace B again with {pin}, {behind}"
        case Class.CORRECTNESS:
            return _error_step(facts, where)
        case Class.FLOATING_POINT:
            limit = facts.root.distance.largest if facts.root is not None and facts.root.distance is not None else None
            stated = short(2 * limit) if limit else "X"
            again = f"tracer diff {facts.a.path} {facts.b.path} --tolerance relative={stated}"
            return f"Look behind it: {again}, to see whether anything larger differs"
        case Class.QUANTIZATION:
            return _PRECISION
        case Class.UNLOCALIZED:
            return _open_step(facts, where)


def _error_step(facts: Facts, where: str) -> str:
    setting = next((found for found in facts.explanations if found.boundary == where and found.shape is Shape.SETTING), None)
    if setting is not None:
        return f"Make {setting.parameters['name']} the same on both sides, then trace again"
    if facts.root is not None and facts.root.between and min(_level(facts.a), _level(facts.b)) < 2:
        return f"Trace both sides at level=2, to see what lies between {names_text(facts.root.between)} and {where}"
    return _compare_step(facts, where)


def _open_step(facts: Facts, where: str) -> str:
    """What would classify a difference that nothing explains yet: cheapest first."""
    root = facts.root
    if root is not None and root.between and min(_level(facts.a), _level(facts.b)) < 2:
        return f"Trace both sides at level=2, to see what lies between {names_text(root.between)} and {where}"
    if not facts.floors.given:
        again = f"tracer diff {facts.a.path} {facts.b.path} --floor-a SECOND"
        return f"Trace side A a second time, then: {again}, to see whether this is above its own noise"
    if root is None:
        return f"Compare how the two sides compute {where}"
    if not facts.dumped:
        plan = f"tracer diff {facts.a.path} {facts.b.path} --plan plan.json"
        return f"Run: {plan}; then run both sides again with TRACER_PLAN=plan.json, to have the values of {where} themselves"
    if not facts.controlled:
        return "Trace both sides once more with the same weights in float32, then add --control A32 B32: an error survives, rounding falls"
    return _compare_step(facts, where)


def _compare_step(facts: Facts, where: str) -> str:
    unseen = mask_unseen(facts.a, facts.b, facts.pairing)
    equal = "equal or within floor" if any(result.outcome is BoundaryOutcome.WITHIN_FLOOR for result in facts.earlier()) else "equal"
    step = f"Compare how the two sides compute {where}: everything it is computed from is {equal}"
    return step + (f", as far as it was seen ({unseen})" if unseen else "")


def _level(trace: LogicalTrace) -> int:
    return trace.manifest.level


def _input_words(boundary: str) -> str:
    return {IDS: "token ids", POSITIONS: "positions", MASK: "attention mask or document boundaries"}.get(boundary, boundary)


def _noise_step(facts: Facts, noise: Finding) -> str:
    path = facts.b.path if noise.side is Side.B else facts.a.path
    if noise.remedy:
        return noise.remedy[0].upper() + noise.remedy[1:]
    if noise.code in (FindingCode.REPEATS_DISAGREE, FindingCode.SIBLINGS_DISAGREE):
        return f"Make this side reproducible (tracer siblings {path}), or take its noise as the floor: --floor self"
    return f"Find out why the two places of {noise.boundary} differ before comparing with the other side"


def _absence_step(facts: Facts, absence: Finding) -> str:
    if absence.remedy:
        return absence.remedy[0].upper() + absence.remedy[1:]
    side = {Side.A: "side A", Side.B: "side B", Side.BOTH: "both sides"}[absence.side]
    match absence.code:
        case FindingCode.NOTHING_COMPARED:
            return "Feed both sides the same token ids, or name the sequences with t.requests([...])"
        case FindingCode.ROWS_UNMATCHED:
            return f"Find out why {side} has no such rows, or declare them never computed with a reason"
        case FindingCode.BOUNDARY_MISSING | FindingCode.VACUOUS:
            return f"Find out why {absence.boundary} was not recorded on {side}: tracer show lists its executions"
        case FindingCode.WIDTH_DIFFERS:
            return f"Say in the boundary map how wide {absence.boundary} is, or which columns to select"
        case _:
            return f"Record {side} again"
