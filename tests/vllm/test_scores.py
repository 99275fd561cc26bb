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
from tracer.scores.results import Branch, RefitKind
from tracer.scores.score_comparison import compare_scores


def sampling(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, **{"temperature": 0, **settings})


DTYPES = {"float32": 1e-4, "bfloat16": 0.03}
"""Pass mark of a healthy pair: a tiny random model in bfloat16 is off by more than a trained one."""
FAMILIES = {"float32": "Qwen3Moe", "bfloat16": "Qwen3"}
"""Rounding in bfloat16 flips a router's choice now and then, which is no healthy pair."""


@pytest.fixture(scope="module")
def scored(engine: Build, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per dtype a folder of three scores: ``rollout``, and the trainer's ``healthy``, ``stale`` and ``temperature``."""
    folder = tmp_path_factory.mktemp("scores")
    given: list[str] = []
    for dtype in DTYPES:
        records = collect_vllm(
            engine(FAMILIES[dtype], dtype), PROMPTS, sampling=sampling(n=2, temperature=1.0, seed=5), requests=["x", "y", "z"], argmax=True
        )
        (folder / dtype).mkdir()
        write_scores(folder / dtype / "rollout.safetensors", records)
        given += [str(checkpoint(FAMILIES[dtype], dtype)), str(folder / dtype / "rollout.safetensors"), str(folder / dtype)]
    run_script("score_trainer.py", *given)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_scores_of_one_batch(scored: Path, dtype: str) -> None:
    """A, B0, B1 from the engine and C0, C1 from transformers in another process, joined by request, agree to rounding."""
    rollout = read_scores(scored / dtype / "rollout.safetensors")
    assert [record.request for record in rollout] == ["x-s0", "x-s1", "y-s0", "y-s1", "z-s0", "z-s1"]
    assert {score.info.definition.kind for record in rollout for score in record.scores.values()} == {ScoreKind.RAW}
    assert {score.dtype for record in rollout for score in record.scores.values()} == {"float32"}
    result = compare_scores(rollout, scored / dtype / "healthy.safetensors", pass_mark=DTYPES[dtype])
    assert (result.exit, result.decision.branch) == (0, Branch.AGREE), result.headline
    assert [pair.name for pair in result.pairs] == ["A-B", "B-C", "A-C"]
    assert [pair.logprob_mae for pair in result.repeats] == [0.0, 0.0]
    assert result.counts.tokens == 72


@pytest.mark.parametrize("dtype", DTYPES)
def test_planted_faults_send_to_the_right_half(scored: Path, dtype: str) -> None:
    """Weights that the engine has not got, with repeatable scores, lead to the weights; a temperature on one side is named."""
    rollout, pass_mark = scored / dtype / "rollout.safetensors", DTYPES[dtype]
    stale = compare_scores(rollout, scored / dtype / "stale.safetensors", pass_mark=pass_mark)
    assert (stale.exit, stale.decision.branch, stale.decision.side) == (1, Branch.WEIGHTS, "C"), stale.headline
    assert [pair.logprob_mae for pair in stale.repeats] == [0.0, 0.0]
    warm = compare_scores(rollout, scored / dtype / "temperature.safetensors", pass_mark=pass_mark)
    assert (warm.exit, warm.decision.branch, warm.decision.side) == (1, Branch.SCORING, "C"), warm.headline
    assert warm.decision.cause is RefitKind.TEMPERATURE
    found = next(refit.parameter for refit in warm.refits if refit.matched and refit.kind is RefitKind.TEMPERATURE)
    assert float(found.removeprefix("T = ")) == pytest.approx(0.8, abs=0.02)


def test_a_replay_keeps_the_most_likely_tokens(engine: Build) -> None:
    """Of a greedy generation they are the response itself."""
    for record in collect_vllm(engine(), PROMPTS, sampling=sampling(), repeats=1, argmax=True):
        likely = record.scores[ScoreName.B0].argmax_R
        assert likely is not None
        assert np.array_equal(likely, record.response)


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
