"""A draft as YAML: kinds, inputs looked through, alternatives of modules, and nothing overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tracer.errors import Code, UsageError
from tracer.record.boundary_maps import load_boundary_map
from tracer.record.map_draft import MapDraft, draft_map
from tracer.record.map_entries import BoundaryMap
from tracer.record.suggestions import Findings, Guess, WeightGuess

LAYERS = (0, 1, 2)
MODULES: dict[str, nn.Module] = {
    path: nn.Linear(2, 2, bias=False)
    for path in (
        "table", "body.0", "body.1", "body.2", "body.0.dense", "body.1.moe", "body.2.moe", "body.0.a", "body.1.b", "body.2.b", "head",
    )
}  # fmt: skip


def guess(module: str, **more: object) -> Guess:
    return Guess({"module": module, "layout": "b s c", **more}, "a test")


def findings() -> Findings:
    """A dense first layer, then mixtures; attn.out under two names; no norms, no projections."""
    found = Findings("body.{layer}", LAYERS)
    host = Guess({"derived": "host"}, "a test")
    found.guesses |= {name: {-1: host} for name in ("input.ids", "input.positions", "input.visible_from")}
    found.guesses["embedding"] = {-1: guess("table")}
    found.guesses["layers.{layer}.attn.out"] = {0: guess("body.{layer}.a"), 1: guess("body.{layer}.b"), 2: guess("body.{layer}.b")}
    found.guesses["layers.{layer}.mlp.out"] = {0: guess("body.{layer}.dense")}
    found.guesses["layers.{layer}.moe.combine"] = {1: guess("body.{layer}.moe"), 2: guess("body.{layer}.moe")}
    found.guesses["layers.{layer}.residual"] = dict.fromkeys(LAYERS, guess("body.{layer}"))
    found.guesses["lm_head"] = {-1: guess("head")}
    found.weights["head.weight"] = WeightGuess(("lm_head.weight",))
    return found


def draft(found: Findings) -> MapDraft:
    return draft_map(found, MODULES, host="here", family="mine", classes=("Mine",), model_types=("mine",))


def loaded(found: Findings, folder: Path) -> BoundaryMap:
    return load_boundary_map(str(draft(found).save(folder / "mine.yaml")))


def test_what_was_not_found_is_looked_through(tmp_path: Path) -> None:
    """A boundary reads what its missing inputs read, mixing of tokens included; of two kinds of parts the absent one adds nothing."""
    entries = loaded(findings(), tmp_path).boundaries
    out = entries["layers.{layer}.attn.out"]
    assert set(out.inputs) == {"layers.{previous}.residual", "input.visible_from"}
    assert out.mixes_tokens
    residual = entries["layers.{layer}.residual"]
    assert set(residual.inputs) == {
        "layers.{previous}.residual", "layers.{layer}.attn.out", "layers.{layer}.mlp.out", "layers.{layer}.moe.combine",
    }  # fmt: skip
    assert not residual.mixes_tokens
    assert entries["lm_head"].inputs == ("layers.{last}.residual",)


def test_layers_that_differ_become_kinds(tmp_path: Path) -> None:
    """What only some layers have gets a kind, told by a module that exactly those layers have; names that differ become alternatives."""
    section = loaded(findings(), tmp_path).hosts["here"]
    assert section.kinds == {"dense": {"dense": "body.{layer}.a", "moe": "body.{layer}.b"}}
    assert section.bindings["layers.{layer}.attn.out"].module == "body.{layer}.a|body.{layer}.b"


def test_what_no_module_tells_apart_is_dropped(tmp_path: Path) -> None:
    """A guess in layers that nothing tells from the others, and one whose layout differs, are dropped and listed with the layers."""
    found = findings()
    found.guesses["layers.{layer}.attn.norm"] = {0: guess("body.{layer}"), 2: guess("body.{layer}")}
    flat = Guess({"module": "x", "layout": "t c"}, "")
    found.guesses["layers.{layer}.mlp.norm"] = {0: guess("body.{layer}"), 1: flat, 2: guess("body.{layer}")}
    found.missing += ["a gap (layer 0)", "a gap (layer 2)"]
    result = draft(found)
    assert "layers.{layer}.attn.norm" not in result.found
    assert "layers.{layer}.attn.norm: found in layers 0, 2 only, and no module tells them from the others" in result.missing
    assert "layers.{layer}.mlp.norm: its place differs between layers 0, 1, 2" in result.missing
    assert "a gap (layers 0, 2)" in result.missing
    assert any(text.startswith("parameters that keep their own names: table.weight, body.{layer}.weight") for text in result.missing)
    assert all(f"# - {text}" in result.text for text in result.missing)
    assert loaded(found, tmp_path).family == "mine"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A file that is there already, perhaps corrected by hand, stays as it is."""
    target = tmp_path / "mine.yaml"
    target.write_text("by hand")
    with pytest.raises(UsageError) as caught:
        draft(findings()).save(target)
    assert caught.value.code is Code.OUT_IN_USE
    assert target.read_text() == "by hand"
