"""Results as JSON: exactly the structs, written in one step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from tracer.errors import Code, UsageError

__all__ = ["encode_result", "write_result"]


def encode_result(result: msgspec.Struct) -> bytes:
    """The struct as indented JSON with a final newline. It decodes strictly into the same struct."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def write_result(result: msgspec.Struct, target: str) -> None:
    """Write a result to a file, whole or not at all, or to standard output for ``-``. An existing file is replaced.

    Raises ``UsageError`` (bad-argument) where the file cannot be written.
    """
    text = encode_result(result)
    if target == "-":
        sys.stdout.write(text.decode())
        sys.stdout.flush()
        return
    path = Path(target)
    sibling = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            sibling.write_bytes(text)
            os.replace(sibling, path)
        finally:
            sibling.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            Code.BAD_ARGUMENT,
            "the JSON file could not be written",
            where=str(path),
            found=error.strerror or str(error),
            remedy="choose another --json",
        ) from error
