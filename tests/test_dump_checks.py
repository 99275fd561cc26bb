"""Tests of ``tracer.read.dump_checks``: is a second run the run that the plan was made from?"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sides import Side
from tracer.format.dumps import DumpPlan
from tracer.read.diff import diff_traces
from tracer.read.dump_checks import check_dumps
from tracer.read.dump_plans import make_dump_plan
from tracer.read.dumped import Dumps
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.findings import Side as Which


@pytest.fixture(scope="module")
def plan() -> DumpPlan:
    """Of two sides that part at layers.1.mlp.out."""
    a, b = Side().trace(), other_side().trace()
    made = make_dump_plan(a, b, diff_traces(a, b))
    assert isinstance(made, DumpPlan)
    return made


def other_side() -> Side:
    side = Side()
    side.change("layers.1.mlp.out", "s0:3", "s0:4", "s1:2")
    return side


def checked(side: Side, which: Which, plan: DumpPlan | None, **more: Any) -> list[Finding]:
    """Findings about a side's dumps."""
    return check_dumps(Dumps(side.trace(), {}, plan=plan, **more), which)


def test_a_run_with_the_recorded_rows_is_reproducible(plan: DumpPlan) -> None:
    """Rows with the digests of the plan's own run say nothing, on either side, and in either order of the sides."""
    for side, which in ((Side(), Which.A), (other_side(), Which.B), (Side(), Which.B), (other_side(), Which.A)):
        assert checked(side, which, plan) == []


def test_a_run_with_other_rows_is_not(plan: DumpPlan) -> None:
    """Each boundary with rows that the first run did not have is a proven difference of the side with itself."""
    side = Side()
    side.change("layers.1.mlp.out", "s0:3", by=3.0)
    side.change("layers.1.attn.residual", "s0:3")
    found = checked(side, Which.A, plan)
    assert [(f.code, f.kind, f.boundary, f.rows, f.side) for f in found] == [
        (FindingCode.NOT_REPRODUCIBLE, Kind.DIFFERENCE, name, 1, Which.A) for name in ("layers.1.mlp.out", "layers.1.attn.residual")
    ]
    assert (found[0].request, found[0].position) == ("s0", 3)
    assert found[0].text.endswith(f"rows are not what run {plan.a.run_id} recorded")


def test_rows_that_the_second_run_lacks_are_not_reproduced(plan: DumpPlan) -> None:
    """Another prompt has none of the plan's tokens."""
    found = checked(Side({"s0": [90, 91, 92]}), Which.A, plan)
    assert found[0].rows == len(plan.boundaries[0].keys)
    assert found[0].position is None


def test_without_a_plan_only_the_cap_is_told() -> None:
    """What the cap left out is information."""
    (found,) = checked(Side(), Which.B, None, left_out={"embedding": 3}, max_bytes=64)
    assert (found.code, found.kind, found.side) == (FindingCode.DUMP_CAPPED, Kind.INFORMATION, Which.B)
    assert "cap of 64 bytes: 3 rows of embedding left out" in found.text
    assert checked(Side(), Which.B, None) == []
