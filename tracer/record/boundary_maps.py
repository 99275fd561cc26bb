"""Boundary maps: YAML files read into validated structs.

A map names the boundaries of a model family in causal order and says, per host, where each is taken from.
Files live in ``boundary_maps/`` (one per family) or anywhere, by path. ``docs/reference/boundary-maps.md`` is the
user's page for every key; this module is where the keys are defined.

How files combine: ``extends`` names one or several bases; the files are merged base first, each file once.
Boundaries merge key by key inside an entry, a new one says ``after:`` which boundary it comes, ``drop`` removes.
Bindings, weight rules and kind groups replace whole. ``family``, ``about``, ``model_types`` and ``classes`` are
never inherited. Every boundary of the merged map has a binding in every host section, if only ``not_observable``.

Every refusal is a ``MapError`` (map-unknown, map-invalid) that names file, key, expected and found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import xxhash
import yaml

from tracer.errors import Code, MapError
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
    "load_boundary_map",
    "map_for_root_class",
    "map_names",
]

_T = TypeVar("_T", bound=msgspec.Struct)

ROW_AXES = ("b", "s", "t", "e")
"""Axes of a layout that count rows: batch, sequence, flattened tokens, (token, expert) rows. All others are columns."""

_LAYER_NAME = "{layer}"
_LEAF = re.compile(r"(?:(?:output|input)(?:\[\d+\]|\.\w+)*|kwargs\.\w+(?:\[\d+\]|\.\w+)*)\Z")
_TAP_LEAF = re.compile(r"\w+\Z")
_LAYOUT_PART = re.compile(r"\([a-z]\w*(?: [a-z]\w*)*\)|[a-z]\w*|1")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_ORDERS = ("contiguous", "zigzag")


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
    kinds: dict[str, dict[str, str]] = {}
    """Group -> kind -> module path that only layers of that kind have. A layer is of exactly one kind of each group."""
    elsewhere: tuple[str, ...] = ()
    """Classes that stand in for modules of other pipeline stages."""
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


class _Document(_Strict, frozen=True, kw_only=True):
    """The keys of one YAML file."""

    family: str
    about: str = ""
    extends: str | tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    before_layers: str = ""
    drop: tuple[str, ...] = ()
    boundaries: dict[str, Any] = {}
    hosts: dict[str, Any] = {}


# ------------------------------------------------------------------------------------------------ finding files


def _map_folder() -> Path:
    """Folder of the maps that come with the package: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "boundary_maps"
    return inside if inside.is_dir() else package.parent / "boundary_maps"


def map_names() -> tuple[str, ...]:
    """Names of the maps that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _map_folder().glob("*.yaml")))


def _find(name_or_path: str, beside: Path | None = None) -> Path:
    """File of a map: a path as it is, a bare name beside the map that names it, else among the package's own."""
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path or "\\" in name_or_path:
        path = Path(name_or_path)
        if beside is not None and not path.is_absolute():
            path = beside / path
        if path.is_file():
            return path
    else:
        for folder in (beside, _map_folder()):
            if folder is not None and (folder / f"{name_or_path}.yaml").is_file():
                return folder / f"{name_or_path}.yaml"
    raise MapError(
        Code.MAP_UNKNOWN,
        f"no boundary map {name_or_path!r}",
        where=str(beside) if beside else "",
        expected=f"a path to a YAML file, or one of {', '.join(map_names())}",
        found=name_or_path,
        remedy="see `tracer map list`",
    )


def load_boundary_map(name_or_path: str) -> BoundaryMap:
    """The map of that name, or in that file, with its bases merged in and everything validated.

    Raises MapError: map-unknown (no such file), map-invalid (anything wrong in it).
    """
    path = _find(str(name_or_path))
    chain = _chain(path, ())
    merged = _merge(chain)
    _check(merged)
    return merged


def map_for_root_class(root_class: str, host: str) -> BoundaryMap:
    """The packaged map that claims ``root_class`` for ``host``. Raises MapError map-unknown with the known classes."""
    known: dict[str, str] = {}
    for name in map_names():
        document = _read(_find(name))
        section = document.hosts.get(host)
        classes = section.get("classes") if isinstance(section, dict) else None
        for known_class in classes or ():
            if known_class in known:
                found = f"{known_class}, also in {known[known_class]}.yaml"
                raise _invalid(_find(name), f"hosts.{host}.classes", "a class that no other map claims", found)
            known[known_class] = name
    if root_class in known:
        return load_boundary_map(known[root_class])
    raise MapError(
        Code.MAP_UNKNOWN,
        f"no boundary map is known for {root_class} on host {host}",
        expected=", ".join(sorted(known)) or f"a map with classes for host {host}",
        found=root_class,
        remedy="pass map= with a name or a YAML file; docs/how-to/write-a-map.md shows how to write one",
    )


