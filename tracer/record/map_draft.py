"""A suggested map as YAML: entries of the boundaries that were found, every binding with its evidence, and what is missing.

The entries come from the map ``any_decoder``. Where a boundary was not found, those that read it read what it reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tracer.errors import Code, UsageError
from tracer.record.boundary_maps import load_boundary_map
from tracer.record.map_entries import BoundaryEntry, BoundaryMap
from tracer.record.suggestions import Findings, Guess

__all__ = ["MapDraft", "draft_map"]

_KINDS = {"mlp": "dense", "moe": "moe", "attn": "full", "linear_attn": "linear"}
"""Part of a boundary's name -> kind of the layers that have it, where only some do."""


_ONE_OF = (("attn.out", "linear_attn.out"), ("mlp.out", "moe.combine"), ("mlp.gate_up", "mlp.up"))
"""Boundaries of which a layer has one: the other is not looked through."""


@dataclass(frozen=True)
class MapDraft:
    """A suggested map. ``text``: the YAML file. ``missing``: what was not found, as in the file's last comment."""

    family: str
    text: str
    found: tuple[str, ...]
    missing: tuple[str, ...]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file. Raises UsageError out-in-use where there is one already: a map may have been corrected by hand."""
        target = Path(path)
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(self.text)
        except FileExistsError:
            raise UsageError(
                Code.OUT_IN_USE,
                "a file is there already, and nothing is overwritten",
                expected="a path that does not exist",
                found=str(target),
                remedy="choose another name, or remove the file",
            ) from None
        return target


def draft_map(
    findings: Findings,
    modules: Mapping[str, torch.nn.Module],
    *,
    host: str,
    family: str,
    classes: tuple[str, ...],
    model_types: tuple[str, ...],
) -> MapDraft:
    """The map that these findings make for one host's models of these classes."""
    return _Draft(findings, modules).write(host, family, classes, model_types)


