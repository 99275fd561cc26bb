"""Scores a suggested map against the family's own, by the rows that both record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import tracer
from tests.tiny_models import make_ids, make_model
from tracer.read.logical import LogicalBoundary, LogicalTrace

__all__ = ["Score", "compare_traces", "score_family", "trace_suggested"]


@dataclass(frozen=True)
class Score:
    """Boundaries by (levels 0 and 1, level 2): those of the family's map, and those found with the same rows."""

    family: str
    wanted: tuple[frozenset[str], frozenset[str]]
    right: tuple[frozenset[str], frozenset[str]]
    wrong: frozenset[str]


def compare_traces(family: str, own: LogicalTrace, suggested: LogicalTrace) -> Score:
    """The score of a trace by the suggested map against one by the family's own."""
    right = {name for name, found in suggested.boundaries.items() if name in own.boundaries and _same(found, own.boundaries[name])}
    levels = tuple(
        frozenset(name for name, found in own.boundaries.items() if (found.info.level == 2) is fine) for fine in (False, True)
    )
    return Score(
        family,
        (levels[0], levels[1]),
        (levels[0] & right, levels[1] & right),
        frozenset(suggested.boundaries) - right,
    )


def trace_suggested(family: str, folder: Path) -> LogicalTrace:
    """A trace of the family's tiny model by the map that was suggested for it."""
    model = make_model(family)
    path = tracer.suggest_map(model).save(folder / "suggested.yaml")
    with torch.no_grad(), tracer.trace(model, map=path, out=folder / "suggested", level=2, strict=True):
        model(input_ids=make_ids(), use_cache=False)
    return tracer.open_trace(folder / "suggested")


def score_family(family: str, folder: Path) -> Score:
    """Trace with both maps and compare."""
    model = make_model(family)
    with torch.no_grad(), tracer.trace(model, out=folder / "own", level=2, strict=True):
        model(input_ids=make_ids(), use_cache=False)
    return compare_traces(family, tracer.open_trace(folder / "own"), trace_suggested(family, folder))


def _same(a: LogicalBoundary, b: LogicalBoundary) -> bool:
    return a.digest_R2.shape == b.digest_R2.shape and bool((a.digest_R2 == b.digest_R2).all())