# ------------------------------------------------------------------------------------------------ reading files


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe loader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


def _read(path: Path) -> _Document:
    """One file, its top level checked."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise _invalid(
            path,
            f"line {mark.line + 1}" if mark else "the file",
            "YAML in which every key is given once",
            getattr(error, "problem", None) or str(error),
        ) from None
    return _convert(raw, _Document, path, "")


def _convert(raw: Any, struct: type[_T], path: Path, key: str) -> _T:
    """``raw`` as ``struct``, or map-invalid with the exact key."""
    if not isinstance(raw, dict):
        raise _invalid(path, key or "the file", "a mapping of keys", _show(raw))
    known = [field.encode_name for field in msgspec.structs.fields(struct) if field.encode_name != "file"]
    for name in raw:
        if name not in known:
            raise _invalid(path, _join(key, name), f"one of {', '.join(known)}", f"unknown key {name!r}")
    try:
        return msgspec.convert(raw, struct)
    except msgspec.ValidationError as error:
        said = re.match(r"(?:Expected (?P<expected>.*?), got (?P<found>.*?)|(?P<text>.*?))(?: - at `\$\.?(?P<at>.*)`)?\Z", str(error))
        assert said is not None
        at = _join(key, said["at"] or "") or "the file"
        raise _invalid(path, at, said["expected"] or "a valid value", said["found"] or said["text"] or "") from None


def _chain(path: Path, below: tuple[Path, ...]) -> list[tuple[Path, _Document]]:
    """The file and its bases, base first, each once."""
    if path.resolve() in below:
        raise _invalid(path, "extends", "bases that do not come back to the map itself", " -> ".join(p.stem for p in (*below, path)))
    document = _read(path)
    bases = (document.extends,) if isinstance(document.extends, str) else document.extends
    chain: list[tuple[Path, _Document]] = []
    for base in bases:
        for entry in _chain(_find(base, path.parent), (*below, path.resolve())):
            if entry[0].resolve() not in {known.resolve() for known, _ in chain}:
                chain.append(entry)
    return [*chain, (path, document)]


# ------------------------------------------------------------------------------------------------ merging


def _merge(chain: list[tuple[Path, _Document]]) -> BoundaryMap:
    """Bases and map into one. The last file's own identity is kept."""
    path, top = chain[-1]
    order: list[str] = []
    boundaries: dict[str, dict[str, Any]] = {}
    hosts: dict[str, HostBindings] = {}
    before_layers = "embedding"
    for file, document in chain:
        before_layers = document.before_layers or before_layers
        _merge_boundaries(file, document, order, boundaries)
        for host, raw in document.hosts.items():
            hosts[host] = _merge_host(hosts.get(host, HostBindings()), _host(raw, file, f"hosts.{host}"))
        for name in document.drop:
            if name not in boundaries:
                raise _invalid(file, "drop", "boundaries of the base", name)
            order.remove(name)
            del boundaries[name]
            hosts = {
                host: msgspec.structs.replace(section, bindings={k: v for k, v in section.bindings.items() if k != name})
                for host, section in hosts.items()
            }
    return BoundaryMap(
        family=top.family,
        file=str(path),
        about=top.about,
        model_types=top.model_types,
        before_layers=before_layers,
        boundaries={name: _convert(boundaries[name], BoundaryEntry, path, f"boundaries.{name}") for name in order},
        hosts=hosts,
    )


def _merge_boundaries(file: Path, document: _Document, order: list[str], boundaries: dict[str, dict[str, Any]]) -> None:
    """One file's boundaries into the order and entries so far (both changed)."""
    starts_order = not order
    for name, raw in document.boundaries.items():
        key = f"boundaries.{name}"
        entry = _convert({} if raw is None else raw, BoundaryEntry, file, key)
        if name not in boundaries or entry.after:
            if name in boundaries:
                order.remove(name)
            if entry.after and entry.after not in order:
                raise _invalid(file, f"{key}.after", "a boundary that comes before in the map or its base", entry.after)
            if not entry.after and not starts_order:
                raise _invalid(file, key, "`after:` for a boundary that the base does not have", "none")
            order.insert(order.index(entry.after) + 1 if entry.after else len(order), name)
        boundaries[name] = {**boundaries.get(name, {}), **{k: v for k, v in (raw or {}).items() if k != "after"}}


