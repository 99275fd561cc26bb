"""Bisect sessions on real models and real processes: the answer, and what becomes of everything that goes wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tracer.errors import Code, SessionError, UsageError
from tracer.hosts.demo_model import build_pair, find_fault
from tracer.read.findings import Class
from tracer.sessions.archive import RunStatus, write_state
from tracer.sessions.bisection import Bisection, Session, SessionStatus, Stage, StepStatus, bisect_traces

FIRST = "layers.2.moe.topk_weights"


def sides(fault: str = "routing-weights") -> tuple[Callable[..., None], Callable[..., None]]:
    """Two callables that trace the demo's models, the second with a fault."""
    pair = build_pair(find_fault(fault))

    def side(model: Any, inputs: dict[str, torch.Tensor]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            with torch.no_grad(), tracer.trace(model, **options):
                model(**inputs)

        return run

    return side(pair.a, pair.inputs_a), side(pair.b, pair.inputs_b)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole session in this process; its folder holds a trace of each side and step."""
    folder = tmp_path_factory.mktemp("recorded") / "session"
    result = bisect_traces(*sides(), folder=folder)
    assert result.first is not None
    assert result.first.boundary == FIRST
    return folder


def replaying(recorded: Path, side: str, before: str = "", after: str = "") -> str:
    """A command that hands out the trace which the recorded session took for this step."""
    choose = 'case "${TRACER_PLAN:+dump}$TRACER_LEVEL" in 0) stage=coarse;; 2) stage=fine;; *) stage=dump;; esac'
    return f'set -e; {before}\n{choose}\n{after}\ncp -r {recorded}/*-$stage-{side}/trace "$TRACER_OUT"'


def session_of(recorded: Path, **options: Any) -> Session:
    fields: dict[str, Any] = {"command_a": replaying(recorded, "a"), "command_b": replaying(recorded, "b"), "cwd": str(recorded)}
    return Session(**{**fields, **options})


def test_coarse_then_fine_then_the_bytes(recorded: Path) -> None:
    """Three steps: the block, the boundary, its bytes; the last comparison has looked at dumped rows."""
    session = Bisection(recorded).session
    assert [(step.stage, step.status) for step in session.steps] == [(stage, StepStatus.DONE) for stage in Stage]
    assert [step.first for step in session.steps] == ["layers.2.residual", FIRST, FIRST]
    fine = session.steps[1].boundaries
    assert FIRST in fine
    assert "layers.3.residual" in fine
    assert not any(name.startswith("layers.1.") and not name.endswith("residual") for name in fine)
    assert session.status is SessionStatus.DONE
    assert session.exit == 1
    assert list((recorded / "0005-dump-a" / "trace" / "dumps").iterdir())


def test_equal_sides_end_after_one_step(tmp_path: Path) -> None:
    """Sides that are the same need no second step."""
    result = bisect_traces(*sides("none"), folder=tmp_path / "s")
    assert result.exit == 0
    assert len(Bisection(tmp_path / "s").session.steps) == 1


def test_an_input_needs_no_narrowing(tmp_path: Path) -> None:
    """Where inputs differ the first step is the answer."""
    result = bisect_traces(*sides("left-padding"), folder=tmp_path / "s")
    assert result.classification is not None
    assert result.classification.klass is Class.INPUT
    assert len(Bisection(tmp_path / "s").session.steps) == 1


def test_a_difference_that_heals_hides_no_later_one(tmp_path: Path) -> None:
    """One fault heals within its layer, another comes later: halving at a healed depth would miss the first; the session names it, and
    lists the second as another root."""
    pair = build_pair(find_fault("none"))
    late = pair.b.model.layers[3].self_attn
    late.scaling *= 1.05
    norm = pair.b.model.layers[0].input_layernorm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) + 0.0  # -0.0 becomes 0.0: equal from the next matmul on
    with torch.no_grad():
        for index in range(norm.weight.shape[0]):
            norm.weight[index] = 0.0 if index < 8 else norm.weight[index]
            pair.a.model.layers[0].input_layernorm.weight[index] = norm.weight[index]

    def run(model: Any, **options: Any) -> None:
        with torch.no_grad(), tracer.trace(model, **options):
            model(**pair.inputs_a)

    result = bisect_traces(
        lambda **options: run(pair.a, **options), lambda **options: run(pair.b, **options), folder=tmp_path / "s", thorough=True
    )
    assert result.first is not None
    roots = {root.place.boundary for root in result.roots}
    assert "layers.3.attn.core" in roots
    healed = next(found for found in result.boundaries if found.name == "layers.0.attn.norm")
    assert healed.rows_differing > 0
    assert healed.outcome.value == "heals"


def test_commands_reach_the_same_answer(recorded: Path, tmp_path: Path) -> None:
    """A session of commands ends like the one in this process, and keeps command, status, time and logs of every run."""
    bisection = Bisection.start(tmp_path / "s", session_of(recorded))
    assert bisection.run().status is SessionStatus.DONE
    result = bisection.result()
    assert result is not None
    assert result.first is not None
    assert result.first.boundary == FIRST
    runs = list(bisection.archive)
    assert [run.purpose for run in runs] == [f"{stage}-{side}" for stage in ("coarse", "fine", "dump") for side in "ab"]
    for run in runs:
        assert run.status is RunStatus.DONE
        assert run.exit_status == 0
        assert run.elapsed_seconds is not None
        assert run.weights
        assert (bisection.archive.path(run) / "stderr.log").exists()


class Killed(BaseException):
    """The process is gone."""


def test_killed_at_every_write_it_resumes_to_the_same_answer(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a process dies, another one goes on from there: same answer, no folder used twice, no run lost from the index."""
    write, count, limit = write_state, 0, 0

    def dying(file: Path, state: Any) -> None:
        nonlocal count
        count += 1
        if count == limit:
            raise Killed
        write(file, state)

    for module in ("tracer.sessions.bisection", "tracer.sessions.archive"):
        monkeypatch.setattr(f"{module}.write_state", dying)
    whole = Bisection.start(tmp_path / "whole", session_of(recorded))
    whole.run()
    writes = count
    assert writes > 20
    for limit in range(2, writes + 1, 3):
        count = 0
        folder = tmp_path / f"killed-{limit}"
        with pytest.raises(Killed):
            Bisection.start(folder, session_of(recorded)).run()
        limit = 0
        again = Bisection(folder)
        again.run()
        assert again.session.said == whole.session.said
        assert [step.first for step in again.session.valid()] == [step.first for step in whole.session.valid()]
        listed = {run.folder for run in again.archive}
        assert listed <= {entry.name for entry in folder.iterdir()}


def test_a_killed_process_is_resumed(recorded: Path, tmp_path: Path) -> None:
    """SIGKILL while a command runs: its folder stays, its run is marked, and another process ends the session."""
    folder, gate = tmp_path / "s", tmp_path / "gate"
    command = replaying(recorded, "b", before=f"until [ -e {gate} ]; do sleep 0.05; done")
    Bisection.start(folder, session_of(recorded, command_b=command))
    process = subprocess.Popen([sys.executable, "-m", "tracer", "bisect", "run", str(folder)], cwd=Path(tracer.__file__).parents[1])
    deadline = time.monotonic() + 60
    while not list(folder.glob("*-coarse-b")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gate.touch()
    bisection = Bisection(folder)
    assert bisection.run().status is SessionStatus.DONE
    assert sorted(run.status.value for run in bisection.archive if run.purpose == "coarse-b") == ["done", "interrupted"]


@pytest.mark.parametrize(
    ("before", "status", "says"),
    [
        ("echo out of memory >&2; exit 3", RunStatus.FAILED, "out of memory"),
        ("sleep 60", RunStatus.TIMED_OUT, "budget"),
        ("exit 0", RunStatus.NO_TRACE, "wrote no trace"),
    ],
    ids=["crash", "hang", "silent"],
)
def test_a_step_that_fails_stops_the_session(before: str, status: RunStatus, says: str, recorded: Path, tmp_path: Path) -> None:
    """A crash, a hang and a command that traces nothing stop the session with the reason; mended, it goes on where it stopped."""
    mended = tmp_path / "mended"
    command = replaying(recorded, "b", before=f"if [ ! -e {mended} ]; then {before}; fi")
    bisection = Bisection.start(tmp_path / "s", session_of(recorded, command_b=command, budget_seconds=1.5))
    session = bisection.run()
    assert session.status is SessionStatus.STOPPED
    assert session.exit == 2
    assert says in session.said
    failed = [run for run in bisection.archive if run.status is not RunStatus.DONE]
    assert [run.status for run in failed] == [status]
    assert bisection.result() is None
    mended.touch()
    assert Bisection(tmp_path / "s").run().status is SessionStatus.DONE


def test_a_vacuous_trace_stops_the_session(recorded: Path, tmp_path: Path) -> None:
    """A compiled model runs no hook: the session says so instead of comparing what is left."""
    run_a, _ = sides("none")
    pair = build_pair(find_fault("none"))
    pair.b.model.layers[1] = torch.compile(pair.b.model.layers[1], backend="eager")
    with torch.no_grad():
        pair.b(**pair.inputs_b)

    def run_b(**options: Any) -> None:
        with torch.no_grad(), tracer.trace(pair.b, **options):
            pair.b(**pair.inputs_b)

    with pytest.raises(SessionError) as error:
        bisect_traces(run_a, run_b, folder=tmp_path / "s")
    assert error.value.code is Code.SESSION_STOPPED
    assert "vacuous" in error.value.what


def test_other_weights_stop_the_session(recorded: Path, tmp_path: Path) -> None:
    """A side that does not hold the weights of the step before is not frozen: the session stops and says which side."""
    run_a, _ = sides()
    pair = build_pair(find_fault("routing-weights"))

    def run_b(**options: Any) -> None:
        with torch.no_grad(), tracer.trace(pair.b, **options):
            pair.b(**pair.inputs_b)
        with torch.no_grad():
            pair.b.lm_head.weight[0, 0] += 1

    with pytest.raises(SessionError, match="side B does not hold the weights of step 1"):
        bisect_traces(run_a, run_b, folder=tmp_path / "s")


def test_a_side_that_does_not_repeat_itself_stops_the_session(tmp_path: Path) -> None:
    """Earlier boundaries are verified, never assumed: a side that moves between steps is named with the boundary."""
    run_a, _ = sides()
    pair = build_pair(find_fault("routing-weights"))
    calls = 0

    def run_b(**options: Any) -> None:
        nonlocal calls
        calls += 1
        pair.b.model.layers[3].self_attn.scaling *= 1 + 0.01 * calls
        with torch.no_grad(), tracer.trace(pair.b, **options):
            pair.b(**pair.inputs_b)

    with pytest.raises(SessionError, match=r"side B does not repeat itself: layers\.3\.residual"):
        bisect_traces(run_a, run_b, folder=tmp_path / "s")


def test_skip_and_reset_keep_what_was(recorded: Path, tmp_path: Path) -> None:
    """A skipped boundary is left out and the earlier conclusions are marked with the reason; nothing is deleted."""
    run_a, run_b = sides()
    folder = tmp_path / "s"
    bisect_traces(run_a, run_b, folder=folder)

    def runner(side: str, run: Any, overrides: dict[str, str]) -> Any:
        options = {"out": overrides["TRACER_OUT"], "level": int(overrides["TRACER_LEVEL"]), "plan": overrides.get("TRACER_PLAN")}
        names = overrides.get("TRACER_BOUNDARIES")
        (run_a if side == "a" else run_b)(boundaries=names.split(",") if names else None, **options)
        return RunStatus.DONE, {}

    bisection = Bisection(folder, runner)
    with pytest.raises(UsageError, match=r"layers\.2\.moe\.topk_weight"):
        bisection.skip("layers.9.moe.topk_weights")
    bisection.skip(FIRST)
    assert {step.invalidated for step in bisection.session.steps} == {f"{FIRST} was skipped"}
    bisection.run()
    result = bisection.result()
    assert result is not None
    assert result.first is not None
    assert result.first.boundary == "layers.2.moe.combine"
    assert all(FIRST not in step.boundaries for step in bisection.session.valid())
    bisection.reset()
    assert bisection.session.status is SessionStatus.OPEN
    assert len(bisection.session.steps) == 6
    assert len(list(bisection.archive)) == 12
    assert all(run.invalidated for run in bisection.archive)


def test_secrets_are_not_kept(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that prints a secret of its environment leaves no trace of it in the folder."""
    monkeypatch.setenv("HUB_TOKEN", "verysecret123")
    command = replaying(recorded, "a", before='echo "token $HUB_TOKEN"; echo "$HUB_TOKEN" >&2')
    bisection = Bisection.start(tmp_path / "s", session_of(recorded, command_a=command))
    bisection.run()
    logs = list((tmp_path / "s").rglob("*.log"))
    assert any("token <redacted>" in log.read_text() for log in logs)
    for file in (tmp_path / "s").rglob("*"):
        if file.is_file():
            assert b"verysecret123" not in file.read_bytes(), file


def test_bad_folders_are_refused(recorded: Path, tmp_path: Path) -> None:
    """A used folder, a folder without a session and a damaged state each have their own error."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(UsageError) as error:
        Bisection.start(tmp_path / "used", session_of(recorded))
    assert error.value.code is Code.OUT_IN_USE
    with pytest.raises(UsageError) as error:
        Bisection(tmp_path / "used")
    assert error.value.code is Code.NOT_A_SESSION
    Bisection.start(tmp_path / "s", session_of(recorded))
    (tmp_path / "s" / "session.json").write_text("{")
    with pytest.raises(UsageError) as error:
        Bisection(tmp_path / "s")
    assert error.value.code is Code.SESSION_DAMAGED
