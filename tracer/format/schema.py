"""Everything a trace directory holds, written once: format 1.

```
trace/
  shard-00000/                     one per process
    segment-000000.safetensors     rows, token ids and fingerprint columns, flushed by size
    weights.safetensors            only with weights="rows": one fingerprint per weight row
    manifest.json                  written last, atomically: its presence is the commit
  dumps/                           only where bytes were asked for
    rank-00000-000000.safetensors  raw values of chosen rows of chosen boundaries, at most so many bytes
```

A segment is columnar. ``R`` lines of the row table, ``L`` entries of row lists, ``N`` fingerprints,
``M`` of them with float statistics, ``V`` raw integer values, ``I`` recorded token ids.

| tensor | dtype, shape | meaning |
|---|---|---|
| ``rows.sequence``  | int32 (R,)  | index into the shard's sequences, in order of first appearance |
| ``rows.position``  | int32 (R,)  | index of the token inside its sequence, from 0 |
| ``rows.forward``   | int32 (R,)  | forward of this process, from 0 |
| ``rows.expert``    | int32 (R,)  | expert id of a (token, expert) row, else -1 |
| ``lists``          | uint32 (L,) | row-table lines; a block names its rows as a range of this |
| ``digest``         | uint64 (N, 2) | two lanes |
| ``sketch``         | float32 (M, 16) | |
| ``sum_squares``    | float64 (M,) | |
| ``abs_max``        | float32 (M,) | |
| ``nonfinite``      | uint32 (M,) | |
| ``values``         | int64 (V,)  | raw values of narrow integer boundaries, row-major |
| ``ids.sequence``   | int32 (I,)  | known token ids: sequence, |
| ``ids.position``   | int32 (I,)  | position, |
| ``ids.token``      | int64 (I,)  | token id |

The safetensors metadata key ``tracer`` holds a ``SegmentHeader`` as JSON, so that a finished
segment can be read although its process died before the manifest.

``weights.safetensors`` has ``digest``, ``sketch``, ``sum_squares``, ``abs_max`` and ``nonfinite``, each with one line per
weight row; rows without statistics (integers, packed) have NaN ones.

History
1   first format
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MOST_TOKENS",
    "NARROW_INTEGER_COLUMNS",
    "OUTSIDE_TOKENS",
    "SEGMENT_METADATA_KEY",
    "WEIGHTS_NAME",
    "Axis",
    "Block",
    "Boundary",
    "BoundaryStatus",
    "Counts",
    "Manifest",
    "MapIdentity",
    "NotComputed",
    "Note",
    "PolicyMark",
    "Record",
    "RowScope",
    "SegmentHeader",
    "SegmentInfo",
    "Sequence",
    "Skipped",
    "Span",
    "Weight",
    "segment_name",
    "shard_name",
]

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights.safetensors"
SEGMENT_METADATA_KEY = "tracer"
NARROW_INTEGER_COLUMNS = 64
"""Integer rows up to this wide are widened to int64 and keep their raw values instead of a sketch."""

MOST_TOKENS = 1 << 27
"""A position beyond this is no token of a sequence, and would make its table larger than the trace."""

OUTSIDE_TOKENS = "outside tokens="
"""Reason of rows that ``tokens=`` left out: computed, yet not recorded. Unlike what was never computed they are missed by a
side that has them."""

Span = tuple[int, int]
"""Half-open range of logical columns (or rows, where said)."""


def shard_name(rank: int) -> str:
    """Folder of one process inside a trace."""
    return f"shard-{rank:05d}"


def segment_name(number: int) -> str:
    """File name of one segment inside a shard."""
    return f"segment-{number:06d}.safetensors"


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of every struct on disk."""


class Axis(Record, frozen=True, kw_only=True):
    """This process's coordinate on one mesh axis."""

    name: str
    """tp, ep, cp, pp, dp, fsdp ... as the host calls it."""
    index: int
    size: int


class RowScope(str, Enum):
    """Which rows a host computes at a boundary."""

    ALL = "all"
    SAMPLED = "sampled"
    """Only positions whose logits are needed."""
    EXPERTS = "experts"
    """One row per (token, expert id)."""
    NEXT = "next"
    """Row t speaks of token t + 1, so it is keyed by the prefix that includes that token; the last token has none."""


