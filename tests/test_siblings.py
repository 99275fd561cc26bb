"""``tracer siblings``: one trace against itself."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tests.sides import Side
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.logical import LogicalTrace
from tracer.read.siblings import check_siblings

NAME = "layers.1.attn.out"


def seen_twice(side: Side) -> LogicalTrace:
    """The side with every row of one boundary seen twice."""
    trace = side.trace()
    twice = dataclasses.replace(trace.boundaries[NAME], seen_R=np.full(12, 2))
    return dataclasses.replace(trace, boundaries={**trace.boundaries, NAME: twice})


def test_rows_that_agree_are_counted() -> None:
    """Rows seen more than once that agree give exit 0 with their number."""
    result = check_siblings(seen_twice(Side()))
    assert result.exit == 0
    assert "12 rows seen more than once agree" in result.headline


def test_nothing_seen_twice_tells_nothing() -> None:
    """A trace without any repeat proves nothing about itself."""
    assert check_siblings(Side().trace()).exit == 2


def test_rows_that_disagree_are_named_with_their_size() -> None:
    """Siblings that differ give exit 1, the place, and the largest distance where one is defined."""
    side = Side()
    side.findings = [
        Finding(
            code=FindingCode.SIBLINGS_DISAGREE,
            kind=Kind.DIFFERENCE,
            boundary=NAME,
            request="s0",
            position=2,
            text="siblings 1 and 3 differ",
        )
    ]
    side.noise = {NAME: 2e-3, "input.ids": math.nan}
    result = check_siblings(seen_twice(side))
    assert result.exit == 1
    assert f"first at {NAME}: siblings 1 and 3 differ" in result.headline
    assert {line.name: line.largest for line in result.boundaries if not line.agree} == {NAME: 2e-3, "input.ids": None}
    assert "--floor self" in result.next_step


def test_an_incomplete_trace_gives_no_verdict() -> None:
    """A trace that cannot be read as a whole is not judged."""
    side = Side()
    side.findings = [Finding(code=FindingCode.SHARD_MISSING, kind=Kind.UNREADABLE, text="rank 1 is missing")]
    assert check_siblings(seen_twice(side)).exit == 2