def _host(raw: Any, path: Path, key: str) -> HostBindings:
    """One file's section of one host, checked entry by entry so that errors name the exact key."""
    if not isinstance(raw, dict):
        raise _invalid(path, key, "a mapping of keys", _show(raw))
    flat = {k: v for k, v in raw.items() if k not in ("bindings", "weights")}
    section: HostBindings = _convert(flat, HostBindings, path, key)
    bindings: dict[str, Binding] = {}
    weights: dict[str, WeightEntry] = {}
    for name, value in _items(raw.get("bindings"), path, f"{key}.bindings"):
        bindings[name] = _convert(value, Binding, path, f"{key}.bindings.{name}")
        _check_binding(bindings[name], name, path, f"{key}.bindings.{name}")
    for name, value in _items(raw.get("weights"), path, f"{key}.weights"):
        value = {"names": [value]} if isinstance(value, str) else {"names": value} if isinstance(value, list) else value
        weights[name] = _convert(value, WeightEntry, path, f"{key}.weights.{name}")
        _check_weight(weights[name], name, path, f"{key}.weights.{name}")
    return msgspec.structs.replace(section, bindings=bindings, weights=weights)


def _merge_host(base: HostBindings, own: HostBindings) -> HostBindings:
    return HostBindings(
        classes=own.classes,
        layers=own.layers or base.layers,
        kinds={**base.kinds, **own.kinds},
        elsewhere=own.elsewhere or base.elsewhere,
        bindings={**base.bindings, **own.bindings},
        weights={**base.weights, **own.weights},
    )


# ------------------------------------------------------------------------------------------------ checking


def layout_axes(layout: str) -> tuple[tuple[str, ...], ...] | None:
    """Axes of every dimension of a layout, outer first: ``b s (h d)`` gives (b), (s), (h, d); ``1`` is an empty
    dimension. None where the text is no layout."""
    dimensions = tuple(
        () if part == "1" else tuple(part.strip("()").split(" ")) for part in _LAYOUT_PART.findall(layout)
    )
    if " ".join(_LAYOUT_PART.findall(layout)) != layout or not layout:
        return None
    axes = [axis for dimension in dimensions for axis in dimension]
    return dimensions if len(axes) == len(set(axes)) and any(axis in ROW_AXES for axis in axes) else None


def _check_binding(binding: Binding, boundary: str, path: Path, key: str) -> None:
    """Everything about one binding that needs no other entry."""
    ways = {
        "module": binding.module is not None,
        "parts": bool(binding.parts),
        "derived": bool(binding.derived),
        "not_observable": bool(binding.not_observable),
    }
    if sum(ways.values()) != 1:
        raise _invalid(path, key, f"exactly one of {', '.join(ways)}", ", ".join(w for w, given in ways.items() if given) or "none")
    if binding.derived not in ("", "host", "logprobs"):
        raise _invalid(path, f"{key}.derived", "host or logprobs", binding.derived)
    if binding.module is None and not binding.parts:
        return
    for n, part in enumerate(binding.parts or (Part(module=binding.module or "", leaf=binding.leaf),)):
        at = f"{key}.parts[{n}]" if binding.parts else key
        if any((_LAYER_NAME in boundary) != (_LAYER_NAME in module) for module in part.module.split("|")):
            wanted = "a module path with {layer}" if _LAYER_NAME in boundary else "a module path without {layer}"
            raise _invalid(path, f"{at}.module", f"{wanted}, as in the boundary's name", part.module or "the root")
        _check_placeholders(part.module, ("layer",), path, f"{at}.module")
        pattern = _TAP_LEAF if binding.tap else _LEAF
        for leaf in part.leaf.split("|"):
            if not pattern.match(leaf):
                example = "a name such as q" if binding.tap else "output, output[1], output.logits, input[0] or kwargs.hidden_states"
                raise _invalid(path, f"{at}.leaf", example, part.leaf)
        layout = part.layout or binding.layout
        if layout_axes(layout) is None:
            wanted = f"axes such as `b s (h d)`, each once, with a row axis ({', '.join(ROW_AXES)})"
            raise _invalid(path, f"{at}.layout", wanted, layout or "none")
    if binding.add and not _LEAF.match(binding.add):
        raise _invalid(path, f"{key}.add", "a leaf such as output[1]", binding.add)
    if binding.select and not re.match(r"\d*:\d*\Z", binding.select):
        raise _invalid(path, f"{key}.select", "columns as start:stop", binding.select)
    if binding.split and boundary not in binding.split:
        raise _invalid(path, f"{key}.split", f"a list with {boundary} in it", ", ".join(binding.split))
    if binding.shares and (len(binding.shares) != len(binding.split) or min(binding.shares) < 1):
        raise _invalid(path, f"{key}.shares", f"{len(binding.split)} positive numbers, one per split boundary", str(list(binding.shares)))
    _check_mesh(binding, path, key)


