"""One small forward, watched whole: every tensor that any module was given or gave, for whoever looks for structure in it.

Unlike a trace this keeps the tensors themselves, all of them, so it is for tiny models only. Nothing of the model is changed.

Shape suffixes: B batch rows, S columns, N = B * S tokens, C columns of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

__all__ = ["Leaf", "Observation", "TapLeaf", "layout_of", "observe_forward", "rows_of"]


@dataclass(frozen=True)
class Leaf:
    """One tensor at the edge of one module, cloned when the module was given it or had returned it.

    ``leaf``: selector as maps write it. ``layout``: "" where the shape does not say which dimension counts tokens.
    ``key``: equal for leaves that hold the same rows, bit for bit, whatever their layout. ``order``: time."""

    module: str
    leaf: str
    tensor: torch.Tensor
    layout: str
    key: tuple[Any, ...]
    order: int

    @property
    def rows_NC(self) -> torch.Tensor:
        """Rows by token. Raises ValueError where the layout is unknown."""
        return rows_of(self.tensor, self.layout)

    @property
    def given(self) -> bool:
        """What the module was given rather than what it returned."""
        return not self.leaf.startswith("output")


@dataclass(frozen=True)
class TapLeaf:
    """A tensor that a host's function tap shows for a module: ``leaf`` is the tap's own name."""

    tap: str
    leaf: str
    tensor: torch.Tensor
    layout: str


@dataclass
class Observation:
    """A forward of ``batch`` x ``columns`` tokens ``ids_BS``."""

    modules: Mapping[str, torch.nn.Module]
    ids_BS: torch.Tensor
    leaves: list[Leaf] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    taps: dict[str, list[TapLeaf]] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return int(self.ids_BS.shape[0])

    @property
    def columns(self) -> int:
        return int(self.ids_BS.shape[1])

    @property
    def tokens(self) -> int:
        return self.batch * self.columns

    def of(self, module: str) -> list[Leaf]:
        """Leaves of one module in the order of time."""
        return [leaf for leaf in self.leaves if leaf.module == module]


def layout_of(shape: tuple[int, ...], batch: int, columns: int) -> str:
    """Layout of a leaf by where the sizes of batch and sequence stand in its shape; "" where they stand nowhere clear."""
    tokens = batch * columns
    known = {
        (batch, columns): ("b s", "b s c", "b s h d"),
        (1, columns): ("b s", "b s c", "b s h d"),
        (columns, batch): ("s b", "s b c", "s b h d"),
    }
    if shape[:2] in known and len(shape) in (2, 3, 4):
        return known[shape[0], shape[1]][len(shape) - 2]
    if len(shape) == 4 and shape[0] == batch and shape[2] == columns:
        return "b h s d"
    if len(shape) in (1, 2, 3) and shape[0] == tokens:
        return ("t", "t c", "t h d")[len(shape) - 1]
    if len(shape) == 3 and shape[1:] in ((batch, columns), (1, columns)):
        return "p b s"  # position ids of a rope with several axes
    if len(shape) == 2 and shape[0] > tokens and shape[0] % tokens == 0:
        return "(t h) d"
    return ""


def rows_of(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A leaf of that layout as rows by token, (N, C); of one batch row where the leaf has one."""
    match layout:
        case "b s" | "t":
            return tensor.reshape(-1, 1)
        case "b s c" | "b s h d":
            return tensor.flatten(0, 1).flatten(1)
        case "s b" | "s b c" | "s b h d":
            return tensor.transpose(0, 1).flatten(0, 1).reshape(tensor.shape[0] * tensor.shape[1], -1)
        case "b h s d":
            return tensor.transpose(1, 2).flatten(0, 1).flatten(1)
        case "p b s":
            return tensor.flatten(1).t()
        case "t c" | "t h d":
            return tensor.flatten(1)
    raise ValueError(f"no rows for layout {layout!r}")


def observe_forward(
    modules: Mapping[str, torch.nn.Module], ids_BS: torch.Tensor, run: Callable[[], Any], outer: torch.nn.Module | None = None
) -> Observation:
    """Run ``run`` once and keep every tensor at every edge. ``outer``: the module to call as root, where it is a wrapper."""
    found = Observation(modules, ids_BS)
    with contextlib.ExitStack() as stack:
        for path, module in modules.items():
            watched = outer if outer is not None and not path else module
            stack.callback(watched.register_forward_pre_hook(_before(found, path), with_kwargs=True).remove)
            stack.callback(watched.register_forward_hook(_after(found, path), with_kwargs=True).remove)
        with torch.no_grad():
            run()
    return found


def _before(found: Observation, path: str) -> Callable[..., None]:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.calls[path] = found.calls.get(path, 0) + 1
        if found.calls[path] == 1:
            for place, value in enumerate(args):
                _keep(found, path, f"input[{place}]", value)
            for name, value in kwargs.items():
                _keep(found, path, f"kwargs.{name}", value)

    return hook


def _after(found: Observation, path: str) -> Callable[..., None]:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if found.calls[path] != 1:
            return
        for leaf, value in _leaves(output):
            _keep(found, path, leaf, value)

    return hook


def _leaves(output: Any) -> Iterator[tuple[str, Any]]:
    """Tensors of a module's output, one level deep."""
    if isinstance(output, torch.Tensor):
        yield "output", output
    elif isinstance(output, Mapping):  # a model output: by name
        yield from ((f"output.{name}", value) for name, value in output.items())
    elif isinstance(output, tuple | list):
        yield from ((f"output[{place}]", value) for place, value in enumerate(output))


def _keep(found: Observation, path: str, leaf: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        return
    tensor = value.detach().clone()
    layout = layout_of(tuple(tensor.shape), found.batch, found.columns)
    rows = tensor if layout in ("", "(t h) d") else rows_of(tensor, layout)
    memory = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if rows.numel() else b""
    key = (str(tensor.dtype), rows.numel(), xxhash.xxh3_128_digest(memory))
    found.leaves.append(Leaf(path, leaf, tensor, layout, key, len(found.leaves)))
