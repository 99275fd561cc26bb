"""Recording a model that lives in other processes: the context manager here, a ``Trace`` in every one of them.

The driver names the run and its folder, sends what the user asked for as plain data, and collects what became of it.
Everything else happens where the model is. How a call reaches the processes is the host's business (``Processes``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from tracer import errors
from tracer.errors import CaptureError, Code, TracerError, UsageError
from tracer.format.dumps import DumpPlan
from tracer.format.reference import Reference
from tracer.record.capture import Trace
from tracer.record.dumping import dump_globs
from tracer.record.host import Host
from tracer.record.map_entries import BoundaryMap
from tracer.record.options import TraceOptions
from tracer.record.run_identity import RunIdentity, agree_on_run
from tracer.record.tallies import reason_of
from tracer.record.tokens import check_text, read_request_names

__all__ = ["OpenReference", "Processes", "RemoteTrace", "TraceServer"]


class OpenReference(Protocol):
    """The facade's ``open_reference``: recording never reads traces itself."""

    def __call__(self, path: str, *, values: bool) -> Reference: ...


class Processes(Protocol):
    """Processes that hold one model between them."""

    name: str
    """Name of the host that records in them."""

    def call(self, method: str, message: bytes) -> Sequence[bytes]:
        """``TraceServer.answer(method, message)`` in every process, in rank order; JSON both ways."""


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """``TraceOptions`` as plain data."""

    out: str
    run_id: str
    version: str
    map: str | BoundaryMap
    level: int
    boundaries: tuple[str, ...] | None
    tokens: tuple[int, ...] | None
    token_slice: tuple[int | None, int | None, int | None] | None
    weights: str | bool | None
    dump: tuple[str, ...] = ()
    max_dump_bytes: int
    plan: DumpPlan | None = None
    against: str = ""
    feed: str = ""
    pin: dict[str, str] = {}
    perturb_ulps: int = 0


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says. ``error``: parts of a TracerError."""

    incomplete: str = ""
    error: dict[str, str] = {}


class RemoteTrace:
    """One recording of a model in other processes; used like a ``Trace``. Enter it once."""

    def __init__(self, processes: Processes, options: TraceOptions, version: str) -> None:
        """Raises UsageError (bad-argument) for what cannot be sent to the processes."""
        if options.sequences is not None:
            raise UsageError(
                Code.BAD_ARGUMENT,
                "sequences= has no meaning here: the engine knows its sequences",
                found=repr(options.sequences),
                remedy="leave sequences= out",
            )
        self._processes = processes
        self._options = options
        self._version = version
        self._identity: RunIdentity | None = None
        self._recording = False

    @property
    def path(self) -> Path:
        """The trace's folder. Raises UsageError (bad-argument) before entering."""
        if self._identity is None:
            raise _not_recording()
        return self._identity.out

    def requests(self, names: Iterable[str]) -> None:
        """Name the requests that come next, in the order in which the engine takes them up: see ``Trace.requests``."""
        self._tell("requests", read_request_names(names))

    def policy(self, version: str | int) -> None:
        """What follows was computed with this version of the policy."""
        check_text(str(version), "a policy version")
        self._tell("policy", str(version))

    def record(self, name: str, values: Any, *, sequence: str | None = None, positions: Sequence[int] | None = None) -> None:
        """Not possible from outside the processes that record. Raises UsageError (bad-argument)."""
        raise UsageError(
            Code.BAD_ARGUMENT,
            "t.record adds values to a trace of this process; this one is recorded by the engine's workers",
            remedy="build the engine in this process, or record the values in a trace of their own",
        )

    def __enter__(self) -> RemoteTrace:
        if self._identity is not None:
            raise UsageError(Code.BAD_ARGUMENT, "a trace is entered once", remedy="make a new one with trace(...)")
        identity = agree_on_run(self._options.out, self._processes.name)
        self._identity = RunIdentity(identity.run_id, identity.out.absolute(), identity.named)
        answers = self._ask("start", _start_message(self._options, self._identity, self._version))
        if failed := [answer for answer in answers if answer.error]:
            self._ask("cancel", None)
            raise _error_of(failed[0].error)
        self._recording = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._recording = False
        assert self._identity is not None
        why = "" if error is None else f"the traced program raised {reason_of(error)}"
        failure: Exception | None = None
        refusals: list[TracerError] = []
        try:
            answers = self._ask("stop", why)
            refusals = [_error_of(answer.error) for answer in answers if answer.error]
            reasons = {answer.incomplete or answer.error.get("what", "") for answer in answers} - {""}
        except Exception as caught:  # a dead engine must not hide what the program raised
            failure, reasons = caught, {f"the processes that record did not answer: {reason_of(caught)}"}
        incomplete = "; ".join(sorted(reasons))
        if incomplete:
            said = f"the traced program raised {type(error).__name__}" if incomplete == why else incomplete
            print(f"tracer: {self._identity.out} is incomplete: {said}", file=sys.stderr)
        elif not self._identity.named:
            print(f"tracer: wrote {self._identity.out}", file=sys.stderr)
        if refusals and error is None:
            raise refusals[0]
        if self._options.strict and error is None and incomplete:
            raise CaptureError(Code.CAPTURE_FAILED, incomplete, where=str(self._identity.out)) from failure

    def _ask(self, method: str, content: Any) -> list[_Answer]:
        return [msgspec.json.decode(answer, type=_Answer) for answer in self._processes.call(method, msgspec.json.encode(content))]

    def _tell(self, method: str, content: Any) -> None:
        if not self._recording:
            raise _not_recording()
        for answer in self._ask(method, content):
            if answer.error:
                raise _error_of(answer.error)


