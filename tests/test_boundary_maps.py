"""The map files that come with the package, against real tiny models; and how files are found and combined."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
import yaml

from tests.tiny_models import FAMILIES, class_name, make_ids, make_model
from tracer.errors import Code, MapError
from tracer.format.schema import BoundaryStatus
from tracer.record.boundaries import Plan, Source, resolve
from tracer.record.boundary_maps import load_boundary_map, map_for_root_class, map_names, require_served
from tracer.record.map_entries import layout_axes

MAPS = Path(__file__).resolve().parent.parent / "boundary_maps"
HOST = "transformers"

SEEN_BY_NO_ONE = {
    "qwen3_moe": {"moe.expert_in", "moe.expert_out"},
    "mixtral": {"moe.expert_in", "moe.expert_out"},
    "olmoe": {"moe.expert_in", "moe.expert_out"},
    "qwen2_moe": {"moe.expert_in", "moe.expert_out", "moe.shared_out"},
    "deepseek_v3": {"moe.expert_in", "moe.expert_out", "attn.k"},
    "qwen3_next": {"attn.gate", "linear_attn.conv"},
}
"""What the library cannot show, per family, without the layer."""


@cache
def tiny(family: str) -> Any:
    """One tiny model per family and session; tests must not change it."""
    return make_model(family)


def plan_of(family: str, level: int = 2) -> Plan:
    """The packaged map of the family's class, resolved against the tiny model."""
    model = tiny(family)
    modules = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    return resolve(map_for_root_class(class_name(family), HOST), HOST, modules, level=level)


@pytest.mark.parametrize("name", map_names())
def test_every_map_validates(name: str) -> None:
    """Every packaged map loads, is called what its file is called, and says what it is."""
    found = load_boundary_map(name)
    assert found.family == name
    assert found.about
    assert Path(found.file).stem == name


