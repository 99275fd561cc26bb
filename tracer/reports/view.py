"""What a report shows, in order, before anyone decides how: one view for terminal and other presenters.

A view is a list of blocks. Nothing here knows about colour, width or escape codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tracer.read.findings import (
    BoundaryOutcome,
    BoundaryResult,
    Counts,
    DiffResult,
    Distance,
    DumpLine,
    Finding,
    Kind,
    Side,
    SideSummary,
    Verdict,
)
from tracer.read.wording import bytes_text, count

if TYPE_CHECKING:  # each command loads the reader it needs, and no other
    from tracer.read.inventory import Inventory
    from tracer.read.load import Problem, VerifyReport
    from tracer.read.siblings import SiblingResult
    from tracer.read.weight_report import WeightResult

__all__ = [
    "Block",
    "Facts",
    "Headline",
    "Items",
    "Table",
    "distance_text",
    "finding_text",
    "side_text",
    "view_diff",
    "view_inventory",
    "view_siblings",
    "view_verify",
    "view_weights",
]

_BEFORE, _AFTER = 2, 6
_TABLE_LINES = 16
_PER_CODE = 3
_CONDITIONS = 8


@dataclass(frozen=True)
class Headline:
    """The one line. ``tone``: good, bad or open."""

    text: str
    tone: str


@dataclass(frozen=True)
class Facts:
    """Labels and what they say; a label may be empty to continue the one before."""

    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Columns and rows of text. ``marked``: rows to stand out. ``rest``: what was left out, in words."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    rest: str = ""


@dataclass(frozen=True)
class Items:
    """A titled list."""

    title: str
    items: tuple[str, ...]


Block: TypeAlias = "Headline | Facts | Table | Items"

_TONES = {Verdict.SAME: "good", Verdict.DIFFERENT: "bad", Verdict.COULD_NOT_TELL: "open"}
_ABSENT = (BoundaryOutcome.MISSING, BoundaryOutcome.INCOMPARABLE)
_QUIET = (BoundaryOutcome.IDENTICAL, BoundaryOutcome.NOT_RECORDED, BoundaryOutcome.NOT_OBSERVABLE)


def view_diff(result: DiffResult, *, everything: bool = False) -> list[Block]:
    """A comparison: headline, sides, class, the boundaries around the first divergence, findings, one next step.

    ``everything``: all boundaries, findings and conditions instead of the telling ones.
    """
    blocks: list[Block] = [Headline(result.headline, _TONES[result.verdict])]
    blocks.append(Facts((("A", side_text(result.a)), ("B", side_text(result.b)), *_counts(result), *_class(result))))
    table = _boundaries(result, everything)
    if table is not None:
        blocks.append(table)
    if result.dumps:
        blocks.append(_dumps(result.dumps))
    findings = [finding for finding in result.findings if everything or not _said_by_table(finding, result)]
    if findings:
        blocks.append(Items("findings", tuple(_grouped(findings, None if everything else _PER_CODE))))
    if result.conditions:
        blocks.append(_conditions(result.conditions, everything))
    if result.next_step:
        blocks.append(Facts((("next", result.next_step),)))
    return blocks


def side_text(side: SideSummary) -> str:
    """``traces/a: transformers Qwen3ForCausalLM, tp=2, level 1, 2 sequences, 96 tokens``."""
    parts = [f"{side.host} {side.root_class}".strip(), side.mesh or (count(side.world_size, "process") if side.world_size > 1 else "")]
    parts += ["" if side.level is None else f"level {side.level}", count(side.sequences, "sequence"), count(side.tokens, "token")]
    return f"{side.path}: " + ", ".join(part for part in parts if part)


def _counts(result: DiffResult) -> list[tuple[str, str]]:
    counts: Counts = result.counts
    lines = []
    if counts.rows_compared:
        text = f"{count(counts.tokens_matched, 'token')}, {count(counts.rows_compared, 'row')} "
        text += f"at {count(counts.boundaries_compared, 'boundary')}: "
        text += f"{counts.boundaries_identical} identical, {counts.boundaries_differing} differ"
        missing = f", {counts.boundaries_missing} missing" if counts.boundaries_missing else ""
        weights = f"; {counts.weights_differing} of {count(counts.weights_compared, 'weight')} differ" if counts.weights_compared else ""
        unknown = f", {counts.weights_unknown} unknown" if counts.weights_unknown else ""
        lines.append(("compared", text + missing + weights + unknown))
    copies = [max((getattr(boundary, name) for boundary in result.boundaries), default=1) for name in ("copies_a", "copies_b")]
    if max(copies) > 1:
        lines.append(("copies", f"up to {copies[0]} on A, {copies[1]} on B"))
    for label, counted in (("not computed", counts.not_computed), ("left out", counts.skipped)):
        if counted:
            lines.append((label, ", ".join(f"{reason} {rows}" for reason, rows in counted.items())))
    return lines


def _class(result: DiffResult) -> list[tuple[str, str]]:
    found = result.classification
    if found is None:
        return []
    lines = [("class", f"{found.klass.value} ({found.confidence.value} confidence)")]
    for label, texts in (("evidence", found.evidence), ("not proven", found.not_proven)):
        lines += [(label if number == 0 else "", text) for number, text in enumerate(texts)]
    roots = result.roots[1:] if result.roots and result.first == result.roots[0].place else result.roots
    for number, root in enumerate(roots[:_PER_CODE]):
        where = f"{root.place.boundary}" + (f", {root.place.request}:{root.place.position}" if root.place.position is not None else "")
        lines.append(
            (
                "other roots" if number == 0 else "",
                f"{where} ({root.klass.value}" + (f", {count(root.rows, 'row')})" if root.rows else ")"),
            )
        )
    if len(roots) > _PER_CODE:
        lines.append(("", f"and {len(roots) - _PER_CODE} more"))
    return lines


# ---------------------------------------------------------------- boundaries


def distance_text(distance: Distance | None) -> str:
    """``2.8e-03``, ``below resolution``, ``undefined``, or nothing."""
    if distance is None:
        return ""
    if distance.below_resolution:
        return "below resolution"
    return "undefined" if distance.largest is None else f"{distance.largest:.2e}"


def _boundaries(result: DiffResult, everything: bool) -> Table | None:
    shown = list(range(len(result.boundaries))) if everything else _telling(result)
    if not shown:
        return None
    floors = any(result.boundaries[at].floor is not None for at in shown)
    columns = ("", "boundary", "outcome", "differ", "distance", *(("floor",) if floors else ()), "tokens", "note")
    rows = tuple(_line(result.boundaries[at], floors, everything) for at in shown)
    first = result.first.boundary if result.first is not None else ""
    marked = frozenset(number for number, at in enumerate(shown) if result.boundaries[at].name == first)
    rows = tuple(("first" if number in marked else row[0], *row[1:]) for number, row in enumerate(rows))
    return Table(columns, rows, marked, _rest(result, set(shown)))


def _line(boundary: BoundaryResult, floors: bool, everything: bool) -> tuple[str, ...]:
    differ = ""
    if boundary.rows_compared:
        rows = boundary.rows_above_floor if boundary.floor is not None or boundary.rows_above_floor else boundary.rows_differing
        differ = f"{rows} of {boundary.rows_compared}"
    notes = [boundary.text] if boundary.text else []
    if boundary.nonfinite_a and boundary.nonfinite_a == boundary.nonfinite_b:
        notes.append(f"nonfinite {boundary.nonfinite_a} on both")
    if everything:
        for what in ("copies", "executions"):
            counted = getattr(boundary, f"{what}_a"), getattr(boundary, f"{what}_b")
            if max(counted) > 1:
                notes.append(f"{what} {counted[0]}, {counted[1]}")
    floor = ("" if boundary.floor is None else f"{boundary.floor:.2e}",) if floors else ()
    mark = "root" if boundary.root else ""
    return (
        mark,
        boundary.name,
        boundary.outcome.value,
        differ,
        distance_text(boundary.distance),
        *floor,
        boundary.tokens,
        "; ".join(notes),
    )


def _telling(result: DiffResult) -> list[int]:
    """Boundaries around the first divergence, further roots, what is missing, what is not finite: a screenful."""
    boundaries = result.boundaries
    places = {boundary.name: at for at, boundary in enumerate(boundaries)}
    chosen: dict[int, None] = {}

    def choose(found: Iterable[int], most: int = _TABLE_LINES) -> None:
        for at in list(found)[:most]:
            if len(chosen) < _TABLE_LINES:
                chosen.setdefault(at)

    recorded = [at for at, boundary in enumerate(boundaries) if boundary.rows_compared or boundary.outcome in _ABSENT]
    loud = [at for at in recorded if boundaries[at].outcome not in _QUIET]
    start = places.get(result.first.boundary) if result.first is not None else None
    if start is None and loud:
        start = loud[0]
    if start is not None:
        choose([start])
        choose(at for at in loud if boundaries[at].root)
        choose([at for at in recorded if at < start][-_BEFORE:])
        choose([at for at in recorded if at > start], _AFTER)
    choose(at for at in loud if boundaries[at].outcome in _ABSENT)
    choose((at for at in recorded if boundaries[at].nonfinite_a or boundaries[at].nonfinite_b), _PER_CODE)
    return sorted(chosen)


def _rest(result: DiffResult, shown: set[int]) -> str:
    hidden: dict[str, int] = {}
    for at, boundary in enumerate(result.boundaries):
        if at not in shown:
            hidden[boundary.outcome.value] = hidden.get(boundary.outcome.value, 0) + 1
    if not hidden:
        return ""
    return "not shown: " + ", ".join(f"{number} {outcome}" for outcome, number in hidden.items()) + " (--all shows every boundary)"


# ---------------------------------------------------------------- dumps


def _dumps(dumps: Sequence[DumpLine]) -> Table:
    """Raw values of both sides, one line per boundary."""
    columns = (
        "dumped", "role", "rows", "shape", "dtype", "finite", "max abs", "MAE", "relative L2", "cosine", "ulps", "B above", "first bad",
        "note",
    )  # fmt: skip
    return Table(columns, tuple(_dump_line(line) for line in dumps))


def _dump_line(line: DumpLine) -> tuple[str, ...]:
    finite = f"{line.finite_a:.0%}" if line.finite_a == line.finite_b else f"{line.finite_a:.2%}, {line.finite_b:.2%}"
    first = ""
    if line.first_column is not None:
        expert = f"/e{line.first_expert}" if line.first_expert is not None else ""
        first = f"{line.first_request}:{line.first_position}{expert} column {line.first_column}"
    notes = [line.text] if line.text else []
    if line.log_softmax is not None and line.total_variation is not None:
        argmax = f"argmax differs in {line.argmax_differs} rows"
        notes.append(f"log-softmax {line.log_softmax:.2e}, total variation {line.total_variation:.2e}, {argmax}")
    return (
        line.boundary,
        line.role,
        f"{line.rows_differing} of {line.rows} differ",
        f"{line.rows} x {line.columns}",
        line.dtype_a if line.dtype_a == line.dtype_b else f"{line.dtype_a}, {line.dtype_b}",
        finite,
        _number(line.max_abs),
        _number(line.mae),
        "undefined" if line.relative_l2 is None and line.max_abs is not None else _number(line.relative_l2),
        "undefined" if line.cosine is None and line.max_abs is not None else "" if line.cosine is None else f"{line.cosine:.6f}",
        "" if line.ulps is None else f"{line.ulps:.3g}",
        "" if line.b_above is None else f"{line.b_above:.0%}",
        first,
        "; ".join(notes),
    )


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.2e}"


# ---------------------------------------------------------------- findings and conditions


def _said_by_table(finding: Finding, result: DiffResult) -> bool:
    """Whether headline, class and table say it already: the root of the first divergence."""
    first = result.first
    return (
        first is not None
        and finding.kind is Kind.DIFFERENCE
        and finding.side is Side.BOTH
        and (finding.boundary, finding.request, finding.position) == (first.boundary, first.request, first.position)
        and first.position is not None
    )


def finding_text(finding: Finding) -> str:
    """``B  layers.1.mlp.out: missing on B: 0 executions  [boundary-missing]``."""
    side = "" if finding.side is Side.BOTH else f"{finding.side.value.upper()}: "
    where = f"{finding.boundary}: " if finding.boundary and not finding.text.startswith(finding.boundary) else ""
    return f"{side}{where}{finding.text} [{finding.code.value}]"


def _grouped(findings: Sequence[Finding], most: int | None) -> list[str]:
    """Findings as text; of each code and kind at most so many, then how many more."""
    lines: list[str] = []
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code.value, finding.kind.value), []).append(finding)
    for (code, _), group in groups.items():
        shown = group if most is None else group[:most]
        lines += [finding_text(finding) for finding in shown]
        if len(group) > len(shown):
            lines.append(f"and {len(group) - len(shown)} more [{code}] (--all)")
    return lines


def _conditions(conditions: dict[str, dict[str, Any]], everything: bool) -> Items:
    shown = list(conditions.items())[: None if everything else _CONDITIONS]
    items = [f"{name}: A {_value(values['a'])}, B {_value(values['b'])}" for name, values in shown]
    if len(conditions) > len(shown):
        items.append(f"and {len(conditions) - len(shown)} more (--all)")
    return Items("conditions that differ (leads, not causes)", tuple(items))


def _value(value: Any) -> str:
    return "not recorded" if value is None else str(value)


# ---------------------------------------------------------------- the other commands


def view_weights(result: WeightResult, *, everything: bool = False) -> list[Block]:
    """Weights that differ, are missing or unknown; with ``everything`` the identical ones too."""
    from tracer.read.weight_report import WeightState, rows_text

    blocks: list[Block] = [Headline(result.headline, _TONES[result.verdict])]
    blocks.append(Facts((("A", side_text(result.a)), ("B", side_text(result.b)))))
    lines = [line for line in result.weights if everything or line.state is not WeightState.IDENTICAL]
    if lines:
        rows = tuple(
            (line.name, line.state.value, rows_text(line), "; ".join(part for part in (line.text, "buffer" * line.buffer) if part))
            for line in lines
        )
        hidden = len(result.weights) - len(lines)
        blocks.append(
            Table(("weight", "state", "rows that differ", "note"), rows, rest=f"not shown: {hidden} identical (--all)" if hidden else "")
        )
    if any(line.state is WeightState.DIFFERS and line.rows_differing is None for line in lines):
        blocks.append(Facts((("next", 'To name rows, record both sides with trace(..., weights="rows")'),)))
    if result.findings:
        blocks.append(Items("findings", tuple(_grouped(result.findings, None if everything else _PER_CODE))))
    return blocks


def view_siblings(result: SiblingResult) -> list[Block]:
    """Boundaries at which a row was seen more than once, those that disagree first."""
    blocks: list[Block] = [Headline(result.headline, _TONES[result.verdict]), Facts((("trace", side_text(result.trace)),))]
    noisy = [line for line in result.boundaries if not line.agree]
    if noisy:
        rows = tuple(
            (line.name, f"{line.seen_again} of {line.rows}", "undefined" if line.largest is None else f"{line.largest:.2e}")
            for line in noisy
        )
        blocks.append(Table(("boundary", "seen again", "largest distance"), rows[:_TABLE_LINES], rest=_more(len(rows))))
    if result.findings:
        blocks.append(Items("findings", tuple(_grouped(result.findings, _PER_CODE))))
    if result.next_step:
        blocks.append(Facts((("next", result.next_step),)))
    return blocks


def _more(rows: int) -> str:
    return f"and {count(rows - _TABLE_LINES, 'more boundary')}" if rows > _TABLE_LINES else ""


def view_inventory(result: Inventory, *, everything: bool = False) -> list[Block]:
    """What a trace holds."""
    from tracer.read.conditions import flat_conditions

    blocks: list[Block] = []
    if result.complete:
        blocks.append(Headline(f"{result.path}: complete, {count(result.world_size, 'process')}", "good"))
    else:
        what = "damaged" if result.problems else "not complete"
        blocks.append(Headline(f"{result.path}: {what}, so tracer diff gives no verdict on it", "bad" if result.problems else "open"))
    facts = [
        ("run", result.run_id or "unknown"),
        (
            "host",
            f"{result.host} {result.root_class}, map {result.family}, level {result.level}, tracer {result.tracer}" if result.host else "",
        ),
        ("sequences", f"{result.sequences} in {count(result.forwards, 'forward')}" if result.host else str(result.sequences)),
        ("size", bytes_text(result.bytes)),
        ("weights", f"{result.weights}, at the end: {result.weights_after}" if result.weights else ""),
        ("left out", ", ".join(f"{reason} {rows}" for reason, rows in result.skipped.items())),
        ("not computed", ", ".join(f"{reason} {rows}" for reason, rows in result.not_computed.items())),
        ("policies", ", ".join(result.policies)),
        ("interventions", ", ".join(result.interventions)),
    ]
    blocks.append(Facts(tuple(fact for fact in facts if fact[1])))
    if len(result.shards) > 1 or not result.complete:
        rows = tuple(
            (str(shard.rank), "committed" if shard.committed else "unfinished", shard.mesh, str(shard.segments), str(shard.rows))
            for shard in result.shards
        )
        blocks.append(Table(("rank", "state", "mesh", "segments", "fingerprints"), rows))
    shown = [line for line in result.boundaries if everything or line.rows or line.status in ("recorded", "vacuous")]
    if shown:
        lines = tuple(
            (
                line.name,
                line.status,
                line.dtype,
                str(line.width or ""),
                str(line.rows or ""),
                str(line.executions or "") + (f" + {line.recomputed} recomputed" if line.recomputed else ""),
                line.reason,
            )
            for line in shown
        )
        hidden: dict[str, int] = {}
        for line in result.boundaries:
            if line not in shown:
                hidden[line.status] = hidden.get(line.status, 0) + 1
        rest = "not shown: " + ", ".join(f"{number} {status}" for status, number in hidden.items()) + " (--all)" if hidden else ""
        blocks.append(Table(("boundary", "status", "dtype", "width", "rows", "executions", "note"), lines, rest=rest))
    blocks += _problems(result.problems, result.findings)
    if result.notes:
        blocks.append(Items("notes", tuple(f"{note.text} [{note.code}]" for note in result.notes)))
    conditions = list(flat_conditions(result.conditions))
    if conditions:
        items = [f"{name}: {value}" for name, value in conditions[: None if everything else 3 * _CONDITIONS]]
        items += [f"and {len(conditions) - len(items)} more (--all)"] if len(conditions) > len(items) else []
        blocks.append(Items("conditions", tuple(items)))
    return blocks


def view_verify(result: VerifyReport) -> list[Block]:
    """What was checked and everything that is wrong."""
    wrong = len(result.problems) + len(result.findings)
    headline = f"{result.path}: " + ("whole and unaltered" if result.good else count(wrong, "problem"))
    blocks: list[Block] = [Headline(headline, "good" if result.good else "bad")]
    shards = f"{result.shards} of {count(result.world_size, 'shard')}"
    checked = f"{count(result.files, 'file')}, {bytes_text(result.bytes)}, {count(result.fingerprints, 'fingerprint')} in {shards}"
    blocks.append(Facts((("run", result.run_id or "unknown"), ("checked", checked))))
    blocks += _problems(result.problems, result.findings)
    return blocks


def _problems(problems: Iterable[Problem], findings: Iterable[Finding]) -> list[Block]:
    """What is wrong with files, then what is wrong with the trace."""
    items = []
    for problem in problems:
        parts = [f"expected {problem.expected}" if problem.expected else "", f"found {problem.found}" if problem.found else ""]
        said = "; ".join(part for part in parts if part)
        items.append(f"{problem.file}: {problem.text}" + (f" ({said})" if said else "") + f" [{problem.code}]")
    items += [finding_text(finding) for finding in findings]
    return [Items("problems", tuple(items))] if items else []
