"""``tracer siblings``: one trace against itself, wherever it saw the same token more than once."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from tracer.read.findings import Finding, FindingCode, Kind, SideSummary, Verdict
from tracer.read.opening import Progress, TraceLike, opened, summarize
from tracer.read.wording import count, short

__all__ = ["SiblingLine", "SiblingResult", "check_siblings"]

_NOISE = (FindingCode.SIBLINGS_DISAGREE, FindingCode.REPEATS_DISAGREE)


class SiblingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One boundary. ``seen_again``: rows seen more than once; ``largest``: distance between two sightings of one row,
    None where all agree or no distance is defined (``agree`` tells them apart)."""

    name: str
    rows: int
    seen_again: int
    agree: bool
    largest: float | None = None


class SiblingResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tracer siblings`` found."""

    version: int = 1
    exit: int
    verdict: Verdict
    headline: str
    next_step: str = ""
    boundaries: tuple[SiblingLine, ...] = ()
    findings: tuple[Finding, ...] = ()
    trace: SideSummary


def check_siblings(trace: TraceLike, *, progress: Progress | None = None) -> SiblingResult:
    """Hold every row that was seen more than once against its first sighting. Raises what ``open_trace`` raises."""
    side = opened(trace, "trace", progress)
    unreadable = [finding for finding in side.findings if finding.kind is Kind.UNREADABLE]
    noisy = [finding for finding in side.findings if finding.code in _NOISE]
    lines = []
    for name, boundary in side.boundaries.items():
        noise = side.noise.get(name)
        lines.append(
            SiblingLine(
                name=name,
                rows=len(boundary),
                seen_again=int(np.count_nonzero(boundary.seen_R > 1)),
                agree=noise is None,
                largest=noise if noise is not None and math.isfinite(noise) else None,
            )
        )
    again = sum(line.seen_again for line in lines)
    step = ""
    if unreadable:
        verdict, text = Verdict.COULD_NOT_TELL, f"Could not tell: {unreadable[0].text}"
        step = unreadable[0].remedy or "Record the trace again"
    elif noisy:
        first = noisy[0]
        sizes = [line.largest for line in lines if line.largest is not None]
        size = f", distance up to {short(max(sizes))}" if sizes else ""
        verdict = Verdict.DIFFERENT
        text = (
            f"Equal prefixes give different values, first at {first.boundary}: {first.text} (at {count(len(side.noise), 'boundary')}{size})"
        )
        step = "Fix this before comparing with another program, or take it as the floor: tracer diff A B --floor self"
    elif not again:
        verdict, text = Verdict.COULD_NOT_TELL, "Could not tell: no token was seen more than once"
        step = "Record siblings of one prompt, or the same forward twice"
    else:
        verdict, text = Verdict.SAME, f"Equal prefixes give equal values: {count(again, 'row')} seen more than once agree bitwise"
    return SiblingResult(
        exit=verdict.exit_code,
        verdict=verdict,
        headline=text,
        next_step=step,
        boundaries=tuple(lines),
        findings=tuple(unreadable or noisy),
        trace=summarize(side),
    )
