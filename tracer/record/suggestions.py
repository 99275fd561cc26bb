"""What a suggested map is made of while it is being found: guesses with their evidence, and one layer as it was observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tracer.record.observed_forward import Leaf, Observation
from tracer.record.suggested_operators import linear_kind, norm_kind

__all__ = ["Findings", "Guess", "LayerView", "Operator", "WeightGuess", "leaf_binding"]


@dataclass(frozen=True)
class Guess:
    """One boundary: its binding as a map writes it (templates), and why."""

    binding: Mapping[str, Any]
    evidence: str


@dataclass(frozen=True)
class WeightGuess:
    """What a parameter holds."""

    names: tuple[str, ...]
    transpose: bool = False
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operator:
    """A module that is one known operator."""

    module: str
    kind: str
    given: Leaf
    returned: Leaf


@dataclass
class Findings:
    """Guesses by boundary (templates) and layer, -1 outside layers; parameter rules; what was not found, with the reason."""

    layers: str
    before: tuple[int, ...]
    guesses: dict[str, dict[int, Guess]] = field(default_factory=dict)
    weights: dict[str, WeightGuess] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass
class LayerView:
    """One layer of an observed forward. ``entry`` and ``exit``: the residual stream before and behind it."""

    index: int
    path: str
    seen: Observation
    entry: Leaf
    exit: Leaf
    guesses: dict[str, Guess] = field(default_factory=dict)
    weights: dict[str, WeightGuess] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unchanged: set[str] = field(default_factory=set)
    """Guesses whose rows are those of the boundary before: no boundary of their own, if so in every layer."""

    _operators: dict[str, list[Operator]] = field(default_factory=dict)

    @cached_property
    def leaves(self) -> list[Leaf]:
        """Leaves of the modules below the layer, of those that ran once."""
        return [leaf for leaf in self.seen.leaves if leaf.module.startswith(f"{self.path}.") and self.seen.calls[leaf.module] == 1]

    @cached_property
    def hidden(self) -> list[Leaf]:
        """Leaves as wide as the residual stream."""
        rows, width = self.entry.rows_NC.shape
        return [
            leaf
            for leaf in self.leaves
            if leaf.layout not in ("", "(t h) d") and leaf.tensor.is_floating_point() and leaf.rows_NC.shape == (rows, width)
        ]

    def template(self, path: str) -> str:
        """A path with the layer's number as ``{layer}``."""
        start = self.path[: len(self.path) - len(str(self.index))]
        return f"{start}{{layer}}{path[len(self.path) :]}" if path == self.path or path.startswith(f"{self.path}.") else path

    def has_parts(self, module: str) -> bool:
        return any(path.startswith(f"{module}.") for path in self.seen.modules)

    def scope(self, leaf: Leaf) -> str:
        """Path below which the work behind a leaf is done: its module, or the layer where that is a single operator."""
        return leaf.module if self.has_parts(leaf.module) else self.path

    def outermost(self, key: tuple[Any, ...]) -> Leaf | None:
        """What returns these rows, as far out as possible below the layer."""
        same = [leaf for leaf in self.leaves if leaf.key == key and not leaf.given]
        return min(same, key=lambda leaf: (leaf.module.count("."), leaf.order), default=None)

    def reader(self, key: tuple[Any, ...]) -> Leaf | None:
        """What is given these rows first; a norm rather than a block, where both are."""
        same = [leaf for leaf in self.leaves if leaf.key == key and leaf.given]
        return min(same, key=lambda leaf: (self.has_parts(leaf.module), leaf.order), default=None)

    def linears(self, scope: str) -> list[Operator]:
        """Linear maps below a path, in the order of time."""
        return [found for found in self._known("linear", linear_kind) if found.module.startswith(f"{scope}.")]

    def norms(self, scope: str) -> list[Operator]:
        """Norms below a path, in the order of time."""
        return [found for found in self._known("norm", norm_kind) if found.module.startswith(f"{scope}.")]

    def _known(self, name: str, kind_of: Any) -> list[Operator]:
        if name not in self._operators:
            self._operators[name] = list(self._find_operators(kind_of))
        return self._operators[name]

    def _find_operators(self, kind_of: Any) -> Iterator[Operator]:
        for path, module in self.seen.modules.items():
            if not path.startswith(f"{self.path}.") or self.seen.calls.get(path) != 1 or list(module.children()):
                continue
            given, returned = operands(self.seen, path)
            if given is None or returned is None:
                continue
            kind = kind_of(module, _rows(given), _rows(returned))
            if kind:
                yield Operator(path, kind, given, returned)

    def guess(self, boundary: str, leaf: Leaf, evidence: str, **more: Any) -> None:
        """Note where a boundary of this layer is."""
        binding = leaf_binding(leaf, self.template(leaf.module), **more)
        self.guesses[f"layers.{{layer}}.{boundary}"] = Guess(binding, evidence)

    def name_weights(self, module: str, *names: str, transpose: bool = False, shares: tuple[int, ...] = ()) -> None:
        """Name weight and bias of a module that is one operator."""
        for own in ("weight", "bias"):
            if self.seen.modules[module]._parameters.get(own) is not None:
                full = tuple(f"layers.{{layer}}.{name}.{own}" for name in names)
                self.weights[self.template(f"{module}.{own}")] = WeightGuess(full, transpose and own == "weight", shares)


def operands(seen: Observation, path: str) -> tuple[Leaf | None, Leaf | None]:
    """First float tensor that a module was given, and the first that it returned; None where the layout is not clear."""
    leaves = [leaf for leaf in seen.of(path) if leaf.tensor.is_floating_point() and leaf.layout]
    given = next((leaf for leaf in leaves if leaf.given), None)
    return given, next((leaf for leaf in leaves if not leaf.given), None)


def leaf_binding(leaf: Leaf, module: str, **more: Any) -> dict[str, Any]:
    """A binding to a leaf, as a map writes it."""
    place = {} if leaf.leaf == "output" else {"leaf": leaf.leaf}
    return {"module": module, **place, "layout": leaf.layout, **more}


def _rows(leaf: Leaf) -> torch.Tensor:
    """Rows by token; where only heads can be told, rows by token and head."""
    return leaf.tensor if leaf.layout == "(t h) d" else leaf.rows_NC
