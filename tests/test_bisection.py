"""Bisect sessions on real models and real processes: the answer, and what becomes of everything that goes wrong."""

from __future__ import annotations

import os
import shutil
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
from tests.trace_files import edit_manifest
from tracer.errors import Code, SessionError, UsageError
from tracer.hosts.demo_model import build_pair, find_fault
from tracer.read.findings import Class
from tracer.sessions.archive import RunStatus, locked
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


def test_block_outputs_that_heal_are_not_halved_over(tmp_path: Path) -> None:
    """The output of the first block differs, that of the second is equal again, the last one differs for a reason of its own: halving
    would look at the middle, go right and miss the first; the session finds it and names the last as another root."""
    pair = build_pair(find_fault("none"))
    for model, zero in ((pair.a, 0.0), (pair.b, -0.0)):
        layer = model.model.layers[0]

        def zeroed(*given: Any, _forward: Any = layer.forward, _zero: float = zero, **named: Any) -> torch.Tensor:
            out: torch.Tensor = _forward(*given, **named).clone()
            out[..., :8] = _zero  # -0.0 and 0.0 differ, and are the same to whatever adds or multiplies them
            return out

        layer.forward = zeroed
    pair.b.model.layers[3].self_attn.scaling *= 1.05

    def run(model: Any, **options: Any) -> None:
        with torch.no_grad(), tracer.trace(model, **options):
            model(**pair.inputs_a)

    result = bisect_traces(
        lambda **options: run(pair.a, **options), lambda **options: run(pair.b, **options), folder=tmp_path / "s"
    )
    outcomes = {found.name: found.outcome.value for found in result.boundaries}
    assert [outcomes[f"layers.{layer}.residual"] for layer in range(4)] == ["heals", "identical", "identical", "differs"]
    roots = [root.place.boundary for root in result.roots]
    assert roots[0] == "layers.0.residual"
    assert "layers.3.residual" in roots


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


def test_killed_at_every_state_transition_it_resumes_to_the_same_answer(recorded: Path, tmp_path: Path) -> None:
    """SIGKILL right before and right after every kind of write of the state, one process after another: the last one ends with the same
    answer, no folder is used twice and no run is lost from the index."""
    whole = Bisection.start(tmp_path / "whole", session_of(recorded))
    whole.run()
    folder = tmp_path / "s"
    Bisection.start(folder, session_of(recorded))
    assert killed(folder) > 60
    ended = Bisection(folder)
    assert ended.session.status is SessionStatus.DONE
    assert (ended.session.said, ended.session.exit) == (whole.session.said, whole.session.exit)
    assert [step.first for step in ended.session.valid()] == [step.first for step in whole.session.valid()]
    runs = list(ended.archive)
    assert len({run.folder for run in runs}) == len(runs)
    assert {run.folder for run in runs} <= {entry.name for entry in folder.iterdir()}
    assert {run.status for run in runs} == {RunStatus.DONE, RunStatus.INTERRUPTED}


