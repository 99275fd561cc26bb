"""tracer: find the first place where two runs of the same weights part.

``trace`` records one side; ``open_trace`` and ``diff_traces`` read. Names load on first use, so that
``import tracer`` is silent and light, and reading never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.errors import TracerError
    from tracer.read.compare import Tolerance
    from tracer.read.diff import diff_traces
    from tracer.read.stitch import open_trace
    from tracer.record.boundary_maps import load_boundary_map
    from tracer.record.capture import trace

__all__ = ["Tolerance", "TracerError", "diff_traces", "load_boundary_map", "open_trace", "trace"]

__version__ = "0.1.0"

_HOMES = {
    "Tolerance": "tracer.read.compare",
    "TracerError": "tracer.errors",
    "diff_traces": "tracer.read.diff",
    "load_boundary_map": "tracer.record.boundary_maps",
    "open_trace": "tracer.read.stitch",
    "trace": "tracer.record.capture",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
