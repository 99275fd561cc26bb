"""Sharded runs of real models stitch to what one process computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.conftest import Runs
from tracer import diff_traces, open_trace
from tracer.read.findings import BoundaryOutcome, DiffResult, FindingCode, Verdict

pytestmark = pytest.mark.distributed

UNREDUCED = [
    *((f"{family}:hf_fsdp", 2) for family in ("qwen3", "qwen3_moe", "llama")),
    *((f"{family}:pp", 2) for family in ("qwen3", "qwen3_moe", "llama")),
    ("qwen3:fsdp", 2), ("qwen3_moe:fsdp_each", 2), ("llama:fsdp", 2), ("qwen3:ddp", 2), ("llama:ddp", 2),
    ("qwen3:fsdp_ckpt", 2), ("qwen3_moe:fsdp_ckpt_each", 2), ("llama:fsdp_ckpt", 2), ("qwen3_moe:fsdp_ckpt_reentrant_same", 2),
    ("llama:fsdp_ckpt_reentrant", 2), ("qwen3:fsdp_ckpt_wrapper", 2), ("qwen3_moe:fsdp_ep", 4), ("qwen3:pp", 4),
]  # fmt: skip
"""No sum is taken over processes."""
REDUCED = [
    *((f"{family}:tp", 2) for family in ("qwen3", "qwen3_moe", "llama")),
    *((f"{family}:torch_tp", 2) for family in ("qwen3", "qwen3_moe", "llama")),
    *((f"{family}:fsdp_tp", 4) for family in ("qwen3", "qwen3_moe", "llama")),
    ("qwen3_moe:tp_ep", 2), ("qwen3_moe:tp_ep_grad", 2), ("qwen3:torch_sp", 2), ("llama:torch_sp", 2),
    ("llama:torch_sp_dtensor", 2), ("llama:torch_sp_dtensor_short", 2),
    ("llama:torch_loss", 2), ("uneven:tp", 4), ("qwen3:torch_fsdp_tp", 4), ("qwen3_moe:torch_fsdp_tp_each", 4), ("llama:torch_fsdp_tp", 4),
    ("llama:torch_fsdp_tp_permuted", 4),
    ("qwen3_moe:fsdp_tp_ep", 4), ("qwen3_moe:fsdp_tp_ep2", 4),
]  # fmt: skip
"""The first sum over processes is that of the attention's output projection."""
RING = [*((f"{family}:cp", 2) for family in ("qwen3", "qwen3_moe", "llama")), ("llama:cp", 4)]
"""The first sum over processes is inside attention."""


def outcomes(result: DiffResult) -> dict[str, BoundaryOutcome]:
    return {boundary.name: boundary.outcome for boundary in result.boundaries}


@pytest.mark.parametrize(("case", "world"), UNREDUCED)
def test_layouts_without_reductions_are_the_same(runs: Runs, case: str, world: int) -> None:
    """Where no sum is taken over processes, every boundary, weight and score is bitwise what one process has."""
    result = runs.against_one_process(case, world)
    assert (result.exit, result.verdict) == (0, Verdict.SAME), result.headline
    assert not result.findings
    assert result.counts.weights_compared > 20
    assert result.counts.weights_differing == result.counts.weights_unknown == 0
    assert result.counts.rows_only_a == result.counts.rows_only_b == result.counts.boundaries_missing == 0
    assert outcomes(result)["scorer.logprobs"] is BoundaryOutcome.IDENTICAL


