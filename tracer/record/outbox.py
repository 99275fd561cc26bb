"""From the traced program to the shard: a bounded queue and the one thread that writes.

Hooks only append to a list; the list goes to the queue when a forward ends or grows long. The writer waits for
fingerprints still on their way from a device, so the traced program does not. When the writer falls behind, the
queue fills and the program waits for it: memory stays bounded, nothing is dropped. After a failure to write
everything is thrown away, the program goes on, and ``failure`` says why.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tracer.format.dtypes import AnyArray
from tracer.format.dumps import DumpBlock, DumpWriter
from tracer.format.schema import Sequence, Span
from tracer.format.store import RowSet, ShardWriter
from tracer.record.fingerprint_tensors import PendingFingerprints
from tracer.record.host import IntArray

__all__ = ["Observation", "Outbox", "SavedRows"]

_BATCH_ITEMS = 128
_QUEUED_BATCHES = 8


@dataclass(frozen=True, eq=False)
class Observation:
    """One execution of one source of a boundary: what ``ShardWriter.add`` needs."""

    boundary: str
    rows: RowSet
    fingerprints: PendingFingerprints
    dtype: str
    width: int
    spans: tuple[Span, ...] = ()
    partial: str = ""
    occurrence: int = 0
    recompute: bool = False
    executions: int = 1


@dataclass(frozen=True, eq=False)
class SavedRows:
    """Rows of one execution that are saved with their bytes: ``index_S`` of its ``rows``, ``finish`` gives uint8 (S, bytes)."""

    block: DumpBlock
    rows: RowSet
    index_S: IntArray
    fingerprints: PendingFingerprints
    finish: Callable[[], AnyArray]


@dataclass(frozen=True, eq=False)
class _Ids:
    sequence: int
    position: int
    ids: IntArray


_Item = Observation | SavedRows | Sequence | _Ids


class Outbox:
    """Everything on its way to one ``ShardWriter`` (and, where bytes are saved, a ``DumpWriter``). Fed by the traced program's
    threads, one at a time."""

    def __init__(self, writer: ShardWriter, dumps: DumpWriter | None = None) -> None:
        self._writer = writer
        self._dumps = dumps
        self._batch: list[_Item] = []
        self._queue: queue.Queue[list[_Item] | None] = queue.Queue(_QUEUED_BATCHES)
        self._thread = threading.Thread(target=self._write, name="tracer-writer", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        self.failure: Exception | None = None

    def open_sequence(self, sequence: Sequence) -> None:
        """A sequence got the next index."""
        self._batch.append(sequence)

    def add_ids(self, sequence: int, position: int, ids: IntArray) -> None:
        """Token ids of a sequence; the array is kept."""
        self._batch.append(_Ids(sequence, position, ids))

    def add(self, observation: Observation) -> None:
        """An execution of a boundary; may wait for the writer."""
        self._batch.append(observation)
        if len(self._batch) >= _BATCH_ITEMS:
            self.send()

    def save(self, saved: SavedRows) -> None:
        """Rows with their bytes, copied already or on their way."""
        self._batch.append(saved)

    def send(self) -> None:
        """Hand what has gathered to the writer; waits while the queue is full."""
        if self._batch:
            batch, self._batch = self._batch, []
            if self.failure is None and os.getpid() == self._process:
                self._queue.put(batch)

    def close(self) -> None:
        """Send the rest and wait until everything is with the ``ShardWriter``, which is then the caller's again. In a forked
        copy of the process there is no writer: nothing happens."""
        if os.getpid() != self._process:
            return
        self.send()
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self.failure is not None:
                continue
            try:
                for item in batch:
                    self._write_one(item)
            except Exception as error:  # whatever it is must reach the manifest, not the program
                self.failure = error

    def _write_one(self, item: _Item) -> None:
        if isinstance(item, Observation):
            self._writer.add(
                item.boundary,
                item.rows,
                item.fingerprints.resolve(),
                dtype=item.dtype,
                width=item.width,
                spans=item.spans,
                partial=item.partial,
                occurrence=item.occurrence,
                recompute=item.recompute,
                executions=item.executions,
            )
        elif isinstance(item, SavedRows):
            assert self._dumps is not None
            rows, index_S = item.rows, item.index_S
            digest_N2 = item.fingerprints.resolve().digest_N2[index_S]
            expert_N = None if rows.expert_R is None else rows.expert_R[index_S]
            self._dumps.add(item.block, digest_N2, item.finish(), rows.sequence_R[index_S], rows.position_R[index_S], expert_N)
        elif isinstance(item, Sequence):
            self._writer.open_sequence(item)
            if self._dumps is not None:
                self._dumps.open_sequence(item)
        else:
            self._writer.add_ids(item.sequence, item.position, item.ids)
