"""The map files that come with the package, against real tiny models; and how files are found and combined."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
import yaml
from einops import rearrange

from tests.family_runs import HOST, plan_for, plan_of, run_of, tiny
from tests.test_vision_language import NAMES
from tests.tiny_models import FAMILIES, class_name, make_ids, make_model
from tracer.errors import Code, MapError
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import BoundaryStatus
from tracer.record.boundaries import Source, resolve
from tracer.record.boundary_maps import load_boundary_map, map_for_root_class, map_names, require_served
from tracer.record.map_entries import layout_axes

MAPS = Path(__file__).resolve().parent.parent / "boundary_maps"

SEEN_BY_NO_ONE = {
    "qwen3_moe": {"moe.expert_in", "moe.expert_out"},
    "mixtral": {"moe.expert_in", "moe.expert_out"},
    "olmoe": {"moe.expert_in", "moe.expert_out"},
    "qwen2_moe": {"moe.expert_in", "moe.expert_out", "moe.shared_out"},
    "deepseek_v3": {"moe.expert_in", "moe.expert_out", "attn.k"},
    "glm4_moe": {"moe.expert_in", "moe.expert_out"},
    "phimoe": {"moe.expert_in", "moe.expert_out"},
    "gpt_oss": {"moe.expert_in", "moe.expert_out"},
    "llama4": {"moe.routed_out"},
}
"""What the library cannot show, per family, without the layer."""


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
    assert claimed == {class_name(family) for family in FAMILIES} | {f"{name}ForConditionalGeneration" for name in NAMES}


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
    assert all(name.endswith("original_inv_freq") for name in set(names) - read), set(names) - read


@pytest.mark.parametrize("family", FAMILIES)
def test_every_leaf_is_there_with_its_layout(family: str) -> None:
    """In a real forward every leaf is a tensor with as many dimensions as its layout says."""
    for source, leaf in run_of(family).leaves:
        axes = layout_axes(source.layout)
        assert axes is not None
        assert leaf.ndim == len(axes), source.boundary


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_exercises_every_boundary(family: str) -> None:
    """One forward records every boundary that the map binds, 24 rows each (all experts' where a family runs them all), no
    boundary is vacuous, and the logits are bitwise those of a forward that nobody watched."""
    run = run_of(family)
    assert torch.equal(run.logits, run.untraced)
    recorded = {boundary.name for boundary in plan_of(family).boundaries if boundary.status is BoundaryStatus.RECORDED}
    assert set(run.trace.boundaries) == recorded
    for name, boundary in run.trace.boundaries.items():
        rows = {"scorer.logprobs": 22}.get(name, 24 * 8 if family == "llama4" and ".moe.expert_" in name else 24)
        assert len(boundary.token_R) == rows, name


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_rows_are_what_our_own_hooks_saw(family: str) -> None:
    """Row by row, the recorded digest (of ids, the values) is that of what a plain forward hook saw at the place the map says."""
    run = run_of(family)
    rows: dict[str, list[torch.Tensor]] = {}
    for source, leaf in run.leaves:
        if not source.derived and not source.split:
            rows.setdefault(source.boundary, []).append(rows_by_token(source, leaf))
    assert rows
    for name, parts in rows.items():
        row_RC, found = torch.cat(parts, 1), run.trace.boundaries[name]
        ids = rows.get(name.replace("topk_weights", "topk_ids")) if ".topk_" in name else None
        if ids is not None:
            row_RC = row_RC.gather(1, ids[0].argsort(1))
        values = found.load_values()
        if values is not None:
            assert (values == row_RC.numpy()).all(), name
        else:
            assert (fingerprint_rows(row_RC.contiguous().numpy(), "float32").digest_N2 == found.digest_R2).all(), name


def rows_by_token(source: Source, leaf: torch.Tensor) -> torch.Tensor:
    """A leaf as a trace has it: rows by sequence, position, expert."""
    axes = [axis for dimension in layout_axes(source.layout) or () for axis in dimension]
    rows = [axis for axis in ("b", "s", "t", "e") if axis in axes]
    columns = [axis for axis in axes if axis not in rows]
    row_RC = rearrange(leaf, f"{source.layout} -> ({' '.join(rows)}) ({' '.join(columns)})", **({"t": 24} if "(" in source.layout else {}))
    if len(row_RC) < 24:  # the same positions for both sequences
        row_RC = row_RC.repeat(2, 1)
    if source.chosen == "ids":
        return row_RC.nonzero()[:, 1:]  # one expert per token
    return row_RC[row_RC != 0][:, None] if source.chosen else row_RC


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_projections_are_those_of_their_weights(family: str) -> None:
    """Where a boundary is one linear map of another, it equals, bit for bit, that map with the weights the map file names."""
    plan, model, leaves = plan_of(family), tiny(family), run_of(family).named
    named = {
        rule[1][0]: tensor
        for path, tensor in model.named_parameters(remove_duplicate=False)
        if (rule := plan.name_weights(path)) is not None and len(rule[1]) == 1 and tensor.dim() < 3
    }
    checked: set[str] = set()
    for boundary in plan.with_weights(named):
        part = boundary.name.partition("attn.")[2] if ".attn." in boundary.name else boundary.name.rpartition("mlp.")[2]
        matrices = [name for name in boundary.weights if name.endswith(".weight") and named[name].dim() == 2]
        source = [leaves[name] for name in boundary.inputs if name in leaves]
        if len(matrices) != 1 or len(source) != 1 or boundary.name not in leaves or part in ("embedding", "linear_attn.conv"):
            continue
        expected = torch.nn.functional.linear(source[0], named[matrices[0]], named.get(matrices[0].removesuffix("weight") + "bias"))
        assert torch.equal(leaves[boundary.name].flatten(), expected.flatten()), boundary.name
        checked.add(re.sub(r"^layers\.\d+\.", "", boundary.name))
    assert checked >= {"attn.out"} | ({"lm_head"} if "lm_head.raw" not in leaves else {"lm_head.raw"})


@pytest.mark.parametrize("family", FAMILIES)
def test_residuals_add_up(family: str) -> None:
    """Both residuals of every layer equal, bit for bit, the residual before plus what the map says was added."""
    plan, leaves = plan_of(family), run_of(family).named
    checked = 0
    for boundary in plan.boundaries:
        if boundary.name.endswith("residual"):
            before, added = (leaves[name] for name in boundary.inputs)
            assert torch.equal(leaves[boundary.name], before + added.view_as(before)), boundary.name
            checked += 1
    assert checked == 2 * tiny(family).config.num_hidden_layers


def test_gemma2_caps_its_logits() -> None:
    """The raw logits are the projection alone, the logits are what the model returns."""
    leaves = run_of("gemma2").named
    assert torch.equal(leaves["lm_head"], torch.tanh(leaves["lm_head.raw"] / 30.0) * 30.0)


def test_gemma2_scales_the_embedding_inside() -> None:
    """The embedding boundary is after the family's scale."""
    model = tiny("gemma2")
    leaves = run_of("gemma2").named
    assert torch.equal(leaves["embedding"], model.model.embed_tokens.weight[make_ids()] * torch.tensor(48.0**0.5))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "glm4_moe", "llama4"])
