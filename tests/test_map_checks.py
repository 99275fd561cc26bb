"""Every way a map can be wrong is refused with file, key, expected and found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracer.errors import Code, MapError
from tracer.record.boundary_maps import load_boundary_map

GOOD = """
family: small
boundaries:
  embedding: {level: 0}
  layers.{layer}.q: {from: ["layers.{previous}.residual"], kind: wide}
  layers.{layer}.ids: {from: ["layers.{layer}.q"], discrete: true, scores: "layers.{layer}.q"}
  layers.{layer}.residual: {level: 0, from: ["layers.{previous}.residual", "layers.{layer}.q"]}
  final_norm: {level: 0, from: ["layers.{last}.residual"]}
hosts:
  here:
    classes: [Small]
    layers: blocks.{layer}
    kinds: {shape: {wide: "blocks.{layer}.wide", narrow: "blocks.{layer}.narrow"}}
    bindings:
      embedding: {module: embed, layout: b s c, replicated: [tp]}
      layers.{layer}.q: {module: "blocks.{layer}.q", layout: b s (h d), shard: {tp: h, cp: s}, order: {s: zigzag}, sizes: {h: 4}}
      layers.{layer}.ids: {module: "blocks.{layer}.router", leaf: "output[1]", layout: t k, canonical_order: "layers.{layer}.ids"}
      layers.{layer}.residual: {module: "blocks.{layer}", layout: b s c}
      final_norm: {not_observable: fused}
    weights:
      blocks.{layer}.q.weight: {names: ["layers.{layer}.q.weight", "layers.{layer}.k.weight"], shares: [2, 1]}
