"""``tracer map``: list, show, check."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny_models import FAMILIES, class_name, make_config
from tracer.cli.cmd_map import app
from tracer.errors import Code, HostError, MapError, TracerError, UsageError
from tracer.record.boundary_maps import map_names


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``tracer map`` with these arguments; errors of ours are raised as they are."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, TracerError):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config.json of a tiny Qwen3-MoE."""
    path = tmp_path / "config.json"
    make_config("qwen3_moe").to_json_file(path)
    return path


def test_list_names_every_map_and_class() -> None:
    """The list has a line for every packaged map and every class it serves."""
    code, output = run("list")
    assert code == 0
    lines = output.splitlines()
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == set(map_names())
    assert all(class_name(family) in output for family in FAMILIES)


def test_show_lists_boundaries_in_order() -> None:
    """Show prints every boundary in causal order with its level, inputs and place, and what cannot be shown with the reason."""
    code, output = run("show", "qwen3_moe")
    assert code == 0
    assert output.index("layers.{layer}.attn.q  (level 2)") < output.index("layers.{layer}.attn.core  (level 2, mixes tokens)")
    assert "layers.{layer}.moe.topk_ids  (level 1, moe layers, discrete)" in output
    assert "not observable: all experts are one module" in output
    assert "at model.layers.{layer}.self_attn q (attention tap), layout b h s d, tp cuts h" in output
    assert "from layers.{previous}.residual" in output


@pytest.mark.parametrize("family", FAMILIES)
def test_check_resolves_every_family(tmp_path: Path, family: str) -> None:
    """A model built from its config alone resolves completely, also when the map is chosen by its class."""
    make_config(family).to_json_file(tmp_path / "config.json")
    for name, where in ((family, tmp_path / "config.json"), ("auto", tmp_path)):
        code, output = run("check", name, "--config", str(where))
        assert code == 0, output
        assert f"map {family}, host transformers, model {class_name(family)}" in output
        n, of, m = output.splitlines()[-1].split()[:3]
        assert (n, of) == (m, "of")


def test_check_names_every_unresolved_boundary(config: Path) -> None:
    """A map of another family exits with 2, every boundary that has no module named with the module it wants."""
    code, output = run("check", "gemma2", "--config", str(config))
    assert code == 2
    assert "unresolved: layers.3.mlp.post_norm: no module model.layers.3.post_feedforward_layernorm" in output
    assert output.count("unresolved: ") == 20
    assert output.splitlines()[-1] == "52 of 72 boundaries resolved"


def test_check_says_that_a_map_serves_another_class(tmp_path: Path) -> None:
    """A map of another class exits with 2 although every boundary resolves, and the fitting map is named."""
    make_config("mistral").to_json_file(tmp_path / "config.json")
    code, output = run("check", "llama", "--config", str(tmp_path))
    assert code == 2
    assert "[map-unfit] boundary map llama does not serve MistralForCausalLM" in output
    assert 'to do: map="mistral", which serves MistralForCausalLM, or map="auto"' in output
    assert output.splitlines()[-1].startswith("63 of 63 boundaries resolved")


def test_check_takes_a_map_file(config: Path, tmp_path: Path) -> None:
    """A path works where a name does."""
    (tmp_path / "mine.yaml").write_text("family: mine\nextends: qwen3_moe\n")
    code, output = run("check", str(tmp_path / "mine.yaml"), "--config", str(config))
    assert (code, output.splitlines()[0]) == (0, "map mine, host transformers, model Qwen3MoeForCausalLM")


def test_wrong_usage_has_a_code(config: Path, tmp_path: Path) -> None:
    """An unknown map, config, config content or host is an error with a code."""
    (tmp_path / "broken.json").write_text('{"model_type": "no such thing"}')
    cases: list[tuple[tuple[str, ...], type[TracerError], Code]] = [
        (("show", "qwen9"), MapError, Code.MAP_UNKNOWN),
        (("show", "qwen3", "--host", "nowhere"), UsageError, Code.BAD_ARGUMENT),
        (("check", "qwen3", "--config", str(tmp_path / "none.json")), UsageError, Code.BAD_ARGUMENT),
        (("check", "qwen3", "--config", str(tmp_path / "broken.json")), UsageError, Code.BAD_ARGUMENT),
        (("check", "auto", "--config", str(config), "--host", "nowhere"), HostError, Code.HOST_UNKNOWN),
    ]
    for arguments, kind, code in cases:
        with pytest.raises(kind) as caught:
            run(*arguments)
        assert caught.value.code is code


def test_suggest_writes_a_map_that_checks(config: Path, tmp_path: Path) -> None:
    """Suggest drafts a map from a config alone, says where it is and what is missing; it checks, and it is never overwritten."""
    target = tmp_path / "draft.yaml"
    code, output = run("suggest", "--config", str(config), "--out", str(target), "--family", "mine")
    assert code == 0
    assert f"boundaries found, each with its evidence in {target}" in output
    assert "not found: no boundary of the name: attn.gated" in output
    code, output = run("check", str(target), "--config", str(config))
    assert (code, output.splitlines()[0]) == (0, "map mine, host transformers, model Qwen3MoeForCausalLM")
    with pytest.raises(UsageError) as caught:
        run("suggest", "--config", str(config), "--out", str(target))
    assert caught.value.code is Code.OUT_IN_USE


def test_check_that_cannot_run_says_so(config: Path) -> None:
    """Module names of an engine come from its own classes: without it the check is not run, with the reason and the remedy."""
    with pytest.raises(HostError) as caught:
        run("check", "qwen3_moe", "--config", str(config), "--host", "vllm")
    assert caught.value.code is Code.HOST_MISSING_PACKAGE
    assert caught.value.what.startswith("not run: ")
    assert caught.value.remedy
