"""The pair that matters: the engine against transformers on the same tokens."""

from __future__ import annotations

import pytest

import tracer
from tests.vllm.conftest import Pair
from tests.vllm.engines import FAMILIES, statuses

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stale_expert_is_found(pair: Pair, dtype: str) -> None:
    """A weight update that the engine has not got is named by its expert, although the engine repacked it, and the verdict
    says so before any value."""
    result = tracer.diff_traces(*pair("Qwen3Moe", dtype, "stale-expert"))
    assert result.exit == 1
    stale = [finding for finding in result.findings if finding.code == "weight-differs"]
    assert [finding.boundary for finding in stale] == ["layers.1.moe.experts.5.down.weight"]
    assert "layers.1.moe.experts.5.down.weight" in result.headline


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_scale_is_found(pair: Pair, dtype: str) -> None:
    """A softmax scale that is wrong in one layer is the first difference larger than rounding, with the weights equal."""
    tolerance = tracer.Tolerance(relative=ROUNDING[dtype])
    result = tracer.diff_traces(*pair("Qwen3Moe", dtype, "scale"), tolerance=tolerance)
    print(result.headline, [f.text for f in result.findings if f.code not in ("weight-missing",)])
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary == "layers.1.attn.core"
