"""Results as JSON: exactly the structs, written in one step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeAlias

import msgspec

from tracer.errors import Code, TracerError, UsageError
from tracer.read.findings import RESULT_VERSION, DiffResult, Verdict
from tracer.reports.writing import write_whole
from tracer.scores.results import SCORE_RESULT_VERSION, ScoreResult, UpdateResult

__all__ = ["ErrorRecord", "Failure", "encode_result", "failure_of", "read_result", "write_result"]


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
    write_whole(text, target, "--json")


Result: TypeAlias = "DiffResult | ScoreResult | UpdateResult"


def read_result(source: str) -> Result:
    """What ``--json`` of ``tracer diff``, ``tracer scores compare`` or ``tracer scores update`` wrote, checked as strictly as it
    was written.

    Raises ``UsageError`` (not-a-result): no such file, no JSON, another version, or another command's result.
    """
    expected = f"a file that tracer diff or tracer scores --json wrote, version {RESULT_VERSION}"
    try:
        content = Path(source).read_bytes()
        kind = _kind(msgspec.json.decode(content, type=dict[str, msgspec.Raw]))
        result = msgspec.json.decode(content, type=kind)
    except (OSError, ValueError) as error:
        found = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise UsageError(
            Code.NOT_A_RESULT, "this is not the result of a comparison", where=source, expected=expected, found=found,
            remedy="run tracer diff A B --json FILE and give that file",
        ) from error  # fmt: skip
    if result.version != (RESULT_VERSION if kind is DiffResult else SCORE_RESULT_VERSION):
        raise UsageError(
            Code.NOT_A_RESULT, "this result was written by another version of tracer", where=source, expected=expected,
            found=f"version {result.version}", remedy="run the comparison again with this version",
        )  # fmt: skip
    return result


def _kind(fields: dict[str, msgspec.Raw]) -> type[Result]:
    """The struct that has these fields: each has one that the others lack."""
    return ScoreResult if "decision" in fields else UpdateResult if "outcome" in fields else DiffResult
