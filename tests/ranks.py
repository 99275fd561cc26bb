"""Worlds of processes that find each other as under torchrun, forked by one interpreter that imported everything once.

Importing torch and a framework costs a process more than recording a dozen tiny models; a fork has them for nothing. The
scripts that use this run in an interpreter of their own: a process that has computed anything with torch must not fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["environment", "run_world"]

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """Variables of a child process that imports this checkout and computes with one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_world(size: int, main: Callable[[], None], timeout: float = 300.0) -> list[int]:
    """Run ``main`` in ``size`` processes with torchrun's variables; the wait status of each, by rank.

    A process that ends badly, or all at the timeout, takes the others with it after a moment in which they may end themselves."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    children = [_fork({**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}, size, main) for rank in range(size)]
    status: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(status) < size:
        for child in set(children) - set(status):
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status[child] = code
                if code:
                    deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            for child in set(children) - set(status):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [status[child] for child in children]


def _fork(variables: dict[str, str], size: int, main: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(variables, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
