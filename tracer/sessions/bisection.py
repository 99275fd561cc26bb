"""Bisect sessions: both sides run once per step, each step narrower than the one before, until the bytes are on the table.

| step | records | answers |
|---|---|---|
| coarse | level 0: embedding, block outputs, final norm, logits | which block |
| fine | level 2 of that block, level 0 of all others | which boundary |
| dump | the same, and the bytes of that boundary and of its inputs | what kind of difference |

Differences are not monotonic in depth, so nothing is halved and nothing assumed: every step records all coarse boundaries
again, holds each side against its own earlier steps, and takes the earliest divergence of the whole comparison.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tracer.errors import Code, SessionError, TracerError, UsageError
from tracer.format.dumps import write_plan
from tracer.format.redaction import redact_command, redact_values
from tracer.read.diff import diff_traces
from tracer.read.dump_plans import make_dump_plan
from tracer.read.findings import DiffResult, Verdict
from tracer.read.floor import Tolerance, parse_tolerance
from tracer.read.logical import LogicalTrace
from tracer.sessions.archive import Archive, Run, RunStatus, locked, read_state, write_state
from tracer.sessions.commands import end_stragglers, run_command, sets_variable
from tracer.sessions.frozen import look_at, moved_boundaries

__all__ = ["SESSION_FILE", "Bisection", "Session", "SessionStatus", "Stage", "Step", "StepStatus", "bisect_traces"]

SESSION_FILE = "session.json"
_SIDES = ("a", "b")
_SET_FOR_A_STEP = ("TRACER_OUT", "TRACER_LEVEL", "TRACER_BOUNDARIES", "TRACER_MAP", "TRACER_PLAN")


class Stage(str, Enum):
    """How closely a step looks."""

    COARSE = "coarse"
    FINE = "fine"
    DUMP = "dump"


class StepStatus(str, Enum):
    """How a step ended."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class SessionStatus(str, Enum):
    """Where a session stands."""

    OPEN = "open"
    """There is a next step."""
    STOPPED = "stopped"
    """A step failed: look at its logs, mend the cause, and run on."""
    DONE = "done"


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step. ``runs``: side -> id of its run. ``result``: file of the comparison. ``first``: the boundary it found."""

    number: int
    stage: Stage
    boundaries: tuple[str, ...] = ()
    status: StepStatus = StepStatus.RUNNING
    runs: dict[str, str] = {}
    result: str = ""
    first: str = ""
    said: str = ""
    invalidated: str = ""


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The state of a session, written before and after everything that changes it. ``tolerance``, ``floor_a``, ``floor_b``: what the
    sides are held against, as for ``tracer diff``. ``skipped``: boundaries left out of the search.
"""

    VERSION: ClassVar[int] = 1

    version: int = VERSION
    map: str = ""
    command_a: str
    command_b: str
    cwd: str
    budget_seconds: float | None = None
    thorough: bool = False
    tolerance: str = ""
    floor_a: tuple[str, ...] = ()
    floor_b: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    status: SessionStatus = SessionStatus.OPEN
    said: str = ""
    exit: int = 2

    def check(self) -> None:
        """Refuse what a session cannot begin with. Raises ``UsageError`` (bad-argument): an unreadable tolerance, a budget that is no
        time, a command with a secret in it, or one that sets what a step sets."""
        if self.limit().ulps:
            raise UsageError(
                Code.BAD_ARGUMENT, "a session cannot hold its sides against ulps: only its last step has the bytes", found=self.tolerance,
                remedy="give relative=NUMBER; tracer diff takes ulps=N for the traces of the last step",
            )  # fmt: skip
        if self.budget_seconds is not None and not (math.isfinite(self.budget_seconds) and self.budget_seconds > 0):
            raise UsageError(Code.BAD_ARGUMENT, "a budget is a time", expected="seconds, more than 0", found=str(self.budget_seconds))
        for command in (self.command_a, self.command_b):
            if redact_values(redact_command(command), os.environ) != command:
                raise UsageError(
                    Code.BAD_ARGUMENT, "a command holds a secret, and the session keeps its commands",
                    expected="a reference to a variable of the environment", found=redact_values(redact_command(command), os.environ),
                    remedy="export the secret and write $NAME in its place, between single quotes",
                )  # fmt: skip
            own = next((name for name in _SET_FOR_A_STEP if sets_variable(command, name)), "")
            if own:
                raise UsageError(
                    Code.BAD_ARGUMENT, f"a command sets {own} itself, which every step sets anew", expected=f"a command without {own}=",
                    found=command, remedy="leave it out; --map MAP gives both sides a map" if own == "TRACER_MAP" else "leave it out",
                )  # fmt: skip

    def limit(self) -> Tolerance:
        """The stated tolerance; all zeros where there is none."""
        return parse_tolerance(self.tolerance) if self.tolerance else Tolerance()

    def valid(self) -> list[Step]:
        """Steps that are done and whose conclusions hold."""
        return [step for step in self.steps if step.status is StepStatus.DONE and not step.invalidated]


