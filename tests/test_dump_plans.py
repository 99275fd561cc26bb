"""Tests of ``tracer.read.dump_plans``."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tests.sides import Side
from tracer.format.dumps import DumpPlan
from tracer.read.diff import diff_traces
from tracer.read.dump_plans import make_dump_plan
from tracer.read.logical import LogicalTrace


def plan(a: Side, b: Side, **more: int) -> DumpPlan | str:
    """The plan of two sides."""
    trace_a, trace_b = a.trace(), b.trace()
    return make_dump_plan(trace_a, trace_b, diff_traces(trace_a, trace_b), **more)


def labels(made: DumpPlan, number: int) -> list[str]:
    """Rows of a boundary of the plan on side A: ``s0:3``."""
    rows = made.boundaries[number]
    return [f"{made.a.sequences[sequence][1]}:{position}" for sequence, position in rows.places_a]


def test_the_plan_holds_the_earliest_boundary_and_its_inputs() -> None:
    """Differing rows first, then equal neighbours, with both sides' digests; inputs at the same tokens; nothing later."""
    a, b = Side(), Side()
    b.change("layers.1.mlp.out", "s0:3", "s1:1")
    b.change("final_norm")
    made = plan(a, b)
    assert isinstance(made, DumpPlan)
    assert [rows.boundary for rows in made.boundaries] == ["layers.1.mlp.out", "layers.1.attn.residual"]
    output, source = made.boundaries
    assert (output.output, output.differing, source.output) == (True, 2, False)
    assert labels(made, 0)[:2] == ["s0:3", "s1:1"]
    assert {"s0:2", "s0:4"} <= set(labels(made, 0)[2:])
    assert sorted(labels(made, 1)) == sorted(labels(made, 0))
    assert [x != y for x, y in zip(output.digests_a, output.digests_b, strict=True)] == [True] * 2 + [False] * (len(output.keys) - 2)
    assert source.digests_a == source.digests_b
    assert msgspec.json.decode(msgspec.json.encode(made), type=DumpPlan) == made


def test_inputs_go_back_to_what_was_recorded() -> None:
    """What lies between the nearest recorded boundaries is saved too, with whole prefixes where tokens are mixed."""
    a, b = Side(level=1), Side(level=1)
    b.change("layers.1.attn.out", "s0:3")
    made = plan(a, b)
    assert isinstance(made, DumpPlan)
    assert {rows.boundary for rows in made.boundaries} >= {
        "layers.1.attn.out",
        "layers.1.attn.core",
        "layers.1.attn.q",
        "layers.0.residual",
    }
    prefix = next(number for number, rows in enumerate(made.boundaries) if rows.boundary == "layers.0.residual")
    assert {"s0:0", "s0:1", "s0:2", "s0:3"} <= set(labels(made, prefix))
    assert made.boundaries[prefix].digests_a
    assert next(rows for rows in made.boundaries if rows.boundary == "layers.1.attn.q").digests_a == ()


def test_rows_are_bounded_and_spread() -> None:
    """Where not all differing rows fit, the largest and an even spread are taken, and the rest is counted."""
    a, b = Side({"s0": range(3, 90)}), Side({"s0": range(3, 90)})
    b.change("layers.0.mlp.out")
    b.change("layers.0.mlp.out", "s0:50", by=10.0)
    width = b.values["layers.0.mlp.out"].rows.shape[1] * 4
    made = plan(a, b, max_bytes=2 * 12 * width)
    assert isinstance(made, DumpPlan)
    output = made.boundaries[0]
    assert output.differing <= 12
    assert output.differing + made.rows_left_out == 87
    assert {"s0:50", "s0:86"} <= set(labels(made, 0))


def test_expert_rows_and_next_token_rows_are_named_right() -> None:
    """Expert rows carry their expert; a score's row is keyed by the next token and its input by its own."""
    a, b = Side(moe=True), Side(moe=True)
    b.change("layers.0.moe.expert_out", "s0:2")
    made = plan(a, b)
    assert isinstance(made, DumpPlan)
    assert len(made.boundaries[0].experts) == len(made.boundaries[0].keys)
    a, b = Side(), Side()
    b.change("scorer.logprobs", "s0:3")
    made = plan(a, b)
    assert isinstance(made, DumpPlan)
    assert [rows.boundary for rows in made.boundaries] == ["scorer.logprobs", "lm_head"]
    assert (labels(made, 0)[0], labels(made, 1)[0]) == ("s0:2", labels(made, 1)[0])
    assert set(labels(made, 0)) == set(labels(made, 1))


def test_without_a_value_that_differs_there_is_no_plan() -> None:
    """Equal sides, and sides that part at a weight or at their inputs, give the reason instead."""
    assert plan(Side(), Side()) == "no value is proven to differ"
    b = Side()
    b.set_weight("layers.1.mlp.up.weight", 1)
    assert "layers.1.mlp.up.weight" in str(plan(Side(), b))
    other = Side({"s0": [1, 2, 3, 4, 9, 6, 7], "s1": range(21, 26)})
    assert "input.ids" in str(plan(Side({"s0": [1, 2, 3, 4, 5, 6, 7], "s1": range(21, 26)}), other))


def test_partial_sums_have_no_digest_to_hold_a_second_run_against() -> None:
    """The rows are listed without digests."""
    a, b = Side(), Side()
    b.change("layers.0.residual", "s0:1")
    trace_a, trace_b = a.trace(), b.trace()
    name = "layers.0.mlp.out"

    def partial(trace: LogicalTrace) -> LogicalTrace:
        return replace(trace, boundaries={**trace.boundaries, name: replace(trace.boundaries[name], partial_axis="tp")})

    made = make_dump_plan(partial(trace_a), partial(trace_b), diff_traces(trace_a, trace_b))
    assert isinstance(made, DumpPlan)
    assert next(rows for rows in made.boundaries if rows.boundary == name).digests_a == ()
