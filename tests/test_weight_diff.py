"""Weights by name: which differ, where they stand, what cannot be told."""

from __future__ import annotations

import msgspec

from tests.sides import Side, catalogue
from tracer.read.findings import FindingCode, Kind
from tracer.read.findings import Side as Which
from tracer.read.weight_diff import WeightComparison, compare_weights, weight_findings


def compared(a: Side, b: Side) -> WeightComparison:
    """Compare the weights of two sides."""
    return compare_weights(a.trace(), b.trace(), catalogue())


def test_weights_stand_before_the_boundary_that_uses_them() -> None:
    """Differences are in causal order; a weight that no boundary lists is placed by its name."""
    b, a = Side(), Side()
    for side in (a, b):
        side.set_weight("layers.1.attn.extra.weight", 0)
    for name in ("lm_head.weight", "layers.1.attn.extra.weight", "embedding.weight"):
        b.set_weight(name, 1)
    found = compared(a, b)
    names = [boundary.name for boundary in catalogue()]
    assert [(weight.name, names[weight.at]) for weight in found.differing] == [
        ("embedding.weight", "embedding"),
        ("layers.1.attn.extra.weight", "layers.1.attn.norm"),
        ("lm_head.weight", "lm_head"),
    ]


def test_shape_and_dtype_come_before_bytes() -> None:
    """Another shape or dtype is a difference, said as such."""
    b = Side()
    b.set_weight("lm_head.weight", 0, rows=5)
    b.set_weight("embedding.weight", 0, dtype="float32")
    assert [weight.text for weight in compared(Side(), b).differing] == ["dtype bfloat16 against float32", "shape 4 x 32 against 5 x 32"]


def test_all_trainable_tensors() -> None:
    """Where every parameter differs the summary counts them without buffers."""
    a, b = Side(), Side()
    for side in (a, b):
        side.set_weight("rope.inv_freq", 0, buffer=True)
    count = len(b.weights) - 1
    for name in list(b.weights):
        if name != "rope.inv_freq":
            b.set_weight(name, 1)
    assert compared(a, b).summary() == f"{count} of {count} trainable tensors differ"


def test_unknown_is_never_equal() -> None:
    """A weight without a fingerprint is listed with its reason and neither compared nor missing."""
    a, b = Side(), Side()
    b.set_weight("lm_head.weight", 0, unknown="repacked")
    found = compared(a, b)
    assert found.unknown == (("lm_head.weight", Which.B, "repacked"),)
    assert found.compared == len(a.weights) - 1


def test_a_side_without_weights_compares_none() -> None:
    """Where one side recorded no weights nothing is missing: nothing was compared."""
    b = Side()
    b.weights = {}
    found = compared(Side(), b)
    assert (found.recorded_a, found.recorded_b, found.compared, found.missing) == (True, False, 0, ())
    assert found.summary() == "no weight was compared"


def test_weights_that_changed_while_recording_are_told() -> None:
    """An optimizer step inside the trace is information about that side."""
    b = Side()
    b.weights["lm_head.weight"] = msgspec.structs.replace(b.weights["lm_head.weight"], after=("0" * 16, "1" * 16))
    a, after = Side().trace(), b.trace()
    findings = weight_findings(compare_weights(a, after, catalogue()), a, after)
    assert [(finding.code, finding.kind, finding.side) for finding in findings] == [
        (FindingCode.CONDITION_DIFFERS, Kind.INFORMATION, Which.B)
    ]
    assert "lm_head.weight" in findings[0].text
