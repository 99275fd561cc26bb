"""Conditions that only the model knows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.tiny_models import FAMILIES, class_name, make_model
from tracer.hosts import find_host
from tracer.hosts.module_conditions import module_attributes


@pytest.mark.parametrize("family", FAMILIES)
def test_conditions_are_plain_json(family: str) -> None:
    """Every family's conditions survive strict JSON unchanged and name class, dtype, backends and mode."""
    conditions = find_host(make_model(family, torch.bfloat16)).conditions()
    assert json.loads(json.dumps(conditions, allow_nan=False)) == conditions
    assert conditions["model_class"] == class_name(family)
    assert (conditions["attention"], conditions["mode"]) == ("eager", "eval")
    assert "bfloat16" in conditions["parameter_dtypes"]
    assert conditions["config"]["vocab_size"] == 512


def test_training_mode_and_active_dropout_are_named() -> None:
    """F08: train mode and a dropout that takes effect are told; in eval mode the same probability is not active."""
    model = make_model("qwen3", attention_dropout=0.1)
    assert find_host(model).conditions()["dropout"] == {}
    model.train()
    conditions = find_host(model).conditions()
    assert conditions["mode"] == "train"
    assert conditions["dropout"] == {"model.layers.*.self_attn.attention_dropout": 0.1}
    model.model.layers[0].eval()
    assert find_host(model).conditions()["mode"].startswith("mixed: ")


def test_attribute_of_one_layer_stands_out() -> None:
    """Scalar attributes are told once where all layers agree, and by layer where one does not."""
    model = make_model("gemma2")
    same = module_attributes(find_host(model).modules())
    assert same["model.layers.*.input_layernorm.eps"] == 1e-6
    assert same["model.layers.*.self_attn.sliding_window"] == {"by_index": {"8": "0 2", "None": "1 3"}}
    model.model.layers[1].input_layernorm.eps = 1e-4
    changed = module_attributes(find_host(model).modules())
    assert changed["model.layers.*.input_layernorm.eps"] == {"by_index": {"1e-06": "0 2 3", "0.0001": "1"}}
    assert {name for name in changed if changed[name] != same[name]} == {"model.layers.*.input_layernorm.eps"}


@pytest.mark.parametrize(
    ("value", "expected"), [(float("inf"), "inf"), (True, True), (None, None), ("text", "text"), ([1], None), (torch.ones(1), None)]
)
def test_only_scalars_are_kept(value: Any, expected: Any) -> None:
    """Numbers, flags and text are kept, infinities as text; lists, tensors and what is nowhere set are not."""
    module = torch.nn.Identity()
    module.kept = value
    assert module_attributes({"a": module}).get("a.kept") == expected
