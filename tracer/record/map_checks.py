"""Refusals of a boundary map before anything runs: one entry by itself, then the map as a whole.

Every refusal is a ``MapError`` map-invalid that names file, key, expected and found.
"""

from __future__ import annotations

import re
from pathlib import Path

from tracer.errors import Code, MapError
from tracer.record.map_entries import ROW_AXES, Binding, BoundaryMap, Part, WeightEntry, layout_axes

__all__ = ["check_binding", "check_map", "check_weight", "invalid"]

_LAYER_NAME = "{layer}"
_LEAF = re.compile(r"(?:output(?:\[\d+\]|\.\w+)*|input(?:\[\d+\]|\.\w+)+|kwargs\.\w+(?:\[\d+\]|\.\w+)*)\Z")
_TAP_LEAF = re.compile(r"\w+\Z")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_ORDERS = ("contiguous", "zigzag")


def invalid(path: Path, key: str, expected: str, found: str) -> MapError:
    return MapError(
        Code.MAP_INVALID,
        f"boundary map {path.name} is not valid at `{key}`",
        where=f"{path}: {key}",
        expected=expected,
        found=found,
        remedy="correct that key; docs/reference/boundary-maps.md lists every key",
    )


def check_binding(binding: Binding, boundary: str, path: Path, key: str) -> None:
    """Everything about one binding that needs no other entry."""
    ways = {
        "module": binding.module is not None,
        "parts": bool(binding.parts),
        "derived": bool(binding.derived),
        "not_observable": bool(binding.not_observable),
    }
    if sum(ways.values()) != 1:
        raise invalid(path, key, f"exactly one of {', '.join(ways)}", ", ".join(w for w, given in ways.items() if given) or "none")
    if binding.derived not in ("", "host", "logprobs"):
        raise invalid(path, f"{key}.derived", "host or logprobs", binding.derived)
    if binding.module is None and not binding.parts:
        return
    for n, part in enumerate(binding.parts or (Part(module=binding.module or "", leaf=binding.leaf),)):
        at = f"{key}.parts[{n}]" if binding.parts else key
        if any((_LAYER_NAME in boundary) != (_LAYER_NAME in module) for module in part.module.split("|")):
            wanted = "a module path with {layer}" if _LAYER_NAME in boundary else "a module path without {layer}"
            raise invalid(path, f"{at}.module", f"{wanted}, as in the boundary's name", part.module or "the root")
        _check_placeholders(part.module, ("layer",), path, f"{at}.module")
        pattern = _TAP_LEAF if binding.tap else _LEAF
        for leaf in part.leaf.split("|"):
            if not pattern.match(leaf):
                example = "a name such as q" if binding.tap else "output, output[1], output.logits, input[0] or kwargs.hidden_states"
                raise invalid(path, f"{at}.leaf", example, part.leaf)
        layout = part.layout or binding.layout
        if layout_axes(layout) is None:
            wanted = f"axes such as `b s (h d)`, each once, with a row axis ({', '.join(ROW_AXES)})"
            raise invalid(path, f"{at}.layout", wanted, layout or "none")
    if binding.add and not _LEAF.match(binding.add):
        raise invalid(path, f"{key}.add", "a leaf such as output[1]", binding.add)
    if binding.select and not re.match(r"\d*:\d*\Z", binding.select):
        raise invalid(path, f"{key}.select", "columns as start:stop", binding.select)
    if binding.chosen not in ("", "ids", "values"):
        raise invalid(path, f"{key}.chosen", "ids or values", binding.chosen)
    if binding.split and boundary not in binding.split:
        raise invalid(path, f"{key}.split", f"a list with {boundary} in it", ", ".join(binding.split))
    if binding.shares and (len(binding.shares) != len(binding.split) or min(binding.shares) < 1):
        raise invalid(path, f"{key}.shares", f"{len(binding.split)} positive numbers, one per split boundary", str(list(binding.shares)))
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
                raise invalid(path, f"{key}.{role}", "each mesh axis in one of shard, replicated, partial", found)
            roles[name] = role
    for name, axis in binding.shard.items():
        if axis not in axes:
            raise invalid(path, f"{key}.shard.{name}", f"an axis of the layout ({', '.join(sorted(axes))})", axis)
    for axis, order in binding.order.items():
        if axis not in ROW_AXES:
            wanted = f"row order on a row axis ({', '.join(ROW_AXES)})"
            raise invalid(path, f"{key}.order.{axis}", wanted, f"{order} on column axis {axis}")
        if axis not in binding.shard.values():
            raise invalid(path, f"{key}.order.{axis}", "an axis that `shard` cuts", axis)
        if order not in _ORDERS:
            raise invalid(path, f"{key}.order.{axis}", " or ".join(_ORDERS), order)
    for axis, size in binding.sizes.items():
        if axis not in axes or size < 1:
            raise invalid(path, f"{key}.sizes.{axis}", f"a positive size of an axis of the layout ({', '.join(sorted(axes))})", str(size))
    if binding.broadcast and (binding.broadcast not in ROW_AXES or binding.broadcast not in axes):
        raise invalid(path, f"{key}.broadcast", "a row axis of the layout", binding.broadcast)