def killed(folder: Path, most: int = 10_000) -> int:
    """How many processes died of a session."""
    command = [sys.executable, "-m", "tests.killed_sessions", str(folder), str(most)]
    done = subprocess.run(command, cwd=Path(tracer.__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.splitlines()[-1])


def test_a_killed_process_is_resumed(recorded: Path, tmp_path: Path) -> None:
    """SIGKILL while a command runs: its folder stays, its run is marked, and another process ends the session."""
    folder, hung = tmp_path / "s", tmp_path / "hung"
    command = replaying(recorded, "b", before=f"if [ ! -e {hung} ]; then touch {hung}; while true; do sleep 0.05; done; fi")
    Bisection.start(folder, session_of(recorded, command_b=command))
    process = subprocess.Popen([sys.executable, "-m", "tracer", "bisect", "run", str(folder)], cwd=Path(tracer.__file__).parents[1])
    deadline = time.monotonic() + 60
    while not hung.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    session = Bisection(folder)
    assert session.run().status is SessionStatus.DONE
    second = [run for run in session.archive if run.purpose == "coarse-b"]
    assert [run.status for run in second] == [RunStatus.INTERRUPTED, RunStatus.DONE]
    assert "processes that it had started were ended" in second[0].reason


@pytest.mark.parametrize(
    ("before", "status", "says"),
    [
        ("echo out of memory >&2; exit 3", RunStatus.FAILED, "out of memory"),
        ("sleep 60", RunStatus.TIMED_OUT, "budget"),
        ("exit 0", RunStatus.NO_TRACE, "wrote no trace"),
        ('TRACER_OUT="$TRACER_OUT-elsewhere"; mkdir "$TRACER_OUT"; exit 0', RunStatus.NO_TRACE, "TRACER_OUT"),
        ('mkdir "$TRACER_OUT"; exit 0', RunStatus.NO_TRACE, "no trace"),
    ],
    ids=["crash", "hang", "silent", "elsewhere", "empty"],
)
def test_a_step_that_fails_stops_the_session(before: str, status: RunStatus, says: str, recorded: Path, tmp_path: Path) -> None:
    """A crash, a hang and a command that traces nothing stop the session with the reason; mended, it goes on where it stopped."""
    mended = tmp_path / "mended"
    command = replaying(recorded, "b", before=f"if [ ! -e {mended} ]; then {before}; fi")
    bisection = Bisection.start(tmp_path / "s", session_of(recorded, command_b=command, budget_seconds=1))
    session = bisection.run()
    assert session.status is SessionStatus.STOPPED
    assert session.exit == 2
    assert says in session.said
    failed = [run for run in bisection.archive if run.status is not RunStatus.DONE]
    assert [run.status for run in failed] == [status]
    assert bisection.result() is None
    mended.touch()
    assert Bisection(tmp_path / "s").run().status is SessionStatus.DONE


@pytest.mark.parametrize("layer", [1, None], ids=["a layer", "everything"])
def test_a_vacuous_trace_stops_the_session(layer: int | None, tmp_path: Path) -> None:
    """Where hooks of a layer never ran, or the model was never called, the session says so instead of comparing what is left."""
    run_a, _ = sides("none")
    pair = build_pair(find_fault("none"))
    if layer is not None:  # what a compiled or captured layer does: it runs, and calls no hook
        chosen = pair.b.model.layers[layer]
        chosen.__class__ = type("Unhooked", (type(chosen),), {"__call__": lambda self, *given, **named: self.forward(*given, **named)})

    def run_b(**options: Any) -> None:
        with torch.no_grad(), tracer.trace(pair.b, **options):
            if layer is not None:
                pair.b(**pair.inputs_b)

    with pytest.raises(SessionError) as error:
        bisect_traces(run_a, run_b, folder=tmp_path / "s")
    assert error.value.code is Code.SESSION_STOPPED
    assert "side B of step 1 vacuous" in error.value.what


def other_policy(manifest: dict[str, Any]) -> None:
    manifest["policies"] = [{"version": "8", "forward": 0}]


def other_weights(manifest: dict[str, Any]) -> None:
    manifest["weights"][0]["digest"] = ["0" * 16, "1" * 16]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_weights, "side B does not hold the weights of step 1"),
        (other_policy, "side B ran with another policy version than in step 1 (none, now 8)"),
        (lambda manifest: manifest["conditions"].update(image="sha256:2"), "side B ran with another image than in step 1"),
        (lambda manifest: manifest.update(weights=[], weights_mode="none"), "nothing proves they stay the same"),
        (lambda manifest: manifest.update(weights_after="changed"), "its weights changed while it was recorded"),
        (lambda manifest: manifest["conditions"].update(optimizer_steps=2), "an optimizer stepped 2 times"),
    ],
    ids=["weights", "policy", "image", "no weights", "changed", "optimizer"],
)
def test_frozen_means_proven(change: Callable[[Any], object], says: str, recorded: Path, tmp_path: Path) -> None:
    """A side that in a later step is not what it was stops the session with the reason, again and again until it is mended; then the
    session reaches its answer, and the run that proved nothing is marked."""
    shutil.copytree(recorded / "0004-fine-b" / "trace", tmp_path / "other")
    edit_manifest(tmp_path / "other" / "shard-00000", change)
    mended = tmp_path / "mended"
    after = f'if [ $stage = fine ] && [ ! -e {mended} ]; then cp -r {tmp_path / "other"} "$TRACER_OUT"; exit; fi'
    session = Bisection.start(tmp_path / "s", session_of(recorded, command_b=replaying(recorded, "b", after=after)))
    for _ in range(2):
        assert session.run().status is SessionStatus.STOPPED
        assert says in session.session.said
    mended.touch()
    assert session.run().status is SessionStatus.DONE
    assert [step.first for step in session.session.valid()] == ["layers.2.residual", FIRST, FIRST]
    bad = [run for run in session.archive if run.purpose == "fine-b"][:2]
    assert all(run.invalidated or run.status is not RunStatus.DONE for run in bad)