@pytest.mark.parametrize(("case", "world"), [*REDUCED, *RING])
def test_sums_over_processes_are_the_first_to_differ(runs: Runs, case: str, world: int) -> None:
    """Inputs, ids and weights are identical; the first bitwise difference lies where a sum over processes ends, or under
    context parallelism in attention, and it is as small as rounding."""
    result = runs.against_one_process(case, world)
    first = "layers.0.attn.core" if "cp" in case else "layers.0.attn.out"
    assert result.first is not None
    assert (result.exit, result.first.boundary) == (1, first)
    assert "inputs and weights identical" in result.headline
    assert result.counts.weights_compared > 20
    assert result.counts.weights_differing == result.counts.weights_unknown == 0
    assert result.counts.boundaries_missing == 0
    found = outcomes(result)
    before = list(found)[: list(found).index(first)]
    assert {"input.ids", "input.positions", "embedding", "layers.0.attn.q_rope"} <= set(before)
    assert all(found[name] is BoundaryOutcome.IDENTICAL for name in before)
    for boundary in result.boundaries:
        if boundary.distance is not None and boundary.distance.largest is not None:
            assert boundary.distance.largest < 1e-4, boundary.name


def test_pieces_of_two_processes_are_one_row(runs: Runs) -> None:
    """Copies of replicated rows are counted, and cut rows have the width of the whole model."""
    stitched = open_trace(runs.path("qwen3:tp", 2))
    assert stitched.boundaries["layers.0.attn.out"].copies == 2
    assert (stitched.boundaries["layers.0.attn.q"].width, stitched.boundaries["layers.0.attn.q"].copies) == (64, 1)
    assert stitched.boundaries["layers.0.mlp.gate_up"].width == 256
    cut = {weight.name: weight.row_spans for weight in stitched.manifests[1].weights}
    assert cut["layers.0.attn.q.weight"] == ((32, 64),)


def test_expert_weights_are_named_by_global_id(runs: Runs) -> None:
    """Under expert parallelism every process fingerprints its own experts, by the id they have in the whole model."""
    stitched = open_trace(runs.path("qwen3_moe:tp_ep", 2))
    held = [{weight.name for weight in manifest.weights if ".moe.experts." in weight.name} for manifest in stitched.manifests]
    assert "layers.0.moe.experts.0.gate.weight" in held[0]
    assert "layers.0.moe.experts.7.gate.weight" in held[1]
    assert not held[0] & held[1]


def test_recomputed_activations_are_counted_apart(runs: Runs) -> None:
    """Under FSDP2 with activation checkpointing the second executions are recompute, not more rows."""
    for case in ("qwen3_moe:fsdp_ckpt_each", "llama:fsdp_ckpt", "llama:fsdp_ckpt_reentrant", "qwen3:fsdp_ckpt_wrapper"):
        boundary = open_trace(runs.path(case, 2)).boundaries["layers.1.attn.q"]
        assert boundary.recomputed > 0, case
        assert len(boundary) == 64


def test_a_copy_that_is_off_is_found_with_its_rank(runs: Runs) -> None:
    """A replicated norm that one process computes differently is a disagreement of copies that names both processes."""
    result = runs.against_one_process("qwen3:off", 2)
    found = [finding for finding in result.findings if finding.code is FindingCode.REPLICAS_DISAGREE]
    assert result.exit == 1
    assert found[0].boundary == "layers.1.attn.norm"
    assert found[0].ranks == (0, 1)


def test_scores_of_a_cut_vocabulary_use_the_whole_normaliser(runs: Runs) -> None:
    """With the vocabulary cut over processes the logits are bitwise equal, and the scores made of both processes' shares
    are those of one process up to rounding."""
    result = runs.against_one_process("llama:head_tp", 2)
    found = {boundary.name: boundary for boundary in result.boundaries}
    assert found["lm_head"].outcome is BoundaryOutcome.IDENTICAL
    scores = found["scorer.logprobs"]
    assert (scores.rows_compared, scores.dtype_b) == (60, "float32")
    largest = 0.0 if scores.distance is None else scores.distance.largest
    assert largest is not None
    assert largest < 1e-6
    assert not result.findings or result.first is not None
    assert {name for name, boundary in found.items() if boundary.outcome is not BoundaryOutcome.IDENTICAL} <= {"scorer.logprobs"}


