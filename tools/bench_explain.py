"""What a comparison with dumps and explanations costs on a large pair: 94 layers, 4096 tokens, level 1.

Both traces are written with the real writers: embedding, per layer attention and MLP outputs, router logits, expert ids and weights,
combined output and residual, final norm and scores. From one layer on the sides differ, and the rows of the first
difference are dumped up to the default cap. Memory is that of this process at its largest.

    python tools/bench_explain.py [--layers 94] [--tokens 4096] [--width 4096] [--folder DIR]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from tracer.format.dumps import DumpBlock, DumpWriter
from tracer.format.fingerprint import Fingerprints, fingerprint_rows
from tracer.format.schema import FORMAT_VERSION, Boundary, Counts, Manifest, MapIdentity, Sequence
from tracer.format.store import RowSet, ShardWriter
from tracer.read.diff import diff_traces

SEQUENCES = 8
EXPERTS, CHOSEN = 128, 8
CAP = 64 << 20


def catalogue(layers: int) -> list[Boundary]:
    """Boundaries of a mixture-of-experts decoder at level 1."""
    found = [Boundary(name="embedding", level=0)]
    stream = "embedding"
    for layer in range(layers):
        at = f"layers.{layer}"
        found += [
            Boundary(name=f"{at}.attn.out", level=1, inputs=(stream,), mixes_tokens=True),
            Boundary(name=(scores := f"{at}.moe.router_logits"), level=1, inputs=(stream, f"{at}.attn.out")),
            Boundary(name=f"{at}.moe.topk_ids", level=1, inputs=(scores,), discrete=True, scores=scores),
            Boundary(name=f"{at}.moe.topk_weights", level=1, inputs=(scores, f"{at}.moe.topk_ids")),
            Boundary(name=f"{at}.moe.combine", level=1, inputs=(stream, f"{at}.attn.out", f"{at}.moe.topk_ids", f"{at}.moe.topk_weights")),
            Boundary(name=f"{at}.residual", level=0, inputs=(stream, f"{at}.attn.out", f"{at}.moe.combine")),
        ]
        stream = f"{at}.residual"
    return [*found, Boundary(name="final_norm", level=0, inputs=(stream,)), Boundary(name="lm_head", level=0, inputs=("final_norm",))]


def write_trace(out: Path, layers: int, tokens: int, width: int, *, fault: int, side: str) -> None:
    """One process, one forward. Side B differs from layer ``fault`` on: its attention output is 1.05 times that of A."""
    writer = ShardWriter(out, 0)
    length = tokens // SEQUENCES
    sequence, position = np.divmod(np.arange(length * SEQUENCES), length)
    rows, count = RowSet(sequence, position, 0), length * SEQUENCES
    ids = np.random.default_rng(0)
    sequences = [Sequence(label=f"s{number}") for number in range(SEQUENCES)]
    for number, entry in enumerate(sequences):
        writer.open_sequence(entry)
        writer.add_ids(number, 0, ids.integers(0, 150_000, length))
    dumps = DumpWriter(out, 0, f"bench-{side}", "bench", CAP)
    for entry in sequences:
        dumps.open_sequence(entry)
    boundaries = []
    apart = False
    for number, info in enumerate(catalogue(layers)):
        random = np.random.default_rng([number, int(apart and side == "b")])
        apart = apart or info.name == f"layers.{fault}.attn.out"
        if info.discrete:
            values = np.sort(random.integers(0, EXPERTS, (count, CHOSEN)), axis=1)
            writer.add(info.name, rows, fingerprint_rows(values, "int64"), dtype="int64", width=CHOSEN)
            boundaries.append(_seen(info, "int64", CHOSEN, count))
            continue
        columns = EXPERTS if "router" in info.name else CHOSEN if "topk" in info.name else width
        found = Fingerprints(
            random.integers(0, 1 << 64, (count, 2), dtype=np.uint64),
            random.standard_normal((count, 16)).astype(np.float32),
            16 + random.random(count),
            random.random(count).astype(np.float32),
            np.zeros(count, np.uint32),
        )
        if info.name == f"layers.{fault}.attn.out":
            values = np.random.default_rng(1).standard_normal((count, width)).astype(np.float32) * (1.05 if side == "b" else 1)
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
            found = fingerprint_rows(stored, "bfloat16")
            kept = min(count, CAP // (2 * width))
            block = DumpBlock(boundary=info.name, dtype="bfloat16", width=width, forward=0, rows=kept)
            raw = stored[:kept].view(np.uint8).reshape(kept, -1)
            dumps.add(block, found.digest_N2[:kept], raw, sequence[:kept], position[:kept], None)
        writer.add(info.name, rows, found, dtype="bfloat16", width=columns)
        boundaries.append(_seen(info, "bfloat16", columns, count))
    writer.commit(
        Manifest(
            format=FORMAT_VERSION, run_id=f"bench-{side}", tracer="bench", host="bench", level=1, weights_mode="none",
            boundaries=tuple(boundaries),
            map=MapIdentity(family="bench", host="bench", root_class="Bench", digest="0"), counts=Counts(forwards=1, rows=count),
            dumps=dumps.finish(),
        )
    )  # fmt: skip


def _seen(info: Boundary, dtype: str, width: int, rows: int) -> Boundary:
    return msgspec.structs.replace(info, dtype=dtype, width=width, executions=1, row_count=rows)


def main() -> None:
    """Write the pair, compare it, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where to write the traces; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        for side, out in (("a", a), ("b", b)):
            write_trace(out, options.layers, options.tokens, options.width, fault=options.layers // 3, side=side)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        start, cpu = time.perf_counter(), time.process_time()
        result = diff_traces(a, b)
        taken, cpu = time.perf_counter() - start, time.process_time() - cpu
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert any("times 1.05" in found.text for found in result.explanations), result.explanations
    assert result.dumps
    print(f"{result.counts.rows_compared} rows at {result.counts.boundaries_compared} boundaries, {size / 2**20:.0f} MiB in both traces")
    print(result.headline)
    for found in result.explanations:
        print(f"  {found.boundary}: {found.text} [{found.source}]")
    print(f"diff with dumps and explain: {taken:.1f} s ({cpu:.1f} s of CPU; aim: below 30 s)")
    print(f"memory: {after:.2f} GiB at most, {before:.2f} GiB of it before (aim: below 4 GiB)")


if __name__ == "__main__":
    main()
