"""The one line."""

from __future__ import annotations

import dataclasses

import msgspec

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.read.findings import Class, DiffResult
from tracer.read.floor import Tolerance


def compared(b: Side, a: Side | None = None, tolerance: Tolerance | None = None) -> DiffResult:
    """Compare side B with the plain side."""
    return diff_traces((a or Side()).trace(), b.trace(), tolerance=tolerance)


def one_element() -> Side:
    """A side with a fault in the middle."""
    side = Side()
    side.carry_on("layers.2.attn.out", "s0:5")
    return side


def test_words_are_weak_without_a_floor_and_strong_with_one() -> None:
    """Without a floor the line says that the divergence is bitwise only; with one it names both the first above it and the first
    bitwise difference."""
    weak = compared(one_element()).headline
    assert weak.startswith("First divergence: layers.2.attn.out, request s0, token 5 (all earlier boundaries identical")
    assert "bitwise: no floor was given" in weak
    strong = compared(one_element(), tolerance=Tolerance(1e-9)).headline
    assert strong.endswith("above the tolerance; first bitwise here too)")
    earlier = one_element()
    earlier.change("layers.0.attn.q", "s0:1", by=1e-7)
    strong = compared(earlier, tolerance=Tolerance(1e-6)).headline
    assert strong.startswith("First divergence: layers.2.attn.out, request s0, token 5 (")
    assert strong.endswith("above the tolerance; first bitwise at layers.0.attn.q, request s0, token 1)")


def test_nothing_is_claimed_about_what_was_not_recorded() -> None:
    """Weights, inputs and boundaries that were not compared are said to be so."""
    a, b = Side(level=1), Side(level=1)
    for side in (a, b):
        side.weights = {}
        del side.values["input.positions"], side.values["input.ids"], side.values["input.visible_from"]
    b.carry_on("layers.2.attn.out", "s0:5")
    line = compared(b, a).headline
    assert "all 7 earlier boundaries recorded on both sides identical" in line
    assert "inputs not recorded" in line
    assert "weights not recorded" in line
    assert "between layers.1.residual and here" in line
    first = Side()
    first.carry_on("embedding", "s0:0")
    assert "nothing before it was compared" in compared(first).headline


def test_inputs_are_not_called_identical_without_the_mask() -> None:
    """A side that does not tell of every token which ones it may attend to is named where inputs are called identical."""
    b = one_element()
    del b.values["input.visible_from"]
    assert "inputs and weights identical, mask not seen on B" in compared(b).headline
    partly = one_element()
    partly.drop_rows("s0:2", boundary="input.visible_from")
    partly.declared = {"no run": {"input.visible_from": [("s0", 2)]}}
    result = compared(partly, partly)
    assert "mask not seen" not in compared(one_element()).headline
    assert (result.exit, result.headline.startswith("Same: 12 rows")) == (0, True)
    weak = compared(partly)
    assert "mask not seen on B" in weak.headline
    assert "1 row not told by B: no run" in str(weak.findings)
    mixing = Side()
    mixing.carry_on("layers.2.attn.core", "s0:5")
    del mixing.values["input.visible_from"]
    found = compared(mixing).classification
    assert found is not None
    assert found.klass is Class.UNLOCALIZED
    assert "that its inputs are equal: mask not seen on B" in found.not_proven


def test_weights_that_changed_while_recorded_are_in_the_line() -> None:
    """Whatever the verdict, the line says whose weights changed while they were recorded, and claims nothing about them."""
    for b, start in ((Side(), "Same: 12 rows"), (one_element(), "First divergence: layers.2.attn.out")):
        trace = b.trace()
        stepped = dataclasses.replace(trace, manifests=(msgspec.structs.replace(trace.manifest, weights_after="changed"),))
        line = diff_traces(Side().trace(), stepped).headline
        assert line.startswith(start)
        assert "weights of B changed while recorded" in line
        assert "weights identical" not in line


def test_weights_that_are_partly_known() -> None:
    """A weight without a fingerprint keeps the line from claiming that all are identical."""
    b = one_element()
    b.set_weight("lm_head.weight", 0, unknown="repacked")
    assert "weights identical as far as known (1 weight not)" in compared(b).headline
    later = one_element()
    later.set_weight("lm_head.weight", 1)
    assert "inputs and the weights up to here identical" in compared(later).headline
    later.set_weight("final_norm.weight", 0, unknown="repacked")
    assert "the weights up to here identical as far as known (1 weight not)" in compared(later).headline


def test_could_not_tell_names_the_first_reason_and_what_is_equal() -> None:
    """The line gives the first absence, how many more there are, and whether anything compared differs."""
    b = Side()
    b.drop("layers.1.mlp.out")
    b.drop("layers.2.mlp.out")
    line = compared(b).headline
    assert line == (
        "Could not tell: layers.1.mlp.out: missing on B: 0 executions (and 1 more finding of this kind); everything compared is identical"
    )


def test_same_says_what_was_not_compared_and_which_numbers_differ() -> None:
    """No weights on either side, and a setting that differs under a tolerance, are in the line of a Same."""
    a, b = Side(), one_element()
    for side, scaling in ((a, 0.25), (b, 0.325)):
        side.weights = {}
        side.conditions = {"model": {"mode": "eval", "attributes": {"model.layers.*.self_attn.scaling": scaling}}}
    line = compared(b, a, Tolerance(10.0)).headline
    assert "within the given tolerance" in line
    assert "not the same numbers: scaling of model.layers.*.self_attn: A 0.25, B 0.325; weights not compared" in line
    assert "weights not compared" not in compared(Side(), Side()).headline
