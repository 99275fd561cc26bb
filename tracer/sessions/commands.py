"""Running a user's command once: its own process group, its own log files, a budget, and no secret on disk.

A command may leave processes behind, also in sessions of their own (the workers of ``torchrun`` are). Every run has a value of
``TRACER_OUT`` that no other has, and its descendants inherit it: where the system shows the environment of processes (Linux),
they are found by it and ended with the command.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tracer.format.redaction import redact_values

__all__ = ["Ended", "end_stragglers", "run_command", "sets_variable"]

_GRACE_SECONDS = 5.0
_PROCESSES = Path("/proc")


def sets_variable(command: str, name: str) -> bool:
    """Whether a shell command gives a variable a value of its own (``NAME=1 run``, ``env NAME=1 run``, ``export NAME=1``) or takes it
    away, so that what is set for the command does not arrive. A value made of the variable itself (``NAME=${NAME:-1}``) does."""
    own = rf"(?<![\w.$-]){name}\+?=(?!['\"]?\$(?:{name}\b|\{{{name}\b))"
    return re.search(rf"{own}|\bunset\s[^;&|]*\b{name}\b|(?:-u\s*|--unset[= ]){name}\b", command) is not None


@dataclass(frozen=True)
class Ended:
    """``exit_status``: of the process; None where it was killed for being over its budget. ``last_words``: the last line it printed.
    ``left_behind``: processes that outlived it and were ended. ``unwritten``: why its logs are not whole, empty where they are."""

    exit_status: int | None
    elapsed_seconds: float
    last_words: str = ""
    left_behind: int = 0
    unwritten: str = ""


def run_command(command: str, folder: Path, environment: Mapping[str, str], budget_seconds: float | None, cwd: Path) -> Ended:
    """Run a shell command to its end. ``folder``: gets ``stdout.log`` and ``stderr.log``, line by line, without secrets.

    ``environment``: the whole environment; its ``TRACER_OUT`` belongs to this run alone. ``budget_seconds``: after which it is ended
    with all its descendants, None for none. An interrupt (Ctrl-C) ends them too and is raised again.
    """
    begun = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    logs = [_Log(stream, folder / f"{name}.log", environment) for name, stream in (("stderr", process.stderr), ("stdout", process.stdout))]
    out = environment.get("TRACER_OUT", "")
    left_behind = 0
    try:
        status: int | None = process.wait(budget_seconds)
        left_behind = _end_group(process, out)
    except subprocess.TimeoutExpired:
        status = None
        _end_group(process, out)
    except BaseException:
        _end_group(process, out)
        raise
    for log in logs:
        log.thread.join(_GRACE_SECONDS)  # a process that nobody can find may hold the pipe open, and is not waited for
    words = next((log.last for log in logs if log.last), "")
    unwritten = next((log.trouble for log in logs if log.trouble), "")
    return Ended(status, round(time.monotonic() - begun, 3), words, left_behind, unwritten)


class _Log:
    """A thread that copies a stream into a file, line by line. A file that cannot be written does not stop the command: the stream
    is read to its end. ``last``: the last line that says something."""

    def __init__(self, stream: IO[str], file: Path, environment: Mapping[str, str]) -> None:
        self.last = self.trouble = ""
        self._stream, self._file, self._environment = stream, file, environment
        self.thread = threading.Thread(target=self._copy, daemon=True)
        self.thread.start()

    def _copy(self) -> None:
        with self._stream:
            try:
                with self._file.open("w", encoding="utf-8") as out:
                    for line in self._stream:
                        line = redact_values(line, self._environment)
                        self.last = line.strip() or self.last
                        out.write(line)
                        out.flush()
            except OSError as error:
                self.trouble = f"{self._file.name}: {error.strerror or error}"
                for _ in self._stream:
                    pass


def _end_group(process: subprocess.Popen[str], out: str) -> int:
    """Ask a command and all it started to end, then end them; how many outlived the command's own process."""
    left_behind = 0
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        running = process.poll() is None
        found = {*_marked(out), *_in_group(process.pid)} - {process.pid}
        left_behind = left_behind or (0 if running else len(found))
        if not running and not found and _PROCESSES.is_dir():
            break
        _send(wanted, process.pid, found)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and (process.poll() is None or any(map(_alive, found))):
            time.sleep(0.02)
    return left_behind


def end_stragglers(out: str) -> int:
    """End the processes of a run whose tracer is gone, known by their ``TRACER_OUT``; how many there were."""
    found = set(_marked(out))
    if found:
        _send(signal.SIGKILL, 0, found)
    return len(found)


def _send(wanted: signal.Signals, group: int, processes: set[int]) -> None:
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, wanted)
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, wanted)


def _marked(out: str) -> list[int]:
    """Processes of ours, not this one, whose ``TRACER_OUT`` is that folder."""
    if not out:
        return []
    mark = b"TRACER_OUT=" + os.fsencode(out)
    found = []
    for entry in _PROCESSES.glob("[0-9]*") if _PROCESSES.is_dir() else ():
        with suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _in_group(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in _PROCESSES.glob("[0-9]*") if _PROCESSES.is_dir() else ():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _alive(process: int) -> bool:
    try:
        return (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
