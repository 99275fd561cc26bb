"""A session whose process is killed at every state transition: ``python -m tests.killed_sessions FOLDER [MOST]``.

One process after another works on the session in FOLDER. Each dies by SIGKILL right before or right after the first write of the
state at which none has died before; the last one comes to the end. With MOST no more than so many die. Printed: how many did.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tracer.sessions import archive, bisection
from tracer.sessions.archive import write_state
from tracer.sessions.bisection import Bisection


def main() -> None:
    folder, most = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    seen = folder.with_name(f"{folder.name}-seen")
    seen.touch()
    killed = 0
    while killed < most and (status := _one_process(folder, seen)):
        if os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit("a process ended badly")
        killed += 1
    print(killed)


def _one_process(folder: Path, seen: Path) -> int:
    """Work on the session in a process that dies where none has died before; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    known = set(seen.read_text().splitlines())

    def dying(file: Path, state: Any) -> None:
        runs = [(run.purpose, run.status.value) for run in getattr(state, "runs", ())]
        steps = [(step.number, step.status.value, sorted(step.runs)) for step in getattr(state, "steps", ())]
        for moment in ("before", "after"):
            label = f"{moment} {file.name} {runs[-1:]} {steps} {getattr(state, 'status', '')}"
            if label not in known:
                with seen.open("a") as labels:
                    labels.write(f"{label}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            if moment == "before":
                write_state(file, state)

    for module in (archive, bisection):
        vars(module)["write_state"] = dying
    try:
        Bisection(folder).run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
