"""Recording one side while a model runs as it always does.

Hooks go on in ``__enter__`` and off in ``__exit__``, whatever happens in between; they return None, keep nothing,
and touch neither random state nor autograd. What goes wrong inside the tracer stops the recording and never the run.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracer.errors import CaptureError, Code, TracerError, UsageError
from tracer.format.dumps import DumpWriter
from tracer.format.schema import FORMAT_VERSION, Boundary, BoundaryStatus, Manifest, Note, PolicyMark, SegmentInfo
from tracer.format.store import ShardWriter
from tracer.record.against import Against
from tracer.record.boundaries import Plan, resolve
from tracer.record.boundary_maps import load_boundary_map, map_for_root_class, require_served
from tracer.record.dumping import Dumping, dump_globs
from tracer.record.environment import run_conditions
from tracer.record.forward_record import ForwardRecord, Watch
from tracer.record.host import Host
from tracer.record.intervention_plan import needed_boundaries, plan_interventions, told_interventions
from tracer.record.interventions import Feed, Intervention, Nudge, unreached
from tracer.record.map_entries import BoundaryMap
from tracer.record.option_checks import check_by_hand, check_name, position_filter, read_boundaries, read_tokens, rows_by_hand, weights_mode
from tracer.record.options import TraceOptions
from tracer.record.outbox import Outbox
from tracer.record.readers import SourceReader
from tracer.record.recompute import in_backward
from tracer.record.recording import Recorder
from tracer.record.run_identity import RunIdentity, agree_on_run
from tracer.record.tallies import reason_of
from tracer.record.tokens import SequenceRegistry, check_text
from tracer.record.weight_dumps import differing_weight, dump_weights, planned_weights
from tracer.record.weights import WeightSnapshot, fingerprint_weights, weights_changed

__all__ = ["Trace"]

_FORKED = "the process was forked while recording; the copy is not recorded"


class Trace:
    """One recording, made by ``tracer.trace``. Enter it once."""

    def __init__(self, host: Host, options: TraceOptions, version: str, identity: RunIdentity | None = None) -> None:
        """``version``: of the package, for the manifest. ``identity``: of the run, where another process has decided it.
        Raises UsageError (bad-argument)."""
        self._decided = identity
        self._host = host
        self._options = options
        self._version = version
        self._wanted = position_filter(read_tokens(options.tokens))
        self._weights_mode = weights_mode(options.weights)
        self._globs = dump_globs(options.dump)
        self._dumps: DumpWriter | None = None
        self._savers: list[Dumping | Against] = []
        self._entered = False
        self._recording = False
        self._stop_reason = ""
        self._incomplete = ""
        self._refusal: TracerError | None = None
        self._depth = 0
        self._last_hooks: tuple[int, ...] = ()
        self._thread = 0
        """Runs the forward that has begun last."""
        self._lock = threading.Lock()
        self._vacuous: list[Boundary] = []
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
    def refusal(self) -> TracerError | None:
        """Why a forward could not carry out an intervention."""
        return self._refusal

    @property
    def incomplete(self) -> str:
        """Why the trace is incomplete, empty where it is not."""
        return self._incomplete

    def stop(self, reason: str = "") -> None:
        """End the trace from outside a ``with`` block. ``reason``: what makes it incomplete, if anything does."""
        self._need(self._recording)
        self._incomplete = self._incomplete or reason
        self._leave(None)

    def cancel(self) -> None:
        """End the trace and leave nothing of it: another process of the run could not begin."""
        self._need(self._recording)
        self._recording = False
        self._stack.close()
        _remove_shard(self._writer.path)

    def requests(self, names: Iterable[str]) -> None:
        """Name the sequences of the next forward: one name per batch row (per document of packed rows, in order; beams and
        ``num_return_sequences`` are rows of their own), "" for none.

        Raises UsageError (bad-argument) for what is no list of strings, for half a character, and for a name given twice. Another number of
        names than sequences leaves them nameless; that, names that no forward took, and names replaced before one did
        are noted in the trace."""
        self._need(self._recording)
        self._registry.name_requests(names)

    def policy(self, version: str | int) -> None:
        """Mark what follows as computed by this policy version. Raises UsageError (bad-argument) for half a character."""
        self._need(self._recording)
        check_text(str(version), "a policy version")
        self._policies.append(PolicyMark(forward=self._recorder.forwards, version=str(version)))

    def record(
        self, name: str, tensor: torch.Tensor | npt.ArrayLike, sequence: str | None = None, positions: npt.ArrayLike | None = None
    ) -> None:
        """Add rows of a boundary computed outside the model: ``t.record("scorer.logprobs", logprobs, sequence="p0")``.

        ``tensor``: (N,) or (N, ...), read at once. ``sequence``: a request name or label (not needed while there is only one).
        ``positions``: (N,) positions in the sequence, by default 0 to N - 1. Scores recorded by hand replace derived ones; give them
        before the second forward begins.

        Raises UsageError (bad-argument): unknown sequence, wrong shapes, rows behind its last token, a name that is none, a boundary
        that is recorded already; ScoreError (scores-positive)."""
        self._need(self._recording)
        check_name(name)
        values, position_N = rows_by_hand(tensor, positions)
        if not self._stop_reason:
            found = self._find_sequence(sequence)
            whole = self._host.mesh().world_size == 1  # else other processes may know more of it
            check_by_hand(name, values, position_N, self._registry.length(found) if whole else 0)
            self._recorder.record_by_hand(name, values, found, position_N)

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
        ancestors = _ancestors(root_class, self._modules.get(""))
        if options.map == "auto":
            boundary_map = map_for_root_class(root_class, self._host.name, ancestors)
        else:
            boundary_map = options.map if isinstance(options.map, BoundaryMap) else load_boundary_map(os.fspath(options.map))
            require_served(boundary_map, self._host.name, root_class, ancestors)
        classes = {path: type(module).__name__ for path, module in self._modules.items()}
        globs = read_boundaries(options.boundaries)
        asked = () if options.plan is None else tuple(rows.boundary for rows in options.plan.boundaries)
        also = (*self._globs, *asked, *needed_boundaries(options))
        plan = resolve(boundary_map, self._host.name, classes, level=options.level, boundaries=globs, also=also, root_class=root_class)
        plan.require_resolved()
        return plan

    def _set_up(self) -> None:
        """Everything that runs while recording, in the order it is taken down again, last first."""
        self._read_surroundings()
        with ExitStack() as stack:
            self._dumps = self._dump_writer()
            self._dump_weights()
            self._outbox = Outbox(self._writer, self._dumps)
            stack.callback(self._outbox.close)
            self._registry = SequenceRegistry(self._outbox.open_sequence, self._outbox.add_ids)
            self._savers = self._make_savers()
            self._recorder = Recorder(self._host, self._plan, self._registry, self._outbox, self._wanted, self._savers)
            self._interventions = plan_interventions(self._options, self._host, self._plan, self._changeable, self._registry)
            stack.callback(self._guarded, self._recorder.close)
            self._process = os.getpid()
            self._wire(stack)
            self._stack = stack.pop_all()

    def _dump_writer(self) -> DumpWriter | None:
        """What bytes are written with, None where nobody asked for any."""
        options = self._options
        asked = [f"dump={','.join(self._globs)}"] if self._globs else []
        asked += ["plan"] if options.plan is not None else []
        asked += [f"against {options.against.name}"] if options.against is not None else []
        if not asked:
            return None
        identity, rank = self._identity, self._host.mesh().rank
        return DumpWriter(identity.out, rank, identity.run_id, "; ".join(asked), self._options.max_dump_bytes, options.plan)

    def _dump_weights(self) -> None:
        """Save rows of weights, before anything runs. What goes wrong unforeseen costs them, not the run. Raises CaptureError."""
        if self._dumps is None:
            return
        wanted = planned_weights(self._options.plan)
        try:
            if self._options.against is not None:
                differing, notes = differing_weight(self._options.against, self._weights, self._plan)
                wanted |= differing
                self._notes += notes
            self._notes += dump_weights(wanted, self._host, self._plan, self._dumps)
        except TracerError:
            raise
        except Exception as error:
            if self._options.strict:
                raise _as_capture_error(error) from error
            self._incomplete = self._incomplete or f"weights could not be saved: {reason_of(error)}"

    def _make_savers(self) -> list[Dumping | Against]:
        """Raises UsageError (bad-argument)."""
        options, boundaries = self._options, self._plan.boundaries
        if self._dumps is None:
            return []
        max_bytes, left_out = options.max_dump_bytes, self._dumps.left_out
        dumping = Dumping(
            self._registry, self._outbox, boundaries, globs=self._globs, plan=options.plan,
            max_bytes=max_bytes - self._dumps.bytes, left_out=left_out,
        )  # fmt: skip
        return [dumping] if options.against is None else [dumping, Against(options.against, boundaries, dumping)]

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
        self._intervene(stack, [entry for entry in self._interventions if isinstance(entry, Nudge)])
        last = []
        for (module, before), watch in _watches(self._recorder.readers, self._modules):
            if before:
                stack.callback(module.register_forward_pre_hook(self._hook_before(watch), with_kwargs=True).remove)
            else:
                handle = module.register_forward_hook(self._hook_after(watch), with_kwargs=True)
                stack.callback(handle.remove)
                last += [handle.id] if module is root else []
        taps = [reader.source for reader in self._recorder.readers if reader.source.tap]
        stack.enter_context(self._host.taps(taps, self._tapped))
        self._intervene(stack, [entry for entry in self._interventions if not isinstance(entry, Nudge)])
        ends = root.register_forward_hook(self._root_ends, with_kwargs=True, always_call=True)
        stack.callback(ends.remove)
        self._last_hooks = (*last, ends.id)

    def _intervene(self, stack: ExitStack, interventions: Iterable[Intervention]) -> None:
        """Hooks of interventions. A nudge comes before what records the boundary, what replaces values after it."""
        for entry in interventions:
            entry.install(self._modules[entry.reader.source.module], stack, self._refused)

    def _changeable(self) -> ForwardRecord | None:
        """The forward that is running, None outside any and once the recording has stopped."""
        return None if self._stop_reason else self._recorder.running()

    def _refused(self, error: Exception) -> None:
        """An intervention could not be carried out: nothing after it is recorded."""
        self._refusal = self._refusal or _as_capture_error(error)
        self._stop(reason_of(error))

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
        with self._lock:
            if os.getpid() != self._process:
                self._stop(_FORKED)
            elif self._depth and self._thread != threading.get_ident() and _runs_a_module(self._thread):
                self._stop("two threads ran the model at once, and which rows are whose cannot be told; run one forward at a time")
                return
            if self._depth and (self._thread != threading.get_ident() or _calls_on_stack(module) < 2):
                self._interrupted()
            self._thread = threading.get_ident()
            self._depth += 1
        if self._depth > 1:
            return
        self._error_before = sys.exc_info()[1]
        self._guarded(self._stay_last, module._forward_hooks)
        self._guarded(self._begin, args, kwargs)

    def _stay_last(self, hooks: OrderedDict[int, Callable[..., Any]]) -> None:
        """Behind hooks that others put on the root since: what those return is what the model returns."""
        if next(reversed(hooks), None) != self._last_hooks[-1]:
            for hook in self._last_hooks:
                hooks.move_to_end(hook)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._options.sequences
        try:
            lengths = given(args, kwargs) if callable(given) else given
        except Exception as error:
            raise UsageError(Code.BAD_ARGUMENT, "the function sequences= failed", found=reason_of(error)) from error
        self._registry.give_lengths(lengths)
        self._recorder.begin(args, kwargs)

    def _interrupted(self) -> None:
        """The last forward ended in what no hook hears of (KeyboardInterrupt), or is not over."""
        self._depth = 0
        self._incomplete = self._incomplete or f"forward {self._recorder.forwards - 1} was interrupted"
        self._recorder.abandon()

    def _root_ends(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or in_backward() or self._thread != threading.get_ident():
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
        failure = self._leave(error)
        if error is not None:
            return
        alone = self._host.mesh().world_size == 1  # others may wait for this process in their next collective
        if self._refusal is not None and (alone or self._options.strict):
            raise self._refusal
        if self._options.strict and (failure is not None or self._incomplete):
            raise CaptureError(Code.CAPTURE_FAILED, self._incomplete, where=str(self._identity.out)) from failure

    def _leave(self, error: BaseException | None) -> Exception | None:
        """Everything off, and the manifest written. Gives what went wrong in that. ``error``: the traced program's."""
        self._recording = False
        if os.getpid() != self._process:  # the shard is the parent's
            self._stop(_FORKED)
            self._stack.close()
            return None
        raised = ""
        if error is not None:
            raised = f"the traced program raised {reason_of(error)}"
            self._incomplete = self._incomplete or raised
        if self._depth:
            self._interrupted()
        failure: Exception | None = None
        try:
            self._stack.close()
            self._commit()
        except Exception as caught:
            failure = caught
            self._incomplete = f"the trace could not be committed: {reason_of(caught)}"
        if self._incomplete:
            said = f"the traced program raised {type(error).__name__}" if self._incomplete == raised else self._incomplete
            print(f"tracer: {self._identity.out} is incomplete: {said}", file=sys.stderr)
        elif not self._identity.named:
            print(f"tracer: wrote {self._identity.out}", file=sys.stderr)
        if self._vacuous and not self._incomplete:
            first, count = self._vacuous[0], len(self._vacuous)
            more = f" (and {count - 1} more)" if count > 1 else ""
            print(f"tracer: {self._identity.out} proves nothing at {first.name}{more}: {first.reason}", file=sys.stderr)
        return failure

    def _commit(self) -> None:
        """Write the manifest of what was recorded."""
        recorder, registry, host = self._recorder, self._registry, self._host
        if self._outbox.failure is not None:
            self._incomplete = self._incomplete or reason_of(self._outbox.failure)
        if registry.unused_requests():
            text = f"no forward took the request names {', '.join(registry.unused_requests()[:8])}"
            self._notes.append(Note(code="requests-unused", text=text))
        if self._recorder.forwards:
            self._incomplete = self._incomplete or unreached(self._interventions)
        dumps: tuple[SegmentInfo, ...] = ()
        if self._dumps is not None and self._outbox.failure is None:
            dumps = self._dumps.finish()
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
            dumps=dumps,
            interventions=told_interventions(self._options, self._interventions),
            replaced={entry.boundary: entry.source for entry in self._interventions if isinstance(entry, Feed)},
            conditions={**self._conditions, "optimizer_steps": self._optimizer_steps},
            notes=(*self._notes, *registry.notes, *recorder.notes(), *(note for saver in self._savers for note in saver.notes())),
            complete=not self._incomplete,
            incomplete_reason=self._incomplete,
        )
        self._vacuous = [boundary for boundary in manifest.boundaries if boundary.status is BoundaryStatus.VACUOUS]
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


def _as_capture_error(error: Exception) -> TracerError:
    return error if isinstance(error, TracerError) else CaptureError(Code.CAPTURE_FAILED, reason_of(error))


def _ancestors(root_class: str, root: torch.nn.Module | None) -> tuple[str, ...]:
    """Classes that the model's class derives from, nearest first, under names as ``Host.root_class`` gives them."""
    stem, bracket, features = root_class.partition("[")
    names = [kind.__name__ for kind in type(root).__mro__]
    return tuple(name + bracket + features for name in names[names.index(stem) + 1 :]) if stem in names else ()


def _calls_on_stack(module: torch.nn.Module) -> int:
    """How many calls of this module are running in this thread, the current one included."""
    frame, count = sys._getframe(), 0
    while frame is not None:
        count += frame.f_code is torch.nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _runs_a_module(thread: int) -> bool:
    """Whether that thread is inside a call of some module."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not torch.nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame is not None


def _remove_shard(shard: Path) -> None:
    """The folder of a recording that never began: it is ours, made a moment ago."""
    shutil.rmtree(shard, ignore_errors=True)
    with suppress(OSError):
        shard.parent.rmdir()
