"""Weights by name: which differ, where they stand, what cannot be told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from tests.sides import Side, catalogue
from tests.trace_files import write_shard
from tracer.read.diff import diff_traces
from tracer.read.findings import FindingCode, Kind
from tracer.read.findings import Side as Which
from tracer.read.weight_diff import WeightComparison, compare_weights, weight_findings
from tracer.read.weight_report import diff_weights


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


def test_rows_against_digests_are_compared_by_digest() -> None:
    """A side with weights="rows" and one with "digest" compare by digest, and both reports say so."""
    a, b = Side(), Side()
    trace = a.trace()
    rows = dataclasses.replace(trace, manifests=(msgspec.structs.replace(trace.manifest, weights_mode="rows"),))
    for sides in ((rows, b.trace()), (b.trace(), rows)):
        for found in (diff_traces(*sides), diff_weights(*sides)):
            assert found.exit == 0
            assert [finding.code for finding in found.findings] == [FindingCode.NOTE]
            assert "compared by digest" in found.findings[0].text
    b.set_weight("lm_head.weight", 1)
    assert (diff_traces(rows, b.trace()).exit, diff_weights(rows, b.trace()).exit) == (1, 1)


@pytest.mark.parametrize("sides", ["one", "both"])
def test_digests_that_nobody_took_are_an_absence(sides: str, tmp_path: Path) -> None:
    """A trace that says it fingerprinted its weights and holds none is no "same", whatever the other side has."""
    for name in ("a", "b"):
        missing = sides == "both" or name == "b"
        write_shard(tmp_path / name, run_id=name, weights_mode="digest" if missing else "none")
    result = diff_traces(tmp_path / "a", tmp_path / "b")
    assert result.exit == 2
    assert {finding.code for finding in result.findings} == {FindingCode.WEIGHT_MISSING}
    assert 'weights="digest"' in result.headline


def test_one_side_without_weights_is_an_absence() -> None:
    """``weights=False`` on one side alone is exit 2, on both sides it is said and no absence."""
    a, b = Side(), Side()
    b.weights = {}
    result = diff_traces(a.trace(), b.trace())
    assert (result.exit, "B recorded no weights" in result.headline) == (2, True)
    a.weights = {}
    assert diff_traces(a.trace(), b.trace()).exit == 0
