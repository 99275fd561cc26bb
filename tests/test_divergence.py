"""Inputs, weights and boundaries in one causal order."""

from __future__ import annotations

from tests.sides import IDS, Side
from tracer.read.diff import diff_traces
from tracer.read.findings import Class, FindingCode
from tracer.read.floor import Tolerance


def roots(a: Side, b: Side) -> list[tuple[str, Class]]:
    """Roots of a comparison, in order."""
    return [(root.place.boundary, root.klass) for root in diff_traces(a.trace(), b.trace()).roots]


def test_inputs_come_before_weights_and_weights_before_their_boundary() -> None:
    """Everything that differs stands in one causal order."""
    b = Side({**IDS, "s0": [11, 12, 13, 99, 15, 16, 17]})
    b.set_weight("layers.1.mlp.up.weight", 1)
    b.carry_on("layers.1.attn.out", "s1:1")
    b.carry_on("layers.1.mlp.out", "s1:3")
    b.carry_on("layers.3.attn.out", "s0:1")
    assert roots(Side(), b) == [
        ("input.ids", Class.INPUT),
        ("layers.1.attn.out", Class.CORRECTNESS),
        ("layers.1.mlp.up.weight", Class.WEIGHT),
        ("layers.3.attn.out", Class.CORRECTNESS),
    ]


def test_weights_of_one_boundary_are_one_root() -> None:
    """Many weights before few boundaries are a root per boundary; weights everywhere are one."""
    few, many = Side(), Side()
    few.set_weight("layers.1.attn.q.weight", 1)
    few.set_weight("layers.2.attn.q.weight", 1)
    for name in many.weights:
        many.set_weight(name, 1)
    assert [name for name, _ in roots(Side(), few)] == ["layers.1.attn.q.weight", "layers.2.attn.q.weight"]
    assert [name for name, _ in roots(Side(), many)] == ["embedding.weight"]


def test_first_bitwise_looks_below_the_floor() -> None:
    """With a tolerance the first divergence and the first bitwise difference are told apart."""
    b = Side()
    b.carry_on("layers.0.attn.out", "s0:1", by=1e-6)
    b.carry_on("layers.2.mlp.out", "s1:2", by=1e-2)
    result = diff_traces(Side().trace(), b.trace(), tolerance=Tolerance(1e-4))
    assert result.first is not None
    assert result.first_bitwise is not None
    assert (result.first.boundary, result.first_bitwise.boundary) == ("layers.2.mlp.out", "layers.0.attn.out")


def test_a_choice_that_flips_by_rounding_within_the_floor_says_so() -> None:
    """Where the scores differ within the floor, the flip is a root of its own and the rounding is named."""
    a, b = Side(moe=True), Side(moe=True)
    scores, ids = "layers.1.moe.router_logits", "layers.1.moe.topk_ids"
    for side, nudge in ((a, 0.0), (b, 1e-5)):
        side.values[scores].rows[side.at("s1:1")] = [0, 0, 9, 0, 0, 4, 4 + nudge, 0]
        side.values[ids].rows[side.at("s1:1")] = [2, 6] if nudge else [2, 5]
        side.values["layers.1.moe.expert_out"].experts = side.values[ids].rows.reshape(-1).copy()
    b.carry_on("layers.1.moe.combine", "s1:1", by=1e-2)
    result = diff_traces(a.trace(), b.trace(), tolerance=Tolerance(1e-4))
    assert [(root.place.boundary, root.klass) for root in result.roots] == [(ids, Class.DISCRETE)]
    assert "the scores differ within the floor in 1 of these tokens" in result.roots[0].text


def test_consequences_are_no_findings() -> None:
    """Only roots and what heals get a finding; the rest stands in the table of boundaries."""
    b = Side()
    b.carry_on("layers.1.attn.out", "s0:2")
    b.change("layers.3.attn.q", "s1:0")
    result = diff_traces(Side().trace(), b.trace())
    assert [(finding.code, finding.boundary) for finding in result.findings] == [
        (FindingCode.VALUE_DIFFERS, "layers.1.attn.out"),
        (FindingCode.VALUE_DIFFERS, "layers.3.attn.q"),
    ]
    assert "equal again at layers.3.attn.core" in result.findings[1].text