def check_weight(entry: WeightEntry, parameter: str, path: Path, key: str) -> None:
    _check_placeholders(parameter, ("layer", "expert"), path, key)
    if not entry.names or not all(entry.names):
        raise invalid(path, f"{key}.names", "at least one semantic name", str(list(entry.names)))
    for name in entry.names:
        _check_placeholders(name, ("layer", "expert"), path, f"{key}.names")
        if (_LAYER_NAME in name) != (_LAYER_NAME in parameter):
            raise invalid(path, f"{key}.names", "{layer} in the names as in the parameter's path", name)
    if entry.shares and (len(entry.shares) != len(entry.names) or min(entry.shares) < 1):
        raise invalid(path, f"{key}.shares", f"{len(entry.names)} positive numbers, one per name", str(list(entry.shares)))


def check_map(merged: BoundaryMap) -> None:
    """Everything that needs the whole map: references, order, and a binding for every boundary in every host."""
    path = Path(merged.file)
    _check_order(merged, path)
    for host, section in merged.hosts.items():
        key = f"hosts.{host}"
        kinds = [kind for group in section.kinds.values() for kind in group]
        in_layers = [name for name in merged.boundaries if _LAYER_NAME in name]
        if in_layers and _LAYER_NAME not in section.layers:
            raise invalid(path, f"{key}.layers", "the module path of a layer, with {layer}", section.layers or "none")
        for name in section.bindings:
            if name not in merged.boundaries:
                raise invalid(path, f"{key}.bindings.{name}", "a boundary of this map", name)
        for name, entry in merged.boundaries.items():
            if name not in section.bindings:
                raise invalid(path, f"{key}.bindings.{name}", "a binding, or `not_observable` with the reason", "none")
            if entry.kind and entry.kind not in kinds:
                raise invalid(path, f"{key}.kinds", f"a module path for kind {entry.kind!r} (boundary {name})", ", ".join(kinds) or "none")
            binding = section.bindings[name]
            for field, others in (("split", binding.split), ("canonical_order", (binding.canonical_order,))):
                for other in others:
                    if other and other not in merged.boundaries:
                        raise invalid(path, f"{key}.bindings.{name}.{field}", "boundaries of this map", other)
            if binding.derived == "logprobs" and "lm_head" not in section.bindings:
                raise invalid(path, f"{key}.bindings.{name}.derived", "a boundary lm_head to derive from", "none")
        for group, members in section.kinds.items():
            for kind, selector in members.items():
                if _LAYER_NAME not in selector:
                    raise invalid(path, f"{key}.kinds.{group}.{kind}", "a module path with {layer}", selector)


def _check_order(merged: BoundaryMap, path: Path) -> None:
    """Names are sound, layer boundaries stand together, and ``from`` only looks back."""
    names = list(merged.boundaries)
    layer_places = [n for n, name in enumerate(names) if _LAYER_NAME in name]
    for n, name in enumerate(names):
        entry, key = merged.boundaries[name], f"boundaries.{name}"
        _check_placeholders(name, ("layer",), path, key)
        if layer_places and layer_places[0] < n < layer_places[-1] and _LAYER_NAME not in name:
            raise invalid(path, key, "a place before or after all layer boundaries", f"among them, after {names[n - 1]}")
        if entry.level not in (0, 1, 2):
            raise invalid(path, f"{key}.level", "0, 1 or 2", str(entry.level))
        if entry.kind and _LAYER_NAME not in name:
            raise invalid(path, f"{key}.kind", "kinds only on layer boundaries", entry.kind)
        if entry.scores and entry.scores not in names[:n]:
            raise invalid(path, f"{key}.scores", "a boundary that comes before", entry.scores)
        for other in entry.inputs:
            _check_input(merged, names, n, other, path)
    looks_back = any("{previous}" in other for entry in merged.boundaries.values() for other in entry.inputs)
    if looks_back and merged.before_layers not in names[: layer_places[0]]:
        raise invalid(path, "before_layers", "a boundary before the layers", merged.before_layers)


def _check_input(merged: BoundaryMap, names: list[str], place: int, other: str, path: Path) -> None:
    name, key = names[place], f"boundaries.{names[place]}.from"
    _check_placeholders(other, ("layer", "previous", "last"), path, key)
    known = other.replace("{previous}", _LAYER_NAME).replace("{last}", _LAYER_NAME)
    if known not in merged.boundaries:
        raise invalid(path, key, "boundaries of this map", f"unknown boundary {other}")
    in_layer = _LAYER_NAME in name
    if ("{last}" in other and in_layer) or ("{previous}" in other or _LAYER_NAME in other) > in_layer:
        raise invalid(path, key, "{layer} and {previous} inside layers, {last} after them", other)
    if "{previous}" not in other and names.index(known) >= place:
        found = "itself" if known == name else f"{other}, which comes later"
        raise invalid(path, key, "causal order: only boundaries that come before", found)


def _check_placeholders(text: str, known: tuple[str, ...], path: Path, key: str) -> None:
    for found in _PLACEHOLDER.findall(text):
        if found not in known:
            raise invalid(path, key, f"placeholders {', '.join('{' + k + '}' for k in known)}", "{" + found + "}")
