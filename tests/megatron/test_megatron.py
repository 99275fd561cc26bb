"""Megatron-core models over gloo: every layout stitches to the trace of one process, and to that of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.expectations import expect_same
from tests.megatron import tiny_gpt
from tests.megatron.runs import ROOT
from tests.test_readme import blocks, run_console
from tracer import collect_trainer, diff_traces, open_trace, read_scores, trace
from tracer.format.schema import BoundaryStatus
from tracer.format.score_records import ScoreName
from tracer.read.findings import BoundaryOutcome, DiffResult, FindingCode, Kind, Side


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory, megatron_core: None) -> Path:
    """Traces of transformers models with the weights that the Megatron models have: qwen3, qwen3_moe, llama."""
    import transformers

    folder = tmp_path_factory.mktemp("transformers")
    common: dict[str, Any] = {
        "vocab_size": tiny_gpt.VOCABULARY,
        "hidden_size": tiny_gpt.HIDDEN,
        "intermediate_size": tiny_gpt.DENSE,
        "num_hidden_layers": tiny_gpt.LAYERS,
        "num_attention_heads": tiny_gpt.HEADS,
        "num_key_value_heads": tiny_gpt.HEADS,
        "head_dim": tiny_gpt.SIZE,
        "rms_norm_eps": tiny_gpt.EPSILON,
        "rope_theta": float(tiny_gpt.ROTARY_BASE),
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    moe = {
        "num_experts": tiny_gpt.EXPERTS,
        "num_experts_per_tok": tiny_gpt.TOP_K,
        "moe_intermediate_size": tiny_gpt.EXPERT_WIDTH,
        "norm_topk_prob": True,
    }
    library: Any = transformers
    torch.set_num_threads(1)
    for name, family, more, weights in (
        ("qwen3", "Qwen3", {}, {}),
        ("qwen3_moe", "Qwen3Moe", moe, {"moe": True}),
        ("llama", "Llama", {}, {"qk_norm": False}),
    ):
        model = getattr(library, f"{family}ForCausalLM")(getattr(library, f"{family}Config")(**common, **more)).eval()
        model.load_state_dict(tiny_gpt.random_hf_weights(**weights))
        with torch.no_grad(), trace(model, out=folder / name, level=2, strict=True) as t:
            t.requests(["d0p0", "d0p1"])
            model(input_ids=tiny_gpt.batch(), use_cache=False)
    return folder


def identical(result: DiffResult) -> set[str]:
    """Boundaries without a differing row."""
    return {entry.name for entry in result.boundaries if entry.outcome is BoundaryOutcome.IDENTICAL}


def first(result: DiffResult) -> str:
    return result.first.boundary if result.first else ""


def largest(result: DiffResult) -> float:
    """Largest distance of any boundary."""
    return max((entry.distance.largest or 0.0 for entry in result.boundaries if entry.distance), default=0.0)


def decisive(result: DiffResult) -> set[FindingCode]:
    """Codes of the findings that make a verdict, differing values left out."""
    return {finding.code for finding in result.findings if finding.kind is not Kind.INFORMATION} - {FindingCode.VALUE_DIFFERS}


def expect_same_start(result: DiffResult) -> None:
    """Equal inputs and weights, equal values up to the first reduction, the distance of float32 rounding behind it."""
    assert decisive(result) == set()
    assert identical(result) >= UP_TO_CORE
    assert result.counts.weights_compared > 20
    assert (result.counts.weights_differing, result.counts.tokens_matched) == (0, 24)
    assert (result.counts.rows_only_a, result.counts.rows_only_b) == (0, 0)
    assert largest(result) < 3e-6


UP_TO_CORE = {"input.ids", "input.positions", "input.visible_from", "embedding"} | {
    f"layers.0.attn.{name}" for name in ("norm", "q", "k", "v", "q_rope", "k_rope", "core")
}
"""What no reduction precedes."""

REDUCING = [
    ("dense1", "tp2"),
    ("dense1", "tp2_sp"),
    ("llama1", "llama_tp2"),
    ("groups1", "groups_tp4"),
    ("moe1", "moe_tp2"),
    ("moe1", "moe_tp2_sp"),
    ("moe1", "moe_tp2_sp_ep2"),
    ("moe1", "moe_allgather"),
    ("dense1", "recompute_tp2_sp"),
    ("dense1", "padded_tp2"),
    ("dense1", "padding_only"),
]


@pytest.mark.parametrize(("one", "other"), REDUCING)
def test_sharded_runs_part_where_they_reduce(runs: Path, one: str, other: str) -> None:
    """Inputs, ids and all weights are those of one process; the first bitwise difference is at the first reduction."""
    result = diff_traces(runs / one, runs / other)
    assert first(result) == "layers.0.attn.out"
    expect_same_start(result)


@pytest.mark.parametrize(("one", "other", "tokens"), [("data1", "dp2", 48), ("dense1", "pp2", 24), ("dense1", "recompute1", 24)])
def test_layouts_that_reduce_nothing_are_the_same(runs: Path, one: str, other: str, tokens: int) -> None:
    """Data parallelism, pipeline stages and recomputation change no bit, and nothing is missing."""
    expect_same(diff_traces(runs / one, runs / other), tokens)


def test_experts_of_other_processes_add_up(runs: Path) -> None:
    """With experts spread over data-parallel processes only the combination is rounded otherwise."""
    result = diff_traces(runs / "moe_data1", runs / "moe_dp2_ep2")
    assert first(result) == "layers.0.moe.combine"
    assert decisive(result) == set()
    assert (result.counts.weights_differing, result.counts.tokens_matched) == (0, 48)
    assert largest(result) < 3e-6


def test_four_processes_on_all_axes(runs: Path) -> None:
    """TP2 x SP x EP2 x DP2 stitches to one process that ran both batches."""
    result = diff_traces(runs / "moe_data1", runs / "moe_tp2_ep2_dp2")
    assert first(result) == "layers.0.attn.out"
    assert decisive(result) == set()
    assert (result.counts.weights_differing, result.counts.tokens_matched) == (0, 48)
    assert largest(result) < 3e-6


def test_recomputed_layers_are_counted_apart(runs: Path) -> None:
    """Activation recomputation is seen in every layer, once, and agrees with the first pass."""
    side = open_trace(runs / "recompute_tp2_sp")
    again = {boundary.name for boundary in side.catalogue if boundary.recomputed}
    assert {"layers.0.attn.q_rope", "layers.1.mlp.act"} <= again
    assert "final_norm" not in again
    assert all(boundary.executions == 1 for boundary in side.catalogue if boundary.name in again)
    assert [finding for finding in side.findings if finding.kind is not Kind.INFORMATION] == []


@pytest.mark.parametrize("other", ["tp2_sp", "groups_tp4"])
def test_replicas_are_copies_and_shards_are_not(runs: Path, other: str) -> None:
    """Rows cut over the tensor axis have one copy, replicated key-value heads and whole rows have one per holder."""
    side = open_trace(runs / other)
    copies = {name: boundary.copies for name, boundary in side.boundaries.items()}
    if other == "tp2_sp":
        assert {copies[name] for name in ("embedding", "layers.0.attn.norm", "layers.0.attn.q", "layers.1.residual", "lm_head")} == {1}
        assert copies["input.ids"] == 2
    else:
        assert (copies["layers.0.attn.k"], copies["layers.0.attn.v"], copies["layers.0.attn.k_rope"]) == (2, 2, 2)
        assert (copies["layers.0.attn.q"], copies["layers.0.attn.norm"]) == (1, 4)


def test_weight_rows_are_those_of_one_process(runs: Path) -> None:
    """Row by row, q, k, v, gate and up of two processes are those of one, interleaved as they are in memory."""
    whole, parts = open_trace(runs / "rows1"), open_trace(runs / "rows_tp2")
    for name in ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down"):
        x, y = (side.load_weight_rows(f"layers.1.{name}.weight") for side in (whole, parts))
        assert x is not None
        assert y is not None
        np.testing.assert_array_equal(x.digest_N2, y.digest_N2)


def test_wrappers_are_looked_through(runs: Path) -> None:
    """A list with DistributedDataParallel around Float16Module is the model inside, recorded in its own dtype."""
    side = open_trace(runs / "wrapped1")
    assert side.manifests[0].map.family == "qwen3"
    assert side.boundaries["layers.0.attn.q"].dtype == "bfloat16"
    assert not [boundary for boundary in side.catalogue if boundary.status is BoundaryStatus.VACUOUS]


# ---------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize(
    ("family", "one", "boundary"),
    [
        ("qwen3", "dense1", ""),
        ("llama", "llama1", ""),
        ("qwen3_moe", "moe1", "layers.0.moe.topk_weights"),
        ("qwen3", "tp2", "layers.0.attn.out"),
        ("qwen3_moe", "moe_tp2_sp_ep2", "layers.0.attn.out"),
    ],
)
def test_transformers_and_megatron(hf: Path, runs: Path, family: str, one: str, boundary: str) -> None:
    """The same weights give the same bits: everywhere in one dense process, else up to the first reduction or the routers' rounding."""
    result = diff_traces(hf / family, runs / one)
    expect_same_start(result)
    assert {f"layers.{n}.moe.topk_ids" for n in range(2)} <= identical(result) or "moe" not in family
    assert first(result) == boundary
    assert result.exit == (1 if boundary else 0)


