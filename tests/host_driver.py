"""Drives a host with real hooks, as the recorder does, and keeps what it says."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from tracer.hosts import find_host
from tracer.record.boundaries import Source
from tracer.record.host import Forward, SkippedForward
from tracer.record.tokens import SequenceRegistry

__all__ = ["HostDriver", "cache_argument", "dynamic_cache"]


@dataclass
class HostDriver:
    """``with HostDriver(model) as driver: model(...)``; then ``driver.rows(n)`` are the rows of forward n."""

    model: Any
    taps: Iterable[Source] = ()
    registry: SequenceRegistry = field(default_factory=SequenceRegistry)
    forwards: list[Forward | SkippedForward] = field(default_factory=list)
    tapped: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)

    def __enter__(self) -> HostDriver:
        self.host = find_host(self.model)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.host.taps(self.taps, lambda path, leaf, tensor: self.tapped.append((path, leaf, tensor.clone()))))
        root = self.host.root()
        self._stack.callback(root.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        self._stack.callback(root.register_forward_hook(self._after).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = self.host.begin_forward(args, kwargs, self.registry)

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(self._running, Forward):
            self.host.finish_forward(self._running, output)
        self.forwards.append(self._running)

    def forward(self, number: int = -1) -> Forward:
        """Forward ``number``, which was not skipped."""
        forward = self.forwards[number]
        assert isinstance(forward, Forward)
        return forward

    def rows(self, number: int = -1) -> list[tuple[str, int] | None]:
        """(sequence label, position) of every row, None for rows that are not recorded."""
        rows = self.forward(number).rows
        return [
            (self.registry[sequence].label, position) if sequence >= 0 else None
            for sequence, position in zip(rows.sequence_N.tolist(), rows.position_N.tolist(), strict=True)
        ]

    def given(self, name: str, number: int = -1) -> list[Any]:
        """Derived input ``input.<name>`` of a forward."""
        return list(self.forward(number).inputs[f"input.{name}"].tolist())

    def ids(self, label: str) -> list[int]:
        """Known token ids of a sequence, from its first known position on."""
        index = next(n for n in range(len(self.registry)) if self.registry[n].label == label)
        known = self.registry._known[index]
        return [int(token) for token in known.id_T[known.known_T]]

    def labels(self) -> list[str]:
        return [self.registry[n].label for n in range(len(self.registry))]


def cache_argument(model: Any) -> str:
    """How this version of the library calls the cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def dynamic_cache(model: Any) -> Any:
    """An empty cache that grows, as this model's layers want it."""
    return transformers.DynamicCache(config=model.config)
