"""The one line of a comparison: from what was found to what is said.

Weak words where nothing strong is proven: without a floor a value difference is marked as "bitwise".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracer.read.conditions import Lead
from tracer.read.findings import (
    BoundaryOutcome,
    BoundaryResult,
    Class,
    Classification,
    Confidence,
    Explanation,
    Finding,
    FindingCode,
    Kind,
    Place,
    Root,
    Side,
    Verdict,
)
from tracer.read.floor import Floors
from tracer.read.logical import LogicalTrace
from tracer.read.pairing import Pairing, mask_unseen
from tracer.read.settings import SettingDifference, differing_numbers
from tracer.read.weight_diff import WeightComparison
from tracer.read.wording import count, place_text, row_text, short

__all__ = ["NOISE", "Facts", "headline", "names_text", "noise_line"]

NOISE = frozenset(
    {
        FindingCode.REPLICAS_DISAGREE,
        FindingCode.RECOMPUTE_DISAGREES,
        FindingCode.REPEATS_DISAGREE,
        FindingCode.SIBLINGS_DISAGREE,
        FindingCode.NOT_REPRODUCIBLE,
    }
)
"""A side that disagrees with itself."""

_EARLIER_NAMED = 3


@dataclass(frozen=True)
class Facts:
    """Everything that was found. ``first``: where the sides part, None where they do not; ``order``: its place in the causal
    order (a weight stands half a step before its boundary). ``weight``: ``first`` is a weight. ``noise``: the finding that a
    side disagrees with itself, which comes before anything about the other side. ``classified``: class and evidence of the earliest
    root. ``dumped``, ``controlled``: raw values of the first divergence, and a control pair, were there."""

    a: LogicalTrace
    b: LogicalTrace
    verdict: Verdict
    floors: Floors
    pairing: Pairing
    weights: WeightComparison
    results: Sequence[BoundaryResult]
    findings: Sequence[Finding]
    roots: Sequence[Root]
    explanations: Sequence[Explanation]
    leads: Sequence[Lead]
    first: Place | None = None
    first_bitwise: Place | None = None
    order: float = -1.0
    weight: bool = False
    noise: Finding | None = None
    classified: Classification | None = None
    dumped: bool = False
    controlled: bool = False
    large_floors: Sequence[tuple[str, float]] = ()
    """Boundaries whose floor hides real errors, largest first."""

    @property
    def root(self) -> Root | None:
        """The earliest root, where it is what the first divergence is."""
        return self.roots[0] if self.roots and self.first is not None and self.roots[0].place == self.first else None

    def of_kind(self, kind: Kind) -> list[Finding]:
        """Findings of one kind, in order."""
        return [finding for finding in self.findings if finding.kind is kind]

    def earlier(self) -> list[BoundaryResult]:
        """Boundaries before the first divergence, model inputs apart."""
        stop = max(0, int(self.order + 0.5))
        return [result for result in self.results[:stop] if not result.name.startswith("input.")]


# ---------------------------------------------------------------- the line


def headline(facts: Facts) -> str:
    """The line a tired person reads."""
    line = _line(facts)
    if facts.large_floors:
        line += f"; the floor is {short(facts.large_floors[0][1])} at {facts.large_floors[0][0]}, of the order of the values themselves"
    interventions = [finding for finding in facts.findings if finding.code is FindingCode.INTERVENTION]
    return f"{line} [under INTERVENTION]" if interventions and "INTERVENTION" not in line else line


def _line(facts: Facts) -> str:
    if facts.noise is not None and facts.verdict is Verdict.DIFFERENT:
        return noise_line(facts.noise)
    if facts.verdict is Verdict.DIFFERENT:
        return _different_line(facts)
    if facts.verdict is Verdict.SAME:
        return _same_line(facts)
    return _open_line(facts)


def _side(side: Side) -> str:
    return {Side.A: "Side A", Side.B: "Side B", Side.BOTH: "Both sides"}[side]


def noise_line(noise: Finding) -> str:
    what = {
        FindingCode.REPLICAS_DISAGREE: "replicas",
        FindingCode.RECOMPUTE_DISAGREES: "recompute",
        FindingCode.REPEATS_DISAGREE: "repeats",
        FindingCode.SIBLINGS_DISAGREE: "siblings",
        FindingCode.NOT_REPRODUCIBLE: "two runs",
    }[noise.code]
    where = noise.boundary + (f", {row_text(noise.request, noise.position)}" if noise.position is not None else "")
    return f"{_side(noise.side)} disagrees with itself: {what} at {where} ({noise.text})"


def _different_line(facts: Facts) -> str:
    first = facts.first
    if first is None:
        proven = facts.of_kind(Kind.DIFFERENCE)
        return f"Different: {proven[0].boundary}: {proven[0].text}" if proven else "Different"
    if first.boundary.startswith("input."):
        root = facts.root
        return f"First divergence: {place_text(first)}" + (f" ({root.text})" if root is not None and root.text else "")
    result = next((result for result in facts.results if result.name == first.boundary), None)
    if facts.weight:
        parts = [facts.weights.summary(), *_earlier_parts(facts)]
        return f"First divergence: weight {first.boundary} ({', '.join(parts)})"
    parts = _earlier_parts(facts)
    root = facts.root
    if root is not None and root.between:
        parts.insert(0, f"between {names_text(root.between)} and here: what lies between was not compared")
    if root is not None and root.klass is Class.DISCRETE and root.text:
        parts.insert(0, root.text)
    elif result is not None and result.text and (root is None or _says_more(result)):
        parts.insert(0, result.text)
    sure = facts.classified is not None and facts.classified.confidence is Confidence.HIGH
    if not (facts.floors.given or (root is not None and root.klass is not Class.UNLOCALIZED and sure)):
        parts.append("bitwise: no floor was given")
    elif facts.floors.given and facts.first_bitwise is not None:
        limit = "floor" if facts.floors.measured else "tolerance"
        same = facts.first_bitwise == first
        parts.append(f"above the {limit}; first bitwise {'here too' if same else f'at {place_text(facts.first_bitwise)}'}")
    dtype_only = first.position is None and result is not None and result.dtype_a != result.dtype_b
    where = f"another dtype at {first.boundary}" if dtype_only else place_text(first)
    return f"First divergence: {where} ({', '.join(parts)})"


def _says_more(result: BoundaryResult) -> bool:
    """Whether what is said of a boundary belongs into the line: that it heals, or that its dtype is another."""
    return result.outcome is BoundaryOutcome.HEALS or result.dtype_a != result.dtype_b


def names_text(names: Sequence[str]) -> str:
    shown = list(names[:_EARLIER_NAMED])
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def numbers_text(numbers: Sequence[SettingDifference]) -> str:
    """``scaling of model.layers.1.self_attn: A 0.25, B 0.325 and 2 more``."""
    return numbers[0].text() + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")


def _earlier_parts(facts: Facts) -> list[str]:
    """What is known about everything before the first divergence."""
    earlier = facts.earlier()
    gone = [result for result in earlier if result.outcome in (BoundaryOutcome.MISSING, BoundaryOutcome.INCOMPARABLE)]
    compared = [result for result in earlier if result.rows_compared and result.outcome is not BoundaryOutcome.INCOMPARABLE]
    parts = []
    if gone:
        what = "missing" if gone[0].outcome is BoundaryOutcome.MISSING else "incomparable"
        parts.append(f"the first divergence may be earlier: {names_text([result.name for result in gone])} {what}")
    unseen = [result for result in earlier if result.outcome in (BoundaryOutcome.NOT_RECORDED, BoundaryOutcome.NOT_OBSERVABLE)]
    by_sketch = [result for result in compared if result.outcome is BoundaryOutcome.BY_SKETCH]
    within = [result for result in compared if result.outcome is BoundaryOutcome.WITHIN_FLOOR]
    if not compared:
        parts.append("nothing before it was compared")
    else:
        recorded = f"{'the' if len(compared) == 1 else 'all'} {count(len(compared), 'earlier boundary')} recorded on both sides"
        which = recorded if unseen or gone else "all earlier boundaries"
        parts.append(f"{which} {'identical or within floor' if within else 'identical'}")
    if by_sketch:
        parts.append(f"{len(by_sketch)} of them only by sketch")
    return parts + _inputs_and_weights(facts)


def _inputs_and_weights(facts: Facts) -> list[str]:
    inputs = [result for result in facts.results if result.name.startswith("input.") and result.rows_compared]
    equal_inputs = bool(inputs) and all(result.outcome is BoundaryOutcome.IDENTICAL for result in inputs) and not facts.pairing.partings
    weights = facts.weights
    said = ["inputs identical"] if equal_inputs else [] if inputs else ["inputs not recorded"]
    unseen = [text] if equal_inputs and (text := mask_unseen(facts.a, facts.b, facts.pairing)) else []
    if facts.pairing.asserted:
        unseen.append(f"what {count(facts.pairing.asserted, 'token')} were fed is taken from the names of their requests")
    if facts.weight:
        return said + unseen
    earlier = [weight for weight in weights.differing if weight.at - 0.5 <= facts.order]
    changed = _changed_weights(facts)
    equal_weights = weights.compared > 0 and not weights.unknown and not weights.missing and not earlier
    if changed:
        return said + unseen + changed
    which = "weights" if not weights.differing else "the weights up to here"
    if equal_inputs and equal_weights:
        return [f"inputs and {which} identical", *unseen]
    if not weights.compared:
        said.append("weights not recorded")
    elif equal_weights:
        said.append(f"{which} identical")
    elif not earlier:
        said.append(f"{which} identical as far as known ({count(len(weights.unknown) + len(weights.missing), 'weight')} not)")
    return said + unseen


def _changed_weights(facts: Facts) -> list[str]:
    sides = [side for side, trace in (("A", facts.a), ("B", facts.b)) if any(m.weights_after == "changed" for m in trace.manifests)]
    return [f"weights of {' and '.join(sides)} changed while recorded"] if sides else []


def _same_run(facts: Facts) -> list[str]:
    """That a trace was compared with itself, which proves nothing about two programs."""
    run_id = facts.a.manifest.run_id
    return [f"A and B are one run, {run_id}: compared with itself"] if run_id and run_id == facts.b.manifest.run_id else []


def _rows_total(facts: Facts) -> tuple[int, int]:
    """Tokens compared, and tokens of both sides together."""
    pairing = facts.pairing
    declared = sum(len(tokens) for side in (pairing.declared_a, pairing.declared_b) for tokens in side.values())
    alone = len(pairing.only_a) + len(pairing.only_b)
    return pairing.matched, pairing.matched + declared + alone


def _same_line(facts: Facts) -> str:
    matched, total = _rows_total(facts)
    boundaries = [result for result in facts.results if result.rows_compared]
    within = [result for result in boundaries if result.outcome is BoundaryOutcome.WITHIN_FLOOR]
    by_sketch = [result for result in boundaries if result.outcome is BoundaryOutcome.BY_SKETCH]
    unseen = [] if facts.weights.compared or facts.weights.unknown or facts.weights.missing else ["weights not compared"]
    notes = [*_same_run(facts), *unseen, *_changed_weights(facts), *declared_notes(facts)]
    line = f"Same on {matched} of {count(total, 'row')}" if matched < total else f"Same: {count(matched, 'row')}"
    line += f" at {count(len(boundaries), 'boundary')}"
    if within and facts.first_bitwise is not None:
        line += f", within the given {'floor' if facts.floors.measured else 'tolerance'} from {within[0].name} on"
        numbers = differing_numbers(facts.a, facts.b)
        notes = [f"not the same numbers: {numbers_text(numbers)}", *notes] if numbers else notes
    elif not by_sketch:
        line += ", all identical"
    if by_sketch:
        line += f", {len(by_sketch)} of them by sketch"
    return line + "".join(f"; {note}" for note in notes)


def declared_notes(facts: Facts) -> list[str]:
    """``3 never computed by B: last sampled token``, once per side and reason; rows of single boundaries named with them."""
    pairing = facts.pairing
    notes = [
        f"{len(tokens)} never computed by {lacking}: {reason}"
        for lacking, declared in (("B", pairing.declared_a), ("A", pairing.declared_b))
        for reason, tokens in declared.items()
    ]
    said: dict[str, list[Finding]] = {}
    for finding in facts.findings:
        if finding.code is FindingCode.ROWS_NOT_COMPUTED and finding.boundary:
            said.setdefault(finding.text, []).append(finding)
    for text, findings in said.items():
        names = [finding.boundary for finding in findings]
        notes.append(f"at {names_text(names)}: {text}")
    return notes


def _open_line(facts: Facts) -> str:
    absent = facts.of_kind(Kind.ABSENCE)
    line = "Could not tell"
    if not absent:
        return line
    first = absent[0]
    where = f"{first.boundary}: " if first.boundary and first.boundary not in first.text else ""
    line += f": {where}{first.text}"
    if len(absent) > 1:
        line += f" (and {count(len(absent) - 1, 'more finding')} of this kind)"
    compared = [result for result in facts.results if result.rows_compared]
    if compared and all(result.outcome is BoundaryOutcome.IDENTICAL for result in compared):
        line += "; everything compared is identical"
    elif compared and not any(result.rows_above_floor for result in compared):
        line += "; nothing compared is proven different"
    return line