class TraceServer:
    """The other end, in one process that holds the model (or a part of it). ``answer`` never raises a TracerError."""

    def __init__(self, open_reference: OpenReference) -> None:
        """``open_reference``: opens another trace, from its folder."""
        self._open_reference = open_reference
        self._trace: Trace | None = None

    def answer(self, method: str, message: bytes, host: Host | None) -> bytes:
        """Carry out a call of ``RemoteTrace``. ``host``: needed by ``start`` only."""
        try:
            answer = self._carry_out(method, message, host)
        except TracerError as error:
            answer = _Answer(error=_error_parts(error))
        return msgspec.json.encode(answer)

    def _carry_out(self, method: str, message: bytes, host: Host | None) -> _Answer:
        if method == "start":
            if self._trace is not None:
                raise UsageError(Code.BAD_ARGUMENT, "this process is recording already", remedy="end the other trace first")
            assert host is not None
            start = msgspec.json.decode(message, type=_Start)
            trace = Trace(host, _options(start, self._open_reference), start.version, RunIdentity(start.run_id, Path(start.out), True))
            self._trace = trace.__enter__()
            return _Answer()
        if self._trace is None:
            if method == "cancel":
                return _Answer()
            raise _not_recording()
        if method == "requests":
            self._trace.requests(msgspec.json.decode(message, type=list[str]))
        elif method == "policy":
            self._trace.policy(msgspec.json.decode(message, type=str))
        elif method == "cancel":
            trace, self._trace = self._trace, None
            trace.cancel()
        else:
            trace, self._trace = self._trace, None
            trace.stop(msgspec.json.decode(message, type=str))
            refused = {} if trace.refusal is None else _error_parts(trace.refusal)
            return _Answer(incomplete=trace.incomplete, error=refused)
        return _Answer()


def _start_message(options: TraceOptions, identity: RunIdentity, version: str) -> _Start:
    tokens = options.tokens
    return _Start(
        out=str(identity.out),
        run_id=identity.run_id,
        version=version,
        map=options.map if isinstance(options.map, BoundaryMap) else str(options.map),
        level=options.level,
        boundaries=None if options.boundaries is None else tuple(options.boundaries),
        tokens=None if tokens is None or isinstance(tokens, slice) else tuple(tokens),
        token_slice=(tokens.start, tokens.stop, tokens.step) if isinstance(tokens, slice) else None,
        weights=options.weights,
        dump=dump_globs(options.dump),
        max_dump_bytes=options.max_dump_bytes,
        plan=options.plan,
        against="" if options.against is None else options.against.path,
        feed="" if options.feed is None else options.feed.path,
        pin={glob: reference.path for glob, reference in (options.pin or {}).items()},
        perturb_ulps=options.perturb_ulps,
    )


def _options(start: _Start, open_reference: OpenReference) -> TraceOptions:
    tokens = slice(*start.token_slice) if start.token_slice is not None else start.tokens
    return TraceOptions(
        map=start.map,
        out=start.out,
        level=start.level,
        boundaries=start.boundaries,
        tokens=tokens,
        weights=start.weights,
        dump=start.dump or None,
        max_dump_bytes=start.max_dump_bytes,
        plan=start.plan,
        against=open_reference(start.against, values=False) if start.against else None,
        feed=open_reference(start.feed, values=True) if start.feed else None,
        pin={glob: open_reference(path, values=False) for glob, path in start.pin.items()} or None,
        perturb_ulps=start.perturb_ulps,
    )


def _not_recording() -> UsageError:
    return UsageError(Code.BAD_ARGUMENT, "this trace is not recording", remedy="use it inside `with trace(...) as t:`")


def _error_parts(error: TracerError) -> dict[str, str]:
    parts = {"kind": type(error).__name__, "code": error.code.value, "what": error.what}
    return {**parts, "where": error.where, "expected": error.expected, "found": error.found, "remedy": error.remedy}


def _error_of(parts: dict[str, str]) -> TracerError:
    """The error that another process raised, of the class it had there."""
    kind: type[TracerError] = getattr(errors, parts["kind"])
    told = {name: parts[name] for name in ("where", "expected", "found", "remedy")}
    return kind(Code(parts["code"]), parts["what"], **told)
