"""One source of a boundary, ready to read: selectors parsed, layout compiled, columns placed.

Shape suffixes: N rows, C columns held here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tracer.errors import Code, MapError
from tracer.record.boundaries import Source
from tracer.record.host import Host, Placement
from tracer.record.snapshot import (
    Layout,
    LeafRoot,
    chosen_columns,
    held_columns,
    leaf_paths,
    local_tensor,
    pick_leaf,
    put_leaf,
    select_columns,
    split_columns,
)

__all__ = ["SourceReader", "canonical_order"]


class SourceReader:
    """Reads one source out of module calls or taps."""

    def __init__(self, source: Source, host: Host) -> None:
        """Raises MapError (map-invalid, map-layout) where selector or layout make no sense."""
        self.source = source
        self.layout = Layout(source.layout, dict(source.sizes), source.broadcast)
        self._paths = () if source.tap else leaf_paths(source.leaf)
        self._added = leaf_paths(source.add) if source.add else ()
        self._host = host
        self._placements: dict[int, Placement] = {}

    @property
    def before(self) -> bool:
        """Read before the module runs: nothing it needs is an output, and the module may change its inputs in place."""
        return all(path.root is not LeafRoot.OUTPUT for path in (*self._paths, *self._added))

    def leaf(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
        """The tensor as the module saw it. Raises CaptureError (leaf-not-tensor)."""
        return pick_leaf(self._paths, args, kwargs, output, dimensions=self.layout.dimensions)

    def rows(
        self, leaf: torch.Tensor, forward_rows: int, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, output: Any = None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Rows of this boundary or part, (N, C) of the leaf's dtype, and the sizes of the row axes. A view wherever possible.

        Raises MapError (map-layout), CaptureError (leaf-not-tensor)."""
        source = self.source
        values = local_tensor(leaf)
        if self._added:
            values = self._with_added(values, args, kwargs or {}, output)
        rows_NC, row_shape = self.layout.to_rows(values, source.boundary, forward_rows)
        if source.select:
            rows_NC = select_columns(rows_NC, source.select)
        if source.split:
            sizes = [self._host.local_columns(name) for name in source.split]
            rows_NC = split_columns(rows_NC, source.split.index(source.boundary), sizes, source.shares, source.boundary)
        if source.chosen:
            rows_NC = chosen_columns(rows_NC, source.chosen, source.boundary)
        return rows_NC, row_shape

    def replaced(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, values: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The call with ``values`` in the leaf's place. A deferred leaf becomes negative zeros, which add nothing to any value.

        Raises CaptureError (leaf-not-tensor)."""
        args, kwargs, output = put_leaf(self._paths, args, kwargs, output, values, dimensions=self.layout.dimensions)
        if self._added:
            added = pick_leaf(self._added, args, kwargs, output, none_is_fine=True)
            if added is not None:
                args, kwargs, output = put_leaf(self._added, args, kwargs, output, torch.full_like(added, -0.0))
        return args, dict(kwargs), output

    def copied(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
        """A copy of the leaf to write into, the deferred one added, wrappers and all. Raises CaptureError (leaf-not-tensor)."""
        leaf = self.leaf(args, kwargs, output)
        copied = leaf.clone()
        if self._added:
            local_tensor(copied).copy_(self._with_added(local_tensor(leaf), args, kwargs, output))
        return copied

    def rows_to_write(self, copied: torch.Tensor, forward_rows: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The rows of a leaf from ``copied``, as a view of it, and the sizes of the row axes.

        Raises MapError (map-layout) where its layout allows no view, or the boundary is only a part of the leaf."""
        source, values = self.source, local_tensor(copied)
        rows_NC, row_shape = self.layout.to_rows(values, source.boundary, forward_rows)
        if source.split or source.select or source.chosen or source.parts > 1 or source.tap or rows_NC.data_ptr() != values.data_ptr():
            raise MapError(
                Code.MAP_LAYOUT,
                f"{source.boundary} cannot be replaced: its rows are no view of one leaf",
                expected="a boundary that is one whole output or input of a module, rows first",
                found=f"{source.describe()}, layout {source.layout}",
            )
        return rows_NC, row_shape

    def _with_added(self, values: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
        """The leaf plus the deferred one, as the next norm adds them: in the leaf's own dtype. None adds nothing."""
        added = pick_leaf(self._added, args, kwargs, output, none_is_fine=True)
        return values if added is None else (values + local_tensor(added)).to(values.dtype)

    def place(self, rows_NC: torch.Tensor, leaf: torch.Tensor) -> tuple[torch.Tensor, Placement]:
        """The columns that belong to the logical row, and where they lie in it. Parts lie side by side, in order.

        Raises MapError (map-axis, map-layout)."""
        columns = rows_NC.shape[1]
        placement = self._placements.get(columns)
        if placement is None:
            placement = self._placements[columns] = self._host.placement(self.source, columns, leaf)
        rows_NC = held_columns(rows_NC, placement.width, placement.spans, self.source.boundary)
        part, parts = self.source.part, self.source.parts
        if parts > 1:
            width = placement.width
            spans = tuple((part * width + start, part * width + stop) for start, stop in placement.spans or ((0, width),))
            placement = Placement(width * parts, spans, placement.partial, placement.axis)
        return rows_NC, placement


def canonical_order(ids_NC: torch.Tensor) -> torch.Tensor:
    """Columns of every row in ascending order of its ids: (N, C) int64, on the ids' device; equal ids keep their order."""
    return torch.argsort(ids_NC, dim=1, stable=True)
