"""The line, the class and the next step."""

from __future__ import annotations

import dataclasses

import msgspec

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.read.findings import Class, DiffResult, Finding, FindingCode, Kind
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
    """Without a floor the line says that the divergence is bitwise only; above a given limit it does not."""
    weak = compared(one_element()).headline
    assert weak.startswith("First divergence: layers.2.attn.out, request s0, token 5 (all earlier boundaries identical")
    assert "bitwise: no floor was given" in weak
    assert "bitwise" not in compared(one_element(), tolerance=Tolerance(1e-9)).headline


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
    assert weak.classification is not None
    assert "that the inputs are equal: mask not seen on B" in weak.classification.not_proven


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


def test_could_not_tell_names_the_first_reason_and_what_is_equal() -> None:
    """The line gives the first absence, how many more there are, and whether anything compared differs."""
    b = Side()
    b.drop("layers.1.mlp.out")
    b.drop("layers.2.mlp.out")
    line = compared(b).headline
    assert line == (
        "Could not tell: layers.1.mlp.out: missing on B: 0 executions (and 1 more finding of this kind); everything compared is identical"
    )


def test_every_verdict_has_one_next_step() -> None:
    """Whatever is found, there is one thing to do next; for the same there is none."""
    weight, choice, noisy, missing, deep = Side(), Side(moe=True), Side(), Side(), one_element()
    weight.set_weight("lm_head.weight", 1)
    choice.values["layers.1.moe.topk_ids"].rows[3] = [0, 1] if choice.values["layers.1.moe.topk_ids"].rows[3][0] != 0 else [1, 2]
    noisy.findings = [
        Finding(code=FindingCode.REPEATS_DISAGREE, kind=Kind.DIFFERENCE, boundary="final_norm", text="executions 1 and 2 differ")
    ]
    missing.drop_rows("s1:4", boundary="layers.0.attn.q")
    steps = {
        "tracer weights": compared(weight),
        "Pin the routing": compared(choice, Side(moe=True)),
        "--floor self": compared(noisy),
        "declare them never computed": compared(missing),
        "--floor-a": compared(deep),
        "Compare how the two sides compute layers.2.attn.out": compared(deep, tolerance=Tolerance(1e-9)),
        "": compared(Side()),
    }
    for words, result in steps.items():
        assert words in result.next_step
        assert "\n" not in result.next_step
        assert bool(result.next_step) is bool(words)


def test_the_class_carries_its_evidence_and_what_is_not_proven() -> None:
    """A value root without more evidence stays unlocalized, and what is missing for a class is listed."""
    found = compared(one_element()).classification
    assert found is not None
    assert found.klass is Class.UNLOCALIZED
    assert any("relative distance up to" in text for text in found.evidence)
    assert "that this is more than noise: no floor was given" in found.not_proven
    assert compared(Side()).classification is None


def test_declared_quantization_is_not_taken_for_design() -> None:
    """Other weights on a side that declares quantization are a weight mismatch, with what is not proven."""
    b = Side()
    b.conditions = {"mode": "eval", "quantization": {"bits": 8}}
    b.set_weight("lm_head.weight", 1)
    found = compared(b).classification
    assert found is not None
    assert found.klass is Class.WEIGHT
    assert "that the quantization is as designed" in found.not_proven
    assert any("declares quantization" in text for text in found.evidence)
