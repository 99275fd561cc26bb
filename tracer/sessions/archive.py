"""What a session keeps: one folder per run of a command, and an index that lists them all.

```
session/
  index.json                 every run: status, evidence, command, times; written before a run starts and after it ends
  0001-coarse-a/             one run of one command, never used twice
    stdout.log  stderr.log   what it printed, secrets taken out
    plan.json                what it was asked to save, if anything
    trace/                   what it recorded
```

Nothing is overwritten: a run that was interrupted keeps its folder and gets a successor; a conclusion that no longer
holds is marked with the reason. The index survives a killed process at every step: it is replaced in one step.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tracer.errors import Code, UsageError

__all__ = ["Archive", "Run", "RunStatus", "locked", "read_state", "write_state"]

_State = TypeVar("_State", bound=msgspec.Struct)


class RunStatus(str, Enum):
    """How a run of a command ended."""

    RUNNING = "running"
    """Begun; if nobody runs it any more, it was interrupted."""
    DONE = "done"
    FAILED = "failed"
    """It exited with an error."""
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    NO_TRACE = "no trace"
    """It exited without a complete trace."""
    VACUOUS = "vacuous"
    """It ran, yet what it should have shown never executed."""


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One run of one command. ``environment``: only what was set for it, secrets taken out. ``weights``: one digest over the
    weights it held; ``policy``, ``image``: as its trace says. ``invalidated``: why what was concluded from it no longer holds."""

    id: str
    purpose: str
    command: str
    folder: str
    environment: dict[str, str] = {}
    started: str = ""
    elapsed_seconds: float | None = None
    exit_status: int | None = None
    status: RunStatus = RunStatus.RUNNING
    reason: str = ""
    weights: str = ""
    policy: str = ""
    image: str = ""
    evidence: str = ""
    invalidated: str = ""


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    runs: tuple[Run, ...] = ()


class Archive:
    """The runs of one session folder."""

    VERSION = 1

    def __init__(self, folder: Path) -> None:
        """Opens the archive in a folder, which may be new. Raises ``UsageError`` (session-damaged)."""
        self.folder = folder
        self._file = folder / "index.json"
        self._runs: dict[str, Run] = {}
        if self._file.exists():
            index = read_state(self._file, _Index, self.VERSION)
            self._runs = {run.id: run for run in index.runs}

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __getitem__(self, name: str) -> Run:
        return self._runs[name]

    def begin(self, purpose: str, command: str, environment: dict[str, str], started: str) -> Run:
        """A new run with a folder of its own; it is in the index before anything runs."""
        number = 1 + max((int(run.id[:4]) for run in self), default=0)
        while True:
            name = f"{number:04d}-{purpose}"
            try:
                (self.folder / name).mkdir(parents=True)
                break
            except FileExistsError:
                number += 1  # left behind by a process that died before its index was written
        run = Run(id=name, purpose=purpose, command=command, folder=name, environment=environment, started=started)
        return self.keep(run)

    def keep(self, run: Run) -> Run:
        """Write a run's new state."""
        self._runs[run.id] = run
        write_state(self._file, _Index(self.VERSION, tuple(self._runs.values())))
        return run

    def change(self, run: Run, **fields: Any) -> Run:
        """A run with other fields, written."""
        return self.keep(msgspec.structs.replace(self._runs[run.id], **fields))

    def path(self, run: Run) -> Path:
        """The run's folder."""
        return self.folder / run.folder

    def trace(self, run: Run) -> Path:
        """Where the run recorded."""
        return self.path(run) / "trace"

    def invalidate(self, names: tuple[str, ...], reason: str) -> None:
        """Mark what was concluded from some runs as no longer holding. What is marked already keeps its first reason."""
        for name in names:
            if name in self._runs and not self._runs[name].invalidated:
                self.change(self._runs[name], invalidated=reason)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time works on a session; the lock goes with the process. Raises ``UsageError`` (session-busy)."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                Code.SESSION_BUSY, "another process works on this session", where=str(folder),
                remedy="wait for it; tracer bisect status and log may be read meanwhile",
            ) from error  # fmt: skip
        yield


def write_state(file: Path, state: msgspec.Struct) -> None:
    """Replace a JSON file in one step: sibling, flush, fsync, rename."""
    sibling = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with sibling.open("wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(sibling, file)


def read_state(file: Path, kind: type[_State], version: int | None = None) -> _State:
    """A JSON file as its struct. ``version``: what its ``version`` must be. Raises ``UsageError`` (session-damaged)."""
    try:
        state = msgspec.json.decode(file.read_bytes(), type=kind)
        if version is not None and getattr(state, "version", None) != version:
            raise ValueError(f"version {getattr(state, 'version', None)} where this tracer writes {version}")
        return state
    except (OSError, ValueError) as error:
        raise UsageError(
            Code.SESSION_DAMAGED, "this session file cannot be read", where=str(file), expected=f"what tracer wrote ({kind.__name__})",
            found=str(error), remedy="start another session; the traces in its folders are still good for tracer diff",
        ) from error  # fmt: skip
