"""The class of a comparison, and the one thing to do next."""

from __future__ import annotations

import numpy as np

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.read.findings import Class, Confidence, DiffResult, Finding, FindingCode, Kind
from tracer.read.floor import Tolerance

NAME = "layers.2.attn.out"


def compared(b: Side, a: Side | None = None, tolerance: Tolerance | None = None) -> DiffResult:
    """Compare side B with the plain side."""
    return diff_traces((a or Side()).trace(), b.trace(), tolerance=tolerance)


def coarse(by: float = 0.01) -> tuple[Side, Side]:
    """Two sides in bfloat16, the second with noise at one boundary and behind it."""
    pair = Side(), Side()
    pair[1].carry_on(NAME, "s0:5", by=by)
    for side in pair:
        for values in side.values.values():
            values.dtype = "bfloat16" if values.dtype == "float32" else values.dtype
    return pair


def test_every_verdict_has_one_next_step() -> None:
    """Whatever is found, there is one thing to do next; for the same there is none."""
    weight, choice, noisy, missing, error = Side(), Side(moe=True), Side(), Side(), Side()
    weight.set_weight("lm_head.weight", 1)
    choice.values["layers.1.moe.topk_ids"].rows[3] = [0, 1] if choice.values["layers.1.moe.topk_ids"].rows[3][0] != 0 else [1, 2]
    noisy.findings = [
        Finding(code=FindingCode.REPEATS_DISAGREE, kind=Kind.DIFFERENCE, boundary="final_norm", text="executions 1 and 2 differ")
    ]
    missing.drop_rows("s1:4", boundary="layers.0.attn.q")
    error.carry_on(NAME, "s0:5")
    a, b = coarse()
    shallow = Side(level=1), Side(level=1)
    for side in shallow:
        side.values[NAME].dtype = "bfloat16"
    shallow[1].carry_on(NAME, "s0:5", by=0.05)
    steps = {
        "tracer weights": compared(weight),
        'pin={"layers.1.moe.topk_ids"': compared(choice, Side(moe=True)),
        "--floor self": compared(noisy),
        "declare them never computed": compared(missing),
        "Compare how the two sides compute layers.2.attn.out": compared(error),
        "--floor-a": compared(b, a),
        "--plan plan.json": compared(b, a, Tolerance(1e-9)),
        "level=2": compared(shallow[1], shallow[0]),
        "": compared(Side()),
    }
    for words, result in steps.items():
        assert words in result.next_step, result.next_step
        assert "\n" not in result.next_step
        assert bool(result.next_step) is bool(words)


def test_no_evidence_no_class() -> None:
    """A small difference in a coarse dtype without dumps, control or shape stays unlocalized, and what is missing is listed."""
    a, b = coarse()
    found = compared(b, a).classification
    assert found is not None
    assert (found.klass, found.confidence) == (Class.UNLOCALIZED, Confidence.LOW)
    assert any("relative distance up to" in text for text in found.evidence)
    assert "that this is more than noise: no floor was given" in found.not_proven
    assert "whether it is an error or rounding" in found.not_proven
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


def test_precision_is_ablated_only_after_quantization_was_seen() -> None:
    """A quantized cache that one side declares, equal inputs, a difference of its size: the ablation in its order, and no other
    class ever gives it."""
    a, b = Side(), Side()
    rows = b.values["layers.1.attn.core"].rows
    b.values["layers.1.attn.core"].rows = rows + np.random.default_rng(0).uniform(-0.05, 0.05, rows.shape).astype(np.float32)
    b.carry_on("layers.1.attn.out", "s0:2")
    b.conditions = {"mode": "eval", "kv_cache_dtype": "fp8_e4m3"}
    result = compared(b, a)
    assert result.classification is not None
    assert (result.classification.klass, result.classification.confidence) == (Class.QUANTIZATION, Confidence.MEDIUM)
    order = [result.next_step.index(word) for word in ("rollout in high precision", "quantization-aware", "low precision")]
    assert order == sorted(order)
    b.conditions = {"mode": "eval"}
    assert "precision" not in compared(b, a).next_step
