"""Engines whose workers are other processes: each scenario is a script of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tracer
from tests.vllm.conftest import Build
from tests.vllm.engines import generate, run_script

Checkpoint = Callable[[str, str], Path]


def test_tensor_parallel_workers(engine: Build, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two workers record one trace: it equals that of one worker up to the attention core, bitwise. A running engine is
    traced for two steps by remote call, and a second start into the same folder is refused with its code."""
    with tracer.trace(engine(), out=tmp_path / "one", level=2, strict=True):
        generate(engine(), prompt_logprobs=1)
    output = run_script("two_workers.py", str(checkpoint("Qwen3Moe", "float32")), str(tmp_path), VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert "refused out-in-use" in output
    assert "steps 2 2" in output
    result = tracer.diff_traces(tmp_path / "one", tmp_path / "two")
    assert result.first is not None
    assert result.first.boundary == "layers.0.attn.out"
    assert not [finding for finding in result.findings if finding.code in ("weight-differs", "weight-unknown", "replicas-disagree")]
    assert len(tracer.open_trace(tmp_path / "steps").sequences) == 3


def test_engine_core_in_another_process(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With the engine core in a process of its own tracing works by way of the extension; without it the error has a code and
    names the line to write."""
    output = run_script("engine_core.py", str(checkpoint("Qwen3", "float32")), str(tmp_path / "t"), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert "refused host-unsupported" in output
    assert "LLM(**tracer.vllm_options()" in output
    assert len(tracer.open_trace(tmp_path / "t").sequences) == 3


def test_compiled_engine_is_vacuous(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In a compiled engine the boundaries inside the graph are vacuous, with the reason and the remedy; no verdict passes."""
    run_script("compiled.py", str(checkpoint("Qwen3", "float32")), str(tmp_path / "t"), TORCHDYNAMO_DISABLE="0")
    logical = tracer.open_trace(tmp_path / "t")
    assert "layers.0.attn.out" not in logical.boundaries
    text = (tmp_path / "t/shard-00000/manifest.json").read_text()
    assert "vLLM compiled the model" in text
    assert "tracer.vllm_options()" in text
    assert tracer.diff_traces(tmp_path / "t", tmp_path / "t").exit == 2