def test_shared_experts_make_the_rest_of_the_combine(family: str) -> None:
    """The combine is the routed sum plus the shared expert, gated where the family has a gate."""
    leaves = run_of(family).named
    combine = leaves["layers.1.moe.combine"].reshape(24, -1)
    routed = leaves.get("layers.1.moe.routed_out")
    if routed is None:  # eight experts, expert by expert
        routed = leaves["layers.1.moe.expert_out"].reshape(8, 24, -1).sum(0)
    if family == "qwen2_moe":
        shared = torch.sigmoid(leaves["layers.1.moe.shared_gate"]) * leaves["layers.1.moe.shared_expert"]
    else:
        shared = leaves["layers.1.moe.shared_out"].reshape(24, -1)
    assert torch.equal(combine, routed + shared)


def test_deepseek_layers_are_dense_then_mixture() -> None:
    """The first layer has the dense boundaries, the later ones those of the mixture."""
    names = {boundary.name for boundary in plan_of("deepseek_v3").boundaries}
    assert {"layers.0.mlp.out", "layers.1.moe.combine", "layers.3.moe.shared_out"} <= names
    assert not names & {"layers.0.moe.combine", "layers.1.mlp.out"}


def test_deepseek_without_a_query_latent() -> None:
    """Without a query latent the query projection stands alone and the latent boundaries are no part of the layer."""
    model = make_model("deepseek_v3", q_lora_rank=None)
    plan = plan_for(load_boundary_map("deepseek_v3"), model)
    assert plan.unresolved == ()
    found = {boundary.name: boundary for boundary in plan.boundaries}
    assert found["layers.0.attn.q"].source == "model.layers.0.self_attn.q_proj output"
    assert found["layers.0.attn.q"].inputs == ("layers.0.attn.norm",)
    assert "layers.0.attn.q_latent" not in found