class _SideRaised(Exception):  # noqa: N818
    """What a callable of ``bisect_traces`` raised, on its way to the caller."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


Runner = Callable[[str, Run, dict[str, str]], tuple[RunStatus, dict[str, Any]]]
"""``runner(side, run, overrides)``: carry out one side once; how it ended, and fields of the run to write down."""


class Bisection:
    """A session in a folder. Every method that changes something writes the state before and after."""

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        """Opens a session. ``runner``: what runs a side once; by default the session's commands in processes of their own.

        Raises ``UsageError`` (not-a-session, session-damaged)."""
        self.folder = folder
        self._file = folder / SESSION_FILE
        if not self._file.exists():
            raise UsageError(
                Code.NOT_A_SESSION, "there is no session in this folder", where=str(folder), expected=f"a folder with {SESSION_FILE}",
                found="none", remedy="tracer bisect start --a COMMAND --b COMMAND FOLDER",
            )  # fmt: skip
        self.session = self._read()
        self.archive = Archive(folder)
        self._runner = runner or self._run_command
        self._traces: dict[str, LogicalTrace] = {}

    @classmethod
    def start(cls, folder: Path, session: Session, runner: Runner | None = None) -> Bisection:
        """A new session. Raises ``UsageError`` (out-in-use): the folder holds something."""
        if folder.exists() and (not folder.is_dir() or any(entry.name != ".lock" for entry in folder.iterdir())):
            raise UsageError(
                Code.OUT_IN_USE, "a session starts in a new folder", where=str(folder), expected="a folder that does not exist",
                found="a folder that holds something", remedy="give another folder; nothing is overwritten",
            )  # fmt: skip
        session.check()
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder / SESSION_FILE, session)
        return cls(folder, runner)

    # ------------------------------------------------------------------------------------------------ the user's calls

    def run(self, told: Callable[[str], None] = lambda text: None) -> Session:
        """Step until the answer is there or a step fails. ``told``: gets one line per step."""
        while self.session.status is not SessionStatus.DONE:
            self.next(told)
            if self.session.status is SessionStatus.STOPPED:
                break
        return self.session

    def next(self, told: Callable[[str], None] = lambda text: None) -> Session:
        """Carry out one step: resume the one that was interrupted or failed, else begin the one that follows."""
        with locked(self.folder):
            self.session = self._read()
            self.archive = Archive(self.folder)
            if self.session.status is SessionStatus.DONE:
                return self.session
            try:
                self._step(told)
            except OSError as error:
                why = f"the session's folder cannot be written: {error.strerror or error}"
                self._stop_at(why)
                raise SessionError(
                    Code.SESSION_STOPPED, why, where=str(error.filename or self.folder),
                    remedy="make room, then tracer bisect run goes on from here",
                ) from error  # fmt: skip
            except KeyboardInterrupt:
                self._stop_at("interrupted; run tracer bisect next to go on from here")
                raise
            except TracerError as error:
                self._stop_at(error.what + (f" ({error.where})" if error.where else ""))
                raise
            except _SideRaised as raised:
                raise raised.error from None
        return self.session

    def _step(self, told: Callable[[str], None]) -> None:
        self._write(status=SessionStatus.OPEN, said="")
        step = self._open_step()
        told(f"step {step.number}, {step.stage.value}: {_asks(step)}")
        self._carry_out(step)

    def _stop_at(self, why: str) -> None:
        """Stop with the step that was being worked on. Where that cannot be written, what is on disk is the state to go on from."""
        with suppress(OSError):
            step = self.session.steps[-1] if self.session.steps else None
            if step is not None and step.status is StepStatus.RUNNING:
                self._stop(step, why)
            else:
                self._write(status=SessionStatus.STOPPED, said=why, exit=2)

    def skip(self, boundary: str) -> Session:
        """Leave a boundary out of the search: what was concluded from it no longer holds, and the session goes on without it."""
        with locked(self.folder):
            self.session = self._read()
            known = {name for step in self.session.valid() for name in self._names(step)}
            if boundary not in known:
                near = sorted(name for name in known if name.rsplit(".", 1)[-1] == boundary.rsplit(".", 1)[-1])[:4]
                raise UsageError(
                    Code.BAD_ARGUMENT, "no step of this session recorded such a boundary",
                    expected=", ".join(near) or "a recorded boundary", found=boundary, remedy="tracer bisect status shows what was found",
                )  # fmt: skip
            self._invalidate(f"{boundary} was skipped", (*self.session.skipped, boundary))
        return self.session

    def reset(self, command_a: str = "", command_b: str = "") -> Session:
        """Start the search anew, with other commands where some are given. Nothing is deleted: earlier steps stay in the archive,
        marked. Raises ``UsageError`` (bad-argument) as ``Session.check`` does."""
        with locked(self.folder):
            self.session = self._read()
            given = {"command_a": command_a, "command_b": command_b}
            session = msgspec.structs.replace(self.session, **{name: command for name, command in given.items() if command})
            session.check()
            self.session = session
            self._invalidate("the session was reset", ())
        return self.session

    def result(self) -> DiffResult | None:
        """The last comparison whose conclusion holds."""
        valid = self.session.valid()
        if not valid:
            return None
        return read_state(self.folder / valid[-1].result, DiffResult)

    # ------------------------------------------------------------------------------------------------ a step

    def _open_step(self) -> Step:
        """The step to work on, in the state already: an unfinished one again, else the next."""
        for run in list(self.archive):
            if run.status is RunStatus.RUNNING:  # the lock is ours, so nobody runs it any more
                left = end_stragglers(str(self.archive.trace(run).resolve()))
                also = f"; {left} processes that it had started were ended" if left else ""
                self.archive.change(run, status=RunStatus.INTERRUPTED, reason=f"its process is gone{also}")
        for step in self.session.steps:
            if step.status is not StepStatus.DONE and not step.invalidated:
                good = {run.id for run in self.archive if run.status is RunStatus.DONE and not run.invalidated}
                kept = {side: name for side, name in step.runs.items() if name in good}
                return self._put(msgspec.structs.replace(step, status=StepStatus.RUNNING, runs=kept, said=""))
        valid = self.session.valid()
        stage = (Stage.COARSE, Stage.FINE, Stage.DUMP)[len(valid)]
        boundaries = self._to_record(stage, valid)
        return self._put(Step(number=len(self.session.steps) + 1, stage=stage, boundaries=boundaries))

    def _to_record(self, stage: Stage, valid: list[Step]) -> tuple[str, ...]:
        """Globs of what a step records; empty for everything of its level."""
        if stage is Stage.COARSE and not self.session.skipped:
            return ()
        if stage is Stage.COARSE:
            before = next(step for step in self.session.steps if step.status is StepStatus.DONE)
            return tuple(name for name in self._names(before, level=0) if name not in self.session.skipped)
        if stage is Stage.DUMP:
            return valid[-1].boundaries
        if self.session.thorough:
            return tuple(name for name in self._names(valid[0]) if name not in self.session.skipped)
        order = self._names(valid[0])
        coarse = set(self._names(valid[0], level=0))
        first = order.index(valid[0].first)
        begin = next((at for at in range(first - 1, -1, -1) if order[at] in coarse and not order[at].startswith("input.")), -1)
        return tuple(name for at, name in enumerate(order) if (name in coarse or begin < at <= first) and name not in self.session.skipped)

    def _carry_out(self, step: Step) -> None:
        """Run what has not run, then look at it."""
        plan = self._plan_file(step)
        if isinstance(plan, str) and plan:
            self._finish(step, self._result_of(self.session.valid()[-1]), plan)
            return
        for side in _SIDES:
            if side not in step.runs:
                done = self._run_side(step, side, plan if isinstance(plan, Path) else None)
                step = self._put(msgspec.structs.replace(step, runs={**step.runs, side: done.id}))
            run = self.archive[step.runs[side]]
            if run.status is not RunStatus.DONE:
                who = f"side {side.upper()} of step {step.number}"
                self._stop(step, f"{who} {run.status.value}: {run.reason} (logs in {self.archive.path(run)})")
                return
            trouble = self._unlike_before(step, side, run)
            if trouble:
                self.archive.invalidate((run.id,), trouble)
                self._stop(step, trouble)
                return
        a, b = (self._trace(step.runs[side]) for side in _SIDES)
        tolerance = self.session.limit() if self.session.tolerance else None
        result = diff_traces(a, b, floor_a=self.session.floor_a, floor_b=self.session.floor_b, tolerance=tolerance)
        self._finish(step, result, "")

    def _plan_file(self, step: Step) -> Path | str | None:
        """The dump step's plan as a file, None for other steps, or why there is nothing to dump."""
        if step.stage is not Stage.DUMP:
            return None
        file = self.folder / f"step-{step.number:04d}-plan.json"
        if not file.exists():
            before = self.session.valid()[-1]
            a, b = (self._trace(before.runs[side]) for side in _SIDES)
            plan = make_dump_plan(a, b, self._result_of(before))
            if isinstance(plan, str):
                return plan
            kept = tuple(rows for rows in plan.boundaries if rows.boundary not in self.session.skipped)
            write_plan(msgspec.structs.replace(plan, boundaries=kept), file)
        return file

    def _run_side(self, step: Step, side: str, plan: Path | None) -> Run:
        command = self.session.command_a if side == "a" else self.session.command_b
        overrides = {"TRACER_LEVEL": "0" if step.stage is Stage.COARSE else "2"}
        if step.boundaries:
            overrides["TRACER_BOUNDARIES"] = ",".join(step.boundaries)
        if self.session.map:
            overrides["TRACER_MAP"] = self.session.map
        if plan is not None:
            overrides["TRACER_PLAN"] = str(plan.resolve())
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run = self.archive.begin(f"{step.stage.value}-{side}", redact_command(command), overrides, started)
        overrides = {**overrides, "TRACER_OUT": str(self.archive.trace(run).resolve())}
        try:
            status, fields = self._runner(side, run, overrides)
        except Exception as error:
            reason = redact_values(f"{type(error).__name__}: {error}", os.environ)
            self._put(msgspec.structs.replace(step, runs={**step.runs, side: run.id}))
            self.archive.change(run, status=RunStatus.FAILED, reason=reason)
            self._stop_at(f"side {side.upper()} of step {step.number} {RunStatus.FAILED.value}: {reason}")
            raise _SideRaised(error) from error
        except BaseException:
            self.archive.change(run, status=RunStatus.INTERRUPTED)
            raise
        if status is RunStatus.DONE:
            evidence = look_at(self.archive.trace(run))
            fields |= {"weights": evidence.weights, "policy": evidence.policy, "image": evidence.image, "evidence": evidence.proof}
            if evidence.trace is not None:
                self._traces[run.id] = evidence.trace
            if evidence.problem:
                status = RunStatus.VACUOUS if evidence.vacuous else RunStatus.NO_TRACE
                fields["reason"] = evidence.problem
        return self.archive.change(run, status=status, **fields)

    def _run_command(self, side: str, run: Run, overrides: dict[str, str]) -> tuple[RunStatus, dict[str, Any]]:
        command = self.session.command_a if side == "a" else self.session.command_b
        budget = self.session.budget_seconds
        try:
            ended = run_command(command, self.archive.path(run), {**os.environ, **overrides}, budget, Path(self.session.cwd))
        except OSError as error:
            return RunStatus.FAILED, {"reason": f"it could not be started in {self.session.cwd}: {error.strerror or error}"}
        fields: dict[str, Any] = {"exit_status": ended.exit_status, "elapsed_seconds": ended.elapsed_seconds}
        if ended.left_behind:
            fields["reason"] = f"{ended.left_behind} processes that it left behind were ended"
        if ended.exit_status is None:
            return RunStatus.TIMED_OUT, {**fields, "reason": f"it ran longer than its budget of {budget:g} s"}
        if ended.exit_status:
            return RunStatus.FAILED, {**fields, "reason": f"exit status {ended.exit_status}: {ended.last_words}"}
        if ended.unwritten:
            return RunStatus.FAILED, {**fields, "reason": f"its logs could not be written: {ended.unwritten}"}
        return RunStatus.DONE, fields

    def _unlike_before(self, step: Step, side: str, run: Run) -> str:
        """Why this run cannot stand beside the side's earlier ones; empty where it can."""
        for earlier in self.session.valid():
            before = self.archive[earlier.runs[side]] if side in earlier.runs else None
            if before is None or before.id == run.id:
                continue
            who = f"side {side.upper()}"
            if before.weights != run.weights:
                return f"{who} does not hold the weights of step {earlier.number}: freeze them, then tracer bisect reset"
            for what, old, new in (("policy version", before.policy, run.policy), ("image", before.image, run.image)):
                if old != new:
                    return f"{who} ran with another {what} than in step {earlier.number} ({old or 'none'}, now {new or 'none'})"
            moved = moved_boundaries(self._trace(before.id), self._trace(run.id))
            if moved:
                return (
                    f"{who} does not repeat itself: {moved[0]} is not what it was in step {earlier.number}"
                    + (f" ({len(moved)} boundaries)" if len(moved) > 1 else "")
                    + "; make it deterministic, or use tracer diff with --floor"
                )
        return ""

    def _finish(self, step: Step, result: DiffResult, nothing_to_dump: str) -> None:
        """Write the comparison, and decide whether there is a next step."""
        file = f"step-{step.number:04d}.json"
        write_state(self.folder / file, result)
        first = result.first.boundary if result.first is not None else ""
        step = msgspec.structs.replace(step, status=StepStatus.DONE, result=file, first=first, said=nothing_to_dump or result.headline)
        if result.verdict is Verdict.COULD_NOT_TELL:
            self._run_again(step, result.headline)
            return
        if step.stage is not Stage.COARSE and result.verdict is Verdict.SAME:
            self._run_again(step, "the sides differed in the step before and are equal now")
            return
        last = step.stage is Stage.DUMP or result.verdict is Verdict.SAME or first.startswith("input.") or first not in self._names(step)
        status = SessionStatus.DONE if last else SessionStatus.OPEN
        self._write(steps=self._with(step), status=status, said=result.headline, exit=result.exit)

    def _run_again(self, step: Step, why: str) -> None:
        """Stop with a step whose runs led to no answer: what comes after the mending needs new ones."""
        self.archive.invalidate(tuple(step.runs.values()), why)
        self._stop(step, why)

    def _read(self) -> Session:
        return read_state(self._file, Session, Session.VERSION)

    def _stop(self, step: Step, why: str) -> None:
        failed = msgspec.structs.replace(step, status=StepStatus.FAILED, said=why)
        self._write(steps=self._with(failed), status=SessionStatus.STOPPED, said=why, exit=2)

    # ------------------------------------------------------------------------------------------------ state

    def _put(self, step: Step) -> Step:
        self._write(steps=self._with(step))
        return step

    def _with(self, step: Step) -> tuple[Step, ...]:
        """All steps, this one as it is now."""
        steps = {known.number: known for known in self.session.steps}
        steps[step.number] = step
        return tuple(steps.values())

    def _write(self, **fields: Any) -> None:
        self.session = msgspec.structs.replace(self.session, **fields)
        write_state(self._file, self.session)

    def _invalidate(self, reason: str, skipped: tuple[str, ...]) -> None:
        """Mark every step with the reason and open the session again, in one write."""
        steps = []
        for step in self.session.steps:
            if not step.invalidated:
                self.archive.invalidate(tuple(step.runs.values()), reason)
                step = msgspec.structs.replace(step, invalidated=reason)
            steps.append(step)
        self._write(steps=tuple(steps), skipped=skipped, status=SessionStatus.OPEN, said="", exit=2)

    def _trace(self, run: str) -> LogicalTrace:
        if run not in self._traces:
            found = look_at(self.archive.trace(self.archive[run]))
            if found.trace is None:
                raise UsageError(Code.SESSION_DAMAGED, found.problem, where=str(self.archive.path(self.archive[run])))
            self._traces[run] = found.trace
        return self._traces[run]

    def _names(self, step: Step, level: int = 2) -> list[str]:
        """Boundaries of the map in causal order, as side A of a step knows them; none where a step ran nothing."""
        if "a" not in step.runs:
            return []
        return [info.name for info in self._trace(step.runs["a"]).catalogue if info.level <= level]

    def _result_of(self, step: Step) -> DiffResult:
        return read_state(self.folder / step.result, DiffResult)