def test_sides_that_cannot_be_compared_are_run_again(recorded: Path, tmp_path: Path) -> None:
    """Where a comparison could not tell, the session stops, and after the mending both sides run anew."""
    _, run_b = sides()
    run_b(out=tmp_path / "part", level=0, boundaries=["embedding"])
    mended = tmp_path / "mended"
    after = f'if [ ! -e {mended} ]; then cp -r {tmp_path / "part"} "$TRACER_OUT"; exit; fi'
    session = Bisection.start(tmp_path / "s", session_of(recorded, command_b=replaying(recorded, "b", after=after)))
    assert session.run().status is SessionStatus.STOPPED
    assert session.session.said.startswith("Could not tell")
    mended.touch()
    assert session.run().status is SessionStatus.DONE
    assert [run.purpose for run in session.archive][:4] == ["coarse-a", "coarse-b", "coarse-a", "coarse-b"]
    assert all("Could not tell" in run.invalidated for run in list(session.archive)[:2])


def test_a_tolerance_is_part_of_the_session(recorded: Path, tmp_path: Path) -> None:
    """Sides within the tolerance are the same after one step; a floor and a tolerance are kept with the session."""
    session = Bisection.start(tmp_path / "s", session_of(recorded, tolerance="relative=10"))
    assert session.run().status is SessionStatus.DONE
    assert (session.session.exit, len(session.session.steps)) == (0, 1)
    sides()[0](out=tmp_path / "again", level=2)
    floored = session_of(recorded, floor_a=(str(tmp_path / "again"),))
    session = Bisection.start(tmp_path / "f", floored)
    assert session.run().exit == 1
    result = session.result()
    assert result is not None
    assert any(boundary.floor is not None for boundary in result.boundaries)
    no_floor = Bisection.start(tmp_path / "n", session_of(recorded, floor_a=(str(tmp_path / "gone"),)))
    with pytest.raises(UsageError):
        no_floor.run()
    assert no_floor.session.status is SessionStatus.STOPPED


def test_a_full_disk_stops_the_session(recorded: Path, tmp_path: Path) -> None:
    """Where the state cannot be written the session says so; with room again it goes on from what is on disk."""
    folder = tmp_path / "s"
    session = Bisection.start(folder, session_of(recorded))
    session.next()
    full = folder / f".session.json.{os.getpid()}.tmp"
    full.symlink_to("/dev/full")
    with pytest.raises(SessionError, match="No space left"):
        session.run()
    full.unlink()
    assert Bisection(folder).run().status is SessionStatus.DONE


def test_two_workers_on_one_session(recorded: Path, tmp_path: Path) -> None:
    """While one process works on a session, run, skip and reset of another are refused, and looking at it is not."""
    session = Bisection.start(tmp_path / "s", session_of(recorded))
    session.next()
    with locked(tmp_path / "s"):
        calls: list[Callable[[], object]] = [session.run, session.reset, lambda: session.skip("embedding")]
        for call in calls:
            with pytest.raises(UsageError) as error:
                call()
            assert error.value.code is Code.SESSION_BUSY
        assert Bisection(tmp_path / "s").result() is not None
    assert session.run().status is SessionStatus.DONE


def test_a_reset_in_the_middle_of_a_step(recorded: Path, tmp_path: Path) -> None:
    """A session whose process died in a step can be reset: the search begins anew, in new folders, with the same answer."""
    folder = tmp_path / "s"
    Bisection.start(folder, session_of(recorded)).next()
    assert killed(folder, 9) == 9
    session = Bisection(folder)
    assert session.session.steps[-1].status is StepStatus.RUNNING
    session.reset()
    assert session.run().said.startswith(f"First divergence: {FIRST}")
    assert [step.invalidated for step in session.session.steps][-3:] == ["", "", ""]
    assert session.session.steps[0].invalidated == "the session was reset"