def test_qwen3_next_with_experts() -> None:
    """With experts the family has the mixture's boundaries and the gated shared expert in every layer."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    model = make_model("qwen3_next", num_experts=8, num_experts_per_tok=2, **sizes)
    plan = plan_for(load_boundary_map("qwen3_next"), model)
    assert plan.unresolved == ()
    names = {boundary.name for boundary in plan.boundaries}
    assert {"layers.0.linear_attn.core", "layers.0.moe.shared_gate", "layers.1.attn.gated", "layers.1.moe.combine"} <= names
    assert not names & {"layers.0.attn.core", "layers.1.linear_attn.core", "layers.0.mlp.out"}


def test_glm_without_norms_of_q_and_k() -> None:
    """Sizes of the family without q and k norms lack those boundaries, and rope reads the projections."""
    model = make_model("glm4_moe", use_qk_norm=False)
    plan = plan_for(load_boundary_map("glm4_moe"), model)
    assert plan.unresolved == ()
    found = {boundary.name: boundary for boundary in plan.boundaries}
    assert "layers.1.attn.q_norm" not in found
    assert found["layers.1.attn.q_rope"].inputs == ("layers.1.attn.q", "input.positions")
    assert "layers.1.attn.q_norm" in {boundary.name for boundary in plan_of("glm4_moe").boundaries}


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


def test_a_model_inside_another_is_moved(tmp_path: Path) -> None:
    """``moved`` puts everything inherited (layers, kinds, alternatives, parts, weights) below another path; the root and the
    map's own entries stay as written."""
    (tmp_path / "mine.yaml").write_text("""
family: mine
extends: glm4_moe
hosts:
  transformers:
    moved: {model: model.language_model, "": outer}
    bindings:
      lm_head: {module: "", leaf: output.logits, layout: b s c}
""")
    base, mine = load_boundary_map("glm4_moe").hosts[HOST], load_boundary_map(str(tmp_path / "mine.yaml")).hosts[HOST]
    assert mine.layers == "model.language_model.layers.{layer}"
    assert mine.kinds["norms"] == {
        "normed": "model.language_model.layers.{layer}.self_attn.q_norm",
        "plain": "!model.language_model.layers.{layer}.self_attn.q_norm",
    }
    router = mine.bindings["layers.{layer}.moe.router_logits"].module
    assert router == "model.language_model.layers.{layer}.mlp.gate|model.language_model.layers.{layer}.mlp.router"
    assert mine.bindings["layers.{layer}.mlp.gate_up"].parts[1].module == "model.language_model.layers.{layer}.mlp.up_proj"
    assert mine.bindings["lm_head"].module == ""
    assert "outer.lm_head.weight" in mine.weights
    assert len(mine.weights) == len(base.weights)


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


@pytest.mark.parametrize(
    ("map_name", "family", "found"),
    [
        ("llama4", "qwen3_moe", "layer has no module model.layers.0.feed_forward.gate_proj (dense)"),
        ("gemma3", "llama", "layers.0.attn.q_norm: no module model.layers.0.self_attn.q_norm"),
        ("qwen2_vl", "qwen2", "Qwen2ForCausalLM with"),
        ("deepseek_v3", "glm4_moe", "layers.0.attn.kv_latent: no module model.layers.0.self_attn.kv_a_proj_with_mqa"),
    ],
)
def test_a_map_for_the_wrong_class_is_refused(map_name: str, family: str, found: str) -> None:
    """A map of another class does not fit, and the error names its file, the modules it expects and what the model has instead."""
    modules = {path: type(module).__name__ for path, module in tiny(family).named_modules()}
    with pytest.raises(MapError) as caught:
        resolve(load_boundary_map(map_name), HOST, modules, level=2).require_resolved()
    assert caught.value.code is Code.MAP_UNFIT
    assert f"{map_name}.yaml" in caught.value.where
    assert "module" in caught.value.expected
    assert found in caught.value.found


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
    plan = plan_for(maps[1], model)
    assert plan.unresolved == ()
    assert {source.split for source in plan.sources if source.boundary == "layers.1.attn.k"} == {
        ("layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v")
    }
    assert [path for path, _ in [*model.named_parameters(), *model.named_buffers()] if plan.name_weights(path) is None] == []
