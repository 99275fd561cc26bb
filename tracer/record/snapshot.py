"""From what a module was given or gave to rows and columns of one boundary.

Picking a leaf out of containers, reaching the plain local tensor behind a wrapper, turning a layout into
rows, and the column adapters. Nothing here keeps a tensor, changes one, or records autograd state: whoever
must outlive the hook clones.

Shape suffixes: N rows (product of the row axes, in the leaf's own order), C columns held here.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, overload

import torch

from tracer.errors import CaptureError, Code, MapError
from tracer.format.schema import Span
from tracer.record.map_entries import ROW_AXES, layout_axes

__all__ = [
    "Layout",
    "LeafPath",
    "LeafRoot",
    "chosen_columns",
    "held_columns",
    "leaf_paths",
    "local_tensor",
    "pick_leaf",
    "put_leaf",
    "select_columns",
    "split_columns",
]


class LeafRoot(str, Enum):
    """Where a leaf path starts."""

    OUTPUT = "output"
    INPUT = "input"
    KWARGS = "kwargs"


@dataclass(frozen=True)
class LeafPath:
    """One way into a module's arguments or output: ``output[1].logits`` is OUTPUT, (1, "logits")."""

    root: LeafRoot
    steps: tuple[int | str, ...]
    text: str


_STEP = re.compile(r"\[(\d+)\]|\.(\w+)")
_MISSING = object()


def leaf_paths(text: str) -> tuple[LeafPath, ...]:
    """The alternatives of a leaf selector, in order of preference: ``kwargs.position_ids|input[1]``.

    Raises MapError (map-invalid) for anything that is no selector."""
    paths = []
    for part in text.split("|"):
        match = re.fullmatch(r"(output|input|kwargs)((?:\[\d+\]|\.\w+)*)", part)
        if match is None or (match[1] != "output" and not match[2]):
            raise MapError(
                Code.MAP_INVALID,
                "no leaf selector",
                expected="output, output[1], output.logits, input[0], kwargs.hidden_states, or several joined by |",
                found=text,
            )
        steps = tuple(int(index) if index else name for index, name in _STEP.findall(match[2]))
        paths.append(LeafPath(LeafRoot(match[1]), steps, part))
    return tuple(paths)


@overload
def pick_leaf(
    paths: Sequence[LeafPath], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, *, dimensions: int = 0
) -> torch.Tensor: ...
@overload
def pick_leaf(
    paths: Sequence[LeafPath], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, *, dimensions: int = 0, none_is_fine: bool
) -> torch.Tensor | None: ...
def pick_leaf(
    paths: Sequence[LeafPath],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
    *,
    dimensions: int = 0,
    none_is_fine: bool = False,
) -> torch.Tensor | None:
    """The first of the alternatives that is a tensor, as the module saw it (not detached, wrappers and all); one of so many
    ``dimensions`` goes before one of others (a tuple of outputs may begin with losses).

    Steps into a bare tensor stay at the tensor: a module that returns ``(y, cache)`` in one version and ``y`` in
    another fits ``output[0]`` both times. With ``none_is_fine`` a leaf that is None is the answer None.

    Raises CaptureError (leaf-not-tensor), saying what was found at the first alternative that exists."""
    taken = _taken(paths, args, kwargs, output, dimensions)
    if taken is not None:
        return taken[1]
    found = next((value for value in (_at(path, args, kwargs, output) for path in paths) if value is not _MISSING), _MISSING)
    if found is None and none_is_fine:
        return None
    what = "leaf is None" if found is None else "no such leaf" if found is _MISSING else f"leaf is a {type(found).__name__}, not a tensor"
    raise CaptureError(Code.LEAF_NOT_TENSOR, what, where="|".join(path.text for path in paths))


def _taken(
    paths: Sequence[LeafPath], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, dimensions: int
) -> tuple[LeafPath, torch.Tensor] | None:
    first = None
    for path in paths:
        value = _at(path, args, kwargs, output)
        if isinstance(value, torch.Tensor):
            if len(paths) == 1 or value.dim() == dimensions:
                return path, value
            first = first or (path, value)
    return first


