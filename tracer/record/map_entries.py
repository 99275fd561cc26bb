"""What a boundary map is made of: the structs behind every key of a map file, and the grammar of layouts.

``docs/reference/boundary-maps.md`` is the user's page. Files are read in ``boundary_maps``, checked in ``map_checks``.
"""

from __future__ import annotations

import re
from functools import cache

import msgspec
import xxhash

from tracer.format.schema import RowScope

__all__ = [
    "ROW_AXES",
    "Binding",
    "BoundaryEntry",
    "BoundaryMap",
    "HostBindings",
    "Part",
    "WeightEntry",
    "layout_axes",
]

ROW_AXES = ("b", "s", "t", "e")
"""Axes of a layout that count rows: batch, sequence, flattened tokens, (token, expert) rows. All others are columns."""

_LAYOUT_PART = re.compile(r"\([a-z]\w*(?: [a-z]\w*)*\)|[a-z]\w*|1")


@cache
def layout_axes(layout: str) -> tuple[tuple[str, ...], ...] | None:
    """Axes of every dimension of a layout, outer first: ``b s (h d)`` gives (b), (s), (h, d); ``1`` is an empty
    dimension. None where the text is no layout."""
    dimensions = tuple(() if part == "1" else tuple(part.strip("()").split(" ")) for part in _LAYOUT_PART.findall(layout))
    if " ".join(_LAYOUT_PART.findall(layout)) != layout or not layout:
        return None
    axes = [axis for dimension in dimensions for axis in dimension]
    return dimensions if len(axes) == len(set(axes)) and any(axis in ROW_AXES for axis in axes) else None


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct of a map."""


class BoundaryEntry(_Strict, frozen=True, kw_only=True):
    """One boundary of a family, whatever the host. Names are templates: ``layers.{layer}.attn.q``."""

    about: str = ""
    level: int = 2
    """0 coarse, 1 the default, 2 everything."""
    inputs: tuple[str, ...] = msgspec.field(default=(), name="from")
    """What it is computed from. ``layers.{previous}.residual`` is the layer before (``before_layers`` for the first),
    ``layers.{last}.residual`` the last layer. Names of boundaries that a layer's kind lacks fall away."""
    mixes_tokens: bool = False
    discrete: bool = False
    scores: str = ""
    """For a choice: the boundary whose values it was chosen by."""
    rows: RowScope = RowScope.ALL
    kind: str = ""
    """Part of a layer only if the layer is of this kind; see ``HostBindings.kinds``."""
    weights: tuple[str, ...] = ()
    """Semantic names (globs allowed) of the parameters and buffers it is computed with."""
    after: str = ""
    """Place in the order, for a boundary that a map adds to its base."""


class Part(_Strict, frozen=True, kw_only=True):
    """One leaf that holds a column slice of a boundary."""

    module: str
    leaf: str = "output"
    layout: str = ""
    """Empty: the binding's."""


class Binding(_Strict, frozen=True, kw_only=True):
    """Where one host shows one boundary: exactly one of ``module``, ``parts``, ``derived``, ``not_observable``."""

    module: str | None = None
    """Path as the host names it, with ``{layer}`` for a layer boundary; ``a|b`` is the first that the model has; empty
    text is the root."""
    tap: str = ""
    """Function tap of the host instead of a module hook (``attention``); ``leaf`` is then the tap's own name."""
    leaf: str = "output"
    layout: str = ""
    parts: tuple[Part, ...] = ()
    """The boundary is these leaves side by side, in order."""
    split: tuple[str, ...] = ()
    """The leaf is these boundaries side by side, in order; this boundary is one of them."""
    shares: tuple[int, ...] = ()
    """Proportions of the ``split`` boundaries' columns; empty: the host knows the sizes."""
    add: str = ""
    """Another leaf of the module to add (deferred residual)."""
    canonical_order: str = ""
    """Ids boundary of the same module whose ascending order reorders these columns."""
    select: str = ""
    """Columns of the leaf, ``start:stop``."""
    chosen: str = ""
    """The leaf has a column per choice, 0 where not chosen: ``ids`` of the chosen columns, ascending, or their ``values``."""
    sizes: dict[str, int] = {}
    """Sizes of layout axes, where the leaf's shape does not give them or must be checked."""
    shard: dict[str, str] = {}
    """Mesh axis -> layout axis it cuts."""
    order: dict[str, str] = {}
    """Row axis cut by ``shard`` -> ``contiguous`` or ``zigzag``."""
    replicated: tuple[str, ...] = ()
    """Mesh axes over which every process holds the same."""
    partial: str = ""
    """Mesh axis over which the values are partial sums."""
    broadcast: str = ""
    """Row axis that may have size 1 and then stands for every index."""
    rows: RowScope | None = None
    """Which rows this host computes, where it differs from the boundary's."""
    derived: str = ""
    """``host``: integer input that the host gives by name. ``logprobs``: computed from ``lm_head``."""
    after_root: bool = False
    """The module runs once the root module has returned, in as many calls as the host likes, each with rows of its own."""
    not_observable: str = ""
    """Why this host cannot show it."""


class WeightEntry(_Strict, frozen=True, kw_only=True):
    """What one parameter or buffer of a host holds; see ``tracer.record.boundaries.WeightRule``."""

    names: tuple[str, ...]
    transpose: bool = False
    shares: tuple[int, ...] = ()


class HostBindings(_Strict, frozen=True, kw_only=True):
    """One host's side of a map."""

    classes: tuple[str, ...] = ()
    """Classes of the loaded root module that ``map="auto"`` takes this map for."""
    layers: str = ""
    """Module path of a layer, with ``{layer}``."""
    moved: dict[str, str] = {}
    """Module path as the bases have it -> where it is here (a language model inside a larger one); "" puts everything below."""
    kinds: dict[str, dict[str, str]] = {}
    """Group -> kind -> module path that only layers of that kind have, ``!`` before it: that only they lack. A layer is of
    exactly one kind of each group."""
    elsewhere: tuple[str, ...] = ()
    """Classes that stand in for modules of other pipeline stages."""
    passthrough: dict[str, str] = {}
    """Classes that return what they are given, with what became of their work: a boundary bound to the output of one cannot be
    shown (a norm fused into the projection behind it)."""
    bindings: dict[str, Binding] = {}
    weights: dict[str, WeightEntry] = {}
    """Parameter path as the host names it (``{layer}``, ``{expert}``) -> what it is."""


class BoundaryMap(_Strict, frozen=True, kw_only=True):
    """A validated map with its bases merged in. ``boundaries`` is in causal order."""

    family: str
    file: str
    about: str = ""
    model_types: tuple[str, ...] = ()
    before_layers: str = "embedding"
    """Stands for ``layers.{previous}.*`` in the first layer."""
    boundaries: dict[str, BoundaryEntry]
    hosts: dict[str, HostBindings]

    def digest(self) -> str:
        """xxh3_128 of the map as JSON, 32 hex digits; the file's place does not enter."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, file="")))
