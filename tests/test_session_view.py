"""What a session shows."""

from __future__ import annotations

from pathlib import Path

from tests.test_page import some_result
from tracer.reports.session_view import controls_page, session_page, view_archive, view_controls, view_session
from tracer.reports.terminal import render_plain
from tracer.sessions.archive import Archive
from tracer.sessions.bisection import Session, SessionStatus, Stage, Step, StepStatus
from tracer.sessions.controls import ControlResult, Effect, VariantResult


def some_session(**fields: object) -> Session:
    step = Step(number=1, stage=Stage.COARSE, status=StepStatus.DONE, first="layers.2.residual", said="First divergence: layers.2.residual")
    values: dict[str, object] = {"command_a": "run a", "command_b": "run b", "cwd": "/", "steps": (step,), **fields}
    return Session(**values)  # type: ignore[arg-type]


def test_every_state_says_what_comes_next() -> None:
    """Open, stopped and done sessions show their steps and one next command."""
    for status, word in ((SessionStatus.OPEN, "bisect run"), (SessionStatus.STOPPED, "mend"), (SessionStatus.DONE, "report")):
        text = render_plain(view_session(some_session(status=status, said="side B timed out", exit=1), "s"))
        assert "layers.2.residual" in text
        assert word in text.splitlines()[-1]


def test_what_the_sides_are_held_against_is_shown() -> None:
    """Tolerance, floors and skipped boundaries stand above the steps."""
    text = render_plain(view_session(some_session(tolerance="relative=1e-4", floor_b=("/f",), skipped=("layers.2.attn.core",)), "s"))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line]
    assert ["tolerance", "relative=1e-4"] in lines
    assert ["skipped", "layers.2.attn.core"] in lines
    assert "floor of B" in text


def test_the_log_lists_every_run(tmp_path: Path) -> None:
    """Every run of the archive is a line with its command."""
    archive = Archive(tmp_path)
    archive.begin("coarse-a", "run a", {"TRACER_LEVEL": "0"}, "2026-01-01T00:00:00+00:00")
    text = render_plain(view_archive(archive))
    assert "0001-coarse-a" in text
    assert "TRACER_LEVEL=0" in text


def test_pages_hold_comparison_and_steps(tmp_path: Path) -> None:
    """A session's page has the comparison, the steps and the runs; a page of controls has the variants; markup is data."""
    archive = Archive(tmp_path)
    archive.begin("coarse-a", "run <a>", {}, "now")
    page = session_page(some_session(status=SessionStatus.DONE, said="First divergence: x", exit=1), archive, some_result())
    for wanted in ("First divergence: x", "run &lt;a&gt;", "Where they differ", "Steps", "Runs"):
        assert wanted in page
    line = VariantResult(name="scale", changes="X=1", run="0001-coarse-a", effect=Effect.MOVES, first="layers.2.attn.out", moved=3)
    result = ControlResult(exit=1, verdict="different", headline="1 of 1 variants move it", base="0001-base", variants=(line,))
    page = controls_page(result, archive)
    assert "layers.2.attn.out" in page
    text = render_plain(view_controls(result, "c"))
    assert "tracer diff c/0001-base/trace c/0001-coarse-a/trace" in text
