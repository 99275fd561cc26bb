"""The logical trace: what one side computed, whatever ranks, shards, batches and chunks it came from.

``stitch`` makes it from shards, ``diff`` compares two of them. Shape suffixes: K distinct token keys of
the trace, R rows of one boundary, C columns of the logical row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Boundary, Manifest, RowScope, Weight
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
    position was never seen (by a row of its own, or by a row about the next token); int64."""

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
    """The K distinct tokens that have a row in a trace, in order of (first sequence, position); a token's prefix comes before it.

    ``key_K``: uint64 token key. ``sequence_K``, ``position_K``: where it was first seen. ``previous_K``: index of
    the nearest token of its prefix that has a row, -1 where there is none. ``labelled_K``: True where the ids of the
    prefix are unknown, so that the key is made from (request or label, position)."""

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
    """One process group's share of partial sums: which coordinate of how many, and its own digests, (R, 2)."""

    coordinate: int
    size: int
    digest_R2: U64


@dataclass(frozen=True)
class LogicalBoundary:
    """One boundary, stitched. Rows are distinct (token, expert) and sorted by (token, expert).

    Where ``info.rows`` is ``next``, a row belongs to the token *after* the one it was recorded at: take 1 off the
    table's position to print it. ``info`` is merged over processes: ``executions`` are those of the busiest one,
    added over data-parallel scopes; ``row_count`` counts sightings. Of a row seen several times the first sighting's
    fingerprint is kept: lowest sequence, then earliest execution.

    ``digest_R2`` is meaningless where ``partial_axis`` is set (no digest exists of a sum: it holds the sum of the
    parts' digests); ``parts`` then holds the digests per coordinate, in the same row order. Of partial sums only
    the sketch is that of the sum: ``sum_squares_R`` is its squared length (off by up to about 35 %), ``abs_max_R`` NaN,
    ``nonfinite_R`` counts over all parts. ``statistics`` and ``values_RC`` are loaded on demand: one of them is None,
    both are for data that keeps neither.

    ``dtype``: ``mixed`` where rows or slices differ in it (integers with raw values are then ``int64``).
    ``load_sum_of_copies``: only where copies disagree, statistics of the sum of all copies of each row, as for partial
    sums: what the value would be if this was declared replicated by mistake. ``load_nonfinite``: ``nonfinite_R`` alone.
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
    load_sum_of_copies: Callable[[], Statistics | None] | None = None
    load_nonfinite: Callable[[], npt.NDArray[np.uint32] | None] = lambda: None

    def __len__(self) -> int:
        return len(self.token_R)


@dataclass(frozen=True)
class LogicalTrace:
    """One side, ready to compare. ``boundaries``: stitched boundaries by name, in causal order, only those with
        at least one execution. ``catalogue``: every boundary of the map, recorded or not, in causal order, merged over
        shards; of a module that runs several times on the same rows of a forward, later uses are boundaries of their own,
        ``name#2`` ... ``not_computed``: reason -> boundary name -> sorted token keys declared never computed; the empty name
        stands for all boundaries except those of ``RowScope.NEXT``, which are listed by name. ``findings``: what is wrong with
        the side by itself. ``noise``: siblings and repeats that disagree, per boundary: the largest distance between two
        sightings of one row (what ``--floor self`` takes), NaN where it is undefined, infinite where they hold non-finite
        values. ``load_weight_rows``: fingerprints of
        every row of a weight, None unless recorded with ``weights="rows"``. ``load_forwards``: the forward in which each token was
    first computed, int64 (K,); None where nobody knows."""

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
    load_weight_rows: Callable[[str], Fingerprints | None] = field(default=lambda name: None)
    load_forwards: Callable[[], I64 | None] = lambda: None

    def declared(self, boundary: str) -> dict[str, U64]:
        """Reason -> sorted keys of rows of this boundary that were declared never computed."""
        info = next((known for known in self.catalogue if known.name == boundary), None)
        names = (boundary,) if info is not None and info.rows is RowScope.NEXT else ("", boundary)
        found = {reason: [keys[name] for name in names if name in keys] for reason, keys in self.not_computed.items()}
        return {reason: np.unique(np.concatenate(keys)) for reason, keys in found.items() if keys}

    @property
    def manifest(self) -> Manifest:
        """Any shard's manifest, for what all shards share (run id, host, map, conditions)."""
        return self.manifests[0]
