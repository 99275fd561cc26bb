"""The class of a root, with what carries it: no evidence, no class.

Classes are ruled out in a fixed order: input, weight, discrete path, correctness error, normal floating point,
quantization as designed. Size alone seldom decides, for real errors are often smaller than ordinary noise. What decides:
equal inputs, a shape that rounding does not have, the same pair in float32, a dtype too fine for a difference this large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracer.format.schema import Boundary
from tracer.read.conditions import Lead
from tracer.read.explain import SYSTEMATIC
from tracer.read.findings import (
    BoundaryOutcome,
    Class,
    Classification,
    Confidence,
    Control,
    ControlOutcome,
    DumpLine,
    Explanation,
    Root,
    Shape,
)
from tracer.read.matched import EPSILON
from tracer.read.wording import count, short

__all__ = ["ROUNDINGS", "RootEvidence", "classify_root", "is_quantized"]

ROUNDINGS = 4
"""So many roundings of its dtype one operation may be off at rounding size."""
_GROSS = 16
"""So many roundings, in most rows, are more than one operation that mixes no tokens can be off."""
_FLOAT32_ERROR = 2.0**-15
"""Beyond this no order of float32 sums explains a difference at equal inputs."""
_FLOAT32_ROUNDING = 2.0**-18
_WIDE = ("float32", "float64")
_FEW_ULPS = 2
_NEAREST = 0.98
_QUANTIZED_SIZE = 2.0**-3
_EVEN = 0.25
"""Rounding puts B above A at half of the elements; at least this share on either side."""


@dataclass(frozen=True)
class RootEvidence:
    """What is known about one root that is a value. ``dtypes``: of both sides. ``same_input``: every direct input was compared
    and is equal. ``ancestors``: it was not, but recorded ancestors stand for it, and are equal. ``weights_equal``: those it
    is computed with, as far as it has any. ``fades``: boundaries that read it, where all of them differ by rounding only.
    ``faded``: they fall to the rounding of float32 in the control pair. ``reduced``: a setting by which float32 products are
    computed in less. ``unseen``: an input that no boundary tells, such as a mask; then neither holds."""

    root: Root
    info: Boundary
    dtypes: tuple[str, str]
    same_input: bool
    ancestors: bool
    weights_equal: bool
    explanations: Sequence[Explanation] = ()
    dump: DumpLine | None = None
    control: Control | None = None
    leads: Sequence[Lead] = ()
    fades: tuple[str, ...] = ()
    faded: bool = False
    reduced: str = ""
    unseen: str = ""
    earlier: Sequence[BoundaryOutcome] = ()

    @property
    def epsilon(self) -> float:
        """One rounding in the coarser dtype."""
        return max(EPSILON.get(dtype, 2.0**-24) for dtype in self.dtypes)

    @property
    def wide(self) -> bool:
        """Both sides compute in float32 or better here, as far as their dtypes say."""
        return all(dtype in _WIDE for dtype in self.dtypes)

    @property
    def largest(self) -> float | None:
        """Largest distance of the root's rows, None where no sketch tells."""
        return None if self.root.distance is None else self.root.distance.largest

    @property
    def shapes(self) -> list[Explanation]:
        """Shapes that rounding to nearest never has."""
        return [found for found in self.explanations if found.shape in SYSTEMATIC]


def classify_root(evidence: RootEvidence) -> Classification:
    """The class of a value root. The next step is left to whoever knows what was run."""
    for ruled in (_run_mode, _quantization, _error, _rounding):
        found = ruled(evidence)
        if found is not None:
            return found
    return Classification(klass=Class.UNLOCALIZED, confidence=Confidence.LOW, evidence=_observed(evidence), not_proven=_open(evidence))


