"""How fast two identical traces are compared, against reading the same files with safetensors and numpy alone.

The traces are written with the real ``ShardWriter``: a million rows by default, 100 boundaries of a decoder over
10 000 tokens. Both ways run in turn in one process, with the files in the page cache; medians count.

    python tools/bench_diff.py [--tokens 10000] [--boundaries 100] [--rounds 7] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import FORMAT_VERSION, Boundary, Counts, Manifest, MapIdentity, Sequence
from tracer.format.store import RowSet, ShardWriter
from tracer.read.diff import diff_traces
from tracer.read.load import load_trace
from tracer.read.stitch import stitch

SEQUENCES = 16


def write_trace(out: Path, tokens: int, names: list[str], seed: int) -> Path:
    """One process, one forward: ``tokens`` tokens of ``SEQUENCES`` sequences at every boundary."""
    random = np.random.default_rng(seed)
    writer = ShardWriter(out, 0)
    length = tokens // SEQUENCES
    sequence, position = np.divmod(np.arange(length * SEQUENCES), length)
    rows = RowSet(sequence, position, 0)
    for number in range(SEQUENCES):
        writer.open_sequence(Sequence(label=f"s{number}"))
        writer.add_ids(number, 0, random.integers(0, 150_000, length))
    count = len(rows)
    for name in names:
        found = Fingerprints(
            random.integers(0, 1 << 64, (count, 2), dtype=np.uint64),
            random.standard_normal((count, 16)).astype(np.float32),
            random.random(count),
            random.random(count).astype(np.float32),
            np.zeros(count, np.uint32),
        )
        writer.add(name, rows, found, dtype="bfloat16", width=4096)
    boundaries = tuple(
        Boundary(name=name, level=0, inputs=tuple(names[at - 1 : at]), dtype="bfloat16", width=4096, executions=1, row_count=count)
        for at, name in enumerate(names)
    )
    writer.commit(
        Manifest(
            format=FORMAT_VERSION,
            run_id="bench",
            tracer="bench",
            host="bench",
            map=MapIdentity(family="bench", host="bench", root_class="Bench", digest="0"),
            level=0,
            weights_mode="none",
            boundaries=boundaries,
            counts=Counts(forwards=1, rows=count),
        )
    )
    return out


def read_plainly(a: Path, b: Path) -> bool:
    """Every tensor of every file of both traces through safetensors, compared with numpy."""
    from safetensors.numpy import load_file

    equal = True
    for path in sorted(a.rglob("*.safetensors")):
        x, y = load_file(path), load_file(b / path.relative_to(a))
        equal &= all(np.array_equal(x[name], y[name]) for name in x)
    return equal


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Write two traces, time both ways, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--boundaries", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write the traces; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        names = ["embedding", *(f"layers.{layer}.residual" for layer in range(options.boundaries - 1))]
        a, b = (write_trace(Path(folder) / side, options.tokens, names, seed=1) for side in ("a", "b"))
        size = sum(path.stat().st_size for side in (a, b) for path in side.rglob("*.safetensors"))
        result = diff_traces(a, b)
        assert result.exit == 0, result.headline
        print(f"{result.counts.rows_compared} rows, {size / 2**20:.0f} MiB in both traces")
        ways: dict[str, Callable[[], object]] = {
            "safetensors + numpy": lambda: read_plainly(a, b),
            "diff": lambda: diff_traces(a, b),
            "  of it, hashing": lambda: (load_trace(a), load_trace(b)),
            "  hashing and stitching": lambda: (stitch(load_trace(a)), stitch(load_trace(b))),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, work in ways.items():
                taken[way].append(seconds(work))
        medians = {way: statistics.median(times) for way, times in taken.items()}
        for way, median in medians.items():
            print(f"{way:<24} {median * 1e3:8.1f} ms   {size / median / 2**30:6.2f} GiB/s")
        ratio = medians["safetensors + numpy"] / medians["diff"]
        print(f"speed of diff / speed of plain reading: {ratio:.2f} (aim: 0.5 or more)")


if __name__ == "__main__":
    main()
