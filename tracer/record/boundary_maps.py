"""Boundary maps: YAML files read into validated structs.

A map names the boundaries of a model family in causal order and says, per host, where each is taken from.
Keys and their meaning are in ``map_entries``, refusals in ``map_checks``. Files live in ``boundary_maps/`` (one per
family) or anywhere, by path; ``docs/reference/boundary-maps.md`` is the user's page for every key.

How files combine: ``extends`` names one or several bases; the files are merged base first, each file once.
Boundaries merge key by key inside an entry, a new one says ``after:`` which boundary it comes, ``drop`` removes,
``drop_hosts`` removes the section of a host that a base serves and this family does not; a section
that only bases have falls away where it lacks a binding for a boundary that this family adds and another host has it.
Bindings, weight rules and kind groups replace whole. ``family``, ``about``, ``model_types`` and ``classes`` are
never inherited. Every boundary of the merged map has a binding in every host section, if only ``not_observable``.

Every refusal is a ``MapError`` (map-unknown, map-invalid) that names file, key, expected and found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import yaml

from tracer.errors import Code, MapError
from tracer.record.map_checks import check_binding, check_map, check_weight, invalid
from tracer.record.map_entries import Binding, BoundaryEntry, BoundaryMap, HostBindings, WeightEntry

__all__ = ["load_boundary_map", "map_for_root_class", "map_names", "require_served"]

_T = TypeVar("_T", bound=msgspec.Struct)


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of one YAML file."""

    family: str
    about: str = ""
    extends: str | tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    before_layers: str = ""
    drop: tuple[str, ...] = ()
    drop_hosts: tuple[str, ...] = ()
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
    check_map(merged)
    return merged


def map_for_root_class(root_class: str, host: str, ancestors: Sequence[str] = ()) -> BoundaryMap:
    """The packaged map that claims ``root_class`` for ``host``, else the nearest of its ``ancestors`` (nearest first).

    Raises MapError map-unknown with the known classes that are closest."""
    known = _known_classes(host)
    for name in (root_class, *ancestors):
        if name in known:
            return load_boundary_map(known[name])
    close = get_close_matches(root_class, known, n=3, cutoff=0.5) or sorted(known)[:3]
    raise MapError(
        Code.MAP_UNKNOWN,
        f"no boundary map is known for {root_class} on host {host}",
        expected=", ".join([*close, "..."]) if known else f"a map with classes for host {host}",
        found=root_class,
        remedy="`tracer map list` shows all; for another class pass map= with a YAML file (docs/how-to/write-a-map.md)",
    )


def require_served(boundary_map: BoundaryMap, host: str, root_class: str, ancestors: Sequence[str] = ()) -> None:
    """Refuse a map for a class that it was not written for, however much of it would resolve.

    A map serves the classes it lists for ``host``, and theirs that derive from them. A map of the user's own that lists none
    is taken at its word; a packaged one that lists none for any host is a base, to be extended.
    Raises MapError map-unfit, with the map that does fit where there is one."""
    section = boundary_map.hosts.get(host)
    serves = section.classes if section is not None else ()
    packaged = Path(boundary_map.file).parent == _map_folder()
    base = packaged and not any(other.classes for other in boundary_map.hosts.values())
    if section is None or not {root_class, *ancestors}.isdisjoint(serves) or not (serves or base):
        return
    known = _known_classes(host)
    fitting = next((known[name] for name in (root_class, *ancestors) if name in known), "")
    own = f"write a map with `extends: {boundary_map.family}` if the model is alike (docs/how-to/write-a-map.md)"
    raise MapError(
        Code.MAP_UNFIT,
        f"boundary map {boundary_map.family} does not serve {root_class}",
        where=f"{boundary_map.file}: hosts.{host}.classes",
        expected=", ".join(serves) if serves else "a map with classes: this one is a base, to be extended",
        found=root_class,
        remedy=f'map="{fitting}", which serves {root_class}, or map="auto"' if fitting else own,
    )


def _known_classes(host: str) -> dict[str, str]:
    """Class -> packaged map that claims it for ``host``. Raises MapError map-invalid where two maps claim one."""
    known: dict[str, str] = {}
    for name in map_names():
        document = _read(_find(name))
        section = document.hosts.get(host)
        classes = section.get("classes") if isinstance(section, dict) else None
        for known_class in classes or ():
            if known_class in known:
                found = f"{known_class}, also in {known[known_class]}.yaml"
                raise invalid(_find(name), f"hosts.{host}.classes", "a class that no other map claims", found)
            known[known_class] = name
    return known


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
        raise invalid(
            path,
            f"line {mark.line + 1}" if mark else "the file",
            "YAML in which every key is given once",
            getattr(error, "problem", None) or str(error),
        ) from None
    return _convert(raw, _Document, path, "")


