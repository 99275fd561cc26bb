"""Module names from a config, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import FAMILIES, make_config, make_model
from tracer.errors import Code, UsageError
from tracer.hosts.transformers_config import modules_from_config


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_the_real_model(tmp_path: Path, family: str) -> None:
    """The names from the config equal those of the model with weights."""
    make_config(family).to_json_file(tmp_path / "config.json")
    model = make_model(family)
    assert modules_from_config(tmp_path) == {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}


def test_the_architecture_of_the_config_is_built(tmp_path: Path) -> None:
    """A config that names a class gets that class; one that names none gets the causal language model."""
    config = make_config("qwen3")
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.to_json_file(tmp_path / "config.json")
    assert modules_from_config(tmp_path / "config.json")[""] == "Qwen3ForSequenceClassification"


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    """A missing file, a file that is no config, and an unknown model type are refused, naming the file."""
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "unknown.json").write_text('{"model_type": "no such thing"}')
    for name in ("none.json", "text.json", "unknown.json"):
        with pytest.raises(UsageError) as caught:
            modules_from_config(tmp_path / name)
        assert caught.value.code is Code.BAD_ARGUMENT
        assert name in caught.value.where + caught.value.found