def _observed(evidence: RootEvidence) -> tuple[str, ...]:
    """What was measured, whatever the class."""
    found = []
    root = evidence.root
    if evidence.same_input:
        weights = ", weights too" if evidence.info.weights and evidence.weights_equal else ""
        found.append(f"everything it is computed from is equal{weights}")
    elif evidence.ancestors:
        found.append(f"equal at {', '.join(root.between[:3])}; what lies between was not compared")
    if evidence.largest is not None and root.distance is not None:
        size = "below the sketch's resolution" if root.distance.below_resolution else f"up to {short(evidence.largest)}"
        found.append(f"relative distance {size}, {root.rows} of {count(root.rows_compared, 'row')} ({root.tokens})")
    found += [_told(explanation) for explanation in evidence.explanations]
    if evidence.control is not None:
        found.append(evidence.control.text)
    if evidence.fades:
        found.append(f"what reads it differs by rounding only ({', '.join(evidence.fades)})")
    if evidence.dump is not None and evidence.dump.ulps is not None:
        share = "" if evidence.dump.b_above is None else f", B above A at {evidence.dump.b_above:.0%} of the elements that differ"
        found.append(f"up to {evidence.dump.ulps:.3g} ulps{share}")
    found += [lead.text for lead in evidence.leads]
    return tuple(dict.fromkeys(found))


def _told(explanation: Explanation) -> str:
    tested = f" ({explanation.source}, tested on {explanation.rows_tested} held-out rows)" if explanation.rows_tested else ""
    return f"{explanation.text}{tested}"


def _reached(evidence: RootEvidence) -> bool:
    """Whether inputs and weights are ruled out, directly or by equal ancestors."""
    return (evidence.same_input or evidence.ancestors) and evidence.weights_equal


def _run_mode(evidence: RootEvidence) -> Classification | None:
    """A side in another mode, such as active dropout."""
    lead = next((lead for lead in evidence.leads if lead.klass is Class.INPUT), None)
    if lead is None:
        return None
    not_proven = ("that nothing else differs: put both sides in the same mode and trace again",)
    return Classification(klass=Class.INPUT, confidence=Confidence.MEDIUM, evidence=_observed(evidence), not_proven=not_proven)


def _quantization(evidence: RootEvidence) -> Classification | None:
    """One side declares quantization, and equal inputs put the difference on the path that it says it quantizes."""
    lead = next((lead for lead in evidence.leads if lead.name == "quantization"), None)
    if lead is None or not evidence.same_input or not evidence.weights_equal or evidence.largest is None:
        return None
    grid = [found for found in evidence.explanations if is_quantized(found, lead.text[:1].lower())]
    cached = "cache" in lead.text and evidence.info.mixes_tokens and evidence.largest <= _QUANTIZED_SIZE
    if not grid and not cached:
        return None
    not_proven = ["that its rules (scales, clipping, which tensors) are those that were meant"]
    if not grid:
        not_proven.append("that no other fault hides in the quantized path: the quantized values themselves were not seen")
    return Classification(
        klass=Class.QUANTIZATION, confidence=Confidence.HIGH if grid else Confidence.MEDIUM, evidence=_observed(evidence),
        not_proven=tuple(not_proven),
    )  # fmt: skip


def is_quantized(explanation: Explanation, side: str) -> bool:
    """Whether it says that values of this side lie on the grid of an 8-bit dtype, and are what rounding the other side's to it gives."""
    parameters = explanation.parameters
    on_grid = explanation.shape is Shape.GRID and parameters.get("side") in (side, "both")
    on_grid = on_grid and float(parameters.get("near", 1.0)) >= _NEAREST and int(parameters.get("steps", 0)) <= 1
    return on_grid and str(parameters.get("dtype")).startswith(("float8", "int8"))


def _error(evidence: RootEvidence) -> Classification | None:
    """Equal inputs, and a difference that no rounding makes."""
    if not _reached(evidence) or evidence.faded:
        return None
    reasons, confidence = [], Confidence.MEDIUM
    control = None if evidence.control is None else evidence.control.outcome
    largest = evidence.largest or 0.0
    reduced = bool(evidence.reduced) and evidence.wide and largest < 2.0**-8
    if control is ControlOutcome.SURVIVES:
        confidence = Confidence.HIGH
        reasons.append("it survives in float32")
    if evidence.shapes and not evidence.fades:
        confidence = Confidence.HIGH if evidence.same_input else confidence
        reasons.append("rounding to nearest does not have this shape")
    if evidence.wide and largest > _FLOAT32_ERROR and not reduced and not evidence.fades:
        reasons.append(f"{short(largest)} is more than any order of float32 sums leaves")
    settings = [e for e in evidence.explanations if e.shape is Shape.SETTING and e.parameters.get("number")]
    if settings and evidence.same_input:
        reasons.append("a number that it is computed with differs")
    gross = evidence.same_input and not evidence.info.mixes_tokens and _median(evidence) > _GROSS * evidence.epsilon
    if gross and control is None and not evidence.fades and not evidence.wide:
        reasons.append(f"{short(_median(evidence))} in half of the rows is more than one operation rounds")
    if not reasons or (control is ControlOutcome.FALLS and not evidence.shapes):
        return None
    not_proven = ["which of the two sides is right"]
    if control is None and not evidence.wide and confidence is not Confidence.HIGH:
        not_proven.append("that it survives in float32: no control pair was given")
    if control is ControlOutcome.FALLS:
        not_proven.append("that it matters: it is gone in float32, so it is a rounding, but one that always goes the same way")
    return Classification(
        klass=Class.CORRECTNESS, confidence=confidence, evidence=(*_observed(evidence), *reasons),
        not_proven=(*not_proven, *_where_open(evidence)),
    )  # fmt: skip