@cache
def _keys(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """Keys of a struct as YAML writes them."""
    return tuple(field.encode_name for field in msgspec.structs.fields(struct))


def _convert(raw: Any, struct: type[_T], path: Path, key: str) -> _T:
    """``raw`` as ``struct``, or map-invalid with the exact key."""
    if not isinstance(raw, dict):
        raise invalid(path, key or "the file", "a mapping of keys", _show(raw))
    known = _keys(struct)
    for name in raw:
        if name not in known:
            raise invalid(path, _join(key, name), f"one of {', '.join(known)}", f"unknown key {name!r}")
    try:
        return msgspec.convert(raw, struct)
    except msgspec.ValidationError as error:
        said = re.match(r"(?:Expected (?P<expected>.*?), got (?P<found>.*?)|(?P<text>.*?))(?: - at `\$\.?(?P<at>.*)`)?\Z", str(error))
        assert said is not None
        at = _join(key, said["at"] or "") or "the file"
        raise invalid(path, at, said["expected"] or "a valid value", said["found"] or said["text"] or "") from None


def _chain(path: Path, below: tuple[Path, ...]) -> list[tuple[Path, _Document]]:
    """The file and its bases, base first, each once."""
    if path.resolve() in below:
        raise invalid(path, "extends", "bases that do not come back to the map itself", " -> ".join(p.stem for p in (*below, path)))
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
        for host in document.drop_hosts:
            if hosts.pop(host, None) is None:
                raise invalid(file, "drop_hosts", "hosts of the base", host)
        for host, raw in document.hosts.items():
            hosts[host] = _merge_host(hosts.get(host, HostBindings()), _host(raw, file, f"hosts.{host}"))
        for name in document.drop:
            if name not in boundaries:
                raise invalid(file, "drop", "boundaries of the base", name)
            order.remove(name)
            del boundaries[name]
            hosts = {
                host: msgspec.structs.replace(section, bindings={k: v for k, v in section.bindings.items() if k != name})
                for host, section in hosts.items()
            }
    served = {host for host, section in hosts.items() if host in top.hosts or boundaries.keys() <= section.bindings.keys()}
    hosts = {host: section if host in top.hosts else msgspec.structs.replace(section, classes=()) for host, section in hosts.items()}
    if served:  # a host that only the bases speak of, and not of every boundary here, is not served
        hosts = {host: section for host, section in hosts.items() if host in served}
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
                raise invalid(file, f"{key}.after", "a boundary that comes before in the map or its base", entry.after)
            if not entry.after and not starts_order:
                raise invalid(file, key, "`after:` for a boundary that the base does not have", "none")
            order.insert(order.index(entry.after) + 1 if entry.after else len(order), name)
        boundaries[name] = {**boundaries.get(name, {}), **{k: v for k, v in (raw or {}).items() if k != "after"}}


def _host(raw: Any, path: Path, key: str) -> HostBindings:
    """One file's section of one host, checked entry by entry so that errors name the exact key."""
    if not isinstance(raw, dict):
        raise invalid(path, key, "a mapping of keys", _show(raw))
    flat = {k: v for k, v in raw.items() if k not in ("bindings", "weights")}
    section: HostBindings = _convert(flat, HostBindings, path, key)
    bindings: dict[str, Binding] = {}
    weights: dict[str, WeightEntry] = {}
    for name, value in _items(raw.get("bindings"), path, f"{key}.bindings"):
        bindings[name] = _convert(value, Binding, path, f"{key}.bindings.{name}")
        check_binding(bindings[name], name, path, f"{key}.bindings.{name}")
    for name, value in _items(raw.get("weights"), path, f"{key}.weights"):
        value = {"names": [value]} if isinstance(value, str) else {"names": value} if isinstance(value, list) else value
        weights[name] = _convert(value, WeightEntry, path, f"{key}.weights.{name}")
        check_weight(weights[name], name, path, f"{key}.weights.{name}")
    return msgspec.structs.replace(section, bindings=bindings, weights=weights)


def _merge_host(base: HostBindings, own: HostBindings) -> HostBindings:
    if own.moved:
        base = _moved(base, own.moved)
    return HostBindings(
        classes=own.classes,
        layers=own.layers or base.layers,
        moved={**base.moved, **own.moved},
        kinds={**base.kinds, **own.kinds},
        elsewhere=own.elsewhere or base.elsewhere,
        passthrough={**base.passthrough, **own.passthrough},
        bindings={**base.bindings, **own.bindings},
        weights={**base.weights, **own.weights},
    )


def _moved(base: HostBindings, places: Mapping[str, str]) -> HostBindings:
    """A section whose module paths begin elsewhere."""

    def at(paths: str) -> str:
        return "|".join(_moved_path(path, places) for path in paths.split("|"))

    return msgspec.structs.replace(
        base,
        layers=at(base.layers),
        kinds={group: {kind: at(path) for kind, path in members.items()} for group, members in base.kinds.items()},
        bindings={
            name: msgspec.structs.replace(
                binding,
                module=None if binding.module is None else at(binding.module),
                parts=tuple(msgspec.structs.replace(part, module=at(part.module)) for part in binding.parts),
            )
            for name, binding in base.bindings.items()
        },
        weights={at(parameter): entry for parameter, entry in base.weights.items()},
    )


def _moved_path(path: str, places: Mapping[str, str]) -> str:
    """``path`` with the longest of the moved beginnings replaced; the root stays the root."""
    lacking, path = ("!", path[1:]) if path.startswith("!") else ("", path)
    for old in sorted(places, key=len, reverse=True) if path else ():
        if not old or path == old or path.startswith(f"{old}."):
            rest = path[len(old) :].removeprefix(".")
            return lacking + ".".join(part for part in (places[old], rest) if part)
    return lacking + path


def _items(raw: Any, path: Path, key: str) -> Iterator[tuple[str, Any]]:
    if raw is None:
        return
    if not isinstance(raw, Mapping):
        raise invalid(path, key, "a mapping of keys", _show(raw))
    yield from raw.items()


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key and name else str(name or key)


def _show(raw: Any) -> str:
    return "nothing" if raw is None else f"{type(raw).__name__} {str(raw)[:60]}"
