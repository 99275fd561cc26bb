"""Replay controls: which variant moves what, and what is never called "no effect"."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tracer
from tests.tiny_models import make_ids, make_model
from tests.trace_files import edit_manifest
from tracer.errors import Code, SessionError, UsageError
from tracer.sessions.archive import Archive, RunStatus
from tracer.sessions.controls import Controls, Effect, Variant, load_controls, preview, run_controls, template_names


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of one model: as it is, with another attention scale, compiled as a whole, and with other weights."""
    folder = tmp_path_factory.mktemp("recorded")
    ids = make_ids(2, 12)

    def record(name: str, model: Any, **options: Any) -> None:
        with torch.no_grad(), tracer.trace(model, out=folder / name, **options):
            model(ids)

    record("base", make_model("qwen3", torch.float32))
    scaled = make_model("qwen3", torch.float32)
    scaled.model.layers[2].self_attn.scaling *= 1.1
    record("scaled", scaled)
    record("coarse", make_model("qwen3", torch.float32), boundaries=["embedding"])
    other = make_model("qwen3", torch.float32)
    with torch.no_grad():
        other.lm_head.weight += 0.1
    record("other", other)
    return folder


def controls_of(recorded: Path, variants: dict[str, Variant], **options: Any) -> Controls:
    return Controls(command=f'cp -r {recorded}/${{SIDE:-base}} "$TRACER_OUT"; true', variants=variants, **options)


def side(name: str) -> Variant:
    return Variant(environment={"SIDE": name})


def test_what_moves_and_what_does_not(recorded: Path, tmp_path: Path) -> None:
    """A variant that changes the model moves the boundary it reaches; a repeat has no effect; each has its own folder and run."""
    result = run_controls(controls_of(recorded, {"repeat": Variant(), "scale": side("scaled")}), tmp_path / "c")
    assert result.exit == 1
    repeat, scale = result.variants
    assert (repeat.effect, repeat.first, repeat.same_weights) == (Effect.NONE, "", True)
    assert (scale.effect, scale.first) == (Effect.MOVES, "layers.2.attn.out")
    archive = Archive(tmp_path / "c")
    assert [run.purpose for run in archive] == ["base", "repeat", "scale"]
    assert all(run.status is RunStatus.DONE and run.evidence for run in list(archive)[1:])
    assert (archive.path(archive[scale.run]) / "against-base.json").exists()


def test_a_target_that_did_not_run_is_vacuous(recorded: Path, tmp_path: Path) -> None:
    """Where the target never ran nothing is known, in a variant and in the base: never "no effect"."""
    controls = controls_of(recorded, {"coarse": side("coarse")}, target=("layers.*",))
    result = run_controls(controls, tmp_path / "c")
    assert result.exit == 2
    assert result.variants[0].effect is Effect.VACUOUS
    assert "nothing is known" in result.headline
    nowhere = run_controls(controls_of(recorded, {"repeat": Variant()}, target=("*.moe.*",)), tmp_path / "d")
    assert nowhere.exit == 2
    assert "the base run is vacuous" in nowhere.headline
    assert nowhere.variants == ()


def test_other_weights_are_no_effect_of_a_variable(recorded: Path, tmp_path: Path) -> None:
    """A variant whose weights are not those of the base proves nothing about its variable."""
    result = run_controls(controls_of(recorded, {"other": side("other")}), tmp_path / "c")
    assert result.variants[0].effect is Effect.FAILED
    assert "weights" in result.variants[0].text
    assert result.exit == 2


def test_a_failure_stops_the_rest(recorded: Path, tmp_path: Path) -> None:
    """A failed run stops the others unless the file says to continue; its logs stay."""
    variants = {"broken": side("missing"), "scale": side("scaled")}
    stopped = run_controls(controls_of(recorded, variants), tmp_path / "c")
    assert [variant.name for variant in stopped.variants] == ["broken"]
    assert stopped.exit == 2
    assert stopped.headline.startswith("Stopped: broken")
    assert "No such file" in (tmp_path / "c" / stopped.variants[0].run / "stderr.log").read_text()
    on = run_controls(controls_of(recorded, variants, continue_on_failure=True), tmp_path / "d")
    assert [variant.effect for variant in on.variants] == [Effect.FAILED, Effect.MOVES]
    assert on.exit == 1


