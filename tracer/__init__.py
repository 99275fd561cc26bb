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
    from tracer.format.reference import Reference
    from tracer.format.score_file import read_scores, write_scores
    from tracer.format.score_records import ScoreRecord
    from tracer.hosts import suggest_map
    from tracer.hosts.sglang_scores import collect_sglang
    from tracer.hosts.trainer_scores import collect_trainer
    from tracer.hosts.vllm_driver import vllm_options
    from tracer.hosts.vllm_scores import collect_vllm
    from tracer.read.diff import diff_traces
    from tracer.read.floor import Tolerance
    from tracer.read.stitch import open_trace
    from tracer.record.boundary_maps import load_boundary_map
    from tracer.record.capture import Trace
    from tracer.record.host import Host, Mesh
    from tracer.record.map_entries import BoundaryMap
    from tracer.record.remote import RemoteTrace
    from tracer.record.replay import ReplayResult
    from tracer.scores.score_comparison import compare_scores

__all__ = [
    "ScoreRecord",
    "Tolerance",
    "TracerError",
    "bisect_traces",
    "collect_sglang",
    "collect_trainer",
    "collect_vllm",
    "compare_scores",
    "diff_traces",
    "load_boundary_map",
    "open_trace",
    "read_scores",
    "replay_operator",
    "suggest_map",
    "trace",
    "vllm_options",
    "write_scores",
]

__version__ = "0.1.0"

_HOMES = {
    "ScoreRecord": "tracer.format.score_records",
    "Tolerance": "tracer.read.floor",
    "TracerError": "tracer.errors",
    "bisect_traces": "tracer.sessions.bisection",
    "collect_sglang": "tracer.hosts.sglang_scores",
    "collect_trainer": "tracer.hosts.trainer_scores",
    "collect_vllm": "tracer.hosts.vllm_scores",
    "compare_scores": "tracer.scores.score_comparison",
    "diff_traces": "tracer.read.diff",
    "load_boundary_map": "tracer.record.boundary_maps",
    "open_trace": "tracer.read.stitch",
    "read_scores": "tracer.format.score_file",
    "suggest_map": "tracer.hosts",
    "vllm_options": "tracer.hosts.vllm_driver",
    "write_scores": "tracer.format.score_file",
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
    dump: str | Sequence[str] | None = None,
    max_dump_bytes: int = 64 << 20,
    plan: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    feed: str | os.PathLike[str] | None = None,
    pin: Mapping[str, str | os.PathLike[str]] | None = None,
    perturb_ulps: int = 0,
) -> Trace | RemoteTrace:
    """A context manager that records the model's forwards: ``with trace(model) as t: model(**batch)``.

    ``map``: ``"auto"`` (by the class of the model, or the nearest it derives from), a map's name or file, or a loaded
    ``BoundaryMap``; a map that lists classes is refused for any other.
    ``out``: a folder that does not hold another run (``TRACER_OUT`` overrides; default ``traces/<UTC>-<host>-<run id>``,
    printed at exit). ``level``: 0 coarse, 1, 2 everything; ``boundaries``: globs over names that choose instead.
    ``tokens``: positions to keep per sequence (slice, range or list of positions from 0 on); the others are declared
    not computed. ``weights``: ``"digest"``, ``"rows"`` or ``False``. ``host``, ``mesh``: override what is found out.
    ``strict``: a failure of the tracer is raised instead of only making the trace incomplete.
    ``sequences``: where packed rows begin, if the model is not told: cu_seqlens of one packed row, or per batch row the
    lengths of its documents, or a function of a call's (args, kwargs) that gives either. They add up to the tokens of
    every row; where they do not, the recording stops.

    Any thread may run the model, one forward at a time.

    Bytes, of which nothing is saved by default. ``dump``: globs of boundaries to save whole (``layers.*.`` is any layer), which
    are then recorded whatever the level. ``plan``: a file of ``tracer diff A B --plan FILE``; its rows are saved (``TRACER_PLAN``
    overrides). ``against``: a trace of the other side; the first boundary that differs is saved with its inputs.
    ``max_dump_bytes``: cap on what one process saves; what it leaves out is counted.

    Interventions, which change what the model computes and are marked in the trace: diagnosis, never a fix. ``feed``: a trace with
    ``dump=["embedding", "layers.*.residual"]``; every block starts from its values, so that each shows its own error only.
    ``pin``: glob of choices -> trace whose choices they are held to, ``{"*.moe.topk_ids": DIR}``. ``perturb_ulps``: every value
    of the embedding moved by so many units in the last place, up or down by token.

    Raises HostError (no host claims the model), UsageError (bad-argument: any argument). Entering raises MapError (the map is
    unknown, malformed or does not fit), UsageError (bad-argument, out-in-use, intervention-refused), CaptureError
    (write-failed). An intervention that a forward cannot carry out leaves that forward alone, makes the trace incomplete, and is
    raised as UsageError (intervention-refused) on leaving; with several processes only if ``strict``, so that none waits for another.
    """
    from tracer.format.dumps import read_plan
    from tracer.hosts import find_host, find_processes
    from tracer.record.capture import Trace
    from tracer.record.option_checks import check_path, check_pin
    from tracer.record.options import TraceOptions
    from tracer.record.overrides import overridden
    from tracer.record.remote import RemoteTrace

    plan = os.environ.get("TRACER_PLAN") or plan
    for name, path in (("plan", plan), ("against", against), ("feed", feed)):
        check_path(path, name)
    check_pin(pin)
    map, level, boundaries = overridden(map, level, boundaries)
    options = TraceOptions(
        map=map,
        out=out,
        level=level,
        boundaries=boundaries,
        tokens=tokens,
        weights=weights,
        strict=strict,
        sequences=sequences,
        dump=dump,
        max_dump_bytes=max_dump_bytes,
        plan=None if plan is None else read_plan(plan),
        against=None if against is None else open_reference(against, values=False),
        feed=None if feed is None else open_reference(feed, values=True),
        pin=None if pin is None else {glob: open_reference(path, values=False) for glob, path in pin.items()},
        perturb_ulps=perturb_ulps,
    )
    if (processes := find_processes(model, host)) is not None:
        return RemoteTrace(processes, options, __version__)
    return Trace(find_host(model, host, mesh), options, __version__)


def replay_operator(
    module: Any,
    dump: str | os.PathLike[str],
    boundary: str,
    *,
    inputs: Sequence[str] | None = None,
    batched: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> ReplayResult:
    """Run one module on the inputs that a trace has dumped, and hold what it gives against the dumped output.

    ``dump``: a trace with dumps of ``boundary`` and what it is computed from (``dump=`` or ``plan=``). ``inputs``: which dumped
    boundaries are the module's positional arguments, by default those that the map names. ``batched``: give them as (1, R, C) instead
    of (R, C). ``kwargs``: passed on. An intervention: the result names itself one. Other numbers of rows can make a library choose another
    kernel, so a difference in the last bits is not yet the module's.

    Raises UsageError (intervention-refused) where the dump lacks the rows, the boundary is not computed row by row, or the module gives
    other rows.
    """
    from tracer.read.references import operator_rows
    from tracer.record.replay import replay_rows

    run, output, given = operator_rows(dump, boundary, inputs)
    return replay_rows(module, boundary, output, given, run=run, batched=batched, kwargs=kwargs)


def open_reference(path: str | os.PathLike[str], *, values: bool) -> Reference:
    """Another trace, for use while recording: not for users, but for processes that record elsewhere. ``values``: with the bytes
    it has dumped."""
    from tracer.read.references import make_reference

    return make_reference(path, values=values)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
