"""Recording one side while a model runs as it always does.

Hooks go on in ``__enter__`` and off in ``__exit__``, whatever happens in between; they return None, keep nothing,
and touch neither random state nor autograd. What goes wrong inside the tracer stops the recording and never the run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import CaptureError, Code, TracerError, UsageError
from tracer.format.schema import FORMAT_VERSION, Manifest, Note, PolicyMark
from tracer.format.store import ShardWriter
from tracer.record.boundaries import Plan, resolve
from tracer.record.boundary_maps import load_boundary_map, map_for_root_class
from tracer.record.environment import run_conditions
from tracer.record.forward_record import PositionFilter, Watch
from tracer.record.host import Host
from tracer.record.map_entries import BoundaryMap
from tracer.record.outbox import Outbox
from tracer.record.readers import SourceReader
from tracer.record.recompute import in_backward
from tracer.record.recording import Recorder
from tracer.record.run_identity import RunIdentity, agree_on_run
from tracer.record.tallies import reason_of
from tracer.record.tokens import SequenceRegistry
from tracer.record.weights import WeightSnapshot, fingerprint_weights, weights_changed

__all__ = ["Trace", "TraceOptions"]

@dataclass(frozen=True)
class TraceOptions:
    """What the user asked for; see ``tracer.trace`` for every field."""

    map: str | os.PathLike[str] | BoundaryMap = "auto"
    out: str | os.PathLike[str] | None = None
    level: int = 1
    boundaries: str | Sequence[str] | None = None
    tokens: slice | Iterable[int] | None = None
    weights: str | bool | None = "digest"
    strict: bool = False
    sequences: Iterable[Any] | Callable[[tuple[Any, ...], Mapping[str, Any]], Iterable[Any] | None] | None = None


class Trace:
    """One recording, made by ``tracer.trace``. Enter it once."""

    def __init__(self, host: Host, options: TraceOptions, version: str, identity: RunIdentity | None = None) -> None:
        """``version``: of the package, for the manifest. ``identity``: of the run, where another process has decided it.
        Raises UsageError (bad-argument)."""
        self._decided = identity
        self._host = host
        self._options = options
        self._version = version
        self._wanted = _position_filter(options.tokens)
        self._weights_mode = _weights_mode(options.weights)
        self._entered = False
        self._recording = False
        self._stop_reason = ""
        self._incomplete = ""
        self._depth = 0
        self._error_before: BaseException | None = None
        self._optimizer_steps = 0
        self._policies: list[PolicyMark] = []
        self._notes: list[Note] = []

    # ------------------------------------------------------------------------------------------------ the user's calls

    @property
    def path(self) -> Path:
        """The trace's folder. Raises UsageError (bad-argument) before entering."""
        self._need(self._entered)
        return self._identity.out

    @property
    def forwards(self) -> int:
        """Forwards recorded so far."""
        return self._recorder.forwards if self._entered else 0

    @property
    def incomplete(self) -> str:
        """Why the trace is incomplete, empty where it is not."""
        return self._incomplete

    def stop(self, reason: str = "") -> None:
        """End the trace from outside a ``with`` block. ``reason``: what makes it incomplete, if anything does."""
        self._need(self._recording)
        self._incomplete = self._incomplete or reason
        self.__exit__(None, None, None)

    def cancel(self) -> None:
        """End the trace and leave nothing of it: another process of the run could not begin."""
        self._need(self._recording)
        self._recording = False
        self._stack.close()
        _remove_shard(self._writer.path)

    def requests(self, names: Iterable[str]) -> None:
        """Name the sequences of the next forward, in batch order."""
        self._need(self._recording)
        self._registry.name_requests(names)

    def policy(self, version: str | int) -> None:
        """Mark what follows as computed by this policy version."""
        self._need(self._recording)
        self._policies.append(PolicyMark(forward=self._recorder.forwards, version=str(version)))

    def record(
        self, name: str, tensor: torch.Tensor | npt.ArrayLike, sequence: str | None = None, positions: npt.ArrayLike | None = None
    ) -> None:
        """Add rows of a boundary computed outside the model: ``t.record("scorer.logprobs", logprobs, sequence="p0")``.

        ``tensor``: (N,) or (N, ...), read at once. ``sequence``: a request name or label (not needed while there is only one).
        ``positions``: (N,) positions in the sequence, by default 0 to N - 1. Scores recorded by hand replace derived ones; give them
        before the second forward begins.

        Raises UsageError (bad-argument): unknown sequence, wrong shapes, a boundary that is recorded already."""
        self._need(self._recording)
        values = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(np.asarray(tensor))
        if values.dim() == 0:
            raise UsageError(Code.BAD_ARGUMENT, "t.record needs rows", expected="a tensor of shape (N,) or (N, ...)", found="a scalar")
        position_N = np.arange(len(values)) if positions is None else np.asarray(_on_cpu(positions), np.int64).reshape(-1)
        if len(position_N) != len(values) or (position_N < 0).any():
            raise UsageError(
                Code.BAD_ARGUMENT,
                "positions do not fit the rows",
                expected=f"{len(values)} positions from 0 on",
                found=f"{len(position_N)}",
            )
        if not self._stop_reason:
            self._recorder.record_by_hand(name, values, self._find_sequence(sequence), position_N)

    def _find_sequence(self, name: str | None) -> int:
        registry = self._registry
        found = registry.find(name) if name is not None else 0 if len(registry) == 1 else None
        if found is None:
            known = ", ".join(registry[n].request or registry[n].label for n in range(min(len(registry), 8)))
            raise UsageError(
                Code.BAD_ARGUMENT,
                "t.record needs to know the sequence",
                expected=known or "a sequence of a forward that has run",
                found=repr(name),
                remedy="pass sequence= with a request name (t.requests) or a label",
            )
        return found

    def _need(self, condition: bool) -> None:
        if not condition:
            raise UsageError(Code.BAD_ARGUMENT, "this trace is not recording", remedy="use it inside `with trace(...) as t:`")

    # ------------------------------------------------------------------------------------------------ entering

    def __enter__(self) -> Trace:
        if self._entered:
            raise UsageError(
                Code.BAD_ARGUMENT, "a trace is entered once", remedy="make a new one with trace(...); several may watch one model"
            )
        self._modules = self._host.modules()
        self._plan = self._resolve()
        self._identity = self._decided or agree_on_run(self._options.out, self._host.name)
        self._writer = ShardWriter(self._identity.out, self._host.mesh().rank, run_id=self._identity.run_id)
        try:
            self._set_up()
        except BaseException:
            _remove_shard(self._writer.path)
            raise
        self._entered = self._recording = True
        return self

    def _resolve(self) -> Plan:
        """The plan, every selected boundary of it resolved. Raises MapError, UsageError."""
        options, root_class = self._options, self._host.root_class()
        if isinstance(options.map, BoundaryMap):
            boundary_map = options.map
        elif options.map == "auto":
            boundary_map = map_for_root_class(root_class, self._host.name)
        else:
            boundary_map = load_boundary_map(os.fspath(options.map))
        classes = {path: type(module).__name__ for path, module in self._modules.items()}
        globs = [options.boundaries] if isinstance(options.boundaries, str) else options.boundaries
        plan = resolve(boundary_map, self._host.name, classes, level=options.level, boundaries=globs, root_class=root_class)
        plan.require_resolved()
        return plan

    def _set_up(self) -> None:
        """Everything that runs while recording, in the order it is taken down again, last first."""
        self._read_surroundings()
        with ExitStack() as stack:
            self._outbox = Outbox(self._writer)
            stack.callback(self._outbox.close)
            self._registry = SequenceRegistry(self._outbox.open_sequence, self._outbox.add_ids)
            self._recorder = Recorder(self._host, self._plan, self._registry, self._outbox, self._wanted)
            stack.callback(self._guarded, self._recorder.close)
            self._process = os.getpid()
            self._wire(stack)
            self._stack = stack.pop_all()

    def _read_surroundings(self) -> None:
        """Run conditions and weights. What goes wrong unforeseen costs them, not the run. Raises MapError, CaptureError."""
        self._conditions: dict[str, Any] = {}
        self._weights = WeightSnapshot("none")
        try:
            self._conditions = run_conditions(self._host)
            weights = fingerprint_weights(self._host, self._plan, self._weights_mode)
            if weights.parts:
                self._writer.write_weight_rows(weights.parts)
            self._weights = replace(weights, parts=())
        except TracerError:
            raise
        except Exception as error:
            if self._options.strict:
                raise _as_capture_error(error) from error
            self._incomplete = f"run conditions and weights could not be read: {reason_of(error)}"

    def _wire(self, stack: ExitStack) -> None:
        """All hooks and taps onto the stack: the root's first before and last after every other."""
        root = self._host.root()
        stack.callback(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        stack.callback(root.register_forward_pre_hook(self._root_begins, with_kwargs=True, prepend=True).remove)
        for (module, before), watch in _watches(self._recorder.readers, self._modules):
            if before:
                stack.callback(module.register_forward_pre_hook(self._hook_before(watch), with_kwargs=True).remove)
            else:
                stack.callback(module.register_forward_hook(self._hook_after(watch), with_kwargs=True).remove)
        taps = [reader.source for reader in self._recorder.readers if reader.source.tap]
        stack.enter_context(self._host.taps(taps, self._tapped))
        stack.callback(root.register_forward_hook(self._root_ends, with_kwargs=True, always_call=True).remove)

    # ------------------------------------------------------------------------------------------------ hooks

    def _hook_before(self, watch: Watch) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                self._guarded(self._recorder.module_ran, watch, args, kwargs, None)

        return before

    def _hook_after(self, watch: Watch) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._guarded(self._recorder.module_ran, watch, args, kwargs, output)

        return after

    def _tapped(self, module_path: str, leaf: str, tensor: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._guarded(self._recorder.tapped, module_path, leaf, tensor)

    def _root_begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        if self._depth and _calls_on_stack(module) < 2:  # the last one ended in what no hook hears of: an interrupt
            self._depth = 0
            self._recorder.abandon()
        self._depth += 1
        if self._depth > 1:
            return
        if os.getpid() != self._process:
            self._stop("the process was forked while recording; the copy is not recorded")
        self._error_before = sys.exc_info()[1]
        self._guarded(self._begin, args, kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._options.sequences
        self._registry.give_lengths(given(args, kwargs) if callable(given) else given)
        self._recorder.begin(args, kwargs)

    def _root_ends(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_before:
            self._recorder.abandon()
            self._incomplete = self._incomplete or f"forward {self._recorder.forwards - 1} raised {reason_of(error)}"
        else:
            self._guarded(self._recorder.end, output)

    def _optimizer_stepped(self, *ignored: Any) -> None:
        self._optimizer_steps += 1

    # ------------------------------------------------------------------------------------------------ failures

    def _guarded(self, act: Callable[..., None], *arguments: Any) -> None:
        """Do something of the tracer's inside the traced program: a failure stops the recording, not the program."""
        if self._stop_reason:
            return
        try:
            act(*arguments)
        except Exception as error:
            self._stop(f"recording failed: {reason_of(error)}")
            if self._options.strict:
                raise _as_capture_error(error) from error

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._incomplete = self._incomplete or reason

    # ------------------------------------------------------------------------------------------------ leaving

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._recording = False
        if error is not None:
            self._incomplete = self._incomplete or f"the traced program raised {reason_of(error)}"
        failure: Exception | None = None
        try:
            self._stack.close()
            self._commit()
        except Exception as caught:
            failure = caught
            self._incomplete = f"the trace could not be committed: {reason_of(caught)}"
        if self._incomplete:
            print(f"tracer: {self._identity.out} is incomplete: {self._incomplete}", file=sys.stderr)
        elif not self._identity.named:
            print(f"tracer: wrote {self._identity.out}", file=sys.stderr)
        if self._options.strict and error is None and (failure is not None or self._incomplete):
            raise CaptureError(Code.CAPTURE_FAILED, self._incomplete, where=str(self._identity.out)) from failure

    def _commit(self) -> None:
        """Write the manifest of what was recorded."""
        recorder, registry, host = self._recorder, self._registry, self._host
        if self._outbox.failure is not None:
            self._incomplete = self._incomplete or reason_of(self._outbox.failure)
        if registry.unused_requests():
            text = f"no forward took the request names {', '.join(registry.unused_requests()[:8])}"
            self._notes.append(Note(code="requests-unused", text=text))
        declared = [*recorder.left_out(), *host.not_computed()]
        weights, weights_after = self._weights.weights, "unknown"
        try:
            weights, weights_after = weights_changed(self._weights, host, self._plan)
        except Exception as error:
            self._incomplete = self._incomplete or f"the weights could not be read again: {reason_of(error)}"
        computed_with = {boundary.name: boundary.weights for boundary in self._plan.with_weights(self._weights.names)}
        mesh = host.mesh()
        manifest = Manifest(
            format=FORMAT_VERSION,
            run_id=self._identity.run_id,
            tracer=self._version,
            host=host.name,
            rank=mesh.rank,
            world_size=mesh.world_size,
            mesh=mesh.axes,
            map=self._plan.map,
            level=self._options.level,
            boundaries=recorder.boundaries(computed_with, declared),
            counts=recorder.counts(),
            not_computed=tuple(declared),
            weights_mode=self._weights_mode if weights or self._plan.weight_rules else "none",
            weights=weights,
            weights_after=weights_after,
            policies=tuple(self._policies),
            conditions={**self._conditions, "optimizer_steps": self._optimizer_steps},
            notes=(*self._notes, *registry.notes, *recorder.notes()),
            complete=not self._incomplete,
            incomplete_reason=self._incomplete,
        )
        self._writer.commit(manifest)


# ---------------------------------------------------------------------------------------------------- pieces


def _watches(readers: Iterable[SourceReader], modules: Mapping[str, torch.nn.Module]) -> list[tuple[tuple[torch.nn.Module, bool], Watch]]:
    """What to hook: (module, before it runs) and the watch that hears of it. Ids are read before what they order."""
    paths: dict[tuple[torch.nn.Module, bool], dict[str, list[SourceReader]]] = {}
    for reader in readers:
        if not reader.source.tap:
            key = (modules[reader.source.module], reader.before)
            paths.setdefault(key, {}).setdefault(reader.source.module, []).append(reader)
    return [
        (key, Watch([sorted(found, key=lambda reader: reader.source.canonical_by != reader.source.boundary) for found in by_path.values()]))
        for key, by_path in paths.items()
    ]


def _position_filter(tokens: slice | Iterable[int] | None) -> PositionFilter | None:
    """``tokens=`` as a test of positions. Raises UsageError (bad-argument)."""
    if tokens is None:
        return None
    chosen = tokens if isinstance(tokens, slice) else sorted({int(position) for position in tokens})
    edges = [chosen.start or 0, chosen.stop or 0, (chosen.step or 1) - 1] if isinstance(chosen, slice) else chosen
    if any(edge < 0 for edge in edges):
        raise UsageError(
            Code.BAD_ARGUMENT,
            "tokens= counts from the start of a sequence",
            expected="a slice, range or list of positions from 0 on",
            found=repr(tokens),
            remedy="how long a sequence will be is not known while it runs: give positions from the start",
        )
    if isinstance(chosen, slice):
        start, step = chosen.start or 0, chosen.step or 1
        stop = np.iinfo(np.int64).max if chosen.stop is None else chosen.stop
        return lambda position_N: (position_N >= start) & (position_N < stop) & ((position_N - start) % step == 0)
    listed = np.array(chosen, np.int64)
    return lambda position_N: np.isin(position_N, listed)


def _weights_mode(weights: str | bool | None) -> str:
    mode = "none" if weights is False or weights is None else "digest" if weights is True else weights
    if mode not in ("digest", "rows", "none"):
        raise UsageError(Code.BAD_ARGUMENT, "weights= is not known", expected='"digest", "rows" or False', found=repr(weights))
    return mode


def _on_cpu(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def _as_capture_error(error: Exception) -> TracerError:
    return error if isinstance(error, TracerError) else CaptureError(Code.CAPTURE_FAILED, reason_of(error))


def _calls_on_stack(module: torch.nn.Module) -> int:
    """How many calls of this module are running in this thread, the current one included."""
    frame, count = sys._getframe(), 0
    while frame is not None:
        count += frame.f_code is torch.nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _remove_shard(shard: Path) -> None:
    """The folder of a recording that never began: it is ours, made a moment ago."""
    shutil.rmtree(shard, ignore_errors=True)
    with suppress(OSError):
        shard.parent.rmdir()