def _check_mesh(binding: Binding, path: Path, key: str) -> None:
    """Mesh axes: each in one role, cutting axes that the layout has, row order only on rows."""
    layouts = [part.layout for part in binding.parts if part.layout] or [binding.layout]
    axes = {axis for layout in layouts for dimension in layout_axes(layout) or () for axis in dimension}
    roles: dict[str, str] = {}
    partial = [binding.partial] if binding.partial else []
    for role, names in (("shard", list(binding.shard)), ("replicated", list(binding.replicated)), ("partial", partial)):
        for name in names:
            if name in roles:
                found = f"{name} is also under {roles[name]}"
                raise _invalid(path, f"{key}.{role}", "each mesh axis in one of shard, replicated, partial", found)
            roles[name] = role
    for name, axis in binding.shard.items():
        if axis not in axes:
            raise _invalid(path, f"{key}.shard.{name}", f"an axis of the layout ({', '.join(sorted(axes))})", axis)
    for axis, order in binding.order.items():
        if axis not in ROW_AXES:
            wanted = f"row order on a row axis ({', '.join(ROW_AXES)})"
            raise _invalid(path, f"{key}.order.{axis}", wanted, f"{order} on column axis {axis}")
        if axis not in binding.shard.values():
            raise _invalid(path, f"{key}.order.{axis}", "an axis that `shard` cuts", axis)
        if order not in _ORDERS:
            raise _invalid(path, f"{key}.order.{axis}", " or ".join(_ORDERS), order)
    for axis, size in binding.sizes.items():
        if axis not in axes or size < 1:
            raise _invalid(path, f"{key}.sizes.{axis}", f"a positive size of an axis of the layout ({', '.join(sorted(axes))})", str(size))
    if binding.broadcast and (binding.broadcast not in ROW_AXES or binding.broadcast not in axes):
        raise _invalid(path, f"{key}.broadcast", "a row axis of the layout", binding.broadcast)


def _check_weight(entry: WeightEntry, parameter: str, path: Path, key: str) -> None:
    _check_placeholders(parameter, ("layer", "expert"), path, key)
    if not entry.names or not all(entry.names):
        raise _invalid(path, f"{key}.names", "at least one semantic name", str(list(entry.names)))
    for name in entry.names:
        _check_placeholders(name, ("layer", "expert"), path, f"{key}.names")
        if (_LAYER_NAME in name) != (_LAYER_NAME in parameter):
            raise _invalid(path, f"{key}.names", "{layer} in the names as in the parameter's path", name)
    if entry.shares and (len(entry.shares) != len(entry.names) or min(entry.shares) < 1):
        raise _invalid(path, f"{key}.shares", f"{len(entry.names)} positive numbers, one per name", str(list(entry.shares)))


