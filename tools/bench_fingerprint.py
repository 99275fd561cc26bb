"""How fast fingerprints are taken: GiB/s per dtype, width and threads, against reading the same bytes.

    python tools/bench_fingerprint.py [--threads 1 2] [--dtypes float32 bfloat16] [--json FILE]

Every figure is the best of several interleaved rounds, so that a busy machine disturbs it least. ``read`` is one torch
sum over the bytes as int64, ``clone`` a copy of them, each on as many threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tracer.record.fingerprint_tensors import fingerprint_on_device, fingerprint_tensor

SHAPES = ((1, 1024), (16, 1024), (512, 128), (512, 1024), (512, 3072), (512, 32768))
"""Rows and columns: one decoded token, a small batch, and what a 512-token forward shows."""


def best_seconds(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Shortest time of each action over interleaved rounds, after one round that is not counted."""
    best = dict.fromkeys(actions, float("inf"))
    for number in range(rounds + 1):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            if number:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def measure(rows: int, columns: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of every way to go through one random tensor."""
    tensor = torch.randn(rows, columns).to(dtype)
    words = tensor.view(torch.uint8).reshape(-1).view(torch.int64)
    copy = torch.empty_like(tensor)
    actions: dict[str, Callable[[], object]] = {
        "fingerprint": lambda: fingerprint_tensor(tensor, width=columns).resolve(),
        "torch": lambda: fingerprint_on_device(tensor, width=columns).resolve(),
        "read": words.sum,
        "clone": lambda: copy.copy_(tensor),
    }
    return best_seconds(actions, rounds)


def main() -> None:
    """Print one line per case, and write them as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "float8_e4m3fn", "float64"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = []
    print("dtype           rows x columns threads  microseconds   GiB/s  torch path    read   clone")
    for dtype in arguments.dtypes:
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for rows, columns in SHAPES:
                kind: torch.dtype = getattr(torch, dtype)
                seconds = measure(rows, columns, kind, arguments.rounds * (1 if rows * columns > 1 << 22 else 4))
                gib = rows * columns * kind.itemsize / 2**30
                rate = {name: gib / value for name, value in seconds.items()}
                case = {"dtype": dtype, "rows": rows, "columns": columns, "threads": threads}
                lines.append(case | {"seconds": seconds, "gib_per_s": rate})
                microseconds = seconds["fingerprint"] * 1e6
                print(f"{dtype:<14} {f'{rows} x {columns}':>15} {threads:>7} {microseconds:>13.1f}", end="")
                print(f" {rate['fingerprint']:>7.2f} {rate['torch']:>11.2f} {rate['read']:>7.1f} {rate['clone']:>7.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
