"""Reports as files: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from tracer.errors import Code, UsageError

__all__ = ["write_whole"]


def write_whole(content: bytes, target: str, option: str) -> None:
    """Write a file in one step. An existing file is replaced. ``option``: the flag that named it, for the error.

    Raises ``UsageError`` (bad-argument) where the file cannot be written.
    """
    path = Path(target)
    sibling = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            sibling.write_bytes(content)
            os.replace(sibling, path)
        finally:
            sibling.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(
            Code.BAD_ARGUMENT, "the report could not be written", where=str(path), found=reason or str(error),
            remedy=f"choose another {option}",
        ) from error  # fmt: skip
