"""Maps suggested for real tiny models: scored against the families' own maps, and for classes that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import tracer
from tests.family_runs import HOST, run_of
from tests.suggestion_scores import compare_traces, trace_suggested
from tests.tiny_models import FAMILIES, make_config, make_ids, make_model
from tracer.errors import Code, HostError, UsageError
from tracer.hosts import suggest_map
from tracer.hosts.transformers_suggest import small_model
from tracer.record.boundaries import resolve
from tracer.record.boundary_maps import load_boundary_map


@pytest.mark.parametrize("family", FAMILIES)
def test_suggested_maps_find_what_the_families_maps_have(family: str, tmp_path: Path) -> None:
    """Without a look at the family's map, the suggested one loads, traces, and records at least nine in ten of the boundaries of
    levels 0 and 1 with the same rows; none of any level has other rows, or a name that the family's map lacks."""
    score = compare_traces(family, run_of(family).trace, trace_suggested(family, tmp_path))
    assert not score.wrong
    assert len(score.right[0]) >= 0.9 * len(score.wanted[0]), sorted(score.wanted[0] - score.right[0])


@pytest.mark.parametrize(
    ("name", "level_2", "missing"),
    [
        ("Phi3", {"attn.q", "attn.v", "attn.q_rope", "attn.core", "mlp.gate_up"}, ""),
        ("Cohere", {"attn.norm", "attn.q", "lm_head.raw"}, "attn.residual: both parts are added at once"),
        ("OPT", {"attn.v", "mlp.up", "mlp.norm"}, ""),
        ("Bloom", {"attn.residual", "mlp.norm"}, "attn.q: no attention function was seen"),
    ],
)
def test_classes_without_a_map(name: str, level_2: set[str], missing: str, tmp_path: Path) -> None:
    """Classes that no map serves get one from their default config: packed projections, parallel blocks, learned positions, and an
    attention that the host cannot tap."""
    getattr(transformers, f"{name}Config")().to_json_file(tmp_path / "config.json")
    model = small_model(tmp_path / "config.json")
    draft = suggest_map(model)
    modules = {path: type(module).__name__ for path, module in model.named_modules()}
    plan = resolve(load_boundary_map(str(draft.save(tmp_path / "draft.yaml"))), HOST, modules, level=2)
    assert plan.unresolved == ()
    names = {found.removeprefix("layers.{layer}.") for found in draft.found}
    assert names >= level_2 | {"embedding", "attn.out", "mlp.out", "residual", "final_norm", "lm_head", "scorer.logprobs"}
    assert any(text.startswith(missing) for text in draft.missing)


_USUAL = {
    "attn.norm": "input_layernorm", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.q_rope": "self_attn", "attn.k_rope": "self_attn", "attn.core": "self_attn.o_proj", "attn.out": "self_attn",
    "attn.residual": "post_attention_layernorm", "mlp.norm": "post_attention_layernorm", "mlp.act": "mlp.down_proj", "mlp.out": "mlp",
    "residual": "",
}  # fmt: skip
_MIXTURE = {"moe.topk_ids": "mlp.gate", "moe.topk_weights": "mlp.gate", "moe.routed_out": "mlp.experts", "moe.combine": "mlp"}


@pytest.mark.parametrize(
    ("name", "settings", "places", "without"),
    [
        ("Nemotron", {"num_key_value_heads": 8, "head_dim": 128}, {"mlp.up": "mlp.up_proj"}, ""),
        (
            "HunYuanMoEV1",  # its norms of q and k come after rope
            {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
            {**_MIXTURE, "moe.router_logits": "mlp.gate.wg", "moe.shared_out": "mlp.shared_mlp"},
            "mlp.act mlp.out",
        ),
        (
            "Exaone4",  # it norms behind its parts
            {},
            {
                **{f"attn.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
                **{f"{part}.post_norm": f"post_{name}_layernorm" for part, name in (("attn", "attention"), ("mlp", "feedforward"))},
                "attn.residual": "mlp.gate_proj", "mlp.gate_up": "",
            },
            "attn.norm mlp.norm",
        ),
    ],
)  # fmt: skip
def test_nothing_is_bound_wrongly_in_classes_it_was_not_made_for(
    name: str, settings: dict[str, Any], places: dict[str, str], without: str, tmp_path: Path
) -> None:
    """Drafts for classes that no rule was written for: every boundary inside layers is where the class has it, and the map serves
    that class: a run by it records every boundary it binds."""
    getattr(transformers, f"{name}Config")(**settings).to_json_file(tmp_path / "config.json")
    model = small_model(tmp_path / "config.json")
    path = suggest_map(model).save(tmp_path / "draft.yaml")
    bindings = yaml.safe_load(path.read_text())["hosts"][HOST]["bindings"]
    found = {
        key.removeprefix("layers.{layer}."): binding.get("module", "model.layers.{layer}").removeprefix("model.layers.{layer}")[1:]
        for key, binding in bindings.items()
        if key.startswith("layers.")
    }
    assert found == {key: place for key, place in {**_USUAL, **places}.items() if key not in without.split()}
    with torch.no_grad(), tracer.trace(model, map=path, out=tmp_path / "trace", level=2, strict=True):
        model(input_ids=make_ids().clamp(max=200), use_cache=False)
    boundaries = tracer.open_trace(tmp_path / "trace").boundaries
    assert {len(boundary.token_R) for key, boundary in boundaries.items() if key != "scorer.logprobs"} == {24}


def test_every_guess_has_its_evidence() -> None:
    """In the file every binding stands under a comment that says why, guesses by name say so, and the last lines say what is missing."""
    model = make_model("llama4")
    draft = suggest_map(model, "mine")
    lines = draft.text.splitlines()
    assert lines.count("# Not found") == 1
    start, stop = lines.index("    bindings:"), lines.index("    weights:")
    bindings = lines[start + 1 : stop]
    assert all(line.startswith("      # ") for line in bindings[::2])
    assert [line.split(": ")[0].strip() for line in bindings[1::2]] == list(draft.found)
    assert any("BY ITS NAME ALONE" in line for line in bindings[::2])  # its q norm comes after rope
    raw = yaml.safe_load(draft.text)
    assert raw["family"] == "mine"
    assert raw["hosts"][HOST]["classes"] == ["Llama4ForCausalLM"]
    assert raw["hosts"][HOST]["kinds"] == {
        "dense": {"dense": "model.layers.{layer}.feed_forward.down_proj", "moe": "model.layers.{layer}.feed_forward.experts"}
    }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_suggested_is_refused(tmp_path: Path) -> None:
    """Active dropout, a config whose small model cannot be built, a model that does not run on ids alone, and no model at all."""
    training = make_model("gpt2", resid_pdrop=0.1).train()
    with pytest.raises(UsageError, match="dropout") as caught:
        suggest_map(training)
    assert caught.value.code is Code.BAD_ARGUMENT
    make_config("qwen3", hidden_act="no such thing").to_json_file(tmp_path / "config.json")
    with pytest.raises(UsageError, match="cannot be built"):
        small_model(tmp_path / "config.json")
    broken: Any = make_model("qwen3")
    broken.model.embed_tokens.forward = lambda ids: ids.no_such_method()
    with pytest.raises(UsageError, match="cannot run 2 x 13 token ids"):
        suggest_map(broken)
    with pytest.raises(HostError):
        suggest_map(torch.nn.Linear(2, 2))
