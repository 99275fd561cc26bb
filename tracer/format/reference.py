"""What recording may know of another trace while it runs: digests and values by token key.

The facade makes one out of an opened trace (``tracer.read``) and hands it to ``tracer.record``, which never meet otherwise.
Suffixes: R rows of one boundary, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Reference", "ReferenceRows", "ReferenceWeight"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ReferenceRows:
    """The rows of one boundary of the other trace, whole rows, each once. ``expert_R``: None where rows are tokens.

    ``digest_R2``: None where no digest of the whole row exists (partial sums). ``raw_RB``: their bytes in ``dtype``, (R, B),
    None where they were not dumped."""

    dtype: str
    width: int
    key_R: U64
    expert_R: I64 | None
    digest_R2: U64 | None = None
    raw_RB: U8 | None = None
    never_K: U64 | None = None
    """Keys of rows that the other trace declares never computed, such as last sampled tokens; None where there are none."""

    @cached_property
    def _lines(self) -> dict[tuple[int, int], int]:
        experts = [-1] * len(self.key_R) if self.expert_R is None else self.expert_R.tolist()
        return {row: line for line, row in enumerate(zip(self.key_R.tolist(), experts, strict=True))}

    def find(self, key_N: U64, expert_N: I64 | None) -> I64:
        """Line of every row, -1 where the other trace has none: int64 (N,)."""
        experts = [-1] * len(key_N) if expert_N is None else expert_N.tolist()
        lines = self._lines
        return np.array([lines.get(row, -1) for row in zip(key_N.tolist(), experts, strict=True)], np.int64).reshape(len(key_N))


@dataclass(frozen=True, eq=False)
class ReferenceWeight:
    """One whole weight of the other trace. ``load_rows``: digests of its rows, (R, 2), None where it recorded none."""

    dtype: str
    rows: int
    columns: int
    digest: tuple[str, str]
    load_rows: Callable[[], U64 | None]


@dataclass(frozen=True, eq=False)
class Reference:
    """Another trace, by boundary. ``name``: its run id, for manifests and messages. ``order``: its boundaries in causal order.
    ``load(boundary)``: its rows, None where it has none; asked once per boundary by whoever keeps them."""

    name: str
    order: Mapping[str, int]
    load: Callable[[str], ReferenceRows | None]
    path: str = ""
    """Its folder, for processes that open it themselves."""
    weights: Mapping[str, ReferenceWeight] = field(default_factory=dict)