@dataclass
class _Draft:
    """Findings, brought together over layers."""

    findings: Findings
    modules: Mapping[str, torch.nn.Module]
    catalogue: BoundaryMap = field(default_factory=lambda: load_boundary_map("any_decoder"))
    guesses: dict[str, Guess] = field(default_factory=dict)
    places: dict[str, frozenset[int]] = field(default_factory=dict)
    """Layers in which a boundary was found; -1 outside layers."""
    kind_of: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing += dict.fromkeys(_by_layers(self.findings.missing))
        for name in self.catalogue.boundaries:
            by_layer = self.findings.guesses.get(name, {})
            if by_layer:
                merged = _same_everywhere(list(by_layer.values()))
                if merged is None:
                    self.missing.append(f"{name}: its place differs between layers {_numbers(by_layer)}")
                else:
                    self.guesses[name], self.places[name] = merged, frozenset(by_layer)
        self.kinds = self._kinds()

    def _kinds(self) -> dict[str, dict[str, str]]:
        """Groups of kinds for what only some layers have; a boundary whose layers no module tells apart is dropped."""
        every = frozenset(self.findings.before)
        telling: dict[frozenset[int], tuple[str, str]] = {}
        for name in list(self.guesses):
            subset = self.places[name]
            if subset in (every, {-1}):
                continue
            module = self._telling_module(subset)
            if module is None:
                self.missing.append(f"{name}: found in layers {_numbers(subset)} only, and no module tells them from the others")
                del self.guesses[name], self.places[name]
                continue
            kind, _ = telling.setdefault(subset, (_KINDS.get(name.split(".")[2], f"some_{len(telling)}"), module))
            self.kind_of[name] = kind
        groups: dict[str, dict[str, str]] = {}
        for subset, (kind, module) in telling.items():
            other, elsewhere = telling.get(every - subset, (f"not_{kind}", f"!{module}"))
            if other not in groups:
                groups[kind] = {kind: module, other: elsewhere}
        return groups

    def _telling_module(self, layers: frozenset[int]) -> str | None:
        """A module path that exactly these layers have."""
        start, end = self.findings.layers.split("{layer}")
        below: dict[str, set[int]] = {}
        for path in self.modules:
            if (match := re.match(re.escape(start) + r"(\d+)" + re.escape(end) + r"\.(.+)", path)) is not None:
                below.setdefault(match[2], set()).add(int(match[1]))
        names = [name for name, found in below.items() if found == layers]
        if not names:
            return None
        one = f"{start}{min(layers)}{end}."
        bare = {name for name in names if not any(tensor is not None for tensor in self.modules[one + name]._parameters.values())}
        return f"{self.findings.layers}.{min(names, key=lambda name: (name in bare, name.count('.'), name))}"

    # entries

    def entry(self, name: str) -> dict[str, Any]:
        """A boundary's keys, what it is computed from reduced to what was found."""
        known = self.catalogue.boundaries[name]
        inputs, mixes = self._inputs(name)
        if name == "embedding" and "layers.{layer}.attn.q_rope" not in self.guesses and "module" in self.guesses["input.positions"].binding:
            inputs = [*inputs, "input.positions"]  # learned positions
        keys: dict[str, Any] = {"level": "" if known.level == 2 else str(known.level), "from": inputs, "kind": self.kind_of.get(name, "")}
        keys |= {"mixes_tokens": known.mixes_tokens or mixes, "discrete": known.discrete}
        keys |= {"scores": known.scores, "rows": "" if known.rows.value == "all" else known.rows.value, "weights": list(known.weights)}
        return {key: value for key, value in keys.items() if value}

    def _inputs(self, name: str) -> tuple[list[str], bool]:
        known = self.catalogue.boundaries[name]
        here = self.places[name]
        found, mixes = self._found(known)
        partial = {other: self.places[key] for other in found if (key := _key(other)) in self.places and key in self.kind_of}
        for other in partial:
            uncovered = here - frozenset().union(*partial.values()) if "{previous}" not in other else frozenset()
            if uncovered:
                more, also = self._found(self.catalogue.boundaries[_key(other)])
                found, mixes = [*found, *more], mixes or also
        return list(dict.fromkeys(found)), mixes

    def _found(self, entry: BoundaryEntry) -> tuple[list[str], bool]:
        """Inputs that were found; for one that was not, its own. And whether one that was not mixes tokens."""
        names: list[str] = []
        mixes = False
        for other in entry.inputs:
            instead = (name for group in _ONE_OF for name in group if other.endswith(group) and not other.endswith(f".{name}"))
            if _key(other) in self.guesses:
                names.append(other)
            elif not any(f"layers.{{layer}}.{name}" in self.guesses for name in instead):
                lost = self.catalogue.boundaries[_key(other)]
                further, also = self._found(lost)
                names += [name for name in further if name != "input.positions"]
                mixes |= lost.mixes_tokens or also
        return names, mixes

    # text

    def write(self, host: str, family: str, classes: tuple[str, ...], model_types: tuple[str, ...]) -> MapDraft:
        absent = [name.removeprefix("layers.{layer}.") for name in self.catalogue.boundaries if name not in self.guesses]
        lines = [
            f"# Drafted by `tracer map suggest` from one forward of a {classes[0]}. Every binding says why it is there.",
            "# Check it, correct it, and give the bindings `shard:` or `replicated:` before you trace a sharded model.",
            f"family: {_scalar(family)}",
            f"about: drafted for {classes[0]}, not reviewed",
            *([f"model_types: {_flow(list(model_types))}"] if model_types else []),
            "",
            "boundaries:",
            *(f"  {name}: {_flow(self.entry(name))}" for name in self.guesses),
            "",
            "hosts:",
            f"  {host}:",
            f"    classes: {_flow(list(classes))}",
            f"    layers: {self.findings.layers}",
            *(["    kinds:"] if self.kinds else []),
            *(f"      {group}: {_flow(members)}" for group, members in self.kinds.items()),
            "    bindings:",
        ]
        for name, guess in self.guesses.items():
            lines += [f"      # {guess.evidence}", f"      {name}: {_flow(guess.binding)}"]
        lines += ["    weights:", *(f"      {path}: {_flow(_weight(weight))}" for path, weight in self.findings.weights.items())]
        unnamed = self._unnamed()
        missing = [*self.missing, f"no boundary of the name: {', '.join(absent)}"]
        if unnamed:
            missing.append(f"parameters that keep their own names: {', '.join(unnamed)}")
        lines += ["", "# Not found", *(f"# - {text}" for text in missing)]
        return MapDraft(family, "\n".join(lines) + "\n", tuple(self.guesses), tuple(missing))

    def _unnamed(self) -> list[str]:
        """Parameters and buffers that no rule is about, layers written as a template."""
        start = self.findings.layers.partition("{layer}")[0]
        paths = [
            re.sub(rf"^{re.escape(start)}\d+(?=\.)", self.findings.layers, f"{path}.{own}" if path else own)
            for path, module in self.modules.items()
            for own, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        ]
        return [path for path in dict.fromkeys(paths) if path not in self.findings.weights]


def _same_everywhere(guesses: list[Guess]) -> Guess | None:
    """One guess for all layers: the same binding, or the same but for modules of other names."""
    first = guesses[0]
    bindings = [dict(guess.binding) for guess in guesses]
    if all(binding == bindings[0] for binding in bindings):
        return first
    modules = [binding.pop("module", None) for binding in bindings]
    if None in modules or any(binding != bindings[0] for binding in bindings):
        return None
    return Guess({"module": "|".join(dict.fromkeys(map(str, modules))), **bindings[0]}, first.evidence)


def _key(name: str) -> str:
    return name.replace("{previous}", "{layer}").replace("{last}", "{layer}")


def _weight(weight: Any) -> Any:
    plain = not weight.transpose and not weight.shares
    if plain:
        return weight.names[0] if len(weight.names) == 1 else list(weight.names)
    more = {"transpose": weight.transpose, "shares": list(weight.shares)}
    return {"names": list(weight.names), **{key: value for key, value in more.items() if value}}


def _by_layers(remarks: Iterable[str]) -> list[str]:
    """Remarks that differ in the layer alone, once, with all their layers."""
    found: dict[str, list[str]] = {}
    for remark in remarks:
        match = re.fullmatch(r"(.*) \(layer (\d+)\)", remark)
        found.setdefault(match[1] if match else remark, []).extend([match[2]] if match else [])
    return [f"{text} (layers {', '.join(layers)})" if layers else text for text, layers in found.items()]


def _numbers(layers: Iterable[int]) -> str:
    return ", ".join(str(layer) for layer in sorted(layers))


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    plain = text.isdigit() or re.fullmatch(r"[A-Za-z_][\w.\[\]]*(?: [a-z0-9]+)*", text) is not None
    return text if plain and "[" not in text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
