"""What the user asked for when a trace was made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracer.format.dumps import DumpPlan
from tracer.format.reference import Reference
from tracer.record.dumping import MAX_DUMP_BYTES
from tracer.record.map_entries import BoundaryMap
from tracer.record.option_checks import (
    check_map,
    check_path,
    read_boundaries,
    read_count,
    read_level,
    read_tokens,
    weights_mode,
)
from tracer.record.tokens import read_lengths

__all__ = ["TraceOptions"]


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

    def __post_init__(self) -> None:
        """Check everything that needs no model, and keep it as plain values. Raises UsageError (bad-argument)."""
        check_map(self.map)
        check_path(self.out, "out", remedy="leave out= away for traces/<UTC>-<host>-<run id>")
        weights_mode(self.weights)
        plain = {
            "level": read_level(self.level),
            "boundaries": read_boundaries(self.boundaries),
            "tokens": read_tokens(self.tokens),
            "sequences": self.sequences if self.sequences is None or callable(self.sequences) else read_lengths(self.sequences),
            "dump": read_boundaries(self.dump, "dump"),
            "max_dump_bytes": read_count(self.max_dump_bytes, "max_dump_bytes"),
            "perturb_ulps": read_count(self.perturb_ulps, "perturb_ulps"),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
