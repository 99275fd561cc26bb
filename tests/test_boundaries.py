"""Resolution of a map against module names: pure, from text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tracer.errors import Code, MapError, UsageError
from tracer.format.schema import BoundaryStatus, RowScope
from tracer.record.boundaries import Plan, Source, WeightRule, resolve
from tracer.record.boundary_maps import load_boundary_map

MAP = """
family: small
boundaries:
  input.ids: {level: 0}
  embedding: {level: 0, from: [input.ids]}
  layers.{layer}.attn.q: {from: ["layers.{previous}.residual"], weights: ["layers.{layer}.attn.q.*"]}
  layers.{layer}.mlp.gate_up: {kind: dense, from: ["layers.{layer}.attn.q"]}
  layers.{layer}.mlp.out: {kind: dense, level: 1, from: ["layers.{layer}.mlp.gate_up"]}
  layers.{layer}.moe.logits: {kind: moe, level: 1, from: ["layers.{layer}.attn.q"]}
  layers.{layer}.moe.ids: {kind: moe, level: 1, from: ["layers.{layer}.moe.logits"], discrete: true, scores: "layers.{layer}.moe.logits"}
  layers.{layer}.moe.experts: {kind: moe, from: ["layers.{layer}.moe.ids"], rows: experts, weights: ["layers.{layer}.moe.experts.*"]}
  layers.{layer}.residual: {level: 0, from: ["layers.{previous}.residual", "layers.{layer}.mlp.out", "layers.{layer}.moe.experts"]}
  lm_head: {level: 0, from: ["layers.{last}.residual"], rows: sampled}
  scorer.logprobs: {level: 1, from: [lm_head, input.ids], rows: next}
hosts:
  here:
    layers: blocks.{layer}
    elsewhere: [Absent]
    kinds: {mlp: {dense: "blocks.{layer}.mlp", moe: "blocks.{layer}.moe"}}
    bindings:
      input.ids: {derived: host}
      embedding: {module: embed, layout: b s c}
      layers.{layer}.attn.q: {module: "blocks.{layer}.q_b|blocks.{layer}.q", layout: b s (h d), sizes: {h: 4}, shard: {tp: h}}
      layers.{layer}.mlp.gate_up: {parts: [{module: "blocks.{layer}.mlp.gate"}, {module: "blocks.{layer}.mlp.up"}], layout: b s i}
      layers.{layer}.mlp.out: {module: "blocks.{layer}.mlp", layout: b s c, partial: tp}
      layers.{layer}.moe.logits: {module: "blocks.{layer}.moe.gate", leaf: "output[0]", layout: t c}
      layers.{layer}.moe.ids: {module: "blocks.{layer}.moe.gate", leaf: "output[1]", layout: t k, canonical_order: "layers.{layer}.moe.ids"}
      layers.{layer}.moe.experts: {not_observable: fused}
      layers.{layer}.residual: {module: "blocks.{layer}", layout: b s c, add: "output[1]"}
      lm_head: {module: head, layout: b s c, replicated: [tp]}
      scorer.logprobs: {derived: logprobs}
    weights:
      embed.weight: embedding.weight
      blocks.{layer}.q.weight: {names: ["layers.{layer}.attn.q.weight"], transpose: true}
      blocks.{layer}.moe.gate_up: ["layers.{layer}.moe.experts.{expert}.gate.weight", "layers.{layer}.moe.experts.{expert}.up.weight"]
      blocks.{layer}.moe.list.{expert}.down: layers.{layer}.moe.experts.{expert}.down.weight
