"""tracer: find the first place where two runs of the same weights part.

``trace`` records one side; ``open_trace`` and ``diff_traces`` read. Names load on first use, so that
``import tracer`` is silent and light, and reading never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.errors import TracerError
    from tracer.hosts import suggest_map
    from tracer.hosts.vllm_driver import vllm_options
    from tracer.read.diff import diff_traces
    from tracer.read.floor import Tolerance
    from tracer.read.stitch import open_trace
    from tracer.record.boundary_maps import load_boundary_map
    from tracer.record.capture import Trace
    from tracer.record.host import Host, Mesh
    from tracer.record.map_entries import BoundaryMap
    from tracer.record.remote import RemoteTrace

__all__ = ["Tolerance", "TracerError", "diff_traces", "load_boundary_map", "open_trace", "suggest_map", "trace", "vllm_options"]

__version__ = "0.1.0"

_HOMES = {
    "Tolerance": "tracer.read.floor",
    "TracerError": "tracer.errors",
    "diff_traces": "tracer.read.diff",
    "load_boundary_map": "tracer.record.boundary_maps",
    "open_trace": "tracer.read.stitch",
    "suggest_map": "tracer.hosts",
    "vllm_options": "tracer.hosts.vllm_driver",
}


def trace(
    model: Any,
    map: str | os.PathLike[str] | BoundaryMap = "auto",
    out: str | os.PathLike[str] | None = None,
    level: int = 1,
    boundaries: str | Sequence[str] | None = None,
    tokens: slice | Iterable[int] | None = None,
    weights: str | bool | None = "digest",
    host: str | Host | None = None,
    mesh: Mapping[str, tuple[int, int]] | Mesh | None = None,
    strict: bool = False,
    sequences: Iterable[Any] | Callable[[tuple[Any, ...], Mapping[str, Any]], Iterable[Any] | None] | None = None,
) -> Trace | RemoteTrace:
    """A context manager that records the model's forwards: ``with trace(model) as t: model(**batch)``.

    ``map``: ``"auto"`` (by the class of the model), a map's name or file, or a loaded ``BoundaryMap``.
    ``out``: a folder that does not hold another run (``TRACER_OUT`` overrides; default ``traces/<UTC>-<host>-<run id>``,
    printed at exit). ``level``: 0 coarse, 1, 2 everything; ``boundaries``: globs over names that choose instead.
    ``tokens``: positions to keep per sequence (slice, range or list of positions from 0 on); the others are declared
    not computed. ``weights``: ``"digest"``, ``"rows"`` or ``False``. ``host``, ``mesh``: override what is found out.
    ``strict``: a failure of the tracer is raised instead of only making the trace incomplete.
    ``sequences``: where packed rows begin, if the model is not told: cu_seqlens of one packed row, or per batch row the
    lengths of its documents, or a function of a call's (args, kwargs) that gives either.

    Raises HostError (no host claims the model), UsageError (bad-argument). Entering raises MapError (the map is unknown,
    malformed or does not fit), UsageError (out-in-use), CaptureError (write-failed).
    """
    from tracer.hosts import find_host, find_processes
    from tracer.record.capture import Trace, TraceOptions
    from tracer.record.remote import RemoteTrace

    options = TraceOptions(map, out, level, boundaries, tokens, weights, strict, sequences)
    if (processes := find_processes(model, host)) is not None:
        return RemoteTrace(processes, options, __version__)
    return Trace(find_host(model, host, mesh), options, __version__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