def _median(evidence: RootEvidence) -> float:
    return (evidence.root.distance.median or 0.0) if evidence.root.distance is not None else 0.0


def _rounding(evidence: RootEvidence) -> Classification | None:
    """Equal inputs, and nothing but rounding to nearest."""
    if not _reached(evidence) or (evidence.shapes and not evidence.faded) or evidence.largest is None:
        return None
    control = None if evidence.control is None else evidence.control.outcome
    reasons, confidence = [], Confidence.MEDIUM
    if evidence.faded:
        confidence = Confidence.HIGH
        reasons.append("an equivalent order of operations: what reads it falls to the rounding of float32 in the control pair")
    elif control is ControlOutcome.FALLS:
        confidence = Confidence.HIGH
    elif control is not None:
        return None
    once = next((e for e in evidence.explanations if e.shape is Shape.GRID and e.parameters.get("scale") == "none"), None)
    if once is not None and evidence.dtypes[0] != evidence.dtypes[1]:
        confidence = Confidence.HIGH
        reasons.append("one rounding to the coarser dtype is all that differs")
    if evidence.wide and evidence.largest <= _FLOAT32_ROUNDING:
        reasons.append(f"{short(evidence.largest)} is what another order of float32 sums leaves")
    dump = evidence.dump
    if evidence.same_input and dump is not None and dump.ulps is not None and dump.ulps <= _FEW_ULPS:
        even = dump.b_above is not None and _EVEN <= dump.b_above <= 1 - _EVEN
        if even and dump.rows_differing >= evidence.root.rows:
            reasons.append(f"no element is off by more than {dump.ulps:.3g} ulps, up and down alike")
    if not reasons and control is not ControlOutcome.FALLS:
        return None
    not_proven = ["that it does no harm: its effect on the scores was not measured"]
    if confidence is not Confidence.HIGH:
        not_proven.append("that the two sides compute the same: a small error can hide at this size")
    return Classification(
        klass=Class.FLOATING_POINT, confidence=confidence, evidence=(*_observed(evidence), *reasons),
        not_proven=(*not_proven, *_where_open(evidence)),
    )  # fmt: skip


def _where_open(evidence: RootEvidence) -> tuple[str, ...]:
    """What is not proven about the place itself."""
    found = []
    if evidence.ancestors and not evidence.same_input:
        found.append(f"which boundary between {', '.join(evidence.root.between[:3])} and {evidence.root.place.boundary} is the first")
    if any(outcome in (BoundaryOutcome.MISSING, BoundaryOutcome.INCOMPARABLE) for outcome in evidence.earlier):
        found.append("that this is the first: boundaries before it are missing")
    return tuple(found)


def _open(evidence: RootEvidence) -> tuple[str, ...]:
    """What an unlocalized root lacks."""
    found = list(_where_open(evidence))
    if not evidence.weights_equal:
        found.append("that the weights are equal: those it is computed with were not compared")
    if evidence.unseen:
        found.append(f"that its inputs are equal: {evidence.unseen}")
    elif not evidence.same_input and not evidence.ancestors:
        found.append("that its inputs are equal: none of what it is computed from was compared")
    if evidence.fades and not evidence.faded:
        found.append("that it is only an equivalent order of operations")
    found.append("whether it is an error or rounding")
    return tuple(found)
