"""Run id and folder, agreed between processes (``tracer.record.run_identity``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tracer.errors import UsageError
from tracer.record.run_identity import agree_on_run

ROOT = Path(__file__).parent.parent

PROCESS = """
import sys
import torch.distributed as dist
from tracer.record.run_identity import agree_on_run
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for out in (None, "named", None):
    run = agree_on_run(out, "small")
    print(run.run_id, run.out)
dist.destroy_process_group()
"""


def test_processes_of_one_group_agree(tmp_path: Path) -> None:
    """Without any collective, all processes of the default group take the id and folder of the first to ask; every
    trace has its own."""
    command = [sys.executable, "-c", PROCESS]
    children = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    first, second = (out.splitlines() for out, _ in said)
    assert first == second
    assert len({line.split()[0] for line in first}) == 3
    assert first[1].split()[1] == "named"


def test_alone_a_run_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without group or environment every run has another id, and a folder named after time, host and id."""
    monkeypatch.delenv("TRACER_RUN_ID", raising=False)
    monkeypatch.delenv("TRACER_OUT", raising=False)
    first, second = agree_on_run(None, "small"), agree_on_run(None, "small")
    assert first.run_id != second.run_id
    assert first.out.name.endswith(f"-small-{first.run_id}")
    assert (first.out.parent, first.named) == (Path("traces"), False)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TRACER_OUT`` overrides what was asked for, ``TRACER_RUN_ID`` names the run."""
    monkeypatch.setenv("TRACER_OUT", "there")
    monkeypatch.setenv("TRACER_RUN_ID", "run-7")
    run = agree_on_run("here", "small")
    assert (run.run_id, run.out, run.named) == ("run-7", Path("there"), True)


def test_an_empty_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TRACER_OUT`` that is set and empty is refused: the trace would lie where nobody looks."""
    monkeypatch.setenv("TRACER_OUT", "")
    with pytest.raises(UsageError, match="TRACER_OUT is empty"):
        agree_on_run("here", "small")
