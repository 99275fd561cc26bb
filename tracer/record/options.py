"""What the user asked for when a trace was made, and its arguments made ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracer.errors import Code, UsageError
from tracer.format.dumps import DumpPlan
from tracer.format.reference import Reference
from tracer.record.dumping import MAX_DUMP_BYTES
from tracer.record.forward_record import PositionFilter
from tracer.record.map_entries import BoundaryMap

__all__ = ["TraceOptions", "position_filter", "weights_mode"]


@dataclass(frozen=True)
class TraceOptions:
    """What the user asked for; see ``tracer.trace`` for every field."""

    map: str | os.PathLike[str] | BoundaryMap = "auto"
    out: str | os.PathLike[str] | None = None
    level: int = 1
    boundaries: str | Sequence[str] | None = None
    tokens: slice | Iterable[int] | None = None
    weights: str | bool | None = "digest"
    strict: bool = False
    sequences: Iterable[Any] | Callable[[tuple[Any, ...], Mapping[str, Any]], Iterable[Any] | None] | None = None
    dump: str | Sequence[str] | None = None
    max_dump_bytes: int = MAX_DUMP_BYTES
    plan: DumpPlan | None = None
    against: Reference | None = None
    feed: Reference | None = None
    pin: Mapping[str, Reference] | None = None
    perturb_ulps: int = 0


def position_filter(tokens: slice | Iterable[int] | None) -> PositionFilter | None:
    """``tokens=`` as a test of positions. Raises UsageError (bad-argument)."""
    if tokens is None:
        return None
    chosen = tokens if isinstance(tokens, slice) else sorted({int(position) for position in tokens})
    edges = [chosen.start or 0, chosen.stop or 0, (chosen.step or 1) - 1] if isinstance(chosen, slice) else chosen
    if any(edge < 0 for edge in edges):
        raise UsageError(
            Code.BAD_ARGUMENT,
            "tokens= counts from the start of a sequence",
            expected="a slice, range or list of positions from 0 on",
            found=repr(tokens),
            remedy="how long a sequence will be is not known while it runs: give positions from the start",
        )
    if isinstance(chosen, slice):
        start, step = chosen.start or 0, chosen.step or 1
        stop = np.iinfo(np.int64).max if chosen.stop is None else chosen.stop
        return lambda position_N: (position_N >= start) & (position_N < stop) & ((position_N - start) % step == 0)
    listed = np.array(chosen, np.int64)
    return lambda position_N: np.isin(position_N, listed)


def weights_mode(weights: str | bool | None) -> str:
    """``weights=`` as digest, rows or none. Raises UsageError (bad-argument)."""
    mode = "none" if weights is False or weights is None else "digest" if weights is True else weights
    if mode not in ("digest", "rows", "none"):
        raise UsageError(Code.BAD_ARGUMENT, "weights= is not known", expected='"digest", "rows" or False', found=repr(weights))
    return mode
