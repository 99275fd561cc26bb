"""Bookkeeping of one forward: its rows, what has been shown of them, and what waits for something else.

Shape suffixes: N rows of a leaf, R those of them that are recorded, C columns, K ids per row.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracer.errors import Code, MapError, TracerError
from tracer.format.store import RowSet
from tracer.record.host import Forward, Host, IntArray, Rows
from tracer.record.readers import SourceReader

__all__ = ["Call", "ForwardRecord", "IdsKey", "PositionFilter", "Selection", "Watch", "expert_rows"]

PositionFilter = Callable[[IntArray], npt.NDArray[np.bool_]]
"""Which positions are recorded."""

IdsKey = tuple[str, int, bool]
"""(ids boundary, occurrence, recompute)."""


@dataclass(eq=False)
class Watch:
    """One place that hooks or a tap report from. A module object that stands at several paths (shared layers) is one
    watch: its n-th call in a forward is that of path ``n % len(readers)``. ``readers``: per path, in reading order."""

    readers: list[list[SourceReader]]

    @property
    def after_root(self) -> bool:
        """The module runs once the root has returned."""
        return any(reader.source.after_root for readers in self.readers for reader in readers)


@dataclass(eq=False)
class Selection:
    """The rows of a leaf that are recorded, and how to take them out of it."""

    rows: RowSet
    index_R: IntArray | None
    """None: all of them."""
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def take(self, rows_NC: torch.Tensor) -> torch.Tensor:
        """(R, C); a view where the rows are consecutive."""
        index_R = self.index_R
        if index_R is None:
            return rows_NC
        if len(index_R) and int(index_R[-1]) - int(index_R[0]) + 1 == len(index_R):
            return rows_NC[int(index_R[0]) : int(index_R[-1]) + 1]
        placed_R = self._on_device.get(rows_NC.device)
        if placed_R is None:
            placed_R = self._on_device[rows_NC.device] = torch.from_numpy(index_R).to(rows_NC.device)
        return rows_NC[placed_R]


class ForwardRecord:
    """One forward. Kept while it runs; with checkpointed regions, as long as a recomputation may come."""

    def __init__(self, number: int, forward: Forward, wanted: PositionFilter | None) -> None:
        self.number = number
        self.forward = forward
        self.grad = torch.is_grad_enabled()
        self.thread = threading.get_ident()
        self.checkpointed = False
        """A module of it ran inside a checkpointed region."""
        self.calls: Counter[tuple[Watch, bool]] = Counter()
        self.shown: dict[str, list[Selection]] = {}
        """Rows recorded so far in the first pass, by boundary."""
        self.ids: dict[IdsKey, torch.Tensor] = {}
        """Ids of a choice as they came, (N, K)."""
        self.waiting: dict[IdsKey, list[Callable[[TracerError | None], None]]] = {}
        """What waits for those ids; called with an error where they do not come."""
        self._wanted = wanted
        self._rows: dict[tuple[SourceReader, tuple[int, ...]], Rows | None] = {}
        self._selections: dict[int, tuple[Rows, Selection]] = {}
        self.main = self.select(forward.rows)
        """The rows of the whole forward."""

    def rows_of(self, reader: SourceReader, row_shape: tuple[int, ...], host: Host) -> Rows:
        """What the rows of this leaf are, as the host says. Raises MapError (map-layout) where it cannot."""
        key = (reader, row_shape)
        if key not in self._rows or reader.source.after_root:
            self._rows[key] = host.leaf_rows(self.forward, reader.source, row_shape)
        rows = self._rows[key]
        if rows is None:
            raise MapError(
                Code.MAP_LAYOUT, f"the host cannot say what the rows of {reader.source.boundary} are", found=f"row shape {list(row_shape)}"
            )
        return rows

    def select(self, rows: Rows) -> Selection:
        """The rows to record; the same object for the same rows."""
        known = self._selections.get(id(rows))
        if known is None:
            kept_N = rows.sequence_N >= 0
            if self._wanted is not None:
                kept_N = kept_N & self._wanted(rows.position_N)
            index_R = None if kept_N.all() else np.flatnonzero(kept_N)
            taken: Any = slice(None) if index_R is None else index_R
            expert_R = None if rows.expert_N is None else rows.expert_N[taken]
            row_set = RowSet(rows.sequence_N[taken], rows.position_N[taken], self.number, expert_R)
            known = self._selections[id(rows)] = (rows, Selection(row_set, index_R))
        return known[1]

    def missing(self, boundary: str) -> tuple[IntArray, IntArray] | None:
        """(sequence, position) of the forward's rows that this boundary did not show; None where it showed all."""
        main, shown = self.main, self.shown.get(boundary, [])
        if main in shown or not len(main.rows):
            return None
        seen = np.concatenate([_places(selection.rows) for selection in shown] or [np.zeros(0, np.int64)])
        left_N = np.flatnonzero(~np.isin(_places(main.rows), seen)) if shown else np.arange(len(main.rows))
        return (main.rows.sequence_R[left_N].astype(np.int64), main.rows.position_R[left_N].astype(np.int64)) if len(left_N) else None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a watched place: which use of its path in which forward, and whether it was recomputed."""

    record: ForwardRecord
    occurrence: int
    recompute: bool


def _places(rows: RowSet) -> IntArray:
    """(sequence, position) as one number each."""
    return rows.sequence_R.astype(np.int64) << 32 | rows.position_R.astype(np.int64)


def expert_rows(rows: Rows, row_axes: tuple[str, ...], row_shape: tuple[int, ...], ids_NK: torch.Tensor | None, boundary: str) -> Rows:
    """(token, expert) rows of a leaf with a row axis ``e``: the axis counts experts, or, where ``ids_NK`` is given, the
    slots of a token's choice. ``rows``: as the host labelled the leaf, the axis ``e`` included or left out.

    Raises MapError (map-layout) where the numbers do not fit."""
    axis = row_axes.index("e")
    experts, total = row_shape[axis], int(np.prod(row_shape))
    slot_N = np.broadcast_to(np.arange(experts).reshape([-1 if n == axis else 1 for n in range(len(row_shape))]), row_shape).reshape(-1)
    token_shape = (*row_shape[:axis], 1, *row_shape[axis + 1 :])
    token_N = np.broadcast_to(np.arange(total // max(experts, 1)).reshape(token_shape), row_shape).reshape(-1)
    if len(rows) == total:
        sequence_N, position_N = rows.sequence_N, rows.position_N
    elif len(rows) * experts == total:
        sequence_N, position_N = rows.sequence_N[token_N], rows.position_N[token_N]
    else:
        raise MapError(
            Code.MAP_LAYOUT,
            f"the rows of {boundary} are not tokens x experts",
            expected=f"{len(rows)} tokens",
            found=f"row shape {list(row_shape)}",
        )
    expert_N = slot_N
    if ids_NK is not None:
        ids = ids_NK.cpu().numpy()
        if ids.shape != (total // max(experts, 1), experts):
            raise MapError(
                Code.MAP_LAYOUT,
                f"the rows of {boundary} are not slots of its choice",
                expected=f"ids {list(ids.shape)}",
                found=f"row shape {list(row_shape)}",
            )
        expert_N = ids[token_N, slot_N]
    return Rows(sequence_N, position_N, expert_N.astype(np.int64))
