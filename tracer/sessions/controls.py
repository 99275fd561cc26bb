"""Replay controls: one command, run again with one thing changed at a time, each time in a process and a folder of its own.

```yaml
command: python rollout.py           # traces once; TRACER_OUT says where
tolerance: relative=1e-4             # what counts as moving; left out: any bit
target: ["*.moe.*"]                  # boundaries that the question is about; a variant in which none of them ran is vacuous
budget_seconds: 600
environment: {OMP_NUM_THREADS: "1"}  # of every run
variants:
  repeat: {}                         # nothing changed: this side's own noise
  eager-experts: {environment: {EXPERTS: eager}}
  no-prefix-cache: {arguments: --no-prefix-cache}
```

The first run is the base; every variant is compared with it. What a variant moves, its variable reaches; what it does not
move is only known not to be reached if the target ran.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from tracer.errors import Code, SessionError, TracerError, UsageError
from tracer.format.redaction import REDACTED, names_secret, redact_command
from tracer.read.diff import diff_traces
from tracer.read.findings import BoundaryOutcome, DiffResult, Verdict
from tracer.read.floor import parse_tolerance
from tracer.read.logical import LogicalTrace
from tracer.sessions.archive import Archive, Run, RunStatus, locked, write_state
from tracer.sessions.commands import run_command, sets_variable
from tracer.sessions.frozen import look_at

__all__ = ["ControlResult", "Controls", "Effect", "Variant", "VariantResult", "load_controls", "preview", "run_controls", "template_names"]

RESULT_FILE = "controls.json"
TEMPLATES = Path(__file__).with_name("control_templates")
_BASE = "base"


class Variant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One changed thing: environment variables (None takes one away) or arguments put behind the command."""

    environment: dict[str, str | None] = {}
    arguments: str = ""
    about: str = ""

    @property
    def changes(self) -> str:
        """What is changed, in one line without secrets; empty for a repeat."""
        parts = [f"{name}={_written(name, value)}" for name, value in self.environment.items()]
        return " ".join([*parts, *([redact_command(self.arguments)] if self.arguments else [])])


class Controls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A file of controls. ``target``: globs of boundaries the question is about. ``budget_seconds``: of one run. ``tolerance``: as for
    ``tracer diff``; what a variable moves by less is no effect."""

    command: str
    variants: dict[str, Variant]
    about: str = ""
    target: tuple[str, ...] = ("*",)
    budget_seconds: float | None = None
    tolerance: str = ""
    environment: dict[str, str] = {}
    continue_on_failure: bool = False


class Effect(str, Enum):
    """What changing the variable did."""

    MOVES = "moves"
    NONE = "no effect"
    VACUOUS = "vacuous"
    """The target did not run: nothing can be said."""
    UNKNOWN = "unknown"
    """The comparison could not tell."""
    FAILED = "failed"


class VariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """One variant against the base. ``first``: the first boundary it moves; ``moved``: how many of the target's it moves."""

    name: str
    changes: str
    run: str
    effect: Effect
    first: str = ""
    moved: int = 0
    text: str = ""
    same_weights: bool | None = None


class ControlResult(msgspec.Struct, frozen=True, kw_only=True):
    """All variants. ``exit``: 0 nothing moves, 1 something does, 2 some run or comparison could not tell."""

    version: int = 1
    exit: int
    verdict: str
    headline: str
    base: str
    variants: tuple[VariantResult, ...] = ()


def template_names() -> list[str]:
    """The ready-made groups."""
    return sorted(path.stem for path in TEMPLATES.glob("*.yaml"))


