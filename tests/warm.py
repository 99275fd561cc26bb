"""A ``python`` that has imported everything already: scripts of documentation pages start in milliseconds.

Most of what a page's commands cost is importing torch and a framework, again for every one of them. Here one process
imports them once and forks a child per command: a process of its own, with the command's arguments, folder, environment
and streams, whose imports are found done. A folder with ``python``, ``torchrun`` and ``tracer`` in front on the path makes that known
to nobody. The server computes nothing, so that a fork inherits no thread of a library.

``python -m tests.warm SOCKET MODULE...`` is the server; the module, run with the name of its socket and a command line, is the client.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_STREAMS = 3


class WarmPython:
    """The server, and the folder to put in front of the path."""

    def __init__(self, folder: Path, modules: tuple[str, ...]) -> None:
        """``folder``: a new one. ``modules``: imported once, before the first command; what is not installed is left out."""
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        name = folder / "socket"
        self.log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.warm", str(name), *modules], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        python = self.bin / "python"
        commands = {
            "python": f'exec "{sys.executable}" -S -E "{__file__}" "{name}"',
            "torchrun": f'PYTHON_EXEC="{python}" exec "{python}" -m torch.distributed.run',
            "tracer": f'exec "{python}" -m tracer',
        }
        for command, line in commands.items():
            (self.bin / command).write_text(f'#!/bin/sh\n{line} "$@"\n')
            (self.bin / command).chmod(0o755)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ------------------------------------------------------------------------------------------------ the client


def _ask(name: str, arguments: list[str]) -> int:
    """Have the server run a command line of python; its exit status. What the server cannot run is run by this interpreter."""
    while arguments and arguments[0] == "-u":  # every stream of a child is flushed at its end
        arguments = arguments[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *arguments])
    link = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + 120
    while True:
        try:
            link.connect(name)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    asked = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    streams = array.array("i", range(_STREAMS))
    link.sendmsg([struct.pack("<I", len(asked))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    link.sendall(asked)
    answer = link.recv(4)
    return struct.unpack("<i", answer)[0] if len(answer) == 4 else 128 + signal.SIGKILL


# ------------------------------------------------------------------------------------------------ the server


def _serve(name: str, modules: list[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            traceback.print_exc()
    gc.collect()
    gc.freeze()
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{name}.new")
    server.listen(64)
    os.rename(f"{name}.new", name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are nobody's to wait for; each tells its client how it ended
    while True:
        link, _ = server.accept()
        if os.fork():
            link.close()
            continue
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = _become(link)
        link.send(struct.pack("<i", status))
        os._exit(status)


def _become(link: socket.socket) -> int:
    """Run what the client asked for as if it were this process's own; the exit status."""
    head, ancillary, _, _ = link.recvmsg(4, socket.CMSG_SPACE(_STREAMS * 4))
    streams = array.array("i", ancillary[0][2])
    wanted = b""
    while len(wanted) < struct.unpack("<I", head)[0]:
        wanted += link.recv(1 << 16)
    asked = json.loads(wanted)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as the client's is
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    status = 0
    try:
        _run(asked["arguments"])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _run(arguments: list[str]) -> None:
    first, rest = arguments[0], arguments[1:]
    sys.argv = arguments
    sys.path[0] = ""
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        main.__file__ = first
        sys.path[0] = str(Path(first).resolve().parent)
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def _end_with(link: socket.socket) -> None:
    """A client that is killed takes its child with it."""
    if not link.recv(1):
        os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    if sys.flags.no_site:
        sys.exit(_ask(sys.argv[1], sys.argv[2:]))
    _serve(sys.argv[1], sys.argv[2:])
