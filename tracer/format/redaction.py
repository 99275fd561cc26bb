"""What never goes to disk: secrets, known by the names they go under and by the shapes they have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["names_secret", "redact_arguments", "redact_text", "redact_values"]

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


def names_secret(name: str) -> bool:
    """Whether a variable or option says by its name that its value is a secret."""
    return bool(_SECRET.search(_NOT_SECRET.sub("", name)))


def redact_text(text: str) -> str:
    """Text without anything that has the shape of a credential."""
    return _LOOKS_SECRET.sub(REDACTED, text)


def redact_values(text: str, environment: Mapping[str, str]) -> str:
    """Text without the values of an environment's secrets, and without anything that has the shape of a credential."""
    values = {value for name, value in environment.items() if names_secret(name) and len(value) >= _SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return redact_text(text)


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