# ---------------------------------------------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    ("one", "faulty", "boundary", "roots"),
    [
        ("dense1", "other_rotary_base", "layers.0.attn.q_rope", {"layers.0.attn.q_rope", "layers.0.attn.k_rope"}),
        ("dense1", "qkv_not_regrouped", "layers.0.attn.q", {"layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"}),
        ("dense1", "qkv_not_regrouped_tp2", "layers.0.attn.q", {"layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"}),
        ("moe1", "experts_shifted", "layers.0.moe.combine", {"layers.0.moe.combine"}),
        ("moe1", "softmax_first", "layers.0.moe.topk_weights", {"layers.0.moe.topk_weights"}),
    ],
)
def test_planted_faults_are_found_where_they_are(runs: Path, one: str, faulty: str, boundary: str, roots: set[str]) -> None:
    """A wrong rotary base, a wrong packing, shifted experts and a softmax before the choice are each found at their boundary."""
    result = diff_traces(runs / one, runs / faulty)
    assert first(result) == boundary
    assert roots <= {root.place.boundary for root in result.roots}
    assert largest(result) > 1e-2


@pytest.mark.parametrize("faulty", ["other_rotary_base", "qkv_not_regrouped_tp2"])
def test_planted_faults_are_found_against_transformers(hf: Path, runs: Path, faulty: str) -> None:
    """The same faults are found at the same boundary when the other side is another framework."""
    expected = {"other_rotary_base": "layers.0.attn.q_rope", "qkv_not_regrouped_tp2": "layers.0.attn.q"}
    assert first(diff_traces(hf / "qwen3", runs / faulty)) == expected[faulty]