def test_a_normaliser_of_one_process_alone_is_caught(runs: Runs) -> None:
    """Scores normalised over one process's columns differ, by much more than rounding, while the logits are identical."""
    result = runs.against_one_process("llama:head_tp_by_hand", 2)
    found = {boundary.name: boundary for boundary in result.boundaries}
    assert result.first is not None
    assert (result.exit, result.first.boundary) == (1, "scorer.logprobs")
    assert found["lm_head"].outcome is BoundaryOutcome.IDENTICAL
    assert (found["scorer.logprobs"].rows_compared, found["scorer.logprobs"].rows_differing) == (60, 60)
    distance = found["scorer.logprobs"].distance
    assert distance is not None
    assert distance.largest is not None
    assert distance.largest > 1e-2


def test_an_axis_of_another_name_is_asked_about(runs: Runs) -> None:
    """Where the map does not know the axis that cuts the heads, what no parameter tells is vacuous, with the axis; the rest compares,
    also where the mesh lists its processes backwards."""
    result = runs.against_one_process("llama:torch_tp_model", 2)
    assert (result.exit, result.counts.weights_differing, result.counts.weights_unknown) == (1, 0, 0)
    vacuous = {finding.boundary: finding.text for finding in result.findings if finding.code is FindingCode.VACUOUS}
    assert {"layers.0.attn.q_rope", "layers.0.attn.k_rope"} <= set(vacuous)
    assert all("[map-axis]" in text and "model" in text for text in vacuous.values())
    found = outcomes(result)
    assert {found[f"layers.0.attn.{name}"] for name in ("norm", "q", "k", "v", "core")} == {BoundaryOutcome.IDENTICAL}
    assert {finding.code for finding in result.findings} <= {FindingCode.VACUOUS, FindingCode.VALUE_DIFFERS}


def test_processes_that_record_otherwise_are_named(runs: Runs) -> None:
    """A process at another level leaves holes where it holds a part, one with another folder is missing: nothing passes for whole."""
    result = runs.against_one_process("qwen3:tp_levels", 2)
    holes = {finding.boundary for finding in result.findings if finding.code is FindingCode.HOLE and finding.ranks == (1,)}
    assert result.exit == 2
    assert {"layers.0.attn.q", "layers.0.mlp.gate_up"} <= holes
    assert not holes & {"layers.0.attn.norm", "layers.0.attn.out"}
    result = runs.against_one_process("qwen3:tp_outs", 2)
    assert result.exit == 2
    assert (result.findings[0].code, result.findings[0].ranks) == (FindingCode.SHARD_MISSING, (1,))


def test_no_collective_is_added(runs: Runs) -> None:
    """A traced forward runs the collectives that a plain one runs, in every process group, and the trace adds none of its own."""
    for case in ("qwen3:tp_counted", "llama:fsdp_counted"):
        path = runs.path(case, 2)
        for rank in range(2):
            plain, traced = json.loads(path.with_suffix(f".rank{rank}.json").read_text())
            assert traced == plain > 0


def test_a_killed_process_is_named(runs: Runs) -> None:
    """A trace whose process 1 died before it committed could not be told, and says which rank is missing."""
    result = runs.against_one_process("llama:killed", 2)
    assert result.exit == 2
    assert result.findings[0].code is FindingCode.SHARD_UNCOMMITTED
    assert result.findings[0].ranks == (1,)


def test_a_lost_shard_is_named_with_its_coordinates(runs: Runs, tmp_path: Path) -> None:
    """A trace that lacks the folder of one process names the rank and where it stood."""
    copy = tmp_path / "trace"
    shutil.copytree(runs.path("qwen3:fsdp_tp", 4), copy)
    shutil.rmtree(copy / "shard-00003")
    result = diff_traces(runs.path("qwen3:whole", 1), copy)
    assert result.exit == 2
    assert result.findings[0].code is FindingCode.SHARD_MISSING
    assert "rank 3 (fsdp=1, tp=1) is missing" in result.findings[0].text