def test_a_side_that_raises_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callable raises reaches its caller as it is; the session keeps it as the reason, without secrets."""
    monkeypatch.setenv("HUB_TOKEN", "verysecret123")
    run_a, _ = sides("none")

    def run_b(**options: Any) -> None:
        raise OSError("denied with verysecret123")

    with pytest.raises(OSError, match="denied with verysecret123"):
        bisect_traces(run_a, run_b, folder=tmp_path / "s")
    session = Bisection(tmp_path / "s")
    assert session.session.status is SessionStatus.STOPPED
    assert session.session.said == "side B of step 1 failed: OSError: denied with <redacted>"
    assert [run.status for run in session.archive] == [RunStatus.DONE, RunStatus.FAILED]


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
    """A command that prints its environment, a key of several lines, an argument and a traceback leaves no secret in the folder."""
    monkeypatch.setenv("HUB_TOKEN", "verysecret123")
    monkeypatch.setenv("SIGNING_KEY", "-----BEGIN\nfirstline\nsecondline\n-----END")
    raising = """python3 -c 'import os; raise ValueError("with " + os.environ["HUB_TOKEN"])' --api-key "$HUB_TOKEN" || true"""
    before = f'echo "token $HUB_TOKEN"; env; env >&2; echo "$SIGNING_KEY"; {raising}'
    command = f'{replaying(recorded, "a", before=before)}; echo "last $HUB_TOKEN" >&2; [ ! -e {tmp_path / "fail"} ]'
    (tmp_path / "fail").touch()
    session = Bisection.start(tmp_path / "s", session_of(recorded, command_a=command))
    assert session.run().said.startswith("side A of step 1 failed: exit status 1: last <redacted>")
    (tmp_path / "fail").unlink()
    assert session.run().status is SessionStatus.DONE
    logs = "".join(log.read_text() for log in (tmp_path / "s").rglob("*.log"))
    assert "token <redacted>" in logs
    assert "ValueError: with <redacted>" in logs
    for file in (tmp_path / "s").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not [word for word in (b"verysecret123", b"firstline", b"secondline") if word in content], file


@pytest.mark.parametrize("command", ["HF_TOKEN=abcdef1 run", "run -v --api-key abcdef1", "run --api-key='abcdef 1'", "run verysecret123"])
def test_a_command_with_a_secret_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session keeps its commands, so one with a secret written into it, or put in by the shell, is refused without repeating it."""
    monkeypatch.setenv("HUB_TOKEN", "verysecret123")
    with pytest.raises(UsageError) as error:
        Bisection.start(tmp_path / "s", Session(command_a="true", command_b=command, cwd="/"))
    assert "$NAME" in error.value.remedy
    assert not any(secret in str(error.value) for secret in ("abcdef", "verysecret"))
    assert not (tmp_path / "s").exists()
    Bisection.start(tmp_path / "s", Session(command_a="HF_TOKEN=$HUB_TOKEN run --api-key $KEY --max-tokens 100000", command_b="x", cwd="/"))


@pytest.mark.parametrize("command", ["TRACER_LEVEL=2 run", "cd x; export TRACER_OUT=y; run", "env TRACER_BOUNDARIES=embedding run"])
def test_a_command_that_sets_what_steps_set_is_refused(command: str, tmp_path: Path) -> None:
    """A level, folder or boundaries set by the command itself would win over those of every step."""
    with pytest.raises(UsageError, match=r"sets TRACER_[A-Z]+ itself"):
        Bisection.start(tmp_path / "s", Session(command_a="true", command_b=command, cwd="/"))


@pytest.mark.parametrize(("field", "value"), [("tolerance", "ulps=4"), ("tolerance", "much"), ("budget_seconds", float("nan"))])
def test_bad_limits_are_refused(field: str, value: Any, recorded: Path, tmp_path: Path) -> None:
    """A tolerance that cannot hold before the last step, one that cannot be read and a budget that is no time are refused at the start."""
    with pytest.raises(UsageError):
        Bisection.start(tmp_path / "s", session_of(recorded, **{field: value}))
    assert not (tmp_path / "s").exists()


def test_a_mistake_in_a_command_is_mended_by_a_reset(tmp_path: Path) -> None:
    """A reset takes other commands, checked like the first ones; the side that is not named keeps its own."""
    bisection = Bisection.start(tmp_path / "s", Session(command_a="pythn side.py", command_b="b", cwd="/"))
    with pytest.raises(UsageError, match="holds a secret"):
        bisection.reset("run --api-key abcdef1")
    assert Bisection(tmp_path / "s").session.command_a == "pythn side.py"
    bisection.reset("python side.py")
    session = Bisection(tmp_path / "s").session
    assert (session.command_a, session.command_b, session.status) == ("python side.py", "b", SessionStatus.OPEN)


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
    state = tmp_path / "s" / "session.json"
    for damaged in ("{", state.read_text().replace('"command_a"', '"command_c"'), state.read_text().replace("{", '{"version": 2,', 1)):
        state.write_text(damaged)
        with pytest.raises(UsageError) as error:
            Bisection(tmp_path / "s")
        assert error.value.code is Code.SESSION_DAMAGED
    with pytest.raises(UsageError) as error:
        Bisection(state)
    assert error.value.code is Code.NOT_A_SESSION
