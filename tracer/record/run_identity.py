"""Which run a process belongs to, and where its trace goes, agreed between processes without a collective."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch.distributed

from tracer.errors import Code, UsageError

__all__ = ["RunIdentity", "agree_on_run"]

_agreed = 0
"""Default-named runs this process has agreed on with the others so far: every process counts the same traces."""


@dataclass(frozen=True)
class RunIdentity:
    """``run_id``: the same in all processes of one run. ``out``: its folder. ``named``: the user chose the folder."""

    run_id: str
    out: Path
    named: bool


def agree_on_run(out: str | os.PathLike[str] | None, host: str) -> RunIdentity:
    """The identity of the run that starts now.

    ``TRACER_OUT`` overrides ``out``; without either the folder is ``traces/<UTC>-<host>-<run id>``. The run id is
    ``TRACER_RUN_ID``; else what the first process put into the store of the default process group, where there is one
    (all processes must then enter the same traces in the same order); else random. Raises UsageError (bad-argument) where
    ``TRACER_OUT`` is set and empty: a script that forgot to fill it in would write elsewhere.
    """
    if os.environ.get("TRACER_OUT") == "":
        raise UsageError(
            Code.BAD_ARGUMENT, "TRACER_OUT is empty", expected="a folder", found="''", remedy="unset it, so that out= or the default holds"
        )
    chosen = os.environ.get("TRACER_OUT") or (os.fspath(out) if out is not None else "")
    stamp, run_id = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ"), secrets.token_hex(4)
    stamp, run_id = _first_of_all(chosen, f"{stamp} {run_id}").split(" ")
    run_id = os.environ.get("TRACER_RUN_ID") or run_id
    return RunIdentity(run_id, Path(chosen) if chosen else Path("traces") / f"{stamp}-{host}-{run_id}", bool(chosen))


def _first_of_all(chosen: str, proposal: str) -> str:
    """``proposal`` of whichever process asked first about this folder."""
    global _agreed
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return proposal
    if not chosen:
        _agreed += 1
    store = torch.distributed.distributed_c10d._get_default_store()
    answer = store.compare_set(f"tracer/run/{chosen or _agreed}", "", proposal)
    return str(answer.decode())