"""

MODULES = {
    "": "Small",
    "embed": "Embedding",
    "head": "Linear",
    **{f"blocks.{n}": "Block" for n in (0, 1, 2)},
    **{f"blocks.{n}.q": "Linear" for n in (0, 1, 2)},
    **{f"blocks.0.mlp{part}": "Part" for part in ("", ".gate", ".up")},
    **{f"blocks.{n}.moe{part}": "Part" for n in (1, 2) for part in ("", ".gate")},
}


@pytest.fixture
def map_file(tmp_path: Path) -> Path:
    """A map with a dense and a mixture kind of layer."""
    path = tmp_path / "small.yaml"
    path.write_text(MAP)
    return path


def plan_of(map_file: Path, modules: Mapping[str, str] = MODULES, level: int = 2, boundaries: list[str] | None = None) -> Plan:
    """The plan of the file for these modules."""
    return resolve(load_boundary_map(str(map_file)), "here", modules, level=level, boundaries=boundaries)


def test_order_is_causal_and_layers_have_what_their_kind_has(map_file: Path) -> None:
    """Boundaries come before layers, layer by layer, after; a dense layer has no moe boundary and the reverse."""
    plan = plan_of(map_file)
    assert [boundary.name for boundary in plan.boundaries] == [
        "input.ids",
        "embedding",
        "layers.0.attn.q",
        "layers.0.mlp.gate_up",
        "layers.0.mlp.out",
        "layers.0.residual",
        *(f"layers.{n}.{name}" for n in (1, 2) for name in ("attn.q", "moe.logits", "moe.ids", "moe.experts", "residual")),
        "lm_head",
        "scorer.logprobs",
    ]
    assert plan.summary == "16 of 16 boundaries resolved; 2 not observable on here"
    assert plan.unresolved == ()
    plan.require_resolved()


def test_inputs_are_full_names(map_file: Path) -> None:
    """The first layer reads the embedding, later ones the residual before; what a kind lacks falls away."""
    inputs = {boundary.name: boundary.inputs for boundary in plan_of(map_file).boundaries}
    assert inputs["layers.0.attn.q"] == ("embedding",)
    assert inputs["layers.2.attn.q"] == ("layers.1.residual",)
    assert inputs["layers.0.residual"] == ("embedding", "layers.0.mlp.out")
    assert inputs["layers.1.residual"] == ("layers.0.residual", "layers.1.moe.experts")
    assert inputs["lm_head"] == ("layers.2.residual",)


def test_boundaries_carry_what_the_map_says(map_file: Path) -> None:
    """Level, rows, choice, scores, place and the reason of what cannot be shown reach the plan."""
    found = {boundary.name: boundary for boundary in plan_of(map_file).boundaries}
    ids = found["layers.1.moe.ids"]
    assert (ids.level, ids.discrete, ids.scores, ids.source) == (1, True, "layers.1.moe.logits", "blocks.1.moe.gate output[1]")
    experts = found["layers.1.moe.experts"]
    assert (experts.status, experts.reason, experts.rows) == (BoundaryStatus.NOT_OBSERVABLE, "fused", RowScope.EXPERTS)
    assert found["lm_head"].rows is RowScope.SAMPLED
    assert found["layers.0.mlp.gate_up"].source == "blocks.0.mlp.gate output + blocks.0.mlp.up output"


def test_sources_carry_the_binding(map_file: Path) -> None:
    """Every part of every recorded boundary is one source with its own module, and a derived one says from where."""
    sources = [source for source in plan_of(map_file).sources if ".2." not in source.boundary]
    by_name = {(source.boundary, source.part): source for source in sources}
    assert by_name["layers.0.mlp.gate_up", 1] == Source("layers.0.mlp.gate_up", "blocks.0.mlp.up", layout="b s i", part=1, parts=2)
    assert by_name["layers.1.attn.q", 0] == Source(
        "layers.1.attn.q", "blocks.1.q", layout="b s (h d)", sizes=(("h", 4),), shard=(("tp", "h"),)
    )
    assert by_name["layers.1.moe.ids", 0].canonical_by == "layers.1.moe.ids"
    assert by_name["layers.1.residual", 0].add == "output[1]"
    assert by_name["layers.0.mlp.out", 0].partial == "tp"
    assert by_name["input.ids", 0] == Source("input.ids", "", leaf="", derived="host")
    logprobs = by_name["scorer.logprobs", 0]
    assert (logprobs.derived, logprobs.module, logprobs.layout, logprobs.replicated) == ("logprobs", "head", "b s c", ("tp",))
    assert all(source.boundary != "layers.1.moe.experts" for source in sources)


def test_the_first_of_alternative_modules_that_exists(map_file: Path) -> None:
    """``a|b`` takes a where the model has it."""
    plan = plan_of(map_file, {**MODULES, "blocks.1.q_b": "Linear"})
    modules = {source.boundary: source.module for source in plan.sources}
    assert modules["layers.1.attn.q"] == "blocks.1.q_b"
    assert modules["layers.2.attn.q"] == "blocks.2.q"


def test_level_chooses(map_file: Path) -> None:
    """A level records itself and what is coarser; the rest is listed with its level."""
    plan = plan_of(map_file, level=1)
    skipped = {boundary.name: boundary.reason for boundary in plan.boundaries if boundary.status is BoundaryStatus.NOT_SELECTED}
    assert skipped == dict.fromkeys(("layers.0.attn.q", "layers.0.mlp.gate_up", "layers.1.attn.q", "layers.2.attn.q"), "level 2")
    assert {source.boundary for source in plan.sources}.isdisjoint(skipped)
    assert plan.summary == "16 of 16 boundaries resolved; 2 not observable on here"


def test_globs_choose_instead_of_the_level(map_file: Path) -> None:
    """Globs pick boundaries of any level, inputs stay, and one that matches nothing is refused."""
    plan = plan_of(map_file, level=0, boundaries=["layers.*.attn.q"])
    recorded = [boundary.name for boundary in plan.boundaries if boundary.status is BoundaryStatus.RECORDED]
    assert recorded == ["input.ids", "layers.0.attn.q", "layers.1.attn.q", "layers.2.attn.q"]
    with pytest.raises(UsageError, match="matches no boundary") as caught:
        plan_of(map_file, boundaries=["layers.*.attn.z"])
    assert caught.value.found == "layers.*.attn.z"


def test_s70_selector_without_module(map_file: Path) -> None:
    """A selector that matches nothing is unresolved with its reason, and a plan that needs it is refused with the count."""
    modules = {path: name for path, name in MODULES.items() if path != "blocks.1.q"}
    plan = plan_of(map_file, modules)
    assert plan.unresolved == (("layers.1.attn.q", "no module blocks.1.q_b|blocks.1.q"),)
    assert plan.summary.startswith("15 of 16 boundaries resolved")
    with pytest.raises(MapError) as caught:
        plan.require_resolved()
    error = caught.value
    assert error.code is Code.MAP_UNFIT
    assert "15 of 16 boundaries resolved" in error.what
    assert str(map_file) in error.where
    assert error.found == "layers.1.attn.q: no module blocks.1.q_b|blocks.1.q"
    plan_of(map_file, modules, level=1).require_resolved()


def test_a_layer_is_of_exactly_one_kind(map_file: Path) -> None:
    """A layer that has the modules of no kind, or of two, leaves the boundaries of all its kinds unresolved, with the reason."""
    neither = {path: name for path, name in MODULES.items() if not path.startswith("blocks.1.moe")}
    plan = plan_of(map_file, neither)
    reasons = dict(plan.unresolved)
    assert set(reasons) == {f"layers.1.{name}" for name in ("mlp.gate_up", "mlp.out", "moe.logits", "moe.ids")}
    assert reasons["layers.1.mlp.out"] == "layer has no module blocks.1.mlp (dense) or blocks.1.moe (moe)"
    both = plan_of(map_file, {**MODULES, "blocks.1.mlp": "Part"})
    assert "at once" in dict(both.unresolved)["layers.1.moe.logits"]


def test_a_kind_may_be_what_a_layer_lacks(tmp_path: Path) -> None:
    """A kind whose path begins with ``!`` is that of the layers without the module."""
    path = tmp_path / "small.yaml"
    path.write_text(MAP.replace('moe: "blocks.{layer}.moe"', 'moe: "!blocks.{layer}.mlp"'))
    plan = plan_of(path)
    assert plan.unresolved == ()
    names = {boundary.name for boundary in plan.boundaries}
    assert {"layers.0.mlp.out", "layers.1.moe.logits"} <= names
    assert not names & {"layers.0.moe.logits", "layers.1.mlp.out"}


def test_stand_ins_are_elsewhere(map_file: Path) -> None:
    """Classes that stand in for another stage's modules make their boundaries elsewhere, not unresolved."""
    modules = {**MODULES, "embed": "Absent", "blocks.0": "Absent"}
    modules = {path: name for path, name in modules.items() if not path.startswith("blocks.0.")}
    plan = plan_of(map_file, modules)
    statuses = {boundary.name: boundary.status for boundary in plan.boundaries}
    assert statuses["embedding"] is BoundaryStatus.ELSEWHERE
    assert statuses["layers.0.attn.q"] is BoundaryStatus.ELSEWHERE
    assert statuses["layers.1.attn.q"] is BoundaryStatus.RECORDED
    assert plan.unresolved == ()
    assert not {source.boundary for source in plan.sources} & {"embedding", "layers.0.attn.q", "layers.0.residual"}


