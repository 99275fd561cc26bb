"""The pair that matters: the engine against transformers on the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tracer
from tests.vllm.conftest import Build
from tests.vllm.engines import generate, statuses, trace_trainer, whole

Checkpoint = Callable[[str, str], Path]


def pair(engine: Build, checkpoint: Checkpoint, family: str, dtype: str, folder: Path, *faults: str) -> tuple[Path, Path]:
    """(trainer, rollout) traces."""
    llm = engine(family, dtype)
    with tracer.trace(llm, out=folder / "rollout", level=2, strict=True):
        outputs = generate(llm, prompt_logprobs=1)
    assert statuses(folder / "rollout", "vacuous") == set()
    return trace_trainer(checkpoint(family, dtype), dtype, whole(outputs), folder / "trainer", *faults), folder / "rollout"


@pytest.mark.parametrize(("dtype", "first"), [("float32", "layers.0.attn.core"), ("bfloat16", "layers.0.attn.q_rope")])
def test_first_difference_of_a_mixture(engine: Build, checkpoint: Checkpoint, tmp_path: Path, dtype: str, first: str) -> None:
    """In float32 the first bitwise difference is the attention core, in bfloat16 the rotary embedding: everything before is
    identical, weights too, those included that the engine repacked when loading."""
    trainer, rollout = pair(engine, checkpoint, "Qwen3Moe", dtype, tmp_path)
    result = tracer.diff_traces(trainer, rollout)
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary == first
    assert result.headline.startswith("First divergence: ")
    assert "bitwise: no floor was given" in result.headline
    assert not [finding for finding in result.findings if finding.code in ("weight-differs", "weight-unknown")]


def test_a_floor_tells_rounding_from_more(engine: Build, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With a healthy pair of the same kind as the tolerance nothing is above it; without one the words are the weaker ones."""
    trainer, rollout = pair(engine, checkpoint, "Qwen3Moe", "float32", tmp_path)
    assert tracer.diff_traces(trainer, rollout).exit == 1
    assert tracer.diff_traces(trainer, rollout, tolerance=tracer.Tolerance(relative=1e-4)).exit == 0


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mixtral", "Gemma2"])
def test_other_families(engine: Build, checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Every family with bindings for both hosts records all its boundaries, finds equal weights, and agrees up to rounding."""
    trainer, rollout = pair(engine, checkpoint, family, "float32", tmp_path)
    result = tracer.diff_traces(trainer, rollout, tolerance=tracer.Tolerance(relative=1e-4))
    assert result.exit == 0, result.headline
    assert not [finding for finding in result.findings if finding.code in ("weight-differs", "weight-unknown")]


def test_a_stale_expert_is_found(engine: Build, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A weight update that the engine has not got is named by its expert, although the engine repacked it."""
    trainer, rollout = pair(engine, checkpoint, "Qwen3Moe", "float32", tmp_path, "stale-expert")
    result = tracer.diff_traces(trainer, rollout)
    assert result.exit == 1
    stale = [f"{finding.boundary} {finding.text}" for finding in result.findings if finding.code == "weight-differs"]
    assert len(stale) == 1
    assert "layers.1.moe.experts.5.down.weight" in stale[0]
