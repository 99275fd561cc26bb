"""What a session shows: its steps and its runs, as blocks of a view and as a page."""

from __future__ import annotations

from tracer.read.findings import DiffResult
from tracer.reports.page import Section, diff_sections, render_page
from tracer.reports.view import Block, Facts, Headline, Table
from tracer.sessions.archive import Archive
from tracer.sessions.bisection import Session, SessionStatus
from tracer.sessions.controls import ControlResult

__all__ = ["controls_page", "session_page", "view_archive", "view_controls", "view_session"]

_TONES = {0: "good", 1: "bad", 2: "open"}


def view_session(session: Session, folder: str) -> list[Block]:
    """Where a session stands, and what comes next."""
    return [_headline(session), *_asked(session), _steps(session), Facts((("next", _next(session, folder)),))]


def view_archive(archive: Archive) -> list[Block]:
    """Every run, in order."""
    return [_runs(archive)]


def session_page(session: Session, archive: Archive, result: DiffResult) -> str:
    """The last comparison, then how it was reached."""
    headline = _headline(session)
    sections = [
        *diff_sections(result),
        Section("steps", "Steps", (*_asked(session), _steps(session)), "Each step ran both sides once, in processes of their own."),
        Section("runs", "Runs", (_runs(archive),), "Every run of a command, whatever became of it."),
    ]
    verdict = result.verdict.value if session.status is SessionStatus.DONE else session.status.value
    return render_page(f"tracer bisect: {headline.text}", headline, verdict, sections)


def _headline(session: Session) -> Headline:
    if session.status is SessionStatus.DONE:
        return Headline(session.said, _TONES[session.exit])
    if session.status is SessionStatus.STOPPED:
        return Headline(f"Stopped: {session.said}", "open")
    return Headline(f"Open: {session.said}" if session.said else "Open: nothing has run yet", "open")


def _asked(session: Session) -> list[Facts]:
    """What the sides are held against, and what is left out of the search."""
    lines = [
        ("tolerance", session.tolerance), ("floor of A", ", ".join(session.floor_a)), ("floor of B", ", ".join(session.floor_b)),
        ("skipped", ", ".join(session.skipped)),
    ]  # fmt: skip
    given = tuple(line for line in lines if line[1])
    return [Facts(given)] if given else []


def _steps(session: Session) -> Table:
    rows = tuple(
        (
            str(step.number),
            step.stage.value,
            "invalidated" if step.invalidated else step.status.value,
            str(len(step.boundaries) or "all of level 0"),
            step.first,
            step.invalidated or step.said,
        )
        for step in session.steps
    )
    return Table(("step", "stage", "status", "boundaries", "first divergence", "note"), rows)


def _runs(archive: Archive) -> Table:
    rows = tuple(
        (
            run.id,
            "invalidated" if run.invalidated else run.status.value,
            "" if run.exit_status is None else str(run.exit_status),
            "" if run.elapsed_seconds is None else f"{run.elapsed_seconds:.1f}",
            run.started,
            run.command,
            " ".join(f"{name}={value}" for name, value in run.environment.items() if name != "TRACER_BOUNDARIES"),
            "; ".join(text for text in (run.invalidated, run.reason, run.evidence) if text),
        )
        for run in archive
    )
    return Table(("run", "status", "exit", "seconds", "started", "command", "set for it", "note"), rows)


def _next(session: Session, folder: str) -> str:
    match session.status:
        case SessionStatus.DONE:
            return f"tracer bisect report {folder} --html report.html"
        case SessionStatus.STOPPED:
            return f"mend the cause, then tracer bisect run {folder} (a command: tracer bisect reset {folder} --a COMMAND or --b COMMAND)"
        case SessionStatus.OPEN:
            return f"tracer bisect run {folder}"


# ---------------------------------------------------------------- controls


def view_controls(result: ControlResult, folder: str) -> list[Block]:
    """What each variant moves."""
    blocks: list[Block] = [Headline(result.headline, _TONES[result.exit])]
    if result.variants:
        blocks.append(_variants(result))
    blocks.append(Facts((("next", _next_control(result, folder)),)))
    return blocks


def controls_page(result: ControlResult, archive: Archive) -> str:
    """The variants, then every run."""
    headline = Headline(result.headline, _TONES[result.exit])
    sections = [
        Section("verdict", "Variants", (_variants(result),), "Each variant changed one thing and was compared with the base run."),
        Section("runs", "Runs", (_runs(archive),), "Every run of a command, whatever became of it."),
    ]
    return render_page(f"tracer controls: {headline.text}", headline, result.verdict, sections)


def _variants(result: ControlResult) -> Table:
    weights = {True: "same", False: "other", None: "unknown"}
    rows = tuple(
        (line.name, line.changes, line.effect.value.upper() if line.effect.value == "vacuous" else line.effect.value, line.first,
         str(line.moved or ""), weights[line.same_weights], line.text)
        for line in result.variants
    )  # fmt: skip
    return Table(("variant", "changes", "effect", "first boundary moved", "moved", "weights", "note"), rows)


def _next_control(result: ControlResult, folder: str) -> str:
    moving = next((line for line in result.variants if line.first), None)
    if moving is not None:
        return f"tracer diff {folder}/{result.base}/trace {folder}/{moving.run}/trace"
    return f"every run with its logs and trace is in {folder}"
