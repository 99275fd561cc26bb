"""Scores A and B of a real engine, and the trainer's C of the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.conftest import Build
from tests.vllm.engines import PROMPTS, generate, logprobs, run_script
from tracer.errors import Code, ScoreError
from tracer.format.score_file import read_scores, write_scores
from tracer.format.score_records import ScoreKind, ScoreName
from tracer.hosts.vllm_scores import collect_vllm
from tracer.scores.results import Branch
from tracer.scores.score_comparison import compare_scores


def sampling(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, **{"temperature": 0, **settings})


def test_three_scores_of_one_batch(engine: Build, checkpoint: Any, tmp_path: Path) -> None:
    """A, B0, B1 from the engine and C0, C1 from transformers in another process, joined by request, agree to rounding."""
    records = collect_vllm(engine(), PROMPTS, sampling=sampling(), requests=["x", "y", "z"], argmax=True)
    assert [record.request for record in records] == ["x", "y", "z"]
    assert [record.prompt_length for record in records] == [len(prompt) for prompt in PROMPTS]
    assert {score.info.definition.kind for record in records for score in record.scores.values()} == {ScoreKind.RAW}
    assert {score.dtype for record in records for score in record.scores.values()} == {"float32"}
    likely = records[0].scores[ScoreName.B0].argmax_R
    assert likely is not None
    assert np.array_equal(likely, records[0].response)  # greedy
    write_scores(tmp_path / "rollout.safetensors", records)
    run_script(
        "score_trainer.py",
        str(checkpoint("Qwen3Moe", "float32")),
        str(tmp_path / "rollout.safetensors"),
        str(tmp_path / "trainer.safetensors"),
    )
    result = compare_scores(tmp_path / "rollout.safetensors", tmp_path / "trainer.safetensors", pass_mark=1e-4)
    assert (result.exit, result.decision.branch) == (0, Branch.AGREE), result.headline
    assert [pair.name for pair in result.pairs] == ["A-B", "B-C", "A-C"]
    assert [pair.logprob_mae for pair in result.repeats] == [0.0, 0.0]
    assert result.counts.tokens == 36


def test_scores_are_the_engines_own(engine: Build) -> None:
    """A is what the engine reports for the same greedy generation."""
    records = collect_vllm(engine(), PROMPTS, sampling=sampling(), repeats=0)
    reported = logprobs(generate(engine(), tokens=12))
    assert [record.scores[ScoreName.A].value_R.tolist() for record in records] == reported


def test_samples_of_one_prompt_are_a_group(engine: Build) -> None:
    """n samples become requests of one group, and their shared prefixes are scored alike."""
    records = collect_vllm(engine(), PROMPTS[:1], sampling=sampling(n=3, temperature=1.0, seed=5))
    assert [(record.request, record.group) for record in records] == [("0-s0", "0"), ("0-s1", "0"), ("0-s2", "0")]
    result = compare_scores(records, pass_mark=1e-4)
    assert all(check.largest < 1e-4 for check in result.siblings)


def test_saved_records_are_only_replayed(engine: Build) -> None:
    """Records that hold their tokens already get B0 and B1; a changed token changes the scores after it."""
    records = collect_vllm(engine(), PROMPTS[:1], sampling=sampling(), repeats=0)
    (again,) = collect_vllm(engine(), records)
    assert set(again.scores) == {ScoreName.A, ScoreName.B0, ScoreName.B1}
    ids = again.ids.copy()
    ids[again.prompt_length + 3] = 7
    (other,) = collect_vllm(engine(), [replace(again, ids=ids, scores={})])
    differs = other.scores[ScoreName.B0].value_R != again.scores[ScoreName.B0].value_R
    assert (differs[:3].any(), differs[3:].all()) == (False, True)


def test_the_prefix_cache_is_emptied(engine: Build) -> None:
    """With a prefix cache the replays still compute everything."""
    llm = engine(enable_prefix_caching=True, block_size=32)
    records = collect_vllm(llm, [list(range(3, 83))], sampling=sampling())
    assert np.array_equal(records[0].scores[ScoreName.B0].value_R, records[0].scores[ScoreName.B1].value_R)


def test_what_the_engine_reports_is_declared(engine: Build) -> None:
    """An engine with processed scores declares temperature or filters of A; one that reports logits is refused."""
    llm = engine(logprobs_mode="processed_logprobs")
    warm = collect_vllm(llm, PROMPTS[:1], sampling=sampling(temperature=0.7, seed=1))
    assert warm[0].scores[ScoreName.A].info.definition.text() == "temperature 0.7"
    assert collect_vllm(llm, PROMPTS[:1], sampling=sampling(temperature=0.7, top_k=5, seed=1), repeats=0)[0].scores[
        ScoreName.A
    ].info.definition.settings == {"top_k": 5}
    with pytest.raises(ScoreError) as refused:
        compare_scores(warm)
    assert refused.value.code is Code.SCORES_DEFINITIONS
    with pytest.raises(ScoreError) as logits:
        collect_vllm(engine(logprobs_mode="raw_logits"), PROMPTS[:1])
    assert logits.value.code is Code.SCORES_COLLECT


def test_a_full_context_cannot_be_replayed(engine: Build) -> None:
    """A sequence that fills the context leaves no room for the dropped token: refused, not cut."""
    records = collect_vllm(engine(), PROMPTS[:1], sampling=sampling(), repeats=0)
    long = replace(
        records[0], ids=np.arange(3, 259), scores={}, mask=np.ones(256 - records[0].prompt_length, np.bool_), positions=np.arange(256)
    )
    with pytest.raises(ScoreError) as refused:
        collect_vllm(engine(), [long])
    assert refused.value.code is Code.SCORES_COLLECT


def test_the_file_keeps_them(engine: Build, tmp_path: Path) -> None:
    """Collected records survive a file bit for bit."""
    records = collect_vllm(engine(), PROMPTS, sampling=sampling())
    write_scores(tmp_path / "a.safetensors", records)
    for a, b in zip(records, read_scores(tmp_path / "a.safetensors"), strict=True):
        assert all(np.array_equal(a.scores[name].value_R, b.scores[name].value_R) for name in a.scores)
