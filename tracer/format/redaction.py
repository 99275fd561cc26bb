"""What never goes to disk: secrets, known by the names they go under and by the shapes they have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["REDACTED", "names_secret", "redact_arguments", "redact_command", "redact_text", "redact_values"]

REDACTED = "<redacted>"
_SHORTEST = 6
"""A secret variable's value shorter than this is no secret, and would take ordinary words out of a log."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SESSION|SIGNATURE|PRIVATE|(?:\A|[_-])PAT(?:\Z|[_-])", re.IGNORECASE)
_NOT_SECRET = re.compile(
    r"TOKENIZ|KEEP|MONKEY|KEYS?[_-]?VALUE|AUTHOR|AUTO"
    r"|(?:MAX|MIN|NUM|NEW|PER|BATCHED|N|PAD|EOS|BOS)[_-](?:\w+[_-])*TOKENS?\b|TOKENS?[_-](?:PER|LIMIT|BUDGET|COUNT|IDS?|LENGTH)",
    re.IGNORECASE,
)
_LOOKS_SECRET = re.compile(
    r"(?:sk|pk|rk|ghp|gho|ghu|ghs|ghr|hf|glpat|xox[abprs]|github_pat|pypi|AKIA|ASIA|AIza|ya29|eyJ)[-_A-Za-z0-9.]{16,}|(?<=://)[^/@\s]+(?=@)"
)
_SETTING = re.compile(
    r"(?<![\w$-])(?P<name>(?:-{0,2}[A-Za-z_][\w-]*=)|(?:--?[A-Za-z][\w-]*\s+(?!-)))(?P<value>'[^']*'|\"[^\"]*\"|[^\s;|&'\"]+)"
)


def names_secret(name: str) -> bool:
    """Whether a variable or option says by its name that its value is a secret."""
    return bool(_SECRET.search(_NOT_SECRET.sub("", name)))


def redact_text(text: str) -> str:
    """Text without anything that has the shape of a credential."""
    return _LOOKS_SECRET.sub(REDACTED, text)


def redact_values(text: str, environment: Mapping[str, str]) -> str:
    """Text without the values of an environment's secrets, and without anything that has the shape of a credential."""
    secrets = [value for name, value in environment.items() if names_secret(name)]
    lines = {line.strip() for value in secrets for line in value.splitlines()}  # a key of several lines is logged line by line
    for value in sorted({value for value in {*secrets, *lines} if len(value) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return redact_text(text)


def redact_command(command: str) -> str:
    """A shell command without the secrets written into it: ``TOKEN=abc run``, ``run --api-key abc``, and what has the shape of a
    credential. A reference (``TOKEN=$TOKEN``) stays."""

    def shown(found: re.Match[str]) -> str:
        name, bare = found["name"], found["value"].strip("'\"")
        if not names_secret(name.rstrip("= \t\n")) or len(bare) < _SHORTEST or bare.startswith("$"):
            return found[0]
        return name + REDACTED

    return redact_text(_SETTING.sub(shown, command))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with the values of secret-looking options, and secret-looking values, replaced."""
    redacted: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            redacted.append(REDACTED)
        elif equals and names_secret(name):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_text(argument))
        hide_next = argument.startswith("-") and not equals and names_secret(argument)
    return redacted