"""

REFUSALS = {
    "choice": ("leaf: ", "chosen: some, leaf: ", ".ids.chosen", "ids or values", "some"),
    "top level key": ("family: small", "family: small\nfamliy: x", "famliy", "one of family, about", "unknown key 'famliy'"),
    "boundary key": ("embedding: {level: 0}", "embedding: {levle: 0}", "boundaries.embedding.levle", "one of about, level", "unknown key"),
    "binding key": ("leaf: ", "leef: ", "hosts.here.bindings.layers.{layer}.ids.leef", "one of module, tap", "unknown key"),
    "host key": ("classes: [Small]", "class: [Small]", "hosts.here.class", "one of classes", "unknown key 'class'"),
    "level type": ("embedding: {level: 0}", "embedding: {level: zero}", "boundaries.embedding.level", "int", "str"),
    "level range": ("embedding: {level: 0}", "embedding: {level: 3}", "boundaries.embedding.level", "0, 1 or 2", "3"),
    "key twice": (
        "  final_norm: {level: 0",
        "  embedding: {level: 1}\n  final_norm: {level: 0",
        "line 8",
        "once",
        "'embedding' is given twice",
    ),
    "no YAML": ("family: small", "family: [small", "line", "YAML", ""),
    "sharded and replicated": (
        "shard: {tp: h, cp: s}",
        "shard: {tp: h, cp: s}, replicated: [tp]",
        ".replicated",
        "each mesh axis in one",
        "tp",
    ),
    "sharded and partial": (
        "shard: {tp: h, cp: s}",
        "shard: {tp: h, cp: s}, partial: tp",
        ".partial",
        "each mesh axis in one",
        "under shard",
    ),
    "column order": ("order: {s: zigzag}", "order: {h: zigzag}", ".order.h", "row order on a row axis", "zigzag on column axis h"),
    "order of a whole axis": ("order: {s: zigzag}", "order: {b: zigzag}", ".order.b", "an axis that `shard` cuts", "b"),
    "order unknown": ("order: {s: zigzag}", "order: {s: striped}", ".order.s", "contiguous or zigzag", "striped"),
    "shard of nothing": ("shard: {tp: h, cp: s}", "shard: {tp: x, cp: s}", ".shard.tp", "an axis of the layout", "x"),
    "size of nothing": ("sizes: {h: 4}", "sizes: {x: 4}", ".sizes.x", "axis of the layout", "4"),
    "layout": ("layout: t k", "layout: h k", ".ids.layout", "with a row axis", "h k"),
    "leaf": ('leaf: "output[1]"', 'leaf: "outputs[1]"', ".ids.leaf", "output, output[1]", "outputs[1]"),
    "input as a whole": ('leaf: "output[1]"', "leaf: input", ".ids.leaf", "input[0]", "input"),
    "no layer in the selector": ('{module: "blocks.{layer}.q"', "{module: blocks.0.q", ".q.module", "with {layer}", "blocks.0.q"),
    "layer outside layers": ("module: embed", 'module: "embed.{layer}"', "embedding.module", "without {layer}", "embed.{layer}"),
    "placeholder": ('{module: "blocks.{layer}.q"', '{module: "blocks.{layer}.{head}"', ".q.module", "{layer}", "{head}"),
    "two ways": (
        "{not_observable: fused}",
        "{not_observable: fused, derived: host}",
        "final_norm",
        "exactly one of",
        "derived, not_observable",
    ),
    "no way": ("{not_observable: fused}", "{}", "final_norm", "exactly one of", "none"),
    "derived unknown": ("{not_observable: fused}", "{derived: magic}", "final_norm.derived", "host or logprobs", "magic"),
    "no binding": ("      final_norm: {not_observable: fused}\n", "", "hosts.here.bindings.final_norm", "a binding, or", "none"),
    "binding of nothing": (
        "      final_norm: {not",
        "      other: {derived: host}\n      final_norm: {not",
        "bindings.other",
        "a boundary of",
        "other",
    ),
    "from unknown": (
        'from: ["layers.{layer}.q"]',
        'from: ["layers.{layer}.k"]',
        "layers.{layer}.ids.from",
        "boundaries of this map",
        "unknown boundary",
    ),
    "from itself": ('from: ["layers.{layer}.q"]', 'from: ["layers.{layer}.ids"]', "layers.{layer}.ids.from", "causal order", "itself"),
    "from later": ("embedding: {level: 0}", "embedding: {level: 0, from: [final_norm]}", "embedding.from", "causal order", "comes later"),
    "layer outside": ("{last}", "{layer}", "final_norm.from", "{last} after them", "layers.{layer}.residual"),
    "scores unknown": ('scores: "layers.{layer}.q"', "scores: final_norm", ".ids.scores", "a boundary that comes before", "final_norm"),
    "kind unknown": ("kind: wide", "kind: tall", "hosts.here.kinds", "kind 'tall'", "wide, narrow"),
    "kind without layer": (
        'narrow: "blocks.{layer}.narrow"',
        "narrow: blocks.narrow",
        "kinds.shape.narrow",
        "with {layer}",
        "blocks.narrow",
    ),
    "layers missing": ("    layers: blocks.{layer}\n", "", "hosts.here.layers", "with {layer}", "none"),
    "ids unknown": (
        'canonical_order: "layers.{layer}.ids"',
        "canonical_order: ids",
        ".ids.canonical_order",
        "boundaries of this map",
        "ids",
    ),
    "shares": ("shares: [2, 1]", "shares: [2]", "weights.blocks.{layer}.q.weight.shares", "2 positive numbers", "[2]"),
    "weight layer": ('"layers.{layer}.k.weight"', "k.weight", "weights.blocks.{layer}.q.weight.names", "{layer}", "k.weight"),
    "not causal start": ("family: small", "family: small\nbefore_layers: final_norm", "before_layers", "before the layers", "final_norm"),
    "between layers": (
        "  layers.{layer}.ids: {from",
        "  mid: {level: 0}\n  layers.{layer}.ids: {from",
        "boundaries.mid",
        "before or after all",
        "among",
    ),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A valid map file."""
    path = tmp_path / "small.yaml"
    path.write_text(GOOD)
    return path


def test_the_untouched_map_is_valid(small: Path) -> None:
    """The map that all refusals start from loads."""
    assert load_boundary_map(str(small)).family == "small"


@pytest.mark.parametrize("name", REFUSALS)
def test_s70_refused(small: Path, name: str) -> None:
    """A wrong map is refused, naming file, key, expected and found."""
    old, new, key, expected, found = REFUSALS[name]
    assert GOOD.count(old) == 1
    small.write_text(GOOD.replace(old, new))
    with pytest.raises(MapError) as caught:
        load_boundary_map(str(small))
    error = caught.value
    assert error.code is Code.MAP_INVALID
    assert str(small) in error.where
    assert key in error.where
    assert expected in error.expected
    assert found in error.found
    assert error.remedy


def test_split_must_hold_its_own_boundary(small: Path) -> None:
    """A split leaf lists the boundary that is bound to it, and one share for each."""
    for extra, key in ((', split: ["layers.{layer}.residual"]', ".split"), (", shares: [1]", ".shares")):
        small.write_text(GOOD.replace("layout: b s (h d)", f"layout: b s (h d){extra}"))
        with pytest.raises(MapError) as caught:
            load_boundary_map(str(small))
        assert f"layers.{{layer}}.q{key}" in caught.value.where
