"""What the page of a score comparison draws: the distribution of differences, and the error by place in the response.

Lines differ in dash and marker as well as in colour. Colours of text and background belong to the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tracer.reports.charts import Chart
from tracer.scores.metrics import limit_of
from tracer.scores.results import PairResult, PositionBin, ScoreResult

__all__ = ["distribution_chart", "position_chart"]

_LOOKS = (
    ("solid", "circle", "#1f77b4"),
    ("dash", "square", "#ff7f0e"),
    ("dot", "diamond", "#2ca02c"),
    ("dashdot", "x", "#d62728"),
    ("longdash", "cross", "#9467bd"),
)
_HEIGHT = 420
_FEW_DECADES = 4
_FIRST = "first"
"""Category of the first response token."""


def distribution_chart(result: ScoreResult) -> Chart | None:
    """Share of tokens by size of the difference, one line per pair and repeat; None where every difference is 0."""
    pairs = [pair for pair in (*result.pairs, *result.repeats) if pair.histogram.zero < pair.tokens]
    if not pairs:
        return None
    edges = pairs[0].histogram.edges
    used = [k for k in range(len(edges)) if any(pair.histogram.counts[k] for pair in pairs)]
    shown = range(used[0], used[-1] + 1)
    labels = ["0", *(_bin_text(edges, k) for k in shown)]
    data = []
    for number, pair in enumerate(pairs):
        counts = (pair.histogram.zero, *(pair.histogram.counts[k] for k in shown))
        hover = f"{pair.name}<br>%{{x}} nats<br>%{{y:.3g}} % of {pair.tokens} tokens<extra></extra>"
        data.append(_line(number, pair.name, labels, [100 * count / pair.tokens for count in counts]) | {"hovertemplate": hover})
    said = "; ".join(
        f"{pair.name}: {pair.histogram.above} tokens with {pair.x.value} above, {pair.histogram.below} below, {pair.histogram.zero} equal"
        for pair in pairs
    )
    layout = _layout({"title": {"text": "absolute difference, nats"}, "type": "category", "categoryarray": labels, "tickangle": 40})
    layout["yaxis"] = {"title": {"text": "% of valid tokens"}, "rangemode": "tozero"}
    caption = f"How many tokens lie how far apart, in half decades; the first place are exact zeros. {said}."
    return Chart("distribution", "Distribution of differences", caption, data, layout, _HEIGHT)


def position_chart(result: ScoreResult) -> Chart | None:
    """Mean error by place in the response, the first token apart from the others; None where every difference is 0."""
    pairs = [pair for pair in result.pairs if pair.largest > 0]
    if not pairs:
        return None
    bins = {part.start: part for pair in pairs for part in pair.positions}
    labels = [_place_text(bins[start]) for start in sorted(bins)]
    data: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs):
        parts = {_place_text(part): part for part in pair.positions}
        first = parts.get(_FIRST)
        later = [label for label in labels if label != _FIRST]
        text = [_hover(pair, parts.get(label)) for label in later]
        hover = {"text": text, "hovertemplate": "%{text}<extra></extra>"}
        data.append(_line(number, pair.name, later, [_drawn(parts.get(label)) for label in later]) | hover)
        if first is not None:
            dot = _line(number, f"{pair.name}, first token", [_FIRST], [_drawn(first)])
            dot |= {"mode": "markers", "showlegend": False, "text": [_hover(pair, first)], "hovertemplate": "%{text}<extra></extra>"}
            dot["marker"] = {**dot["marker"], "size": 12, "line": {"width": 2, "color": dot["marker"]["color"]}}
            data.append(dot)
    limit = max(limit_of(pair.noise, result.thresholds) for pair in pairs)
    data.append(
        {"type": "scatter", "mode": "lines", "name": f"apart above {limit:.3g}", "x": labels, "y": [limit] * len(labels),
         "line": {"dash": "dot", "width": 1, "color": "#888888"}, "hoverinfo": "skip"}
    )  # fmt: skip
    layout = _layout({"title": {"text": "response token"}, "type": "category", "categoryarray": labels, "tickangle": 40, "nticks": 40})
    drawn = [value for line in data for value in line["y"] if value is not None]
    layout["yaxis"] = {"type": "log", "title": {"text": "logprob_mae, nats"}, **_decades(min(drawn), max(drawn))}
    if _FIRST in labels and len(labels) > 1:
        edge = {"xref": "x", "yref": "paper", "x0": 0.5, "x1": 0.5, "y0": 0, "y1": 1}
        layout["shapes"] = [{"type": "line", **edge, "line": {"dash": "dot", "width": 1, "color": "#888888"}}]
    caption = (
        "Mean error by place in the response: single tokens, then bins that grow by half. Left of the dotted line stands the first "
        "response token, which comes from prefill; the others come from decode. An error of exactly 0 is not drawn."
    )
    return Chart("positions", "Error by place in the response", caption, data, layout, _HEIGHT)


def _line(number: int, name: str, x: Sequence[Any], y: Sequence[Any]) -> dict[str, Any]:
    dash, symbol, colour = _LOOKS[number % len(_LOOKS)]
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y), "connectgaps": False,
        "line": {"dash": dash, "color": colour}, "marker": {"symbol": symbol, "size": 7, "color": colour},
    }  # fmt: skip


def _layout(xaxis: dict[str, Any]) -> dict[str, Any]:
    return {
        "xaxis": {"showgrid": False, **xaxis},
        "margin": {"l": 80, "r": 30, "t": 40, "b": 100},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    }


def _decades(least: float, largest: float) -> dict[str, Any]:
    """Ticks at 1 and 3 of every decade, or at 1 where there are many."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(largest))
    steps = (1, 3) if last - first <= _FEW_DECADES else (1,)
    ticks = [(step * 10.0**decade, f"{step}e{decade}") for decade in range(first, last + 1) for step in steps]
    return {"tickmode": "array", "tickvals": [value for value, _ in ticks], "ticktext": [text for _, text in ticks]}


def _bin_text(edges: Sequence[float], k: int) -> str:
    if k == 0:
        return f"below {edges[1]:.0e}"
    return f"{edges[k]:.1e}" if k + 1 < len(edges) else f"{edges[k]:.0f} and more"


def _place_text(part: PositionBin) -> str:
    if part.start == 0:
        return _FIRST
    return str(part.start) if part.stop == part.start + 1 else f"from {part.start}"


def _drawn(part: PositionBin | None) -> float | None:
    return part.logprob_mae if part is not None and part.logprob_mae > 0 else None


def _hover(pair: PairResult, part: PositionBin | None) -> str:
    if part is None:
        return ""
    where = f"token {part.start}" if part.stop == part.start + 1 else f"tokens {part.start} to {part.stop - 1}"
    return (
        f"{pair.name}, {where}: logprob_mae {part.logprob_mae:.3g}, signed mean {part.signed_mean:+.3g}, "
        f"largest {part.largest:.3g} over {part.tokens} tokens"
    )
