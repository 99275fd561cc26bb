"""The bounded queue and the thread that writes (``tracer.record.outbox``)."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np

from tracer.errors import CaptureError, Code
from tracer.format.fingerprint import Fingerprints, fingerprint_rows
from tracer.format.schema import Sequence
from tracer.format.store import RowSet, ShardWriter
from tracer.record.fingerprint_tensors import PendingFingerprints
from tracer.record.outbox import Observation, Outbox


def observation(n: int, finish: object = None) -> Observation:
    rows = RowSet(np.zeros(2, np.int64), np.arange(2) + 2 * n, n)
    taken = fingerprint_rows(np.full((2, 3), n, np.float32), "float32")

    def resolve() -> Fingerprints:
        if callable(finish):
            finish()
        return taken

    return Observation("b", rows, PendingFingerprints(resolve), "float32", 3)


def test_everything_reaches_the_writer_in_order(tmp_path: Path) -> None:
    """More than the queue holds at once is written, sequences before the rows that name them."""
    writer = ShardWriter(tmp_path / "trace", 0, flush_bytes=1 << 14)
    outbox = Outbox(writer)
    outbox.open_sequence(Sequence(label="a"))
    outbox.add_ids(0, 0, np.arange(4))
    for n in range(3000):
        outbox.add(observation(n))
    outbox.close()
    assert outbox.failure is None
    assert writer.sequence_count == 1
    assert list((tmp_path / "trace" / "shard-00000").glob("segment-*"))


def test_a_full_queue_makes_the_program_wait(tmp_path: Path) -> None:
    """While the writer waits for one fingerprint the queue stays bounded: adding blocks instead of piling up."""
    outbox = Outbox(ShardWriter(tmp_path / "trace", 0))
    gate, added = threading.Event(), threading.Event()
    outbox.open_sequence(Sequence(label="a"))

    def feed() -> None:
        outbox.add(observation(0, gate.wait))
        for n in range(1, 3000):
            outbox.add(observation(n))
        added.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert not added.wait(0.5)
    gate.set()
    assert added.wait(30)
    feeder.join()
    outbox.close()
    assert outbox.failure is None


def test_a_failure_to_write_is_kept_and_the_program_goes_on(tmp_path: Path) -> None:
    """After a failed write everything is thrown away without blocking, and the failure is there to be told."""
    writer = ShardWriter(tmp_path / "trace", 0, flush_bytes=1)
    outbox = Outbox(writer)
    shutil.rmtree(tmp_path / "trace")
    outbox.open_sequence(Sequence(label="a"))
    for n in range(5000):
        outbox.add(observation(n))
    outbox.close()
    assert isinstance(outbox.failure, CaptureError)
    assert outbox.failure.code is Code.WRITE_FAILED


def test_a_failure_of_a_device_is_kept(tmp_path: Path) -> None:
    """A fingerprint that cannot be fetched is a failure like any other."""

    def fail() -> None:
        raise RuntimeError("device lost")

    outbox = Outbox(ShardWriter(tmp_path / "trace", 0))
    outbox.open_sequence(Sequence(label="a"))
    outbox.add(observation(0, fail))
    outbox.close()
    assert str(outbox.failure) == "device lost"