def test_a_model_without_layers_does_not_fit(map_file: Path) -> None:
    """A map whose layers are nowhere in the model is refused, saying what was looked for."""
    with pytest.raises(MapError) as caught:
        plan_of(map_file, {"": "Other", "body.0": "Block"})
    assert caught.value.code is Code.MAP_UNFIT
    assert "blocks.{layer}" in caught.value.expected
    assert "Other" in caught.value.found


def test_a_host_without_bindings_and_a_level_out_of_range(map_file: Path) -> None:
    """A host that the map does not know, and a level that is none, are refused."""
    found = load_boundary_map(str(map_file))
    with pytest.raises(MapError, match="no bindings for host there"):
        resolve(found, "there", MODULES)
    with pytest.raises(UsageError, match="level must be"):
        resolve(found, "here", MODULES, level=3)


def test_weight_rules_name_parameters(map_file: Path) -> None:
    """Paths give semantic names with layer and expert filled in; experts stacked in one parameter stay open."""
    plan = plan_of(map_file)
    found = plan.name_weights("blocks.2.q.weight")
    assert found is not None
    assert (found[0].transpose, found[1]) == (True, ("layers.2.attn.q.weight",))
    stacked = plan.name_weights("blocks.1.moe.gate_up")
    assert stacked is not None
    assert stacked[1] == ("layers.1.moe.experts.{expert}.gate.weight", "layers.1.moe.experts.{expert}.up.weight")
    single = plan.name_weights("blocks.1.moe.list.5.down")
    assert single is not None
    assert single[1] == ("layers.1.moe.experts.5.down.weight",)
    assert plan.name_weights("blocks.1.other.weight") is None


