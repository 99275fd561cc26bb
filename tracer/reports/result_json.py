"""Results as JSON: exactly the structs, written in one step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from tracer.errors import Code, TracerError, UsageError
from tracer.read.findings import Verdict

__all__ = ["ErrorRecord", "Failure", "encode_result", "failure_of", "write_result"]


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A ``TracerError`` as data; parts that it does not have are empty."""

    code: str
    what: str
    where: str = ""
    expected: str = ""
    found: str = ""
    remedy: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a command writes that came to no result."""

    version: int = 1
    exit: int = Verdict.COULD_NOT_TELL.exit_code
    verdict: Verdict = Verdict.COULD_NOT_TELL
    headline: str
    error: ErrorRecord


def failure_of(error: TracerError) -> Failure:
    """An error in place of a result."""
    record = ErrorRecord(
        code=error.code.value, what=error.what, where=error.where, expected=error.expected, found=error.found, remedy=error.remedy
    )
    return Failure(headline=f"Could not tell: {error.what}", error=record)


def encode_result(result: msgspec.Struct) -> bytes:
    """The struct as indented JSON with a final newline. It decodes strictly into the same struct."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def write_result(result: msgspec.Struct, target: str) -> None:
    """Write a result to a file, whole or not at all, or to standard output for ``-``. An existing file is replaced.

    Raises ``UsageError`` (bad-argument) where the file cannot be written.
    """
    text = encode_result(result)
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(text)  # UTF-8, whatever the terminal's encoding
        sys.stdout.buffer.flush()
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