def _at(path: LeafPath, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """What is at the end of a path; ``_MISSING`` where it leads nowhere."""
    value: Any = output if path.root is LeafRoot.OUTPUT else args if path.root is LeafRoot.INPUT else kwargs
    for step in path.steps:
        value = _into(value, step)
    return value


def _into(value: Any, step: int | str) -> Any:
    """One step down: item of a sequence, key of a mapping, else attribute."""
    if isinstance(value, torch.Tensor) or value is _MISSING or value is None:
        return value
    if isinstance(step, int):
        if isinstance(value, Mapping):
            value = tuple(value.values())
        return value[step] if isinstance(value, Sequence) and step < len(value) else _MISSING
    if isinstance(value, Mapping) and step in value:
        return value[step]
    return getattr(value, step, _MISSING)


def put_leaf(
    paths: Sequence[LeafPath], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, value: torch.Tensor, *, dimensions: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments, keyword arguments and output with ``value`` in the place of the leaf that ``pick_leaf`` picks. Containers on
    the way are copied, nothing that was passed in is changed.

    Raises CaptureError (leaf-not-tensor) where there is no such leaf."""
    pick_leaf(paths, args, kwargs, output)
    taken = _taken(paths, args, kwargs, output, dimensions)
    assert taken is not None  # else the line above has raised
    path = taken[0]
    if path.root is LeafRoot.OUTPUT:
        return args, dict(kwargs), _with(output, path.steps, value)
    if path.root is LeafRoot.INPUT:
        return _with(args, path.steps, value), dict(kwargs), output
    return args, _with(kwargs, path.steps, value), output


def _with(container: Any, steps: Sequence[int | str], value: torch.Tensor) -> Any:
    """A copy of the container with ``value`` at the end of ``steps``."""
    if isinstance(container, torch.Tensor) or not steps:
        return value
    step, rest = steps[0], steps[1:]
    inner = _with(_into(container, step), rest, value)
    if isinstance(container, tuple):
        step = step if isinstance(step, int) else container._fields.index(step)  # type: ignore[attr-defined]
        items = (*container[:step], inner, *container[step + 1 :])
        return type(container)(*items) if hasattr(container, "_fields") else items
    changed = copy.copy(container)
    if isinstance(container, Mapping):
        key = list(container)[step] if isinstance(step, int) else step
        changed[key] = inner
    elif isinstance(step, int):
        changed[step] = inner
    else:
        setattr(changed, step, inner)
    return changed


def local_tensor(leaf: torch.Tensor) -> torch.Tensor:
    """The plain, detached tensor of this process: same storage, waited for, no wrapper.

    A DTensor gives its local part (never a collective: other ranks may not be in a hook); an asynchronous collective's
    result is waited for, because ``detach`` and ``view`` of it would be read unreduced.

    Raises CaptureError (leaf-not-tensor) for tensors without readable data: meta, fake, sparse, nested, quantized."""
    if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
        if hasattr(leaf, "_local_tensor"):
            leaf = leaf._local_tensor
        if hasattr(leaf, "trigger_wait"):
            leaf = leaf.trigger_wait()
        if hasattr(leaf, "fake_mode"):
            raise CaptureError(Code.LEAF_NOT_TENSOR, "leaf is a fake tensor: it has no data")
    leaf = leaf.detach()
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta or leaf.is_quantized:
        kinds = {"meta": leaf.is_meta, "nested": leaf.is_nested, "quantized": leaf.is_quantized}
        kind = next((kind for kind, is_it in kinds.items() if is_it), str(leaf.layout).removeprefix("torch."))
        raise CaptureError(Code.LEAF_NOT_TENSOR, f"leaf is a {kind} tensor: it has no plain data")
    return leaf


class Layout:
    """A leaf's layout, ready to apply. ``row_axes``: the row axes in layout order, as ``Host.leaf_rows`` gets their sizes;
    ``dimensions``: how many a leaf has."""

    def __init__(self, text: str, sizes: Mapping[str, int] | None = None, broadcast: str = "") -> None:
        """``sizes``: known sizes of axes; ``broadcast``: row axis that may have size 1 and then stands for every index.

        Raises MapError (map-layout) where the text is no layout, or a dimension cannot be unfolded."""
        dimensions = layout_axes(text)
        if dimensions is None:
            raise MapError(Code.MAP_LAYOUT, "no layout", expected="axes such as `b s (h d)`, with a row axis", found=text)
        self.text = text
        self._sizes = dict(sizes or {})
        self._dimensions = tuple(self._groups(axes) for axes in dimensions)
        self.dimensions = len(dimensions)
        groups = [group for dimension in self._dimensions for group in dimension]
        rows = [n for n, group in enumerate(groups) if group and group[0] in ROW_AXES]
        self.row_axes = tuple(" ".join(groups[n]) for n in rows)
        order = (*rows, *(n for n in range(len(groups)) if n not in rows))
        self._order = order if order != tuple(range(len(groups))) else None
        self._broadcast = self.row_axes.index(broadcast) if broadcast in self.row_axes else -1
        self._checked = tuple(
            place
            for place, axes in enumerate(dimensions)
            if len(self._dimensions[place]) > 1 or not axes or any(axis in self._sizes for axis in axes)
        )

    def _groups(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Axes of one dimension that stay together: all of them if they are all rows or all columns, else row axes
        singly and columns between them together."""
        if len({axis in ROW_AXES for axis in axes}) < 2:
            unknown_axes = sum(axis not in self._sizes for axis in axes)
            single = bool(axes) and axes[0] in ROW_AXES and (unknown_axes < 2 or (unknown_axes == 2 and "e" in axes))
            return tuple((axis,) for axis in axes) if single else (axes,)
        groups: list[tuple[str, ...]] = []
        for axis in axes:
            if groups and axis not in ROW_AXES and groups[-1][0] not in ROW_AXES:
                groups[-1] = (*groups[-1], axis)
            else:
                groups.append((axis,))
        unknown = [group for group in groups if any(axis not in self._sizes for axis in group)]
        if len(unknown) > 2 or (len(unknown) == 2 and sum(group[0] in ROW_AXES for group in unknown) != 1):
            raise MapError(
                Code.MAP_LAYOUT,
                f"layout `{self.text}` cannot be unfolded",
                expected=f"sizes for all but one row axis and one column axis of ({' '.join(axes)})",
                found=str(self._sizes or "no sizes"),
            )
        return tuple(groups)

    def to_rows(self, leaf: torch.Tensor, boundary: str, forward_rows: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Rows and columns of a plain tensor: (N, C), and the sizes of the row axes, whose product is N. A view where the
        layout allows.

        ``forward_rows``: rows of the whole forward, for a broadcast axis and for rows folded into a dimension with columns or
        experts.

        Raises MapError (map-layout) naming boundary, layout and shape where they do not fit."""
        if leaf.dim() != self.dimensions:
            raise self._unfit(boundary, leaf.shape, f"{self.dimensions} dimensions")
        if self._checked:
            leaf = self._unfolded(leaf, boundary, forward_rows)
        if self._order is not None:
            leaf = leaf.permute(self._order)
        count = len(self.row_axes)
        row_shape = tuple(leaf.shape[:count])
        if self._broadcast >= 0 and row_shape[self._broadcast] == 1:
            others = math.prod(row_shape)
            if others and forward_rows % others == 0:
                row_shape = (*row_shape[: self._broadcast], forward_rows // others, *row_shape[self._broadcast + 1 :])
                leaf = leaf.expand(*row_shape, *leaf.shape[count:])
        return leaf.reshape(math.prod(row_shape), math.prod(leaf.shape[count:])), row_shape

    def _unfolded(self, leaf: torch.Tensor, boundary: str, forward_rows: int) -> torch.Tensor:
        """The leaf with one dimension per group of axes, all known sizes checked."""
        shape = list(leaf.shape)
        for place in reversed(self._checked):
            groups, size = self._dimensions[place], shape[place]
            known = [math.prod(self._sizes.get(axis, 1) for axis in group) for group in groups]
            open_groups = [n for n, group in enumerate(groups) if any(axis not in self._sizes for axis in group)]
            if len(open_groups) == 2:
                row = next(n for n in open_groups if groups[n][0] in ROW_AXES and groups[n][0] != "e")
                open_groups.remove(row)
                known[row] = forward_rows
            product = math.prod(known)
            fits = size == product if not open_groups else product > 0 and size % product == 0
            if not fits:
                told = [f"{axis}={self._sizes[axis]}" for group in groups for axis in group if axis in self._sizes]
                otherwise = f"a multiple of {product}" if open_groups else f"size {product}"
                raise self._unfit(boundary, leaf.shape, f"{' '.join(told) or otherwise} in dimension {place}")
            if len(groups) > 1:
                if open_groups:
                    known[open_groups[0]] *= size // product
                shape[place : place + 1] = known
        return leaf.reshape(shape)

    def _unfit(self, boundary: str, shape: Sequence[int], expected: str) -> MapError:
        return MapError(
            Code.MAP_LAYOUT,
            f"layout `{self.text}` does not fit {boundary}",
            expected=expected,
            found=f"shape {list(shape)}",
            remedy="correct the layout of this boundary in the map",
        )


def select_columns(rows_NC: torch.Tensor, select: str) -> torch.Tensor:
    """Columns ``start:stop`` of the leaf; a view."""
    start, stop = (int(edge) if edge else None for edge in select.split(":"))
    return rows_NC[:, start:stop]


def chosen_columns(rows_NC: torch.Tensor, what: str, boundary: str) -> torch.Tensor:
    """Of rows with a column per choice, 0 where not chosen: the ``ids`` (int64) of the chosen columns, ascending, or their
    ``values``. (N, K).

    Raises MapError (map-layout) where rows have unequal numbers of choices: then the zeros do not tell them."""
    chosen_NC = rows_NC != 0
    count_N = chosen_NC.sum(1)
    least, most = (int(count_N.min()), int(count_N.max())) if len(count_N) else (0, 0)
    if least != most:
        raise MapError(
            Code.MAP_LAYOUT,
            f"the chosen columns of {boundary} cannot be told from zeros",
            expected="as many columns other than 0 in every row",
            found=f"{least} to {most}",
        )
    ids_NK = chosen_NC.nonzero()[:, 1].reshape(len(rows_NC), most)
    return ids_NK if what == "ids" else rows_NC.gather(1, ids_NK)


def split_columns(rows_NC: torch.Tensor, index: int, sizes: Sequence[int | None], shares: Sequence[int], boundary: str) -> torch.Tensor:
    """Columns of the ``index``-th of several boundaries that lie side by side in one leaf; a view.

    ``sizes``: columns of each held here, None where unknown; ``shares``: their proportions, used where no size is known;
    without either they are equal. Raises MapError (map-layout) where that does not add up."""
    columns = rows_NC.shape[1]
    known = list(sizes)
    missing = [n for n, size in enumerate(known) if size is None]
    if missing:
        rest = columns - sum(size for size in known if size is not None)
        weights = [shares[n] if shares else 1 for n in missing]
        if rest >= 0 and rest % sum(weights) == 0:
            for n, weight in zip(missing, weights, strict=True):
                known[n] = rest // sum(weights) * weight
    widths = [size for size in known if size is not None]
    if len(widths) != len(known) or sum(widths) != columns:
        raise MapError(
            Code.MAP_LAYOUT,
            f"packed leaf of {boundary} does not split",
            expected=f"columns of {len(known)} boundaries, {[size if size is not None else '?' for size in sizes]}",
            found=f"{columns} columns",
            remedy="give the proportions with `shares`, or let the host say how many columns it holds of each",
        )
    start = sum(widths[:index])
    return rows_NC[:, start : start + widths[index]]


def held_columns(rows_NC: torch.Tensor, width: int, spans: Sequence[Span], boundary: str) -> torch.Tensor:
    """The columns that belong to the logical row: local columns beyond the spans are padding and are dropped; a view.

    Raises MapError (map-layout) where there are fewer than declared."""
    held = sum(stop - start for start, stop in spans) if spans else width
    columns = rows_NC.shape[1]
    if columns == held:
        return rows_NC
    if columns < held:
        raise MapError(
            Code.MAP_LAYOUT,
            f"{boundary} has fewer columns than declared",
            expected=f"{held} of {width} columns",
            found=f"{columns} columns",
        )
    return rows_NC[:, :held]
