"""What a page draws of a comparison: plain plotly.js figures as JSON-ready dicts, without colours of the page.

Names are data: plotly reads a small markup in labels, so every name is escaped here. Colours of text and background belong
to the page, which knows whether it is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from tracer.errors import visible
from tracer.read.findings import BoundaryOutcome, DiffResult, MapColumn, TokenMap

__all__ = ["Chart", "distance_curve", "token_map_chart"]

_LOWEST, _NO_DISTANCE = -9.0, 1.0
"""log10 of what stands for "below the sketch's resolution" and for "no distance is kept" (integers, undefined)."""
_CATEGORIES = {"nticks": 12, "tickangle": 40, "showgrid": False}
_LABELS = 48
_LONGEST, _KEPT = 40, 18
"""Characters of a name on an axis, and of each of its ends where it is longer."""
_HATCHED = 4000
"""Cells with a stroke besides their colour: what is grey must not be mistaken for a distance where no colour is seen."""
_LINE = 17
"""CSS pixels that one label needs."""
_TICKS = {_LOWEST: "below resolution", -8.0: "1e-8", -6.0: "1e-6", -4.0: "1e-4", -2.0: "1e-2", 0.0: "1", _NO_DISTANCE: "other value"}


@dataclass(frozen=True)
class Chart:
    """One drawing. ``caption``: what it shows and by which rule, readable without it. ``height`` in CSS pixels."""

    name: str
    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int


def token_map_chart(result: DiffResult) -> Chart | None:
    """Boundaries against tokens; None where nothing differs, so that there is nothing to see."""
    token_map = result.token_map
    if not any(row.columns for row in token_map.rows):
        return None
    names = _names(row.boundary for row in token_map.rows)
    labels = _names(_column_text(column) for column in token_map.columns)
    distance: list[list[float | None]] = [[None] * len(labels) for _ in names]
    counts: list[list[int | None]] = [[None] * len(labels) for _ in names]
    unseen: list[list[int | None]] = [[None] * len(labels) for _ in names]
    marks: tuple[list[str], list[str]] = ([], [])
    hatched: tuple[list[str], list[str]] = ([], [])
    for at, row in enumerate(token_map.rows):
        for column in row.unseen:
            unseen[at][column] = 1
            hatched[0].append(labels[column])
            hatched[1].append(names[at])
        for column, rows, largest, roots in zip(row.columns, row.rows, row.largest, row.roots, strict=True):
            distance[at][column] = _log(largest)
            counts[at][column] = rows
            if roots:
                marks[0].append(labels[column])
                marks[1].append(names[at])
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap", "name": "not compared", "x": labels, "y": names, "z": unseen, "zmin": 0, "zmax": 1, "showscale": False,
            "colorscale": [[0, "#8884"], [1, "#8884"]], "hovertemplate": "%{y}<br>%{x}<br>nothing compared<extra></extra>",
        },
        {
            "type": "heatmap", "name": "distance", "x": labels, "y": names, "z": distance, "customdata": counts, "zmin": _LOWEST,
            "zmax": _NO_DISTANCE, "colorscale": "Viridis", "ygap": 1 if len(names) <= 60 else 0,
            "colorbar": {"title": {"text": "relative distance", "side": "right"}, "thickness": 14, "len": 1,
                         "tickvals": list(_TICKS), "ticktext": list(_TICKS.values())},
            "hovertemplate": "%{y}<br>%{x}<br>%{customdata} rows differ, largest 10^%{z:.1f}<extra></extra>",
        },
        {
            "type": "scatter", "mode": "markers", "name": "nothing compared", "x": hatched[0][:_HATCHED], "y": hatched[1][:_HATCHED],
            "showlegend": bool(hatched[0]), "hoverinfo": "skip", "marker": {"symbol": "line-ne-open", "size": 6, "color": "#888"},
        },
        {
            "type": "scatter", "mode": "markers", "name": "causal root", "x": marks[0], "y": marks[1], "showlegend": True,
            "marker": {"symbol": "x", "size": 9, "color": "#d62728", "line": {"width": 1, "color": "#fff"}},
            "hovertemplate": "%{y}<br>%{x}<br>causal root<extra></extra>",
        },
    ]  # fmt: skip
    height = min(max(_LINE * len(names), 10 * _LINE), 60 * _LINE)
    layout = {
        "xaxis": {"type": "category", "title": {"text": "tokens of side A"}, "categoryarray": labels, **_CATEGORIES},
        "yaxis": {"type": "category", "autorange": "reversed", "categoryarray": names, "showgrid": False, **_ticks(names, height)},
        "margin": {"l": 210, "r": 30, "t": 40, "b": 110},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    }
    return Chart("map", "Where they differ", _map_rule(token_map), data, layout, height + 170)


def distance_curve(result: DiffResult) -> Chart | None:
    """Largest distance per boundary in causal order, against the floor where one was given; None where nothing differs."""
    compared = [boundary for boundary in result.boundaries if boundary.rows_compared]
    differing = [boundary for boundary in compared if boundary.distance is not None and boundary.rows_differing]
    if not differing:
        return None
    order = {boundary.name: at for at, boundary in enumerate(compared)}
    names = _names(boundary.name for boundary in compared)
    first = result.first.boundary if result.first is not None else ""
    values = [boundary.distance.largest if boundary.distance is not None else None for boundary in differing]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines+markers", "name": "largest distance", "x": [order[boundary.name] for boundary in differing],
            "y": [10**_LOWEST if value == 0 else value for value in values], "connectgaps": False,
            "text": [f"{_text(boundary.name)}<br>{boundary.rows_differing} of {boundary.rows_compared} rows" for boundary in differing],
            "hovertemplate": "%{text}<br>%{y:.2e}<extra></extra>",
        }
    ]  # fmt: skip
    floored = [boundary for boundary in compared if boundary.floor is not None]
    if floored:
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": "floor", "x": [order[boundary.name] for boundary in floored],
                "y": [boundary.floor or None for boundary in floored], "line": {"dash": "dot", "shape": "hvh"},
                "text": [_text(boundary.name) for boundary in floored], "hovertemplate": "%{text}<br>floor %{y:.2e}<extra></extra>",
            }
        )  # fmt: skip
    if first in order:
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": "first divergence", "x": [order[first]],
                "y": [_drawn(differing, first)], "marker": {"symbol": "star", "size": 15, "color": "#d62728"},
                "text": [_text(first)], "hovertemplate": "first divergence<br>%{text}<extra></extra>",
            }
        )  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "boundaries in causal order"}, "range": [-0.5, len(names) - 0.5], "tickangle": 40, **_numbered(names)},
        "yaxis": {"type": "log", "title": {"text": "largest relative distance"}, **_decades(data)},
        "margin": {"l": 80, "r": 30, "t": 40, "b": 150},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    }
    equal = sum(boundary.outcome is BoundaryOutcome.IDENTICAL for boundary in compared)
    rule = (
        f"One point per boundary that differs, {len(differing)} of {len(compared)}; the {equal} identical ones have none. "
        "A distance below the sketch's resolution is drawn at 1e-9. A floor of 0 is not drawn."
    )
    return Chart("curve", "How much they differ", rule, data, layout, 460)


def _text(name: str) -> str:
    return escape(visible(name))


def _names(texts: Iterable[str]) -> list[str]:
    """Names as labels of an axis: short, escaped, and each another one, since an axis tells its places by their names."""
    labels: dict[str, None] = {}
    for text in texts:
        label = short = _text(text if len(text) <= _LONGEST else f"{text[:_KEPT]}…{text[-_KEPT:]}")
        number = 1
        while label in labels:
            number += 1
            label = f"{short} ({number})"
        labels[label] = None
    return list(labels)


def _decades(data: list[dict[str, Any]]) -> dict[str, Any]:
    """Range and ticks of a logarithmic axis: whole powers of ten, few enough to stand apart."""
    values = [math.log10(value) for line in data for value in line["y"] if value]
    low, high = math.floor(min(values)), math.ceil(max(values))
    high += low == high
    powers = range(low, high + 1, -(-(high - low) // 10))
    return {"range": [low - 0.2, high + 0.2], "tickvals": [10.0**power for power in powers], "ticktext": [f"1e{power}" for power in powers]}


def _drawn(differing: list[Any], name: str) -> float | None:
    for boundary in differing:
        if boundary.name == name and boundary.distance.largest is not None:
            return float(boundary.distance.largest) or 10**_LOWEST
    return float(10**_LOWEST)


def _log(largest: float | None) -> float:
    if largest is None:
        return _NO_DISTANCE
    return _LOWEST if largest <= 0 else round(max(_LOWEST, math.log10(largest)), 2)


def _column_text(column: MapColumn) -> str:
    if (column.request, column.position) == (column.last_request, column.last_position):
        return f"{column.request}:{column.position}"
    if column.request == column.last_request:
        return f"{column.request}:{column.position}..{column.last_position}"
    return f"{column.request}:{column.position} .. {column.last_request}:{column.last_position}"


def _map_rule(token_map: TokenMap) -> str:
    most = max(column.tokens for column in token_map.columns)
    several = f"One column per run of up to {most} neighbouring tokens, drawn with its largest distance"
    rule = "One column per token" if most == 1 else several
    return (
        f"{rule}; one line per compared boundary, in causal order from the top. "
        "Blank: bitwise equal. Grey with a stroke: nothing compared. A cross: a causal root: it differs although all its inputs are equal."
    )


def _ticks(names: list[str], height: int) -> dict[str, Any]:
    """Every name while there is room, else those of the residual stream and what lies outside the layers, none over another."""
    gap = -(-_LINE * len(names) // height)
    chosen: list[str] = []
    last = -gap
    for at, name in enumerate(names):
        coarse = not name.startswith("layers.") or (name.endswith(".residual") and not name.endswith(".attn.residual"))
        if at - last >= gap and (gap == 1 or coarse):
            chosen.append(name)
            last = at
    return {"tickmode": "array", "tickvals": chosen}


def _numbered(names: list[str]) -> dict[str, Any]:
    step = -(-len(names) // _LABELS)
    return {"tickmode": "array", "tickvals": list(range(0, len(names), step)), "ticktext": names[::step]}