def _check(merged: BoundaryMap) -> None:
    """Everything that needs the whole map: references, order, and a binding for every boundary in every host."""
    path = Path(merged.file)
    _check_order(merged, path)
    for host, section in merged.hosts.items():
        key = f"hosts.{host}"
        kinds = [kind for group in section.kinds.values() for kind in group]
        in_layers = [name for name in merged.boundaries if _LAYER_NAME in name]
        if in_layers and _LAYER_NAME not in section.layers:
            raise _invalid(path, f"{key}.layers", "the module path of a layer, with {layer}", section.layers or "none")
        for name in section.bindings:
            if name not in merged.boundaries:
                raise _invalid(path, f"{key}.bindings.{name}", "a boundary of this map", name)
        for name, entry in merged.boundaries.items():
            if name not in section.bindings:
                raise _invalid(path, f"{key}.bindings.{name}", "a binding, or `not_observable` with the reason", "none")
            if entry.kind and entry.kind not in kinds:
                raise _invalid(path, f"{key}.kinds", f"a module path for kind {entry.kind!r} (boundary {name})", ", ".join(kinds) or "none")
            binding = section.bindings[name]
            for field, others in (("split", binding.split), ("canonical_order", (binding.canonical_order,))):
                for other in others:
                    if other and other not in merged.boundaries:
                        raise _invalid(path, f"{key}.bindings.{name}.{field}", "boundaries of this map", other)
            if binding.derived == "logprobs" and "lm_head" not in section.bindings:
                raise _invalid(path, f"{key}.bindings.{name}.derived", "a boundary lm_head to derive from", "none")
        for group, members in section.kinds.items():
            for kind, selector in members.items():
                if _LAYER_NAME not in selector:
                    raise _invalid(path, f"{key}.kinds.{group}.{kind}", "a module path with {layer}", selector)


def _check_order(merged: BoundaryMap, path: Path) -> None:
    """Names are sound, layer boundaries stand together, and ``from`` only looks back."""
    names = list(merged.boundaries)
    layer_places = [n for n, name in enumerate(names) if _LAYER_NAME in name]
    for n, name in enumerate(names):
        entry, key = merged.boundaries[name], f"boundaries.{name}"
        _check_placeholders(name, ("layer",), path, key)
        if layer_places and layer_places[0] < n < layer_places[-1] and _LAYER_NAME not in name:
            raise _invalid(path, key, "a place before or after all layer boundaries", f"among them, after {names[n - 1]}")
        if entry.level not in (0, 1, 2):
            raise _invalid(path, f"{key}.level", "0, 1 or 2", str(entry.level))
        if entry.kind and _LAYER_NAME not in name:
            raise _invalid(path, f"{key}.kind", "kinds only on layer boundaries", entry.kind)
        if entry.scores and entry.scores not in names[:n]:
            raise _invalid(path, f"{key}.scores", "a boundary that comes before", entry.scores)
        for other in entry.inputs:
            _check_input(merged, names, n, other, path)
    looks_back = any("{previous}" in other for entry in merged.boundaries.values() for other in entry.inputs)
    if looks_back and merged.before_layers not in names[: layer_places[0]]:
        raise _invalid(path, "before_layers", "a boundary before the layers", merged.before_layers)


def _check_input(merged: BoundaryMap, names: list[str], place: int, other: str, path: Path) -> None:
    name, key = names[place], f"boundaries.{names[place]}.from"
    _check_placeholders(other, ("layer", "previous", "last"), path, key)
    known = other.replace("{previous}", _LAYER_NAME).replace("{last}", _LAYER_NAME)
    if known not in merged.boundaries:
        raise _invalid(path, key, "boundaries of this map", f"unknown boundary {other}")
    in_layer = _LAYER_NAME in name
    if ("{last}" in other and in_layer) or ("{previous}" in other or _LAYER_NAME in other) > in_layer:
        raise _invalid(path, key, "{layer} and {previous} inside layers, {last} after them", other)
    if "{previous}" not in other and names.index(known) >= place:
        found = "itself" if known == name else f"{other}, which comes later"
        raise _invalid(path, key, "causal order: only boundaries that come before", found)


def _check_placeholders(text: str, known: tuple[str, ...], path: Path, key: str) -> None:
    for found in _PLACEHOLDER.findall(text):
        if found not in known:
            raise _invalid(path, key, f"placeholders {', '.join('{' + k + '}' for k in known)}", "{" + found + "}")


def _items(raw: Any, path: Path, key: str) -> Iterator[tuple[str, Any]]:
    if raw is None:
        return
    if not isinstance(raw, Mapping):
        raise _invalid(path, key, "a mapping of keys", _show(raw))
    yield from raw.items()


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key and name else str(name or key)


def _show(raw: Any) -> str:
    return "nothing" if raw is None else f"{type(raw).__name__} {str(raw)[:60]}"


def _invalid(path: Path, key: str, expected: str, found: str) -> MapError:
    return MapError(
        Code.MAP_INVALID,
        f"boundary map {path.name} is not valid at `{key}`",
        where=f"{path}: {key}",
        expected=expected,
        found=found,
        remedy="correct that key; docs/reference/boundary-maps.md lists every key",
    )
