"""Replay controls: which variant moves what, and what is never called "no effect"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.tiny_models import make_ids, make_model
from tracer.errors import Code, UsageError
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


def test_the_preview_hides_secrets() -> None:
    """A secret in the file's environment is not printed."""
    controls = Controls(command="x", variants={"a": Variant()}, environment={"HUB_TOKEN": "hunter2hunter2"})
    assert "hunter2hunter2" not in "\n".join(preview(controls))