class BoundaryStatus(str, Enum):
    """What became of a boundary of the map in this process."""

    RECORDED = "recorded"
    NOT_SELECTED = "not selected"
    """Above the level, or outside ``boundaries=``."""
    NOT_OBSERVABLE = "not observable"
    """The host cannot show it; the map says why."""
    ELSEWHERE = "elsewhere"
    """Belongs to another process (pipeline stage)."""
    UNRESOLVED = "unresolved"
    """The map binds it, but this model has no such module or leaf."""
    VACUOUS = "vacuous"
    """Selected and bound, yet it did not execute, or with fewer rows than the map says."""


class Boundary(Record, frozen=True, kw_only=True):
    """One boundary of the resolved map, and what this process saw of it. The manifest lists them in causal order."""

    name: str
    level: int
    inputs: tuple[str, ...] = ()
    """Full names of the boundaries it is computed from (``from:`` of the map)."""
    mixes_tokens: bool = False
    """Row t may depend on input rows at tokens <= t of its sequence, not only on t."""
    discrete: bool = False
    """Its values are choices (ids)."""
    scores: str = ""
    """For a choice: the boundary whose values it was chosen by."""
    rows: RowScope = RowScope.ALL
    status: BoundaryStatus = BoundaryStatus.RECORDED
    reason: str = ""
    """Why the status is not ``recorded``."""
    dtype: str = ""
    """As seen, before any widening; empty if it never executed, ``mixed`` if it changed during the run."""
    width: int = 0
    """Columns of the whole logical row; 0 if it never executed."""
    source: str = ""
    """Where it was taken, for people: ``model.layers.3.mlp.gate output[0]``."""
    executions: int = 0
    """How often it was recorded, recompute apart; forwards without rows count too."""
    recomputed: int = 0
    """Executions under activation recompute."""
    row_count: int = 0
    """Rows recorded, recompute apart."""
    weights: tuple[str, ...] = ()
    """Semantic names of the parameters and buffers this boundary is computed with."""


class Block(Record, frozen=True, kw_only=True):
    """Fingerprints of one boundary inside a segment that share all of the following. Row k of the block is
    row-table line ``lists[row_start + k]`` and digest ``digest_start + k``."""

    boundary: str
    dtype: str
    """torch's name without the prefix: bfloat16, float8_e4m3fn, int64. As seen, before any widening."""
    width: int
    """Columns of the whole logical row."""
    spans: tuple[Span, ...] = ()
    """Logical columns held by this process, ascending in local column order; empty means the whole row."""
    partial: str = ""
    """Mesh axis over which these values are partial sums."""
    occurrence: int = 0
    """Use of the module within one forward."""
    recompute: bool = False
    row_start: int
    row_count: int
    digest_start: int
    stats_start: int = -1
    """First line in sketch, sum_squares, abs_max and nonfinite; -1 where raw values or nothing is kept."""
    values_start: int = -1
    """First value in ``values`` (``row_count * columns`` of them); -1 where none is kept."""
    executions: int = 1
    """Module calls merged into this block, calls with no rows included."""


class Sequence(Record, frozen=True, kw_only=True):
    """One sequence of this run, as the host labelled it."""

    label: str
    """Unique inside the sequences' scope: equal labels on two processes of one scope are one sequence."""
    request: str = ""
    """The user's name for it (``t.requests``), else empty."""
    scope: str = ""
    """Data-parallel coordinate the label belongs to, for example ``dp=1``; empty without data parallelism."""
    salt: str = ""
    """Context besides token ids that conditions the sequence (adapter, image digests)."""
    start: int = 0
    """First position this trace could see; > 0 when tokens before it are unknown, so that its rows have no key."""
    row: str = ""
    """Batch row it came from (``forward/row``): documents packed in one row share it, in order."""


class SegmentHeader(Record, frozen=True, kw_only=True):
    """What a segment says about itself, in its safetensors metadata."""

    format: int
    number: int
    blocks: tuple[Block, ...]
    sequences: tuple[Sequence, ...] = ()
    """Sequences first seen in this segment; the shard's list is their concatenation."""


class SegmentInfo(Record, frozen=True, kw_only=True):
    """One finished segment, as the manifest lists it."""

    file: str
    size_bytes: int
    xxh3_128: str
    """32 hex digits over the whole file."""
    rows: int
    fingerprints: int