def test_a_rule_matches_whole_paths_only() -> None:
    """Dots are dots, numbers are whole numbers, and the same placeholder is the same number."""
    rule = WeightRule("a.{layer}.b", ("layers.{layer}.b",))
    assert rule.match("a.12.b") == ("layers.12.b",)
    assert [rule.match(path) for path in ("a.x.b", "a1xb", "a.1.b.c", "z.a.1.b")] == [None] * 4
    twice = WeightRule("a.{layer}.{layer}", ("layers.{layer}.b",))
    assert (twice.match("a.1.1"), twice.match("a.1.2")) == (("layers.1.b",), None)


def test_boundary_weights_expand_to_what_exists(map_file: Path) -> None:
    """Globs become the names that the model has, in their order, and nothing of another layer."""
    names = ["embedding.weight", "layers.1.attn.q.weight", "layers.1.attn.q.bias", "layers.11.attn.q.weight"]
    names += [f"layers.1.moe.experts.{n}.down.weight" for n in range(3)]
    weights = {boundary.name: boundary.weights for boundary in plan_of(map_file).with_weights(names)}
    assert weights["layers.1.attn.q"] == ("layers.1.attn.q.weight", "layers.1.attn.q.bias")
    assert weights["layers.1.moe.experts"] == tuple(names[-3:])
    assert weights["layers.2.attn.q"] == ()
    assert weights["lm_head"] == ()


def test_identity_names_map_host_and_model(map_file: Path) -> None:
    """The plan says which map it came from, by content."""
    found = load_boundary_map(str(map_file))
    identity = resolve(found, "here", MODULES, root_class="Wrapped").map
    assert (identity.family, identity.host, identity.root_class) == ("small", "here", "Wrapped")
    assert identity.digest == found.digest()
    assert plan_of(map_file).map.root_class == "Small"
