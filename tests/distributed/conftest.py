"""Sharded runs of tiny real models, all recorded before the first test, and the traces of one process they are held against."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import environment
from tracer import diff_traces
from tracer.read.findings import DiffResult

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Runs:
    """What ``worker.py`` recorded: traces in ``root/WORLD/FAMILY-LAYOUT``."""

    root: Path

    def path(self, case: str, world: int) -> Path:
        """The trace of a case. One that raised fails the test with its traceback."""
        path = self.root / str(world) / case.replace(":", "-")
        for rank in range(world):
            raised = path.with_suffix(f".rank{rank}")
            assert not raised.exists(), raised.read_text()
        return path

    def against_one_process(self, case: str, world: int) -> DiffResult:
        """The diff of the trace of one process and that of a case, both with the same batches."""
        family, _, layout = case.partition(":")
        batches = re.search("_(each|short)$", layout)
        return diff_traces(self.path(f"{family}:whole{batches[0] if batches else ''}", 1), self.path(case, world))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every case, recorded once."""
    root = tmp_path_factory.mktemp("sharded")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), str(root)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return Runs(root)
