"""The logical trace: what one side computed, whatever ranks, shards, batches and chunks it came from.

``stitch`` makes it from shards, ``diff`` compares two of them. Shape suffixes: K distinct token keys of
the trace, R rows of one boundary, C columns of the logical row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracer.format.schema import Boundary, Manifest, Weight
from tracer.read.findings import Finding

__all__ = ["LogicalBoundary", "LogicalSequence", "LogicalTrace", "PartialPart", "Statistics", "TokenTable"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogicalSequence:
    """One sequence, joined over ranks and forwards. ``ids``: known token ids from position 0 on, int64;
    empty where nobody recorded them. ``token``: index into the token table per position, -1 where the
    position was never seen; int64."""

    label: str
    request: str
    scope: str
    ids: I64
    token: I64
    row: str = ""

    @property
    def name(self) -> str:
        """What people call it: the request id, else the label."""
        return self.request or self.label


@dataclass(frozen=True)
class TokenTable:
    """The K distinct tokens of a trace, in order of (first sequence, position); a token's prefix comes before it.

    ``key_K``: uint64 token key. ``sequence_K``, ``position_K``: where it was first seen. ``previous_K``: index of
    the token before it in its prefix, -1 at the start. ``labelled_K``: True where the ids of the prefix are
    unknown, so that the key is made from (request or label, position)."""

    key_K: U64
    sequence_K: I64
    position_K: I64
    previous_K: I64
    labelled_K: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.key_K)


@dataclass(frozen=True)
class Statistics:
    """Float statistics of R rows. ``sketch_R16`` float32, ``sum_squares_R`` float64, ``abs_max_R`` float32,
    ``nonfinite_R`` uint32."""

    sketch_R16: F32
    sum_squares_R: F64
    abs_max_R: F32
    nonfinite_R: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class PartialPart:
    """One process group's share of partial sums: which coordinate, and its own digests."""

    coordinate: int
    size: int
    digest_R2: U64


@dataclass(frozen=True)
class LogicalBoundary:
    """One boundary, stitched. Rows are distinct (token, expert) and sorted by (token, expert).

    ``digest_R2`` is meaningless where ``partial_axis`` is set (no digest exists of a sum); ``parts`` then holds
    the digests per coordinate, in the same row order. ``statistics`` and ``values_RC`` are loaded on demand:
    one of them is None, both are for data that keeps neither.
    """

    info: Boundary
    dtype: str
    width: int
    token_R: I64
    expert_R: I64 | None
    seen_R: I64
    """How often each row was seen (siblings, repeats), replicas and recompute not counted."""
    digest_R2: U64
    load_statistics: Callable[[], Statistics | None]
    load_values: Callable[[], I64 | None]
    copies: int = 1
    """Replicas over ranks that were joined."""
    executions: int = 0
    recomputed: int = 0
    partial_axis: str = ""
    parts: tuple[PartialPart, ...] = ()

    def __len__(self) -> int:
        return len(self.token_R)


@dataclass(frozen=True)
class LogicalTrace:
    """One side, ready to compare. ``boundaries``: stitched boundaries by name, in causal order, only those with
    at least one execution. ``catalogue``: every boundary of the map, recorded or not, in causal order, merged over
    shards. ``not_computed``: reason -> boundary name ("" for all) -> token keys declared never computed.
    ``findings``: what is wrong with the side by itself. ``noise``: siblings and repeats that disagree, per boundary:
    the largest distance between two sightings of one row (what ``--floor self`` takes)."""

    path: str
    manifests: tuple[Manifest, ...]
    sequences: tuple[LogicalSequence, ...]
    tokens: TokenTable
    catalogue: tuple[Boundary, ...]
    boundaries: Mapping[str, LogicalBoundary]
    weights: Mapping[str, Weight]
    not_computed: Mapping[str, Mapping[str, U64]] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Any shard's manifest, for what all shards share (run id, host, map, conditions)."""
        return self.manifests[0]
