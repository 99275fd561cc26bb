"""What never goes to disk."""

from __future__ import annotations

import pytest

from tracer.format.redaction import redact_arguments, redact_command, redact_values


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


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("HF_TOKEN=abcdef1 python x.py", "HF_TOKEN=<redacted> python x.py"),
        ("python x.py --verbose --api-key 'abc def' --seed 3", "python x.py --verbose --api-key <redacted> --seed 3"),
        ('A_SECRET="abcdef1" x; export B_TOKEN=abcdef1', "A_SECRET=<redacted> x; export B_TOKEN=<redacted>"),
        ('HF_TOKEN=$T x --api-key "$KEY" --token ${T}', 'HF_TOKEN=$T x --api-key "$KEY" --token ${T}'),
        ("SIDE=a x --token=abcdef1 --password abcdef1", "SIDE=a x --token=<redacted> --password <redacted>"),
        ("OPENAI_API_KEY=sk-abcdef1 python x.py", "OPENAI_API_KEY=<redacted> python x.py"),
        ("x --max-tokens 1000000 --tokenizer org/name key.py", "x --max-tokens 1000000 --tokenizer org/name key.py"),
    ],
)
def test_a_command_keeps_references_and_no_secret(command: str, expected: str) -> None:
    """Secrets written into a shell command are replaced; references to variables and what only sounds like a secret stay."""
    assert redact_command(command) == expected


def test_a_secret_of_several_lines_leaves_a_log_line_by_line() -> None:
    """A key of several lines is taken out of a text that shows one of its lines."""
    assert redact_values("x secondline y", {"SIGNING_KEY": "firstline\nsecondline\n"}) == "x <redacted> y"
