"""Replay controls: one command, run again with one thing changed at a time, each time in a process and a folder of its own.

```yaml
command: python rollout.py           # traces once; TRACER_OUT says where
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

import os
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import yaml

from tracer.errors import Code, UsageError
from tracer.format.redaction import names_secret, redact_text
from tracer.read.diff import diff_traces
from tracer.read.findings import BoundaryOutcome, DiffResult, Verdict
from tracer.read.logical import LogicalTrace
from tracer.sessions.archive import Archive, Run, RunStatus, locked, write_state
from tracer.sessions.commands import run_command
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
        """What is changed, in one line; empty for a repeat."""
        parts = [f"{name}={'(unset)' if value is None else value}" for name, value in self.environment.items()]
        return " ".join([*parts, *([self.arguments] if self.arguments else [])])


class Controls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A file of controls. ``target``: globs of boundaries the question is about. ``budget_seconds``: of one run."""

    command: str
    variants: dict[str, Variant]
    about: str = ""
    target: tuple[str, ...] = ("*",)
    budget_seconds: float | None = None
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
        controls: Controls = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Controls)
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = (error.strerror or str(error)) if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(
            Code.CONTROLS_INVALID, "this is no file of controls", where=source,
            expected="command, variants: {NAME: {environment, arguments}}", found=found, remedy="tracer controls template prints one",
        ) from error  # fmt: skip
    for name, variant in controls.variants.items():
        _check_variant(source, name, variant)
    if not controls.command.strip() or not controls.variants:
        raise UsageError(
            Code.CONTROLS_INVALID, "there is nothing to run", where=source, expected="a command and at least one variant",
            found="no command" if not controls.command.strip() else "no variant",
        )  # fmt: skip
    return controls


def _check_variant(source: str, name: str, variant: Variant) -> None:
    changed = len(variant.environment) + bool(variant.arguments)
    if changed > 1:
        raise UsageError(
            Code.CONTROLS_INVALID, "a variant changes one thing, so that its effect has one cause", where=f"{source}: variants.{name}",
            expected="one variable, or arguments", found=variant.changes, remedy="make one variant of each",
        )  # fmt: skip
    if name == _BASE or not name.replace("-", "").replace("_", "").isalnum():
        raise UsageError(
            Code.CONTROLS_INVALID, "a variant's name becomes a folder's", where=f"{source}: variants", expected="letters, digits, - and _",
            found=repr(name), remedy=f"choose another name ({_BASE} is taken)",
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
    settings = {**controls.environment, **{name: value or "" for name, value in variant.environment.items()}}
    words = [f"{name}={'<redacted>' if names_secret(name) else shlex.quote(value)}" for name, value in settings.items()]
    return redact_text(" ".join([*words, _command(controls, variant)]))


def _command(controls: Controls, variant: Variant) -> str:
    return f"{controls.command} {variant.arguments}".strip()


def run_controls(
    controls: Controls, folder: Path, told: Callable[[str], None] = lambda text: None, cwd: Path | None = None
) -> ControlResult:
    """Run the base and every variant, and compare. ``folder``: a new one. ``told``: gets one line per run.

    A run that fails stops the rest, unless the file says to continue. Raises ``UsageError`` (out-in-use).
    """
    if folder.exists() and any(entry.name != ".lock" for entry in folder.iterdir()):
        raise UsageError(
            Code.OUT_IN_USE, "controls run in a new folder", where=str(folder), expected="a folder that does not exist",
            found="a folder that holds something", remedy="give another folder; nothing is overwritten",
        )  # fmt: skip
    with locked(folder):
        write_state(folder / "plan.json", controls)
        result = _Controlling(controls, Archive(folder), told, cwd or Path.cwd()).run()
        write_state(folder / RESULT_FILE, result)
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
        written = {key: "<redacted>" if names_secret(key) else redact_text(value or "(unset)") for key, value in settings.items()}
        command = _command(self.controls, variant)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run = self.archive.begin(name, redact_text(command), written, started)
        self.told(f"{run.id}: {_shown(self.controls, variant)}")
        environment: Mapping[str, str | None] = {**os.environ, **settings, "TRACER_OUT": str(self.archive.trace(run).resolve())}
        given = {key: value for key, value in environment.items() if value is not None}
        try:
            ended = run_command(command, self.archive.path(run), given, self.controls.budget_seconds, self.cwd)
        except BaseException:
            self.archive.change(run, status=RunStatus.INTERRUPTED)
            raise
        status, reason = RunStatus.DONE, ""
        if ended.exit_status is None:
            status, reason = RunStatus.TIMED_OUT, f"it ran longer than its budget of {self.controls.budget_seconds:g} s"
        elif ended.exit_status:
            status, reason = RunStatus.FAILED, f"exit status {ended.exit_status}: {ended.last_words}"
        run = self.archive.change(run, status=status, reason=reason, exit_status=ended.exit_status, elapsed_seconds=ended.elapsed_seconds)
        if status is not RunStatus.DONE:
            return run, None
        evidence = look_at(self.archive.trace(run))
        run = self.archive.change(run, weights=evidence.weights, policy=evidence.policy, image=evidence.image)
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
        found = VariantResult(name=name, changes=variant.changes or "nothing (repeat)", run=run.id, effect=Effect.FAILED, text=run.reason)
        if trace is None:
            return msgspec.structs.replace(found, effect=Effect.VACUOUS) if run.status is RunStatus.VACUOUS else found
        if not self._reached(trace):
            self.archive.change(run, status=RunStatus.VACUOUS, reason="the target did not run")
            return msgspec.structs.replace(found, effect=Effect.VACUOUS, text=f"no boundary of {', '.join(self.controls.target)} ran")
        known = bool(base.weights) and bool(run.weights)
        same_weights = base.weights == run.weights if known else None
        result = diff_traces(base_trace, trace)
        write_state(self.archive.path(run) / "against-base.json", result)
        moved = [boundary for boundary in result.boundaries if boundary.outcome in (BoundaryOutcome.DIFFERS, BoundaryOutcome.HEALS)]
        target = [boundary.name for boundary in moved if self._targeted(boundary.name)]
        effect = _effect(result, bool(target))
        if same_weights is False:
            effect = Effect.FAILED
        self.archive.change(run, evidence=result.headline)
        return msgspec.structs.replace(
            found, effect=effect, first=result.first.boundary if result.first is not None else "", moved=len(target),
            same_weights=same_weights, text="its weights are not those of the base" if same_weights is False else result.headline,
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


def _effect(result: DiffResult, moved: bool) -> Effect:
    if moved:
        return Effect.MOVES
    return Effect.UNKNOWN if result.verdict is Verdict.COULD_NOT_TELL else Effect.NONE
