"""Runs of hundreds of processes: what reading them costs grows with their bytes, and fits into little memory.

The shards are written by one process. Nothing here looks at a clock: a run of the reader in a process of its own counts
what it opens, what it calls and what it holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.shard_records import Rank

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROWS, LAYERS = 512, 32, 2
READER = """
import cProfile, json, os, resource, sys, tracemalloc
import tracer.read.diff
from tracer import diff_traces

a, b = sys.argv[1:]
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" and str(given[0]).startswith(b) else None)
calls = cProfile.Profile()
tracemalloc.start()
calls.enable()
result = diff_traces(a, b)
calls.disable()
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "exit": result.exit, "rows": result.counts.rows_compared, "copies": max(one.copies_b for one in result.boundaries),
    "opens": len(opened), "calls": sum(entry.callcount for entry in calls.getstats()),
    "held": tracemalloc.get_traced_memory()[1], "resident": resident * (1 if sys.platform == "darwin" else 1024),
}))
"""


def write_world(out: Path, tp: int, dp: int) -> int:
    """``tp`` x ``dp`` ranks, every data-parallel one with a sequence of its own: cut, copied and narrow boundaries of a decoder.
    The bytes written."""
    random = np.random.default_rng(7)
    names = [f"layers.{n}.{name}" for n in range(LAYERS) for name in ("attn.q", "mlp.act", "attn.out", "residual")]
    whole = {name: random.standard_normal((ROWS, WIDTH)).astype(np.float32) for name in names}

    def write(rank: int) -> None:
        data, cut = divmod(rank, tp)
        shard = Rank(out, rank, tp * dp, {"dp": (data, dp), "tp": (cut, tp)})
        label, ids = f"s{data}", [1000 * data + n for n in range(ROWS)]
        shard.open(label, ids, scope=f"dp={data}")
        rows = shard.row_set([(label, position) for position in range(ROWS)])
        shard.add("input.ids", np.array(ids)[:, None], rows, dtype="int64")
        span = (WIDTH * cut // tp, WIDTH * (cut + 1) // tp)
        for name in names:
            shard.add(name, whole[name], rows, spans=(span,) if tp > 1 and name.endswith(("attn.q", "mlp.act")) else ())
        shard.commit(run_id=out.name)

    with ThreadPoolExecutor(8) as pool:  # each waits for the disk
        list(pool.map(write, range(tp * dp)))
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def read(a: Path, b: Path) -> dict[str, Any]:
    """What a diff says, and what it costs in a process of its own."""
    command = [sys.executable, "-c", READER, str(a), str(b)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_reading_grows_with_the_bytes(tmp_path: Path) -> None:
    """TP8 x DP64 and TP8 x DP8 are the same as DP alone; eight times the shards take eight times the opens, calls and memory at most,
    far below 2 GiB. Beyond what can be mapped at once, the parts of a file that are asked for are read, none of them twice."""
    found: dict[int, dict[str, Any]] = {}
    size: dict[int, int] = {}
    for dp in (8, 64):
        write_world(tmp_path / f"a{dp}", 1, dp)
        size[dp] = write_world(tmp_path / f"b{dp}", 8, dp)
        found[dp] = read(tmp_path / f"a{dp}", tmp_path / f"b{dp}")
        blocks = 8 * dp * (1 + 4 * LAYERS)
        assert (found[dp]["exit"], found[dp]["copies"], found[dp]["rows"]) == (0, 8, dp * ROWS * (1 + 4 * LAYERS))
        assert found[dp]["opens"] < 2 * blocks + 12 * 8 * dp
        assert found[dp]["resident"] < 2 << 30
    assert found[64]["held"] < size[64] < 8.5 * size[8]
    for cost in ("calls", "held"):
        assert found[64][cost] < 8.5 * found[8][cost], cost