def test_nothing_is_overwritten(recorded: Path, tmp_path: Path) -> None:
    """A used folder is refused."""
    run_controls(controls_of(recorded, {"repeat": Variant()}), tmp_path / "c")
    with pytest.raises(UsageError) as error:
        run_controls(controls_of(recorded, {"repeat": Variant()}), tmp_path / "c")
    assert error.value.code is Code.OUT_IN_USE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command: x\nvariants: {a: {environment: {A: '1', B: '2'}}}", "one thing"),
        ("command: x\nvariants: {a: {enviroment: {A: '1'}}}", "enviroment"),
        ("command: x\nvariants: {a: {arguments: --one 1 --two 2}}", "one thing"),
        ("command: x\nvariants: {a: {arguments: --one 1, environment: {A: '1'}}}", "one thing"),
        ("command: x\nenvironment: {A: '1'}\nvariants: {a: {environment: {A: '1'}}}", "changes nothing"),
        ("command: x\nvariants: {a: {arguments: \"--one 'x\"}}", "cannot be read"),
        ("command: x\nvariants:\n  a: {}\n  a: {arguments: --x}", "key 'a' is given twice"),
        ("command: x\nbudget: 3\nvariants: {a: {}}", "budget"),
        ("command: x\nbudget_seconds: -3\nvariants: {a: {}}", "a budget is a time"),
        ("command: x\nbudget_seconds: .inf\nvariants: {a: {}}", "a budget is a time"),
        ("command: x\ntarget: []\nvariants: {a: {}}", "no target"),
        ("command: x\ntolerance: ulps=3\nvariants: {a: {}}", "ulps"),
        ("command: SIDE=a x\nvariants: {b: {environment: {SIDE: b}}}", "the command sets SIDE itself"),
        ("command: cd y && env -i SIDE=a x\nvariants: {b: {environment: {SIDE: b}}}", "the command sets SIDE itself"),
        ("command: A=1 x\nenvironment: {A: '2'}\nvariants: {a: {}}", "the command sets A itself"),
        ("command: TRACER_OUT=t x\nvariants: {a: {}}", "the command sets TRACER_OUT itself"),
        ("command: x\nvariants: {}", "nothing to run"),
        ("command: ''\nvariants: {a: {}}", "nothing to run"),
        ("variants: {a: {}}", "command"),
        ("command: x\nvariants: {'../a': {}}", "folder"),
        ("command: x\nvariants: {base: {}}", "folder"),
        (": [", "no file of controls"),
    ],
)
def test_bad_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    """Each mistake is named with the file and the key."""
    file = tmp_path / "controls.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        load_controls(str(file))
    assert error.value.code is Code.CONTROLS_INVALID
    assert says in str(error.value)


@pytest.mark.parametrize("name", template_names())
def test_templates_are_good_files(name: str) -> None:
    """Every ready-made group loads, has a repeat, and previews its commands and its budget without a secret."""
    from tracer.sessions.controls import TEMPLATES

    controls = load_controls(str(TEMPLATES / f"{name}.yaml"))
    assert "repeat" in controls.variants
    lines = preview(controls)
    assert len(lines) == len(controls.variants) + 2
    assert "s in all" in lines[-1]


def test_secrets_are_neither_shown_nor_kept(recorded: Path, tmp_path: Path) -> None:
    """A secret in the file's environment, in a variant or in its arguments is not in the preview, the folder or the result."""
    variants = {"a": Variant(environment={"OTHER_KEY": "hunter3hunter3"}), "b": Variant(arguments="--api-key hunter4hunter4")}
    controls = controls_of(recorded, variants, environment={"HUB_TOKEN": "hunter2hunter2"}, continue_on_failure=True)
    controls = msgspec.structs.replace(controls, command=controls.command + '; echo "$HUB_TOKEN $OTHER_KEY" #')
    lines = list(preview(controls))
    result = run_controls(controls, tmp_path / "c", lines.append)
    assert [variant.effect for variant in result.variants] == [Effect.NONE, Effect.NONE]
    assert "hunter" not in "\n".join(lines)
    for file in (tmp_path / "c").rglob("*"):
        if file.is_file():
            assert b"hunter" not in file.read_bytes(), file


def test_a_variable_that_is_set_already_changes_nothing(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that gives a variable the value it has is a repeat, and is called one."""
    monkeypatch.setenv("THREADS", "1")
    controls = controls_of(recorded, {"one": Variant(environment={"THREADS": "1"})})
    assert run_controls(controls, tmp_path / "c").variants[0].changes == "nothing (THREADS=1 already)"


def test_a_tolerance_says_what_counts_as_moving(recorded: Path, tmp_path: Path) -> None:
    """What a variant moves by less than the file's tolerance is no effect."""
    variants = {"scale": side("scaled")}
    assert run_controls(controls_of(recorded, variants, tolerance="relative=10"), tmp_path / "c").variants[0].effect is Effect.NONE
    named = run_controls(controls_of(recorded, variants, tolerance="layers.77.attn.out=1"), tmp_path / "d")
    assert named.variants[0].effect is Effect.UNKNOWN


@pytest.mark.parametrize("changed", ["policy", "image"])
def test_another_policy_or_image_is_no_effect_of_a_variable(changed: str, recorded: Path, tmp_path: Path) -> None:
    """A variant that ran with another policy version or image than the base proves nothing about its variable."""
    other = Path(shutil.copytree(recorded / "scaled", tmp_path / "other"))

    def change(manifest: dict[str, Any]) -> None:
        if changed == "policy":
            manifest["policies"] = [{"version": "8", "forward": 0}]
        else:
            manifest["conditions"]["image"] = "sha256:2"

    edit_manifest(other / "shard-00000", change)
    command = f'if [ "$SIDE" ]; then cp -r {other} "$TRACER_OUT"; else cp -r {recorded / "base"} "$TRACER_OUT"; fi'
    result = run_controls(Controls(command=command, variants={"other": side("other")}), tmp_path / "c")
    assert result.variants[0].effect is Effect.FAILED
    assert "than the base" in result.variants[0].text


def test_bad_folders_and_a_full_disk_are_named(recorded: Path, tmp_path: Path) -> None:
    """A file in the folder's place is refused, and a result that cannot be written is an error that says why."""
    (tmp_path / "file").touch()
    controls = controls_of(recorded, {"repeat": Variant()})
    with pytest.raises(UsageError) as error:
        run_controls(controls, tmp_path / "file")
    assert error.value.code is Code.OUT_IN_USE
    for name in ("index.json", "controls.json"):
        filling = f"{controls.command}; ln -sf /dev/full {tmp_path}/c-{name}/.{name}.{os.getpid()}.tmp"
        with pytest.raises(SessionError, match="No space left"):
            run_controls(msgspec.structs.replace(controls, command=filling), tmp_path / f"c-{name}")
