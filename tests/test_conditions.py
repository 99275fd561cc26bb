"""Run conditions: what differs, and what it says."""

from __future__ import annotations

import dataclasses

import msgspec

from tests.sides import Side
from tracer.read.conditions import differing_conditions, flat_conditions, leads
from tracer.read.findings import Class


def differing(a: dict[str, object], b: dict[str, object]) -> dict[str, dict[str, object]]:
    """Conditions that differ between two sides."""
    sides = Side(), Side()
    for side, conditions in zip(sides, (a, b), strict=True):
        side.conditions = conditions
    return differing_conditions(sides[0].trace(), sides[1].trace())


def test_nested_conditions_are_flat_and_volatile_ones_are_left_out() -> None:
    """Names are joined by dots; what is another in every run is not listed; the model comes before packages."""
    a = {"packages": {"x": "1"}, "model": {"eps": 1e-6, "mode": "eval"}, "command": ["a"], "host": {"hostname": "m1"}}
    b = {"packages": {"x": "2"}, "model": {"eps": 1e-5, "mode": "eval"}, "command": ["b"], "host": {"hostname": "m2"}}
    assert differing(a, b) == {"model.eps": {"a": 1e-6, "b": 1e-5}, "packages.x": {"a": "1", "b": "2"}}
    assert list(differing(a, b)) == ["model.eps", "packages.x"]
    assert dict(flat_conditions({"a": {"b": 1, "c": None}})) == {"a.b": 1}


def test_a_condition_of_one_side_is_listed() -> None:
    """What only one side recorded is shown against nothing, after what both recorded."""
    assert differing({"x": 1}, {}) == {"x": {"a": 1, "b": None}}
    assert list(differing({"model": {"x": 1}, "y": 1}, {"y": 2})) == ["y", "model.x"]


def test_what_differs_by_layer_meets_what_does_not() -> None:
    """An attribute with several values by layer is one text under its own name."""
    scaled: dict[str, object] = {"scaling": {"by_index": {"0.25": "0 2", "0.5": "1"}}}
    assert differing(scaled, {"scaling": 0.25}) == {"scaling": {"a": "0.25 at 0 2, 0.5 at 1", "b": 0.25}}


def test_processes_that_differ_are_told() -> None:
    """Where the processes of one side differ, that is a condition of its own."""
    trace = Side().trace()
    other = msgspec.structs.replace(trace.manifest, rank=1, conditions={"mode": "train"})
    both = dataclasses.replace(trace, manifests=(trace.manifest, other))
    assert differing_conditions(both, trace) == {"mode": {"a": "differs between processes: eval, train", "b": "eval"}}


def test_active_dropout_on_one_side_makes_an_input_mismatch() -> None:
    """Dropout that only one side applies decides the class of a root; the training mode alone does not."""
    found = leads(differing({"model": {"mode": "eval", "dropout": {}}}, {"model": {"mode": "train", "dropout": {"attn.p": 0.1}}}))
    assert [(lead.name, lead.klass) for lead in found] == [("dropout", Class.INPUT), ("training mode", None)]
    assert found[0].text == "B has active dropout (model.dropout.attn.p = 0.1), A not"


def test_declared_quantization_is_a_lead() -> None:
    """Quantization that one side declares is evidence and decides no class."""
    found = leads(differing({"model": {"quantization": None}}, {"model": {"quantization": {"bits": 8}}}))
    assert [(lead.name, lead.klass) for lead in found] == [("quantization", None)]


def test_both_sides_alike_is_no_lead() -> None:
    """Conditions that both sides share suggest nothing."""
    assert leads(differing({"dropout": {"p": 0.1}}, {"dropout": {"p": 0.1}})) == []


def test_values_by_layer_are_one_line() -> None:
    """What a host lists by layer index is read as values and where they hold, against a single value of the other side."""
    a: dict[str, object] = {"mlp": {"top_k": 2}}
    layers, experts = {"2": "0 1 2 5", "4": "3"}, {"1": "0.1 0.2", "2": "1.1"}
    b: dict[str, object] = {"mlp": {"top_k": {"by_index": layers}, "experts": {"by_index": experts}}}
    assert differing(a, b) == {
        "mlp.experts": {"a": None, "b": "1 at 0.1 0.2, 2 at 1.1"},
        "mlp.top_k": {"a": 2, "b": "2 at 0..2 5, 4 at 3"},
    }
