"""What stitching costs: one rank, tensor parallel over 8 and 512 ranks, and layouts that spread rows.

Every case holds the same logical rows (``--rows`` fingerprints over the boundaries of a small decoder), cut as the layout would
cut them. Prints one Markdown row per case for ``docs/explanation/performance.md``: loading with checksums, stitching,
the shards' bytes, and the peak of resident memory of a fresh process that loads and stitches.

Warm means that all files are in the page cache, which is how they are right after a run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Axis, Boundary, Counts, Manifest, MapIdentity, Sequence, Span
from tracer.format.store import RowSet, ShardWriter
from tracer.read.load import load_trace
from tracer.read.stitch import stitch

HEADER = "| case | ranks | fingerprints on disk | MiB on disk | load + checksums ms | stitch ms | peak MiB |\n|---|---|---|---|---|---|---|"
WIDTH = 4096
SLICED = ("attn.q", "attn.core", "mlp.act")
"""Cut by column under tensor parallelism; the others are copies on every rank."""
COPIED = ("attn.norm", "attn.out", "mlp.norm", "mlp.out", "residual")
TOKENS_PER_SEQUENCE = 512


def boundary_names(count: int) -> list[str]:
    """Names of a decoder with as many layers as it takes, in causal order."""
    order = ("attn.norm", "attn.q", "attn.core", "attn.out", "mlp.norm", "mlp.act", "mlp.out", "residual")
    return [f"layers.{index // len(order)}.{order[index % len(order)]}" for index in range(count)]


class Layout:
    """A mesh, and what each rank holds. ``tp``: cuts SLICED by columns. ``cp``: cuts all rows in two chunks per rank, zigzag.
    ``shuffle``: rows of each forward in random order. ``steps``: the same rows over so many forwards."""

    def __init__(self, name: str, tp: int = 1, cp: int = 1, *, copies: bool = True, shuffle: bool = False, steps: int = 1) -> None:
        self.name, self.tp, self.cp, self.copies, self.shuffle, self.steps = name, tp, cp, copies, shuffle, steps

    def _sliced(self, name: str) -> bool:
        return name.endswith(SLICED) and self.tp > 1

    def write(self, out: Path, tokens: int, names: list[str]) -> None:
        """Write every shard. Slices get digests that are valid in form; copies are equal."""
        random = np.random.default_rng(0)
        sequences = -(-tokens // TOKENS_PER_SEQUENCE)
        sequence, position = np.divmod(np.arange(tokens), TOKENS_PER_SEQUENCE)
        order = random.permutation(tokens) if self.shuffle else np.arange(tokens)
        world = self.tp * self.cp
        pool = {name: random.integers(0, 1 << 64, (tokens, 2), dtype=np.uint64) for name in names}
        sketch = np.zeros((tokens, 16), np.float32)
        plain, small, counts = np.ones(tokens), np.ones(tokens, np.float32), np.zeros(tokens, np.uint32)
        for rank in range(world):
            cp, tp = divmod(rank, self.tp)
            chunks = np.array_split(order, 2 * self.cp)
            mine = np.concatenate([chunks[cp], chunks[2 * self.cp - 1 - cp]])
            writer = ShardWriter(out, rank)
            for index in range(sequences):
                writer.open_sequence(Sequence(label=f"s{index}"))
                writer.add_ids(index, 0, np.arange(TOKENS_PER_SEQUENCE) * 7 + index)
            held = [name for name in names if self.copies or not tp or self._sliced(name)]
            for step, lines in enumerate(np.array_split(mine, self.steps)):
                rows = RowSet(sequence[lines], position[lines], step)
                for name in held:
                    sliced = self._sliced(name)
                    spans: tuple[Span, ...] = ((WIDTH // self.tp * tp, WIDTH // self.tp * (tp + 1)),) if sliced else ()
                    found = Fingerprints(pool[name][lines], sketch[lines], plain[lines], small[lines], counts[lines])
                    writer.add(name, rows, found, dtype="bfloat16", width=WIDTH, spans=spans)
            writer.commit(
                Manifest(
                    format=1,
                    run_id="bench",
                    tracer="0",
                    host="bench",
                    rank=rank,
                    world_size=world,
                    mesh=(Axis(name="cp", index=cp, size=self.cp), Axis(name="tp", index=tp, size=self.tp)),
                    map=MapIdentity(family="bench", host="bench", root_class="Bench", digest="0"),
                    level=2,
                    weights_mode="none",
                    boundaries=tuple(
                        Boundary(name=name, level=1, dtype="bfloat16", width=WIDTH, executions=self.steps, row_count=len(mine))
                        for name in held
                    ),
                    counts=Counts(forwards=self.steps, rows=len(mine)),
                )
            )


def milliseconds(action: Callable[[], object], repeats: int) -> float:
    """Fastest of some runs, after one to warm up: what else the machine does only ever adds."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def peak_mebibytes(out: Path) -> float:
    """Peak resident memory of a process that loads and stitches a trace, mapped pages included."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(out)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="logical fingerprints per case (default 1000000)")
    parser.add_argument("--boundaries", type=int, default=40, help="boundaries they are spread over (default 40)")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs per case (default 7)")
    parser.add_argument("--many", type=int, default=512, help="ranks of the large case (default 512)")
    parser.add_argument("--many-rows", type=int, default=20_000, help="logical fingerprints of the large case (default 20000)")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--peak", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        stitch(load_trace(options.peak))
        status = Path("/proc/self/status").read_text()
        print(next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")))
        return
    names = boundary_names(options.boundaries)
    cases = [
        (Layout("one rank"), options.rows),
        (Layout("one rank, 64 forwards", steps=64), options.rows),
        (Layout("one rank, shuffled rows", shuffle=True), options.rows),
        (Layout("TP8, copies on every rank", tp=8), options.rows),
        (Layout("TP8, copies recorded once", tp=8, copies=False), options.rows),
        (Layout("CP8", cp=8), options.rows),
        (Layout("CP2 x TP4, shuffled rows", tp=4, cp=2, shuffle=True), options.rows),
        (Layout(f"TP{options.many}", tp=options.many), options.many_rows),
        (Layout(f"CP{options.many // 8} x TP8", tp=8, cp=options.many // 8), options.many_rows * options.many // 8),
    ]
    print(HEADER)
    for layout, rows in cases:
        if options.only not in layout.name:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            layout.write(folder / "trace", rows // len(names), names)
            files = load_trace(folder / "trace")
            size = sum(info.size_bytes for shard in files.shards if shard.manifest for info in shard.manifest.segments)
            count = sum(info.fingerprints for shard in files.shards if shard.manifest for info in shard.manifest.segments)
            repeats = options.repeats if len(files.shards) < 64 else 1
            load = milliseconds(lambda: load_trace(folder / "trace"), repeats)  # noqa: B023
            join = milliseconds(lambda: stitch(files), repeats)  # noqa: B023
            assert stitch(files).findings == ()
            peak = peak_mebibytes(folder / "trace")
            print(
                f"| {layout.name} | {len(files.shards)} | {count} | {size / 2**20:.0f} | {load:.0f} | {join:.0f} | {peak:.0f} |", flush=True
            )
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
