"""Scalar settings of the modules that compute a boundary, where they differ between the sides: eps, scaling, cap, window.

They come with the run conditions (``model.attributes``), by module path with ``*`` for numbers. Only sides of one host
can be compared, for another host's modules have other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracer.format.schema import Boundary
from tracer.read.logical import LogicalTrace

__all__ = ["SettingDifference", "differing_numbers", "settings_at"]

_NONE = "none"

_LAYOUT = re.compile(r"chunk|block|tile|split|thread|rank|world|partition|_id$|_idx$|drop|seed", re.IGNORECASE)
"""Attributes that say how a result is computed, or what never counts in a run without gradients."""


@dataclass(frozen=True)
class SettingDifference:
    """One attribute of one module: ``model.layers.2.self_attn.scaling``, as text on both sides. ``number``: both are
    numbers or switches (or absent), not names of implementations."""

    name: str
    a: str
    b: str
    number: bool

    def text(self) -> str:
        """``scaling of model.layers.2.self_attn: A 0.25, B 0.2625``."""
        module, _, attribute = self.name.rpartition(".")
        return f"{attribute} of {module}: A {self.a}, B {self.b}"


def settings_at(a: LogicalTrace, b: LogicalTrace, info: Boundary) -> tuple[SettingDifference, ...]:
    """Settings that differ in the modules around a boundary: the one it is taken from, the one that holds this, what else
    that holds, and the modules of the weights it is computed with."""
    attributes_a, attributes_b = _attributes(a), _attributes(b)
    if a.manifest.host != b.manifest.host or attributes_a == attributes_b:
        return ()
    modules = set(_modules(a, info))
    found = []
    for pattern in sorted(attributes_a.keys() | attributes_b.keys()):
        held_a, held_b = attributes_a.get(pattern), attributes_b.get(pattern)
        if held_a == held_b:
            continue
        path, _, attribute = pattern.rpartition(".")
        matches = re.compile(r"\.".join(r"(\d+)" if part == "*" else re.escape(part) for part in path.split(".")))
        for module in sorted(modules):
            hit = matches.fullmatch(module)
            numbers = hit.groups() if hit is not None else _numbers_below(path, module)
            if numbers is None:
                continue
            index = ".".join(numbers)
            value_a, value_b = _value_at(held_a, index), _value_at(held_b, index)
            if value_a != value_b:
                name = _filled(path, numbers) + f".{attribute}"
                found.append(SettingDifference(name, value_a, value_b, _is_number(value_a) and _is_number(value_b)))
                break
    return tuple(found)


def differing_numbers(a: LogicalTrace, b: LogicalTrace) -> tuple[SettingDifference, ...]:
    """Numbers of modules that differ anywhere between two traces of one host: scaling, eps, window. Switches, names of
    implementations and what only lays a computation out are no numbers of the model; whole numbers count on one mesh only, for
    processes hold parts of sizes."""
    attributes_a, attributes_b = _attributes(a), _attributes(b)
    if a.manifest.host != b.manifest.host or attributes_a == attributes_b:
        return ()
    whole = _mesh(a) == _mesh(b)
    paths = [{pattern.rpartition(".")[0] for pattern in held} for held in (attributes_a, attributes_b)]
    found = []
    for pattern in sorted(attributes_a.keys() | attributes_b.keys()):
        held_a, held_b = attributes_a.get(pattern), attributes_b.get(pattern)
        path, _, attribute = pattern.rpartition(".")
        if held_a == held_b or _LAYOUT.search(attribute) or not all(path in held for held in paths):
            continue
        listed = [text for held in (held_a, held_b) if isinstance(held, dict) for text in held.get("by_index", {}).values()]
        places = [index for text in listed for index in str(text).split()]
        for index in dict.fromkeys(places or [""]):
            texts = _value_at(held_a, index), _value_at(held_b, index)
            numbers = [_number(text) for text in texts]
            if texts[0] == texts[1] or numbers[0] == numbers[1] or not (whole or all(map(_written_as_float, texts))):
                continue
            name = _filled(path, tuple(index.split(".")) if index else ()) + f".{attribute}"
            found.append(SettingDifference(name, *texts, True))
            break
    return tuple(found)


def _mesh(trace: LogicalTrace) -> tuple[object, ...]:
    return trace.manifest.world_size, {(axis.name, axis.size) for manifest in trace.manifests for axis in manifest.mesh}


def _number(text: str) -> float | None:
    """The number that a text writes, None for anything else."""
    try:
        return float(text)
    except ValueError:
        return None


def _written_as_float(text: str) -> bool:
    return _number(text) is not None and not text.lstrip("-").isdigit()


def _attributes(trace: LogicalTrace) -> Mapping[str, Any]:
    model = trace.manifest.conditions.get("model")
    attributes = model.get("attributes") if isinstance(model, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _modules(trace: LogicalTrace, info: Boundary) -> Iterator[str]:
    """Paths of the modules around a boundary, as the host calls them."""
    module = info.source.partition(" ")[0]
    if module:
        yield module
        parent = module.rpartition(".")[0]
        if parent and not parent.rpartition(".")[2].isdigit() and parent.count(".") > 1:
            yield parent
    for name in info.weights:
        weight = trace.weights.get(name)
        if weight is not None:
            yield weight.parameter.rpartition(".")[0]


def _numbers_below(path: str, module: str) -> tuple[str, ...] | None:
    """Of a pattern for something inside ``module``: the numbers that put it there, None where it lies elsewhere. Only
    children of modules that hold several, so that a projection's neighbours count."""
    parts, own = path.split("."), module.split(".")
    if len(parts) != len(own) + 1 or parts[-1] == "*":
        return None
    numbers = []
    for part, held in zip(parts, own, strict=False):
        if part == "*" and held.isdigit():
            numbers.append(held)
        elif part != held:
            return None
    return tuple(numbers)


def _filled(path: str, numbers: tuple[str, ...]) -> str:
    left = list(numbers)
    return ".".join(left.pop(0) if part == "*" and left else part for part in path.split("."))


def _value_at(held: Any, index: str) -> str:
    """One value for all modules of a pattern, or the one that lists this index."""
    if held is None:
        return _NONE
    if isinstance(held, dict):
        for text, places in held.get("by_index", {}).items():
            if index in str(places).split():
                return str(text)
        return _NONE
    return str(held)


def _is_number(text: str) -> bool:
    if text in (_NONE, "None", "True", "False"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True