def test_every_map_with_classes_has_a_tiny_model() -> None:
    """No packaged map claims a class that these tests do not build."""
    claimed = {cls for name in map_names() for cls in load_boundary_map(name).hosts[HOST].classes}
    assert claimed == {class_name(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_boundary_resolves_on_a_real_model(family: str) -> None:
    """On a real model of the class every boundary resolves, but for what the map says the library cannot show."""
    plan = plan_of(family)
    assert plan.map.family == family
    assert plan.unresolved == ()
    hidden = {re.sub(r"^layers\.\d+\.", "", b.name) for b in plan.boundaries if b.status is BoundaryStatus.NOT_OBSERVABLE}
    assert hidden == SEEN_BY_NO_ONE.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_order_and_known_inputs(family: str) -> None:
    """In the resolved plan every input is a boundary of the plan that comes before, and all but inputs have one."""
    seen: set[str] = set()
    for boundary in plan_of(family).boundaries:
        assert set(boundary.inputs) <= seen, boundary.name
        assert boundary.inputs or boundary.name.startswith("input.")
        assert not boundary.scores or boundary.scores in seen
        seen.add(boundary.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_boundary_leads_to_the_logits(family: str) -> None:
    """Nothing stands aside: every boundary is, over its readers, an input of the logits."""
    boundaries = {boundary.name: boundary for boundary in plan_of(family).boundaries}
    reached, todo = set(), ["lm_head"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += boundaries[name].inputs
    assert set(boundaries) - reached == {"scorer.logprobs"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_buffer_has_one_semantic_name(family: str) -> None:
    """Exactly one rule is about each parameter and buffer, no two give one name, and every name is read by a boundary."""
    plan, model = plan_of(family), tiny(family)
    names: list[str] = []
    for path, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        matches = [rule for rule in plan.weight_rules if rule.match(path)]
        assert len(matches) == 1, path
        names += matches[0].match(path) or ()
    assert len(names) == len(set(names))
    read = {name for boundary in plan.with_weights(names) for name in boundary.weights}
    assert set(names) - read <= {"rope.original_inv_freq"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_leaf_is_there_with_its_layout(family: str) -> None:
    """In a real forward every leaf is a tensor with as many dimensions as its layout says."""
    for source, leaf in record(family, plan_of(family)):
        axes = layout_axes(source.layout)
        assert axes is not None
        assert leaf.ndim == len(axes), source.boundary


@pytest.mark.parametrize("family", FAMILIES)
def test_residuals_add_up(family: str) -> None:
    """Both residuals equal, bit for bit, the residual before plus what the map says was added."""
    plan = plan_of(family)
    leaves = {source.boundary: leaf for source, leaf in record(family, plan)}
    for boundary in plan.boundaries:
        if boundary.name.endswith("residual"):
            before, *added = (leaves[name] for name in boundary.inputs)
            assert len(added) == 1
            assert torch.equal(leaves[boundary.name], before + added[0]), boundary.name


def test_gemma2_caps_its_logits() -> None:
    """The raw logits are the projection alone, the logits are what the model returns."""
    leaves = {source.boundary: leaf for source, leaf in record("gemma2", plan_of("gemma2"))}
    assert torch.equal(leaves["lm_head"], torch.tanh(leaves["lm_head.raw"] / 30.0) * 30.0)


def test_gemma2_scales_the_embedding_inside() -> None:
    """The embedding boundary is after the family's scale."""
    model = tiny("gemma2")
    leaves = {source.boundary: leaf for source, leaf in record("gemma2", plan_of("gemma2"))}
    assert torch.equal(leaves["embedding"], model.model.embed_tokens.weight[make_ids()] * torch.tensor(48.0**0.5))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_make_the_rest_of_the_combine(family: str) -> None:
    """The combine is the routed sum plus the shared expert, gated where the family has a gate."""
    leaves = {source.boundary: leaf for source, leaf in record(family, plan_of(family))}
    routed, combine = leaves["layers.1.moe.routed_out"], leaves["layers.1.moe.combine"].flatten(0, 1)
    if family == "qwen2_moe":
        shared = torch.sigmoid(leaves["layers.1.moe.shared_gate"]) * leaves["layers.1.moe.shared_expert"]
    else:
        shared = leaves["layers.1.moe.shared_out"].flatten(0, 1)
    assert torch.equal(combine, routed + shared)


def test_deepseek_layers_are_dense_then_mixture() -> None:
    """The first layer has the dense boundaries, the later ones those of the mixture."""
    names = {boundary.name for boundary in plan_of("deepseek_v3").boundaries}
    assert {"layers.0.mlp.out", "layers.1.moe.combine", "layers.3.moe.shared_out"} <= names
    assert not names & {"layers.0.moe.combine", "layers.1.mlp.out"}


def test_deepseek_without_a_query_latent() -> None:
    """Without a query latent the query projection stands alone and the latent boundaries are no part of the layer."""
    model = make_model("deepseek_v3", q_lora_rank=None)
    modules = {path: type(module).__name__ for path, module in model.named_modules()}
    plan = resolve(load_boundary_map("deepseek_v3"), HOST, modules, level=2)
    assert plan.unresolved == ()
    found = {boundary.name: boundary for boundary in plan.boundaries}
    assert found["layers.0.attn.q"].source == "model.layers.0.self_attn.q_proj output"
    assert found["layers.0.attn.q"].inputs == ("layers.0.attn.norm",)
    assert "layers.0.attn.q_latent" not in found


def test_qwen3_next_with_experts() -> None:
    """With experts the family has the mixture's boundaries and the gated shared expert in every layer."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    model = make_model("qwen3_next", num_experts=8, num_experts_per_tok=2, **sizes)
    modules = {path: type(module).__name__ for path, module in model.named_modules()}
    plan = resolve(load_boundary_map("qwen3_next"), HOST, modules, level=2)
    assert plan.unresolved == ()
    names = {boundary.name for boundary in plan.boundaries}
    assert {"layers.0.linear_attn.core", "layers.0.moe.shared_gate", "layers.1.attn.gated", "layers.1.moe.combine"} <= names
    assert not names & {"layers.0.attn.core", "layers.1.linear_attn.core", "layers.0.mlp.out"}


@pytest.mark.parametrize("name", [name for name in map_names() if name != "decoder"])
def test_no_map_repeats_its_base(name: str, tmp_path: Path) -> None:
    """What a file states differs from what its bases say already."""
    raw = yaml.safe_load((MAPS / f"{name}.yaml").read_text())
    bases = [str(MAPS / f"{base}.yaml") for base in ([raw["extends"]] if isinstance(raw["extends"], str) else raw["extends"])]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"family": "base", "about": "bases alone", "extends": bases}))
    base, own = load_boundary_map(str(tmp_path / "base.yaml")), load_boundary_map(name)
    for boundary, entry in raw.get("boundaries", {}).items():
        if boundary in base.boundaries:
            known = msgspec.to_builtins(base.boundaries[boundary])
            repeated = {key for key, value in entry.items() if key != "after" and known.get(key) == value}
            assert not repeated, f"{boundary}: {repeated}"
    for host, section in raw["hosts"].items():
        for kind in ("bindings", "weights"):
            for key in section.get(kind, {}):
                mine, its = getattr(own.hosts[host], kind)[key], getattr(base.hosts[host], kind).get(key)
                assert mine != its, f"{kind} {key}"


def test_maps_extend_maps(tmp_path: Path) -> None:
    """A map states what differs: it adds after a boundary, changes a field, drops, and rebinds; classes are not inherited."""
    (tmp_path / "mine.yaml").write_text("""
family: mine
extends: qwen3
drop: ["layers.{layer}.mlp.act"]
boundaries:
  layers.{layer}.attn.extra: {after: "layers.{layer}.attn.core", from: ["layers.{layer}.attn.core"]}
  layers.{layer}.mlp.out: {level: 2, from: ["layers.{layer}.mlp.gate_up"]}
hosts:
  transformers:
    bindings:
      layers.{layer}.attn.extra: {not_observable: a test}
      final_norm: {module: model.last, layout: b s c}
""")
    base, mine = load_boundary_map("qwen3"), load_boundary_map(str(tmp_path / "mine.yaml"))
    names = list(mine.boundaries)
    assert names.index("layers.{layer}.attn.extra") == names.index("layers.{layer}.attn.core") + 1
    assert "layers.{layer}.mlp.act" not in names
    assert mine.boundaries["layers.{layer}.mlp.out"].level == 2
    assert mine.boundaries["layers.{layer}.mlp.out"].weights == base.boundaries["layers.{layer}.mlp.out"].weights
    assert mine.hosts[HOST].bindings["final_norm"].module == "model.last"
    assert mine.hosts[HOST].bindings["embedding"] == base.hosts[HOST].bindings["embedding"]
    assert mine.hosts[HOST].classes == ()


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("extends: mine", "extends", "do not come back"),
        ("extends: qwen3\ndrop: [nothing]", "drop", "boundaries of the base"),
        ("extends: qwen3\nboundaries: {extra: {level: 1}}", "boundaries.extra", "`after:`"),
        ("extends: qwen3\nboundaries: {extra: {after: nothing}}", "boundaries.extra.after", "comes before"),
        ("extends: qwen3\ndrop: [final_norm]", "boundaries.lm_head.from", "boundaries of this map"),
    ],
)
def test_wrong_extensions_are_refused(tmp_path: Path, text: str, key: str, expected: str) -> None:
    """A base that comes back, and a drop, place or reference that the base does not have, are refused by key."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"family: mine\n{text}\n")
    with pytest.raises(MapError) as caught:
        load_boundary_map(str(path))
    assert caught.value.code is Code.MAP_INVALID
    assert key in caught.value.where
    assert expected in caught.value.expected


def test_unknown_maps_and_classes(tmp_path: Path) -> None:
    """A name, path or class that no map has is refused, listing what there is."""
    for name in ("qwen9", str(tmp_path / "none.yaml")):
        with pytest.raises(MapError) as caught:
            load_boundary_map(name)
        assert caught.value.code is Code.MAP_UNKNOWN
        assert "qwen3_moe" in caught.value.expected
    with pytest.raises(MapError) as caught:
        map_for_root_class("Qwen9ForCausalLM", HOST)
    assert caught.value.code is Code.MAP_UNKNOWN
    assert "Qwen3ForCausalLM" in caught.value.expected
    assert caught.value.expected.count("ForCausalLM") == 3
    assert "tracer map list" in caught.value.remedy
    assert caught.value.found == "Qwen9ForCausalLM"


def test_a_subclass_has_the_map_of_its_nearest_ancestor() -> None:
    """A class that no map knows takes the map of the nearest class it derives from."""
    ancestors = ("MyBase", "Qwen3ForCausalLM", "LlamaForCausalLM", "PreTrainedModel")
    assert map_for_root_class("MyQwen", HOST, ancestors).family == "qwen3"
    assert map_for_root_class("LlamaForCausalLM", HOST, ancestors).family == "llama"
    with pytest.raises(MapError):
        map_for_root_class("GPTModel[strange]", "megatron", ("GPTModule[strange]",))


def test_a_map_of_another_class_is_refused(tmp_path: Path) -> None:
    """A map serves the classes it lists and those that derive from them, however much of another model would resolve."""
    llama = load_boundary_map("llama")
    require_served(llama, HOST, "LlamaForCausalLM")
    require_served(llama, HOST, "MyLlama", ("LlamaForCausalLM", "PreTrainedModel"))
    with pytest.raises(MapError) as caught:
        require_served(llama, HOST, "Qwen3ForCausalLM")
    error = caught.value
    assert (error.code, error.expected, error.found) == (Code.MAP_UNFIT, "LlamaForCausalLM", "Qwen3ForCausalLM")
    assert error.what == "boundary map llama does not serve Qwen3ForCausalLM"
    assert error.remedy == 'map="qwen3", which serves Qwen3ForCausalLM, or map="auto"'
    with pytest.raises(MapError, match="extends: llama"):
        require_served(llama, HOST, "PhiForCausalLM")
    with pytest.raises(MapError, match="this one is a base"):
        require_served(load_boundary_map("decoder"), HOST, "LlamaForCausalLM")


def test_a_map_of_the_users_own_is_taken_at_its_word(tmp_path: Path) -> None:
    """A file that lists no class serves any; one that lists classes is held to them."""
    for name, classes in (("open", ""), ("closed", "hosts: {transformers: {classes: [MyModel]}}\n")):
        (tmp_path / f"{name}.yaml").write_text(f"family: {name}\nextends: llama\n{classes}")
    require_served(load_boundary_map(str(tmp_path / "open.yaml")), HOST, "Qwen3ForCausalLM")
    closed = load_boundary_map(str(tmp_path / "closed.yaml"))
    require_served(closed, HOST, "MyModel")
    with pytest.raises(MapError):
        require_served(closed, HOST, "Qwen3ForCausalLM")


def test_the_maps_of_the_how_to_work(tmp_path: Path) -> None:
    """Every map printed in the how-to loads, and its Phi-3 map resolves on a real model with a name for every parameter."""
    page = (MAPS.parent / "docs/how-to/write-a-map.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 2
    maps = []
    for number, text in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(text)
        maps.append(load_boundary_map(str(tmp_path / f"{number}.yaml")))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, pad_token_id=0))  # type: ignore[arg-type]
    modules = {path: type(module).__name__ for path, module in model.named_modules()}
    plan = resolve(maps[1], HOST, modules, level=2)
    assert plan.unresolved == ()
    assert {source.split for source in plan.sources if source.boundary == "layers.1.attn.k"} == {
        ("layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v")
    }
    assert [path for path, _ in [*model.named_parameters(), *model.named_buffers()] if plan.name_weights(path) is None] == []


def record(family: str, plan: Plan) -> list[tuple[Source, torch.Tensor]]:
    """Every leaf that a module hook can show in one forward, cloned, in the plan's order."""
    seen: dict[int, torch.Tensor] = {}
    modules = dict(tiny(family).named_modules())

    def watch(number: int, source: Source) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for leaf in source.leaf.split("|"):
                root, *steps = re.findall(r"\w+", leaf)
                value: Any = {"input": args, "kwargs": kwargs, "output": output}[root]
                for step in steps:
                    if step.isdigit():
                        value = value[int(step)] if len(value) > int(step) else None
                    else:
                        value = value.get(step) if isinstance(value, dict) else getattr(value, step)
                if isinstance(value, torch.Tensor):
                    seen[number] = value.clone()
                    return

        return modules[source.module].register_forward_hook(hook, with_kwargs=True)

    hooked = [(n, source) for n, source in enumerate(plan.sources) if not source.tap and source.derived != "host"]
    handles = [watch(n, source) for n, source in hooked]
    try:
        with torch.no_grad():
            tiny(family)(input_ids=make_ids(), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    assert set(seen) == {n for n, _ in hooked}, [source.boundary for n, source in hooked if n not in seen]
    return [(source, seen[n]) for n, source in hooked]
