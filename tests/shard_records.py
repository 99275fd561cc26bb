"""Traces of simulated ranks, cut from full tensors, for the tests of stitching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import Fingerprints, fingerprint_rows
from tracer.format.schema import Axis, Boundary, BoundaryStatus, Counts, Manifest, MapIdentity, Span
from tracer.format.schema import Sequence as SequenceInfo
from tracer.format.store import RowSet, ShardWriter
from tracer.read.load import load_trace
from tracer.read.logical import LogicalBoundary, LogicalTrace, Statistics
from tracer.read.stitch import stitch

Array = npt.NDArray[Any]
Row = tuple[str, int]

IDS = {"s0": list(range(11, 18)), "s1": list(range(21, 26))}
"""Token ids of the two sequences the tests use: 7 and 5 tokens."""
ROWS = [(label, position) for label, ids in IDS.items() for position in range(len(ids))]
"""The 12 rows of both, in order."""


def values(width: int, seed: int = 42, count: int = len(ROWS)) -> Array:
    """Random float32 rows, (count, width)."""
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


class Rank:
    """One simulated process: records slices of full tensors into its shard, then commits."""

    def __init__(self, out: Path, rank: int = 0, world: int = 1, mesh: Mapping[str, tuple[int, int]] | None = None) -> None:
        """``mesh``: axis -> (index, size)."""
        self.writer = ShardWriter(out, rank)
        self.rank, self.world = rank, world
        self.mesh = tuple(Axis(name=name, index=index, size=size) for name, (index, size) in (mesh or {}).items())
        self.boundaries: dict[str, Boundary] = {}
        self.labels: dict[str, int] = {}
        self.rows_of_part: Counter[tuple[str, tuple[Span, ...]]] = Counter()

    def open(self, label: str, ids: Sequence[int] | None = None, **fields: Any) -> int:
        """Open a sequence, or find it again, and record its ids where given."""
        if label not in self.labels:
            self.labels[label] = self.writer.open_sequence(SequenceInfo(label=label, **fields))
        if ids is not None:
            self.writer.add_ids(self.labels[label], 0, np.array(ids, np.int64))
        return self.labels[label]

    def ids(self, known: Mapping[str, Sequence[int]] = IDS) -> Rank:
        """Record the token ids of sequences."""
        for label, ids in known.items():
            self.open(label, ids)
        return self

    def row_set(self, rows: Iterable[Row], forward: int = 0, experts: Sequence[int] | None = None) -> RowSet:
        """Rows as the store takes them."""
        rows = list(rows)
        return RowSet(
            np.array([self.open(label) for label, _ in rows], np.int64),
            np.array([position for _, position in rows], np.int64),
            forward,
            None if experts is None else np.array(experts, np.int64),
        )

    def add(
        self,
        name: str,
        tensor: Array,
        rows: Iterable[Row] | RowSet = ROWS,
        *,
        take: Sequence[int] | None = None,
        spans: tuple[Span, ...] = (),
        forward: int = 0,
        experts: Sequence[int] | None = None,
        dtype: str = "float32",
        padding: int = 0,
        fields: Mapping[str, Any] | None = None,
        **block: Any,
    ) -> Rank:
        """Record rows ``take`` (default all) and columns ``spans`` (default all) of a full tensor, with ``padding`` columns
        behind them that are no part of it. ``fields``: of the manifest's boundary."""
        if not isinstance(rows, RowSet):
            listed = list(rows)
            index = list(range(len(listed))) if take is None else list(take)
            tensor = tensor[index]
            rows = self.row_set([listed[i] for i in index], forward, None if experts is None else [experts[i] for i in index])
        width = tensor.shape[1]
        held = np.concatenate([tensor[:, start:stop] for start, stop in spans], axis=1) if spans else tensor
        held = np.pad(held, ((0, 0), (0, padding)), mode="constant", constant_values=7) if padding else held
        found = fingerprint_rows(np.ascontiguousarray(held), dtype, width=width, spans=spans)
        self.writer.add(name, rows, found, dtype=dtype, width=width, spans=spans, **block)
        self.declare(name, **(fields or {}))
        if block.get("recompute"):
            self._count(name, recomputed=1)
        else:
            before = max((held for (of, _), held in self.rows_of_part.items() if of == name), default=0)
            self.rows_of_part[name, spans] += len(rows)
            self._count(name, executions=1, row_count=max(0, self.rows_of_part[name, spans] - before))
        return self

    def declare(self, name: str, **fields: Any) -> Rank:
        """A boundary of this rank's map, in the order of first mention."""
        known = self.boundaries.get(name, Boundary(name=name, level=0))
        self.boundaries[name] = msgspec.structs.replace(known, **fields)
        return self

    def _count(self, name: str, **added: int) -> None:
        known = self.boundaries[name]
        self.boundaries[name] = msgspec.structs.replace(known, **{field: getattr(known, field) + count for field, count in added.items()})

    def vacuous(self, name: str, reason: str = "compiled region") -> Rank:
        """A boundary that should have been recorded and was not."""
        return self.declare(name, status=BoundaryStatus.VACUOUS, reason=reason)

    def commit(self, **changes: Any) -> None:
        """Write the manifest."""
        plain = Manifest(
            format=1,
            run_id="run",
            tracer="0",
            host="test",
            rank=self.rank,
            world_size=self.world,
            mesh=self.mesh,
            map=MapIdentity(family="tiny", host="test", root_class="Tiny", digest="0"),
            level=2,
            weights_mode="none",
            boundaries=tuple(self.boundaries.values()),
            counts=Counts(forwards=1, rows=1),
        )
        self.writer.commit(msgspec.structs.replace(plain, **changes))


def tensor_parallel(out: Path, size: int) -> list[Rank]:
    """Ranks along one axis, each knowing all ids."""
    return [Rank(out, rank, size, {"tp": (rank, size)}).ids() for rank in range(size)]


def commit_all(ranks: Iterable[Rank]) -> None:
    """Commit every rank."""
    for rank in ranks:
        rank.commit()


def stitched(out: Path, *, reverse: bool = False) -> LogicalTrace:
    """Load and stitch; ``reverse``: with the shards given in the other order."""
    files = load_trace(out)
    if reverse:
        object.__setattr__(files, "shards", files.shards[::-1])
    return stitch(files)


def assert_holds(boundary: LogicalBoundary, tensor: Array, dtype: str = "float32") -> None:
    """A stitched boundary equals the fingerprints of the whole tensor, rows in table order."""
    whole: Fingerprints = fingerprint_rows(tensor, dtype)
    assert len(boundary) == len(tensor)
    np.testing.assert_array_equal(boundary.digest_R2, whole.digest_N2)
    statistics = boundary.load_statistics()
    if whole.sketch_N16 is None:
        assert statistics is None
        np.testing.assert_array_equal(boundary.load_values(), whole.values_NC)
        return
    assert isinstance(statistics, Statistics)
    assert boundary.load_values() is None
    assert whole.sum_squares_N is not None
    scale = float(np.sqrt(whole.sum_squares_N.max(initial=1e-30)))
    np.testing.assert_allclose(statistics.sketch_R16, whole.sketch_N16, atol=1e-5 * scale)
    np.testing.assert_allclose(statistics.sum_squares_R, whole.sum_squares_N)
    np.testing.assert_array_equal(statistics.abs_max_R, whole.abs_max_N)
    np.testing.assert_array_equal(statistics.nonfinite_R, whole.nonfinite_N)