def test_shifted_experts_are_named_by_their_weights(runs: Path) -> None:
    """With weights recorded, an expert offset under expert parallelism shows as the experts' weights, by global id, and no others."""
    result = diff_traces(runs / "moe1", runs / "experts_shifted_ep2")
    differing = {finding.boundary for finding in result.findings if finding.code is FindingCode.WEIGHT_DIFFERS}
    parts = ("gate", "up", "down")
    assert differing == {f"layers.{n}.moe.experts.{e}.{part}.weight" for n in range(2) for e in range(tiny_gpt.EXPERTS) for part in parts}


# ---------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("cut", ["tp2", "padded_tp2", "padding_only", "groups_tp4"])
def test_scores_of_sharded_logits_have_the_whole_normaliser(runs: Path, cut: str) -> None:
    """Where no process has all columns, also where one has nothing but padding, their shares make the scores of one process."""
    result = diff_traces(runs / ("groups1" if cut == "groups_tp4" else "dense1"), runs / cut)
    scores = next(entry for entry in result.boundaries if entry.name == "scorer.logprobs")
    assert (scores.rows_compared, scores.dtype_b) == (22, "float32")
    assert scores.distance is None or (scores.distance.largest or 0) < 1e-6
    assert decisive(result) == set()


def test_scores_recorded_from_the_models_loss(runs: Path) -> None:
    """The model's own loss has the global normaliser: recorded by hand it gives the scores of one process, alike everywhere."""
    result = diff_traces(runs / "dense1", runs / "scores_of_loss")
    scores = next(entry for entry in result.boundaries if entry.name == "scorer.logprobs")
    assert (scores.rows_compared, scores.copies_b) == (22, 2)
    assert scores.distance is None or (scores.distance.largest or 0) < 1e-5
    assert decisive(result) == set()


