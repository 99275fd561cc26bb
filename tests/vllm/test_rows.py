"""Rows of a step are requests and positions, whatever the engine does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracer
from tests.vllm.conftest import Build
from tests.vllm.engines import PROMPTS, generate, keys, logprobs, statuses, whole
from tracer.read.findings import Kind

pytestmark = pytest.mark.xdist_group("engine")  # one process, so that the engines are built once

WATCHED = 3
"""Requests of ``PROMPTS``."""


def installed(runner: Any) -> bool:
    """Whether anything of the tracer is on the model, its routers or its runner."""
    modules = list(runner.get_model().modules())
    methods = {"_dummy_run", "execute_model"} & vars(runner).keys()
    routers = [module.router for module in modules if "router" in vars(module)]
    hooks = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return hooks or bool(methods) or any("_select_experts" in vars(router) for router in routers)


@pytest.fixture(scope="module")
def base(engine: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three prompts and their continuations, every logit asked for."""
    out = tmp_path_factory.mktemp("base") / "trace"
    with tracer.trace(engine(), out=out, level=2, strict=True):
        generate(engine(), prompt_logprobs=1)
    return out


def test_tracing_changes_nothing(engine: Build, tmp_path: Path) -> None:
    """Tokens and log probabilities of the engine are bitwise the same with and without tracing, and no hook stays."""
    plain = generate(engine())
    with tracer.trace(engine(), out=tmp_path / "t", level=2, strict=True):
        traced = generate(engine())
    assert (whole(traced), logprobs(traced)) == (whole(plain), logprobs(plain))
    assert not installed(engine().llm_engine.model_executor.driver_worker.worker.model_runner)


def test_every_row_has_its_key(engine: Build, base: Path) -> None:
    """A trace's token keys are those of the tokens that were run: all but the last sampled one of every request."""
    logical = tracer.open_trace(base)
    assert len(logical.sequences) == WATCHED
    assert statuses(base, "vacuous") == set()
    assert len(keys(base)) == sum(len(prompt) + 3 for prompt in PROMPTS)


def test_chunks_and_batches_do_not_matter(engine: Build, base: Path, tmp_path: Path) -> None:
    """Chunked prefill in steps of eight tokens, mixed with decode, records the same rows with the same values."""
    chunked = engine(max_num_batched_tokens=8)
    with tracer.trace(chunked, out=tmp_path / "t", level=2, strict=True):
        generate(chunked, prompt_logprobs=1)
    result = tracer.diff_traces(base, tmp_path / "t")
    assert result.exit == 0, result


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(WATCHED)), split=st.integers(1, WATCHED), small=st.booleans())
def test_any_order_gives_the_same_keys(
    engine: Build, base: Path, tmp_path_factory: pytest.TempPathFactory, order: list[int], split: int, small: bool
) -> None:
    """Any order, chunk size and batching of the same requests gives the same set of token keys."""
    llm = engine(max_num_batched_tokens=8) if small else engine()
    out = tmp_path_factory.mktemp("order") / "t"
    prompts = [PROMPTS[n] for n in order]
    with tracer.trace(llm, out=out, level=0, strict=True):
        generate(llm, prompts[:split])
        if prompts[split:]:
            generate(llm, prompts[split:])
    assert keys(out) == keys(base)


def test_logits_not_asked_for_are_declared(engine: Build, base: Path, tmp_path: Path) -> None:
    """Without prompt_logprobs only sampling rows have logits; the others are declared, and named on the verdict line."""
    with tracer.trace(engine(), out=tmp_path / "t", level=2, strict=True):
        generate(engine())
    result = tracer.diff_traces(base, tmp_path / "t")
    assert result.exit == 0
    assert "logits not requested" in result.headline
    assert statuses(tmp_path / "t", "vacuous") == set()


def test_scores_are_the_engines_own(engine: Build, base: Path, tmp_path: Path) -> None:
    """scorer.logprobs has a row per token that was scored, the last sampled one too, with the value that the engine reports."""
    with tracer.trace(engine(), out=tmp_path / "t", level=1, strict=True):
        outputs = generate(engine(), prompt_logprobs=1)
    reported = {
        (*prompt[: n + 1],): step[prompt[n]].logprob
        for output, prompt in zip(outputs, whole(outputs), strict=True)
        for n, step in enumerate([*output.prompt_logprobs, *output.outputs[0].logprobs])
        if n
    }
    assert len(reported) == sum(len(prompt) + 4 - 1 for prompt in PROMPTS)
    logical = tracer.open_trace(tmp_path / "t")
    scores, tokens = logical.boundaries["scorer.logprobs"], logical.tokens
    statistics = scores.load_statistics()
    assert statistics is not None
    recorded = {}
    for row, token in enumerate(scores.token_R.tolist()):  # of the token after the row
        ids = logical.sequences[tokens.sequence_K[token]].ids[: tokens.position_K[token] + 1]
        recorded[tuple(ids.tolist())] = -float(statistics.abs_max_R[row])
    assert recorded == pytest.approx(reported, abs=1e-5)
    assert all(finding.kind is not Kind.DIFFERENCE for finding in tracer.diff_traces(base, tmp_path / "t").findings)


