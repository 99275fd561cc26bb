"""What a session asks of a script through the environment."""

from __future__ import annotations

import pytest

from tracer.errors import Code, UsageError
from tracer.record.overrides import overridden


def test_arguments_stand_where_nothing_is_set() -> None:
    """Without variables everything is as given; empty variables are none."""
    assert overridden("qwen3", 1, ["embedding"], {}) == ("qwen3", 1, ["embedding"])
    assert overridden("qwen3", 1, None, {"TRACER_LEVEL": "", "TRACER_BOUNDARIES": " , "}) == ("qwen3", 1, None)


def test_variables_take_the_arguments_place() -> None:
    """Map, level and boundaries come from the environment where it has them."""
    environment = {"TRACER_LEVEL": "2", "TRACER_BOUNDARIES": "embedding, layers.*.residual", "TRACER_MAP": "llama"}
    assert overridden("auto", 0, None, environment) == ("llama", 2, ["embedding", "layers.*.residual"])


def test_a_variable_that_means_nothing_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt variable is named with the one that may be meant, and not again; those of tracer's own are not."""
    environment = {"TRACER_LEVLE": "2", "TRACER_RUN_ID": "x", "TRACER_DEBUG": "1"}
    overridden("auto", 1, None, environment)
    assert capsys.readouterr().err == "tracer: the variable TRACER_LEVLE means nothing; did you mean TRACER_LEVEL?\n"
    overridden("auto", 1, None, environment)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["3", "-1", "two", "1.0"])
def test_a_level_that_is_none_is_refused(text: str) -> None:
    """Anything but 0, 1 and 2 has a typed error that names the variable."""
    with pytest.raises(UsageError, match="TRACER_LEVEL") as error:
        overridden("auto", 1, None, {"TRACER_LEVEL": text})
    assert error.value.code is Code.BAD_ARGUMENT