def load_controls(source: str) -> Controls:
    """Read and check a file of controls. Raises ``UsageError`` (controls-invalid) with file, key, expected and found."""
    path = Path(source)
    try:
        controls: Controls = msgspec.convert(yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader), Controls)
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = (error.strerror or str(error)) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(
            Code.CONTROLS_INVALID, "this is no file of controls", where=source,
            expected="command, variants: {NAME: {environment, arguments}}", found=found, remedy="tracer controls template prints one",
        ) from error  # fmt: skip
    for name, variant in controls.variants.items():
        _check_variant(source, name, variant, controls.environment)
        _check_reach(source, f"variants.{name}.environment", controls.command, variant.environment)
    _check_reach(source, "environment", controls.command, (*controls.environment, "TRACER_OUT"))
    if controls.tolerance and parse_tolerance(controls.tolerance).ulps:
        raise UsageError(
            Code.CONTROLS_INVALID, "nothing is dumped here, and ulps need the bytes", where=f"{source}: tolerance",
            expected="relative=NUMBER", found=controls.tolerance,
        )  # fmt: skip
    budget = controls.budget_seconds
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        where = f"{source}: budget_seconds"
        raise UsageError(Code.CONTROLS_INVALID, "a budget is a time", where=where, expected="seconds, more than 0", found=str(budget))
    if not controls.target:
        where = f"{source}: target"
        raise UsageError(Code.CONTROLS_INVALID, "there is no target", where=where, expected="globs of boundaries", found="none")
    if not controls.command.strip() or not controls.variants:
        raise UsageError(
            Code.CONTROLS_INVALID, "there is nothing to run", where=source, expected="a command and at least one variant",
            found="no command" if not controls.command.strip() else "no variant",
        )  # fmt: skip
    return controls


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice: the second variant of a name would take the place of the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for twice in {str(key) for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


def _check_variant(source: str, name: str, variant: Variant, everywhere: Mapping[str, str]) -> None:
    try:
        options = sum(word.startswith("-") and word.strip("-")[:1].isalpha() for word in shlex.split(variant.arguments))
    except ValueError as error:
        raise UsageError(
            Code.CONTROLS_INVALID, "these arguments cannot be read", where=f"{source}: variants.{name}", expected="words of a command line",
            found=str(error),
        ) from error  # fmt: skip
    same = next((key for key, value in variant.environment.items() if everywhere.get(key) == value), None)
    if same is not None:
        raise UsageError(
            Code.CONTROLS_INVALID, "a variant changes nothing: every run has this variable", where=f"{source}: variants.{name}",
            expected=f"another value of {same}, or {{}} for a repeat", found=variant.changes,
        )  # fmt: skip
    if len(variant.environment) + max(options, bool(variant.arguments)) > 1:
        raise UsageError(
            Code.CONTROLS_INVALID, "a variant changes one thing, so that its effect has one cause", where=f"{source}: variants.{name}",
            expected="one variable, or one option", found=variant.changes, remedy="make one variant of each",
        )  # fmt: skip
    if name == _BASE or not name.replace("-", "").replace("_", "").isalnum():
        raise UsageError(
            Code.CONTROLS_INVALID, "a variant's name becomes a folder's", where=f"{source}: variants", expected="letters, digits, - and _",
            found=repr(name), remedy=f"choose another name ({_BASE} is taken)",
        )  # fmt: skip


def _check_reach(source: str, key: str, command: str, names: Iterable[str]) -> None:
    """Refuse a variable that the command sets itself: its value never arrives, and reads as "no effect"."""
    for name in names:
        if sets_variable(command, name):
            raise UsageError(
                Code.CONTROLS_INVALID, f"the command sets {name} itself, so that another value does not arrive", where=f"{source}: {key}",
                expected=f"a command that leaves {name} alone", found=redact_command(command),
                remedy=f"take {name}= out of the command"
                + ("" if name == "TRACER_OUT" else f" and write it under environment: {{{name}: ...}}"),
            )  # fmt: skip


def preview(controls: Controls) -> list[str]:
    """Every command that would run, and the most time they may take."""
    lines = [f"{_BASE}: {_shown(controls, Variant())}"]
    lines += [f"{name}: {_shown(controls, variant)}" for name, variant in controls.variants.items()]
    runs = len(controls.variants) + 1
    each = controls.budget_seconds
    lines.append(f"{runs} runs, " + (f"at most {each:g} s each, {runs * each:g} s in all" if each is not None else "without a budget"))
    return lines


def _shown(controls: Controls, variant: Variant) -> str:
    settings: dict[str, str | None] = {**controls.environment, **variant.environment}
    words = [f"{name}={shlex.quote(_written(name, value))}" for name, value in settings.items() if value is not None]
    unset = [f"-u {name}" for name, value in settings.items() if value is None]
    return " ".join([*(["env", *unset] if unset else []), *words, redact_command(_command(controls, variant))])


def _written(name: str, value: str | None) -> str:
    """A variable's value as it may be shown and kept."""
    return "(unset)" if value is None else REDACTED if names_secret(name) else redact_command(value)


def _kept(controls: Controls) -> Controls:
    """A file of controls without its secrets."""

    def clean(variant: Variant) -> Variant:
        settings = {name: None if value is None else _written(name, value) for name, value in variant.environment.items()}
        return msgspec.structs.replace(variant, environment=settings, arguments=redact_command(variant.arguments))

    return msgspec.structs.replace(
        controls, command=redact_command(controls.command), variants={name: clean(variant) for name, variant in controls.variants.items()},
        environment={name: _written(name, value) for name, value in controls.environment.items()},
    )  # fmt: skip


def _command(controls: Controls, variant: Variant) -> str:
    return f"{controls.command} {variant.arguments}".strip()


def run_controls(
    controls: Controls, folder: Path, told: Callable[[str], None] = lambda text: None, cwd: Path | None = None
) -> ControlResult:
    """Run the base and every variant, and compare. ``folder``: a new one. ``told``: gets one line per run.

    A run that fails stops the rest, unless the file says to continue. Raises ``UsageError`` (out-in-use), and ``SessionError``
    (session-stopped) where the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(entry.name != ".lock" for entry in folder.iterdir())):
        raise UsageError(
            Code.OUT_IN_USE, "controls run in a new folder", where=str(folder), expected="a folder that does not exist",
            found="a folder that holds something", remedy="give another folder; nothing is overwritten",
        )  # fmt: skip
    try:
        with locked(folder):
            write_state(folder / "plan.json", _kept(controls))
            result = _Controlling(controls, Archive(folder), told, cwd or Path.cwd()).run()
            write_state(folder / RESULT_FILE, result)
    except OSError as error:
        raise SessionError(
            Code.SESSION_STOPPED, f"the folder of the controls cannot be written: {error.strerror or error}",
            where=str(error.filename or folder), remedy="make room, or give another folder, and run again",
        ) from error  # fmt: skip
    return result


class _Controlling:
    """One pass over a file of controls."""

    def __init__(self, controls: Controls, archive: Archive, told: Callable[[str], None], cwd: Path) -> None:
        self.controls, self.archive, self.told, self.cwd = controls, archive, told, cwd

    def run(self) -> ControlResult:
        base, base_trace = self._run(_BASE, Variant())
        if base_trace is None:
            return self._result(base, [], f"the base run {base.status.value}: {base.reason}")
        if not self._reached(base_trace):
            self.archive.change(base, status=RunStatus.VACUOUS, reason="the target did not run")
            wanted = ", ".join(self.controls.target)
            return self._result(base, [], f"the base run is vacuous: no boundary of {wanted} ran, so that no variant could show anything")
        found: list[VariantResult] = []
        stopped = ""
        for name, variant in self.controls.variants.items():
            run, trace = self._run(name, variant)
            found.append(self._compare(name, variant, run, trace, base, base_trace))
            if found[-1].effect is Effect.FAILED and not self.controls.continue_on_failure:
                stopped = f"{name} {run.status.value}: {run.reason}"
                break
        return self._result(base, found, stopped)

    def _run(self, name: str, variant: Variant) -> tuple[Run, LogicalTrace | None]:
        """One run; its trace, None where it cannot be used."""
        settings: dict[str, str | None] = {**self.controls.environment, **variant.environment}
        written = {key: _written(key, value) for key, value in settings.items()}
        command = _command(self.controls, variant)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run = self.archive.begin(name, redact_command(command), written, started)
        self.told(f"{run.id}: {_shown(self.controls, variant)}")
        environment: Mapping[str, str | None] = {**os.environ, **settings, "TRACER_OUT": str(self.archive.trace(run).resolve())}
        given = {key: value for key, value in environment.items() if value is not None}
        try:
            ended = run_command(command, self.archive.path(run), given, self.controls.budget_seconds, self.cwd)
        except BaseException:
            self.archive.change(run, status=RunStatus.INTERRUPTED)
            raise
        status, reason = RunStatus.DONE, f"{ended.left_behind} processes that it left behind were ended" if ended.left_behind else ""
        if ended.exit_status is None:
            status, reason = RunStatus.TIMED_OUT, f"it ran longer than its budget of {self.controls.budget_seconds:g} s"
        elif ended.exit_status:
            status, reason = RunStatus.FAILED, f"exit status {ended.exit_status}: {ended.last_words}"
        elif ended.unwritten:
            status, reason = RunStatus.FAILED, f"its logs could not be written: {ended.unwritten}"
        run = self.archive.change(run, status=status, reason=reason, exit_status=ended.exit_status, elapsed_seconds=ended.elapsed_seconds)
        if status is not RunStatus.DONE:
            return run, None
        evidence = look_at(self.archive.trace(run))
        kept = {"weights": evidence.weights, "policy": evidence.policy, "image": evidence.image, "evidence": evidence.proof}
        run = self.archive.change(run, **kept)
        if evidence.problem:
            status = RunStatus.VACUOUS if evidence.vacuous else RunStatus.NO_TRACE
            return self.archive.change(run, status=status, reason=evidence.problem), None
        return run, evidence.trace

    def _reached(self, trace: LogicalTrace) -> bool:
        return any(len(rows) and self._targeted(name) for name, rows in trace.boundaries.items())

    def _targeted(self, name: str) -> bool:
        return not name.startswith("input.") and any(fnmatchcase(name, glob) for glob in self.controls.target)

    def _compare(
        self, name: str, variant: Variant, run: Run, trace: LogicalTrace | None, base: Run, base_trace: LogicalTrace
    ) -> VariantResult:
        found = VariantResult(name=name, changes=_changes(variant), run=run.id, effect=Effect.FAILED, text=run.reason)
        if trace is None:
            return msgspec.structs.replace(found, effect=Effect.VACUOUS) if run.status is RunStatus.VACUOUS else found
        if not self._reached(trace):
            self.archive.change(run, status=RunStatus.VACUOUS, reason="the target did not run")
            return msgspec.structs.replace(found, effect=Effect.VACUOUS, text=f"no boundary of {', '.join(self.controls.target)} ran")
        same_weights = False if base.weights != run.weights else None if base.evidence or run.evidence else True
        tolerance = parse_tolerance(self.controls.tolerance) if self.controls.tolerance else None
        try:
            result = diff_traces(base_trace, trace, tolerance=tolerance)
        except TracerError as error:
            return msgspec.structs.replace(found, effect=Effect.UNKNOWN, same_weights=same_weights, text=error.what)
        write_state(self.archive.path(run) / "against-base.json", result)
        moved = [boundary for boundary in result.boundaries if boundary.outcome in (BoundaryOutcome.DIFFERS, BoundaryOutcome.HEALS)]
        target = [boundary.name for boundary in moved if self._targeted(boundary.name)]
        effect, text = _effect(result, bool(target)), result.headline
        if effect is Effect.NONE and variant.changes:
            text += f"; {_arrived(result)}"
        if same_weights is False:
            effect, text = Effect.FAILED, "its weights are not those of the base"
        for what, old, new in (("policy version", base.policy, run.policy), ("image", base.image, run.image)):
            if old != new:
                effect, text = Effect.FAILED, f"it ran with another {what} than the base ({old or 'none'}, now {new or 'none'})"
        self.archive.change(run, evidence="; ".join(part for part in (run.evidence, result.headline) if part))
        return msgspec.structs.replace(
            found, effect=effect, first=result.first.boundary if result.first is not None else "", moved=len(target),
            same_weights=same_weights, text=text,
        )  # fmt: skip

    def _result(self, base: Run, found: list[VariantResult], stopped: str) -> ControlResult:
        moving = [variant.name for variant in found if variant.effect is Effect.MOVES]
        open_ones = [variant for variant in found if variant.effect in (Effect.VACUOUS, Effect.UNKNOWN, Effect.FAILED)]
        if stopped:
            headline, status = f"Stopped: {stopped}", 2
        elif moving:
            headline, status = f"{len(moving)} of {len(found)} variants move the target: {', '.join(moving)}", 1
        else:
            headline, status = f"No variant of {len(found)} moves the target", 0
        if open_ones and not stopped:
            headline += f"; of {', '.join(f'{variant.name} ({variant.effect.value})' for variant in open_ones)} nothing is known"
            status = 1 if moving else 2
        repeats = [variant for variant in found if variant.changes.startswith("nothing") and variant.effect is Effect.MOVES]
        if repeats:
            headline += "; a repeat moves it too, so that what the others move may be noise"
        return ControlResult(exit=status, verdict=list(Verdict)[status].value, headline=headline, base=base.id, variants=tuple(found))


def _changes(variant: Variant) -> str:
    """What a variant changes; a variable that this environment has already changes nothing."""
    same = all(os.environ.get(name) == value for name, value in variant.environment.items())
    if variant.changes and same and not variant.arguments:
        return f"nothing ({variant.changes} already)"
    return variant.changes or "nothing (repeat)"


def _arrived(result: DiffResult) -> str:
    """Where the traces themselves show a change that moved nothing; what was set for the run is no proof that it was looked at."""
    shown = [name for name in result.conditions if not name.startswith(("environment.", "command"))]
    if not shown:
        return "no condition of the trace shows the change: see that it arrived"
    return f"its trace shows the change at {', '.join(shown[:2])}" + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")


def _effect(result: DiffResult, moved: bool) -> Effect:
    if moved:
        return Effect.MOVES
    return Effect.UNKNOWN if result.verdict is Verdict.COULD_NOT_TELL else Effect.NONE
