"""Scalar settings of the modules around a boundary."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.sides import Side
from tracer.format.schema import Boundary
from tracer.read.logical import LogicalTrace
from tracer.read.settings import differing_numbers, settings_at


def side(attributes: dict[str, Any], host: str = "playback") -> LogicalTrace:
    """A side whose modules have these attributes."""
    made = Side()
    made.host = host
    made.conditions = {"model": {"attributes": attributes}}
    table = msgspec.structs.replace(made.weights["lm_head.weight"], name="rope.inv_freq", parameter="model.rotary_emb.inv_freq")
    made.weights = {"rope.inv_freq": table}
    return made.trace()


def at(source: str, *weights: str) -> Boundary:
    """A boundary taken from there."""
    return Boundary(name="x", level=2, source=source, weights=weights)


A = {
    "model.layers.*.self_attn.scaling": 0.25,
    "model.layers.*.self_attn.cap": 50.0,
    "model.rotary_emb.attention_scaling": 1.0,
    "model.layers.*.mlp.act_fn.name": "gelu",
    "model.norm.eps": 1e-6,
}
B = {
    "model.layers.*.self_attn.scaling": {"by_index": {"0.25": "0 1 3", "0.2625": "2"}},
    "model.rotary_emb.attention_scaling": 1.4159,
    "model.layers.*.mlp.act_fn.name": "silu",
    "model.norm.eps": 1e-5,
}


def test_the_setting_of_the_own_layer_is_named() -> None:
    """Layer 2's scaling differs and layer 1's does not; an attribute that one side lacks is none there."""
    a, b = side(A), side(B)
    found = settings_at(a, b, at("model.layers.2.self_attn.o_proj input[0]"))
    assert [setting.text() for setting in found] == [
        "cap of model.layers.2.self_attn: A 50.0, B none",
        "scaling of model.layers.2.self_attn: A 0.25, B 0.2625",
    ]
    assert all(setting.number for setting in found)
    other = settings_at(a, b, at("model.layers.1.self_attn.o_proj input[0]"))
    assert [setting.name for setting in other] == ["model.layers.1.self_attn.cap"]


def test_modules_of_weights_and_neighbours_count_and_names_are_no_numbers() -> None:
    """The rotary table's module, and what the same block holds beside the module it is taken from."""
    a, b = side(A), side(B)
    found = settings_at(a, b, at("model.layers.0.mlp.down_proj input[0]", "rope.inv_freq"))
    assert {setting.name: setting.number for setting in found} == {
        "model.layers.0.mlp.act_fn.name": False,
        "model.rotary_emb.attention_scaling": True,
    }
    assert settings_at(a, b, at("model.layers.0.input_layernorm output")) == ()


def test_another_host_has_other_modules() -> None:
    """Settings of two programs are not compared, nor is anything where all are equal."""
    assert settings_at(side(A), side(B, host="engine"), at("model.norm output")) == ()
    assert settings_at(side(A), side(A), at("model.norm output")) == ()


def test_numbers_that_differ_anywhere_are_found_once_per_pattern() -> None:
    """Numbers only: no names, no switches, nothing that lays a computation out; a module that one side lacks has none."""
    more = {"model.layers.*.self_attn.chunk_size": 64, "model.layers.*.self_attn.causal": True, "other.module.eps": 1.0}
    found = differing_numbers(side({**A, **more}), side({**B, "model.layers.*.self_attn.chunk_size": 32}))
    assert [number.text() for number in found] == [
        "cap of model.layers.*.self_attn: A 50.0, B none",
        "scaling of model.layers.2.self_attn: A 0.25, B 0.2625",
        "eps of model.norm: A 1e-06, B 1e-05",
        "attention_scaling of model.rotary_emb: A 1.0, B 1.4159",
    ]
    assert differing_numbers(side(A), side(B, host="other")) == ()
    assert differing_numbers(side(A), side(A)) == ()
