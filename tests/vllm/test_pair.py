"""The pair that matters: the engine against transformers on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import tracer
from tests.vllm.conftest import Build, Pair
from tests.vllm.engines import FAMILIES, OTHERS, generate, statuses
from tracer.read.weight_report import WeightState, diff_weights

pytestmark = pytest.mark.xdist_group("engine")  # one process, so that the engines are built once

ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}
"""Relative distances that rounding alone does not reach in two layers."""
FIRST = {"float32": "layers.0.attn.core", "bfloat16": "layers.0.attn.q_rope"}
"""Where rounding shows first: the order of sums over keys; products of the rotary embedding rounded one by one, or once."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_rounding_parts_the_two(pair: Pair, family: str, dtype: str) -> None:
    """Everything is recorded, weights are equal (those too that the engine repacked when loading), everything before the first
    rounding is bitwise identical, and nothing is larger than rounding; without a tolerance the words are the weaker ones."""
    trainer, rollout = pair(family, dtype)
    assert statuses(rollout, "vacuous") == set()
    result = tracer.diff_traces(trainer, rollout)
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary == FIRST[dtype]
    assert result.headline.startswith("First divergence: ")
    assert "bitwise: no floor was given" in result.headline
    assert not [finding for finding in result.findings if finding.code in ("weight-differs", "weight-unknown")]
    within = tracer.diff_traces(trainer, rollout, tolerance=tracer.Tolerance(relative=ROUNDING[dtype]))
    assert within.exit == 0, within.headline
    assert within.headline.startswith("Same on 33 of 36 rows")
    assert "3 never computed by B: last sampled token" in within.headline


@pytest.mark.parametrize("family", [family for family in OTHERS if family != "Qwen3Next"])
def test_other_families_part_by_rounding_alone(pair: Pair, family: str) -> None:
    """Everything that the map binds is recorded, weights are equal however they are packed, stacked, turned or reordered, so are
    the inputs, and nothing is larger than rounding."""
    trainer, rollout = pair(family, OTHERS[family])
    assert statuses(rollout, "vacuous") == statuses(rollout, "unresolved") == set()
    weights = diff_weights(trainer, rollout)
    assert weights.exit == 0
    assert {line.state for line in weights.weights} <= {WeightState.IDENTICAL, WeightState.MISSING}
    bitwise = tracer.diff_traces(trainer, rollout)
    assert bitwise.first is not None
    assert bitwise.first.boundary in ("layers.0.attn.q_rope", "layers.0.attn.core")
    within = tracer.diff_traces(trainer, rollout, tolerance=tracer.Tolerance(relative=ROUNDING["float32"]))
    assert within.exit == 0, within.headline
    assert within.headline.startswith("Same on 33 of 36 rows")


def test_linear_attention_parts_by_rounding_alone(pair: Pair) -> None:
    """Qwen3-Next, in bfloat16, which is all that the engine's linear attention knows on the CPU: no value differs by more than
    rounding; what differs is the dtype of one weight and of the routing weights, which the engine keeps in float32."""
    trainer, rollout = pair("Qwen3Next", OTHERS["Qwen3Next"])
    assert statuses(rollout, "vacuous") == statuses(rollout, "unresolved") == set()
    differing = {line.name: line.state for line in diff_weights(trainer, rollout).weights if line.state is not WeightState.IDENTICAL}
    assert {name: state for name, state in differing.items() if state is not WeightState.MISSING} == {
        "layers.0.linear_attn.a_log": WeightState.DIFFERS
    }
    assert set(differing) == {"layers.0.linear_attn.a_log", "rope.inv_freq", "rope.original_inv_freq", *_engine_buffers(differing)}
    within = tracer.diff_traces(trainer, rollout, tolerance=tracer.Tolerance(relative=0.3))
    assert within.exit == 1
    assert {(finding.code.value, finding.boundary) for finding in within.findings if finding.code.value.endswith("-differs")} == {
        ("weight-differs", "layers.0.linear_attn.a_log"),
        *(("dtype-differs", f"layers.{layer}.moe.topk_weights") for layer in (0, 1)),
    }


def _engine_buffers(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.endswith((".attn.rope_table", "_scale"))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stale_expert_is_found(pair: Pair, dtype: str) -> None:
    """A weight update that the engine has not got is named by its expert and rows, although the engine repacked it; beyond
    rounding it is the first divergence, and without a tolerance the line says up to where the weights are equal."""
    trainer, rollout = pair("Qwen3Moe", dtype, "stale-expert")
    name = "layers.1.moe.experts.5.down.weight"
    differing = [line for line in diff_weights(trainer, rollout).weights if line.state is WeightState.DIFFERS]
    assert [(line.name, line.rows_differing, line.rows) for line in differing] == [(name, 128, 128)]
    bitwise = tracer.diff_traces(trainer, rollout)
    assert [finding.boundary for finding in bitwise.findings if finding.code == "weight-differs"] == [name]
    assert "the weights up to here identical as far as known" in bitwise.headline
    beyond = tracer.diff_traces(trainer, rollout, tolerance=tracer.Tolerance(relative=ROUNDING[dtype]))
    assert beyond.exit == 1
    assert beyond.headline.startswith(f"First divergence: weight {name} (1 of ")


def test_a_weight_exchanged_after_repacking_is_unknown(pair: Pair, engine: Build, tmp_path: Path) -> None:
    """A repacked weight that the running engine exchanges is unknown, never equal; with its bytes back it is known again."""
    trainer, _ = pair("Qwen3Moe", "bfloat16")
    llm = engine("Qwen3Moe", "bfloat16")
    (experts,) = llm.apply_model(lambda model: model.model.layers[1].mlp.experts.routed_experts.w2_weight)
    name = "layers.1.moe.experts.5.down.weight"
    for factor, state in ((2.0, WeightState.UNKNOWN), (0.5, WeightState.IDENTICAL)):
        with torch.no_grad():
            experts.mul_(factor)
        with tracer.trace(llm, out=tmp_path / state.value, level=0, strict=True):
            generate(llm)
        result = diff_weights(trainer, tmp_path / state.value)
        assert {line.state for line in result.weights if line.name == name} == {state}
        assert result.exit == (2 if state is WeightState.UNKNOWN else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_scale_is_found(pair: Pair, dtype: str) -> None:
    """A softmax scale that is wrong in one layer is the first difference beyond rounding, with equal weights, and the
    conditions name it."""
    tolerance = tracer.Tolerance(relative=ROUNDING[dtype])
    result = tracer.diff_traces(*pair("Qwen3Moe", dtype, "scale"), tolerance=tolerance)
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary == "layers.1.attn.core"
    assert not [finding for finding in result.findings if finding.code == "weight-differs"]
    assert " at 1" in result.conditions["model.attributes.model.layers.*.self_attn.scaling"]["a"]
