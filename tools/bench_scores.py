"""Time ``compare_scores`` on a million tokens: five scores, honest and with a fault, in memory and from a file.

A thousand long requests, and ten thousand short ones.

python tools/bench_scores.py [--tokens N] [--requests Q ...]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from tracer.format.score_file import write_scores
from tracer.format.score_records import ScoreName, ScoreRecord, make_score
from tracer.scores.score_comparison import compare_scores

_SCORED = (ScoreName.A, ScoreName.B0, ScoreName.C0)


def records(tokens: int, requests: int, offset: float) -> list[ScoreRecord]:
    """Requests of equal length, groups of eight siblings, bfloat16-sized noise."""
    generator = np.random.default_rng(0)
    length = tokens // requests
    made = []
    for q in range(requests):
        clean = -generator.exponential(1.0, length) - 0.2
        columns = {name: (clean + 0.006 * generator.standard_normal(length)).astype(np.float32) for name in _SCORED}
        columns |= {ScoreName.B1: columns[ScoreName.B0], ScoreName.C1: columns[ScoreName.C0]}
        columns[ScoreName.A] = columns[ScoreName.A] + np.float32(offset)
        ids = np.concatenate([np.full(64, q // 8), generator.integers(0, 2, 4), generator.integers(0, 100_000, length - 4)])
        scores = {name: make_score(values) for name, values in columns.items()}
        made.append(ScoreRecord(request=str(q), ids=ids, prompt_length=64, scores=scores, group=str(q // 8)))
    return made


def main() -> None:
    """Print seconds per case, best of three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, nargs="+", default=[1_000, 10_000])
    given = parser.parse_args()
    cases = [(requests, *case) for requests in given.requests for case in (("honest", 0.0), ("constant offset on A", -0.1))]
    with tempfile.TemporaryDirectory() as folder:
        for requests, kind, offset in cases:
            made = records(given.tokens, requests, offset)
            name = f"{requests} x {given.tokens // requests}, {kind}"
            path = write_scores(Path(folder) / f"{name}.safetensors", made)
            for where, source in (("in memory", made), ("from a file", path)):
                seconds = []
                for _ in range(3):
                    start, cpu = time.perf_counter(), time.process_time()
                    result = compare_scores(source)
                    seconds.append((time.perf_counter() - start, time.process_time() - cpu))
                wall, cpu_seconds = min(seconds)
                print(f"{name}, {where}: {wall:.2f} s wall, {cpu_seconds:.2f} s of processor time: {result.decision.branch.value}")


if __name__ == "__main__":
    main()
