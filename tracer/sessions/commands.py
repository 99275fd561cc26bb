"""Running a user's command once: its own process group, its own log files, a budget, and no secret on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tracer.format.redaction import redact_values

__all__ = ["Ended", "run_command"]

_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """``exit_status``: of the process; None where it was killed for being over its budget."""

    exit_status: int | None
    elapsed_seconds: float
    last_words: str = ""


def run_command(command: str, folder: Path, environment: Mapping[str, str], budget_seconds: float | None, cwd: Path) -> Ended:
    """Run a shell command to its end. ``folder``: gets ``stdout.log`` and ``stderr.log``, line by line, without secrets.

    ``environment``: the whole environment. ``budget_seconds``: after which its process group is ended, None for none. An
    interrupt (Ctrl-C) ends the group too and is raised again.
    """
    begun = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    tails: dict[str, str] = {}
    copying = [
        threading.Thread(target=_copy, args=(stream, folder / f"{name}.log", environment, tails), daemon=True)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    for thread in copying:
        thread.start()
    try:
        status: int | None = process.wait(budget_seconds)
    except subprocess.TimeoutExpired:
        status = None
        _end_group(process)
    except BaseException:
        _end_group(process)
        raise
    for thread in copying:
        thread.join(_GRACE_SECONDS)  # a grandchild that holds the pipe open is not waited for
    words = (tails.get("stderr.log") or tails.get("stdout.log") or "").strip()
    return Ended(status, round(time.monotonic() - begun, 3), words)


def _copy(stream: IO[str], file: Path, environment: Mapping[str, str], tails: dict[str, str]) -> None:
    with stream, file.open("w", encoding="utf-8") as out:
        for line in stream:
            line = redact_values(line, environment)
            out.write(line)
            out.flush()
            if line.strip():
                tails[file.name] = line


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ask the process and its children to end, then end them."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, wanted)
        except ProcessLookupError:
            return
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
