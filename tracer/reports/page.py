"""A result as one self-contained HTML page: no network, no server, nothing beside the file.

Everything shown is escaped; what a trace holds is data. The drawing library is in the page, which is why it has about
5 MB. Without it (nothing differs, nothing to draw) a page is a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tracer.errors import Code, UsageError, visible
from tracer.read.findings import BoundaryOutcome, DiffResult, Kind
from tracer.read.wording import count
from tracer.reports.charts import Chart, distance_curve, token_map_chart
from tracer.reports.view import Block, Facts, Headline, Items, Table, view_diff
from tracer.reports.writing import write_whole

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["Flow", "FlowStep", "Section", "diff_page", "diff_sections", "render_page", "write_page"]

_ABSENT = (BoundaryOutcome.MISSING, BoundaryOutcome.INCOMPARABLE, BoundaryOutcome.NOT_OBSERVABLE, BoundaryOutcome.NOT_RECORDED)
_REMEDY = "pip install 'boundary-tracer[report]'"


@dataclass(frozen=True)
class FlowStep:
    """A question, its answer (empty: not asked), numbers, and where it can end: when, the name of the end, whether it did."""

    question: str
    answer: str
    numbers: str
    exits: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class Flow:
    """A decision as a flat path of questions that ends once. ``end``: where; ``following``: what to do then."""

    steps: tuple[FlowStep, ...]
    end: str
    following: str


@dataclass(frozen=True)
class Section:
    """A titled part of a page. ``folded``: the blocks are behind this line until asked for."""

    anchor: str
    title: str
    blocks: tuple[Block, ...] = ()
    caption: str = ""
    chart: Chart | None = None
    folded: str = ""
    flow: Flow | None = None

    @property
    def height(self) -> int:
        """Of the drawing, in CSS pixels."""
        return 0 if self.chart is None else self.chart.height


def write_page(page: str, target: str) -> None:
    """Write a page in one step; an existing file is replaced. Raises ``UsageError`` (bad-argument)."""
    write_whole(page.encode(), target, "--html")


def diff_page(result: DiffResult) -> str:
    """The page of a comparison."""
    headline = view_diff(result)[0]
    assert isinstance(headline, Headline)
    return render_page(f"tracer: {headline.text}", headline, result.verdict.value, diff_sections(result))


def diff_sections(result: DiffResult) -> list[Section]:
    """Everything a page says of a comparison, below its headline."""
    telling, whole = view_diff(result), view_diff(result, everything=True)
    facts = whole[1]
    assert isinstance(facts, Facts)
    steps = [block for block in whole[2:] if isinstance(block, Facts)]
    sections = [Section("verdict", "Verdict", (facts, *steps))]
    for chart in (token_map_chart(result), distance_curve(result)):
        if chart is not None:
            sections.append(Section(chart.name, chart.title, caption=chart.caption, chart=chart))
    tables = [[block for block in view if isinstance(block, Table)] for view in (telling, whole)]
    titles = {"boundaries": "Boundaries", "every": "Every boundary"}
    if tables[0]:
        sections.append(Section("boundaries", titles["boundaries"], (tables[0][0],), "Around the first divergence, in causal order."))
        folded = f"all {len(result.boundaries)} boundaries of the map"
        sections.append(Section("every", titles["every"], (tables[1][0],), folded=folded))
        sections += _flips(result)
        for number, table in enumerate(tables[1][1:]):
            sections.append(Section(f"table-{number}", "Values", (table,), "What was dumped, both sides of every row."))
    for block in whole:
        if isinstance(block, Items) and block.title.startswith("conditions"):
            sections.append(_conditions(result, block.title))
        elif isinstance(block, Items):
            anchor = block.title.split()[0]
            sections.append(Section(anchor, block.title[0].upper() + block.title[1:], (block,)))
    sections.append(_omissions(result))
    return sections


def _flips(result: DiffResult) -> list[Section]:
    """The choices that differ, token by token."""
    apart = [boundary for boundary in result.boundaries if boundary.flips]
    if not apart:
        return []
    lines = [
        (boundary.name, f"{flip.request}:{flip.position}", _ids(flip.a, flip.b), _ids(flip.b, flip.a))
        for boundary in apart
        for flip in boundary.flips
    ]
    tokens = [boundary.rows_above_floor or boundary.rows_differing for boundary in apart]
    notes = [(boundary.name, f"{count(number, 'token')}: {boundary.text}") for boundary, number in zip(apart, tokens, strict=True)]
    hidden = sum(tokens) - len(lines)
    rest = f"and {count(hidden, 'more token')}" if hidden else ""
    table = Table(("boundary", "token", "A chose", "B chose"), tuple(lines), rest=rest)
    caption = "Choices that differ, the first tokens of each boundary. In brackets: what only that side chose."
    return [Section("flips", "Routing flips", (Facts(tuple(notes)), table), caption)]


def _ids(own: tuple[int, ...], other: tuple[int, ...]) -> str:
    return " ".join(str(chosen) if chosen in other else f"[{chosen}]" for chosen in own)


def _conditions(result: DiffResult, title: str) -> Section:
    """The settings that differ, side by side."""
    said = [(name, values["a"], values["b"]) for name, values in result.conditions.items()]
    shown = tuple(tuple("not recorded" if text is None else str(text) for text in line) for line in said)
    return Section("conditions", title[0].upper() + title[1:], (Table(("setting", "A", "B"), shown),))


def _omissions(result: DiffResult) -> Section:
    """Everything that was not compared, with its reason."""
    counts = result.counts
    lines = [(f"rows not computed, {reason}", str(rows), "declared by the host") for reason, rows in counts.not_computed.items()]
    lines += [(f"rows left out, {reason}", str(rows), "not recorded") for reason, rows in counts.skipped.items()]
    for side, rows in (("A", counts.rows_only_a), ("B", counts.rows_only_b)):
        if rows:
            lines.append((f"rows only {side} has", str(rows), "no partner on the other side"))
    for boundary in result.boundaries:
        if boundary.outcome in _ABSENT:
            lines.append((boundary.name, "", f"{boundary.outcome.value}" + (f": {boundary.text}" if boundary.text else "")))
    absent = [finding for finding in result.findings if finding.kind in (Kind.ABSENCE, Kind.UNREADABLE)]
    caption = f"Nothing passes by absence: {len(absent)} finding{'s' * (len(absent) != 1)} of absence count towards the verdict."
    if not lines:
        return Section("omissions", "Not compared", caption=caption + " Every boundary and every row had a partner.")
    return Section("omissions", "Not compared", (Table(("what", "rows", "reason"), tuple(lines)),), caption)


def render_page(title: str, headline: Headline, verdict: str, sections: Sequence[Section]) -> str:
    """Any sections as a page. ``verdict``: the word in front of the headline, so that its colour says nothing alone.

    Raises ``UsageError`` (extra-missing) where the packages that pages need are not installed.
    """
    charts = [section.chart for section in sections if section.chart is not None]
    figures = [{"name": chart.name, "data": chart.data, "layout": chart.layout} for chart in charts]
    encoded = msgspec.json.encode(figures).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template, safe = _template()
    page: str = template.render(
        title=title,
        tone=headline.tone,
        verdict=verdict.upper(),
        headline=headline.text,
        sections=sections,
        figures=safe(encoded) if charts else "",
        library=safe(_drawing_library()) if charts else "",
        footer="Written by tracer. Nothing on this page was fetched from a network.",
    )
    return page


@cache
def _template() -> tuple[Template, type[str]]:
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise _missing(error) from error
    source = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")

    def shown(value: object) -> object:
        return visible(value) if type(value) is str else value  # Markup is the page's own

    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, finalize=shown).from_string(source), Markup


@cache
def _drawing_library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise _missing(error) from error
    library: str = get_plotlyjs()
    return library.replace("</script", "<\\/script")


def _missing(error: ImportError) -> UsageError:
    return UsageError(
        Code.EXTRA_MISSING, "an HTML page needs packages that are not installed", expected="jinja2 and plotly", found=f"no {error.name}",
        remedy=_REMEDY,
    )  # fmt: skip