class Skipped(Record, frozen=True, kw_only=True):
    """Rows or forwards that were seen and deliberately not recorded."""

    reason: str
    """padding, dummy forward, warm-up, outside tokens= ..."""
    rows: int = 0
    forwards: int = 0


class NotComputed(Record, frozen=True, kw_only=True):
    """Rows that the host declares it never computed, or of which it could not tell an input. They are no absence."""

    sequence: str
    """Label of the sequence."""
    scope: str = ""
    positions: tuple[Span, ...]
    boundaries: tuple[str, ...] = ()
    """Names; empty means every boundary."""
    reason: str
    """last sampled token, cache hit from before the trace, logits not requested ..."""


class Counts(Record, frozen=True, kw_only=True):
    """What this process saw, over all boundaries."""

    forwards: int = 0
    """Root forwards recorded, those without rows included."""
    rows: int = 0
    """Token rows over all forwards (padding excluded, expert rows excluded)."""
    skipped: tuple[Skipped, ...] = ()


class Note(Record, frozen=True, kw_only=True):
    """Something the reader should know: a warning of the recorder, with a code that the docs explain."""

    code: str
    text: str


class PolicyMark(Record, frozen=True, kw_only=True):
    """``t.policy(version)``: holds for this forward and later ones."""

    forward: int
    version: str


class MapIdentity(Record, frozen=True, kw_only=True):
    """Which boundary map was used."""

    family: str
    host: str
    root_class: str
    digest: str
    """xxh3_128 over the resolved map as JSON: equal maps, equal digests."""


class Weight(Record, frozen=True, kw_only=True):
    """Fingerprint of one parameter or buffer by semantic name; rows are its output rows (1-D: one row)."""

    name: str
    parameter: str
    """The host's own name."""
    dtype: str
    rows: int
    """Rows of the whole logical parameter."""
    columns: int
    """Columns of the whole logical row."""
    row_spans: tuple[Span, ...] = ()
    """Rows held by this process; empty means all."""
    column_spans: tuple[Span, ...] = ()
    """Columns held by this process; empty means all."""
    digest: tuple[str, str] = ("", "")
    """Two lanes, 16 hex digits each: ``sum_r xxh3_64(le64(r), seed=4) * digest_r mod 2^64``, r the global row."""
    after: tuple[str, str] | None = None
    """The same at the end of the trace, where it was taken and differs."""
    buffer: bool = False
    start: int = -1
    """First line in ``weights.safetensors`` (weights="rows"), else -1."""
    unknown: str = ""
    """Why no fingerprint could be taken (repacked by the engine ...). Never compared as equal."""


class Manifest(Record, frozen=True, kw_only=True):
    """The commit of one shard."""

    format: int
    run_id: str
    tracer: str
    """Version of the package."""
    host: str
    rank: int = 0
    world_size: int = 1
    mesh: tuple[Axis, ...] = ()
    map: MapIdentity
    level: int
    boundaries: tuple[Boundary, ...]
    """Every boundary of the resolved map, in causal order, recorded or not."""
    counts: Counts = Counts()
    segments: tuple[SegmentInfo, ...] = ()
    not_computed: tuple[NotComputed, ...] = ()
    weights_mode: str = "digest"
    """digest, rows or none; none too where there are none and the map names none."""
    weights: tuple[Weight, ...] = ()
    weights_file: SegmentInfo | None = None
    dumps: tuple[SegmentInfo, ...] = ()
    """Files of raw values of this process, in the trace's folder ``dumps``."""
    weights_after: str = "unknown"
    """equal, changed or unknown: weights at exit against weights at entry."""
    policies: tuple[PolicyMark, ...] = ()
    conditions: dict[str, Any] = {}
    """Run conditions, nested plain JSON; what could not be found out is the string ``unknown``."""
    interventions: tuple[str, ...] = ()
    """feed, pin, perturb_ulps: anything that changed what the model computed."""
    replaced: dict[str, str] = {}
    """Boundary -> run id: its values were replaced by that run's after they were recorded (feed), so that what is computed
    from it starts from those."""
    notes: tuple[Note, ...] = ()
    complete: bool = True
    incomplete_reason: str = ""
    xxh3_128: str = ""
    """32 hex digits over everything else that the file says: the object without this key, written with all keys sorted and
    no white space."""