def test_scores_over_one_shard_are_caught(runs: Path) -> None:
    """Scores normalised over a process's own columns disagree between the processes and from the right ones."""
    result = diff_traces(runs / "dense1", runs / "scores_of_shard")
    found = [finding for finding in result.findings if finding.code is FindingCode.REPLICAS_DISAGREE]
    assert [(finding.boundary, finding.rows, finding.side) for finding in found] == [("scorer.logprobs", 22, Side.B)]
    assert {root.place.boundary for root in result.roots} == {"layers.0.attn.out"}
    scores = next(entry for entry in result.boundaries if entry.name == "scorer.logprobs")
    assert scores.distance is not None
    assert (scores.distance.largest or 0) > 0.1


# ---------------------------------------------------------------------------------------------------- the page


def test_the_how_to_runs(tmp_path: Path) -> None:
    """Every command of docs/how-to/trace-megatron.md runs on its script, and prints what the page shows."""
    page = ROOT / "docs" / "how-to" / "trace-megatron.md"
    script, commands = blocks(page)
    (tmp_path / "step.py").write_text(script.text)
    run_console(commands, tmp_path, page.name)


def test_trainer_scores_of_every_layout(runs: Path) -> None:
    """C of a model that is cut over two processes, in wrappers and with a padded vocabulary, is that of one process and that of
    transformers; full logits and most likely tokens cover the vocabulary and no padding; pipeline stages are refused."""
    import transformers

    library: Any = transformers
    config = library.Qwen3Config(
        vocab_size=tiny_gpt.VOCABULARY, hidden_size=tiny_gpt.HIDDEN, intermediate_size=tiny_gpt.DENSE, num_hidden_layers=tiny_gpt.LAYERS,
        num_attention_heads=tiny_gpt.HEADS, num_key_value_heads=tiny_gpt.HEADS, head_dim=tiny_gpt.SIZE, rms_norm_eps=tiny_gpt.EPSILON,
        rope_theta=float(tiny_gpt.ROTARY_BASE), tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = library.Qwen3ForCausalLM(config)
    model.load_state_dict(tiny_gpt.random_hf_weights())
    bare = [replace(record, scores={}, logits=None) for record in read_scores(runs / "collected1.safetensors")]
    expected = collect_trainer(model, bare, logits=2, argmax=True)
    for name, tolerance in (("collected1", 1e-4), ("collected_tp2", 1e-4), ("collected_padded_tp2", 1e-4), ("collected_tp2_sp", 0.1)):
        for mine, theirs in zip(read_scores(runs / f"{name}.safetensors"), expected, strict=True):
            assert set(mine.scores) == {ScoreName.C0, ScoreName.C1}
            assert np.array_equal(mine.scores[ScoreName.C0].value_R, mine.scores[ScoreName.C1].value_R)
            np.testing.assert_allclose(mine.scores[ScoreName.C0].value_R, theirs.scores[ScoreName.C0].value_R, atol=tolerance)
            assert mine.logits is not None
            assert theirs.logits is not None
            np.testing.assert_allclose(mine.logits.value_LV, theirs.logits.value_LV, atol=10 * tolerance)
            likely = [ids for record in (mine, theirs) if (ids := record.scores[ScoreName.C0].argmax_R) is not None]
            assert name == "collected_tp2_sp" or np.array_equal(likely[0], likely[1])
    assert "pipeline parallelism" in (runs / "collected_pp2-0.txt").read_text()