def _asks(step: Step) -> str:
    match step.stage:
        case Stage.COARSE:
            return "which block?"
        case Stage.FINE:
            return f"which boundary? ({len(step.boundaries)} are recorded)"
        case Stage.DUMP:
            return "what kind of difference? (the rows that differ are saved)"


def bisect_traces(
    run_a: Callable[..., object], run_b: Callable[..., object], map: str = "auto", folder: str | os.PathLike[str] = "bisect",
    *, thorough: bool = False, tolerance: str = "", floor_a: Sequence[str] = (), floor_b: Sequence[str] = (),
) -> DiffResult:  # fmt: skip
    """A session in this process: narrow a divergence of two callables down to its bytes.

    ``run_a``, ``run_b``: called once per step with keywords for ``trace`` (``map``, ``out``, ``level``, ``boundaries``, ``plan``), as
    ``def run_a(**options): with trace(model, **options): model(**batch)``; they must do the same every time. ``folder``: a new one; it
    keeps every step. ``thorough``: look into all blocks at once. ``tolerance`` (``"relative=1e-4"``), ``floor_a``, ``floor_b``: what the
    sides are held against, as for ``tracer diff``.

    Returns the last comparison. Raises ``UsageError`` (out-in-use), and ``SessionError`` (session-stopped) where a step failed.
    """
    calls: Mapping[str, Callable[..., object]] = {"a": run_a, "b": run_b}

    def runner(side: str, run: Run, overrides: dict[str, str]) -> tuple[RunStatus, dict[str, Any]]:
        options: dict[str, Any] = {"map": map, "out": overrides["TRACER_OUT"], "level": int(overrides["TRACER_LEVEL"])}
        if "TRACER_BOUNDARIES" in overrides:
            options["boundaries"] = overrides["TRACER_BOUNDARIES"].split(",")
        if "TRACER_PLAN" in overrides:
            options["plan"] = overrides["TRACER_PLAN"]
        calls[side](**options)
        return RunStatus.DONE, {}

    names = [f"{getattr(call, '__module__', '')}.{getattr(call, '__qualname__', call)}" for call in calls.values()]
    session = Session(
        command_a=names[0], command_b=names[1], cwd=str(Path.cwd()), thorough=thorough, tolerance=tolerance,
        floor_a=tuple(os.path.abspath(path) for path in floor_a), floor_b=tuple(os.path.abspath(path) for path in floor_b),
    )  # fmt: skip
    bisection = Bisection.start(Path(folder), session, runner)
    ended = bisection.run()
    result = bisection.result()
    if ended.status is SessionStatus.STOPPED or result is None:
        raise SessionError(Code.SESSION_STOPPED, ended.said, where=str(folder), remedy="mend the cause; the folder keeps what was recorded")
    return result