def test_prefix_cache_hits_are_declared(engine: Build, tmp_path: Path) -> None:
    """Rows that the prefix cache spared are declared with their reason, and compare as never computed."""
    llm = engine(enable_prefix_caching=True, block_size=32)
    prompts = [list(range(3, 73)), list(range(103, 143))]
    with tracer.trace(llm, out=tmp_path / "a", level=1, strict=True):
        generate(llm, prompts)
    with tracer.trace(llm, out=tmp_path / "b", level=1, strict=True):
        cached = sum(output.num_cached_tokens for output in generate(llm, prompts))
    assert cached == 96
    result = tracer.diff_traces(tmp_path / "a", tmp_path / "b")
    assert result.exit == 0
    assert "96 never computed by B: prefix cache hit" in result.headline


def test_preempted_requests_run_again(engine: Build, tmp_path: Path) -> None:
    """With too few cache blocks requests are preempted; their rows come twice, under the same keys, and agree."""
    llm = engine(num_gpu_blocks_override=7, block_size=32, max_model_len=128)
    prompts = [list(range(3 + n, 33 + n)) for n in range(4)]
    with tracer.trace(llm, out=tmp_path / "t", level=1, strict=True) as t:
        generate(llm, prompts, tokens=60)
    logical = tracer.open_trace(t.path)
    embedding = logical.boundaries["embedding"]
    assert len(embedding) == sum(len(prompt) + 59 for prompt in prompts)
    assert embedding.info.row_count > len(embedding)
    assert not logical.noise


def test_siblings_agree(engine: Build, tmp_path: Path) -> None:
    """Several samples of one prompt are siblings: sequences of their own whose shared prefix agrees bitwise."""
    with tracer.trace(engine(), out=tmp_path / "t", level=1, strict=True):
        generate(engine(), PROMPTS[:1], n=2, temperature=1.0, seed=3)
    logical = tracer.open_trace(tmp_path / "t")
    assert len(logical.sequences) == 2
    assert tracer.diff_traces(tmp_path / "t", tmp_path / "t").exit == 0


def test_dummy_runs_are_left_out(engine: Build, base: Path, tmp_path: Path) -> None:
    """The engine's dummy runs are counted under their reason and recorded nowhere."""
    worker = engine().llm_engine.model_executor.driver_worker.worker
    with tracer.trace(engine(), out=tmp_path / "t", level=2, strict=True):
        worker.execute_dummy_batch()
        generate(engine(), prompt_logprobs=1)
        worker.execute_dummy_batch()
    assert tracer.diff_traces(base, tmp_path / "t").exit == 0
    assert "dummy, warm-up or profiling run of the engine" in (tmp_path / "t/shard-00000/manifest.json").read_text()


def test_a_running_engine_is_traced_for_n_steps(engine: Build, base: Path, tmp_path: Path) -> None:
    """Tracing that is switched on by remote call takes its hooks off before the step after the last one asked for, while the
    engine goes on; nothing is installed before, and nothing after."""
    llm = engine()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert not installed(runner)
    llm.collective_rpc("tracer_start", kwargs={"out": str(tmp_path / "t"), "level": 2, "steps": 2})
    assert installed(runner)
    outputs = generate(llm, prompt_logprobs=1)
    assert not installed(runner)
    assert len(outputs[0].outputs[0].token_ids) == 4
    assert llm.collective_rpc("tracer_stop") == [{"out": str(tmp_path / "t"), "forwards": 2, "incomplete": ""}]
    assert keys(tmp_path / "t") < keys(base)
    assert len(keys(tmp_path / "t")) == sum(len(prompt) + 1 for prompt in PROMPTS)
    with pytest.raises(tracer.TracerError, match="not recording"):
        llm.collective_rpc("tracer_stop")


def test_a_loaded_module_is_enough(engine: Build, base: Path, tmp_path: Path) -> None:
    """The module that a runner of this process runs, and the worker itself, trace like the engine; requests take names."""
    worker = engine().llm_engine.model_executor.driver_worker.worker
    for n, model in enumerate((engine().apply_model(lambda module: module)[0], worker)):
        out = tmp_path / f"t{n}"
        with tracer.trace(model, out=out, level=2, strict=True) as t:
            t.requests(["x", "y", "z"])
            generate(engine(), prompt_logprobs=1)
        assert tracer.diff_traces(base, out).exit == 0
        assert {sequence.name for sequence in tracer.open_trace(out).sequences} == {"x", "y", "z"}
