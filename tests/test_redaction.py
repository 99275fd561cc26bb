"""What never goes to disk."""

from __future__ import annotations

import pytest

from tracer.format.redaction import redact_arguments, redact_values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.py", "--lr", "1e-4", "--max-new-tokens", "5"], ["train.py", "--lr", "1e-4", "--max-new-tokens", "5"]),
        (["x", "--hub-token", "abc", "--seed", "3"], ["x", "--hub-token", "<redacted>", "--seed", "3"]),
        (["x", "--api-key=abc", "wandb_api_key=abc"], ["x", "--api-key=<redacted>", "wandb_api_key=<redacted>"]),
        (["x", "--push-token", "--verbose"], ["x", "--push-token", "--verbose"]),
        (["x", "hf_" + "a" * 30], ["x", "<redacted>"]),
        (["x", "https://user:word@host/path"], ["x", "https://<redacted>@host/path"]),
        (["x", "--tokenizer", "a/b", "--num-key-value-heads", "2"], ["x", "--tokenizer", "a/b", "--num-key-value-heads", "2"]),
    ],
)
def test_arguments_that_look_like_secrets_are_redacted(arguments: list[str], expected: list[str]) -> None:
    """Values of secret-looking options, and values with the shape of a credential, are replaced; the rest stays."""
    assert redact_arguments(arguments) == expected


def test_values_of_secret_variables_leave_a_text() -> None:
    """Whatever a variable with a secret's name holds is taken out of a log; ordinary words and short values stay."""
    environment = {"HUB_TOKEN": "abc123xyz", "MAX_TOKENS": "4096000", "API_KEY": "on", "HOME": "/srv/me"}
    text = "using abc123xyz on 4096000 in /srv/me with hf_" + "a" * 30
    assert redact_values(text, environment) == "using <redacted> on 4096000 in /srv/me with <redacted>"
