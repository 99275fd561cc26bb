"""Findings and results as structs, and the page that documents them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tracer.read.findings import DiffResult, FindingCode, Kind, SideSummary, Verdict

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/findings.md"


def test_every_code_is_a_heading() -> None:
    """The findings page documents every code exactly once, in the order of the enum, and no other."""
    assert re.findall(r"^### `([a-z-]+)`$", PAGE.read_text(), re.MULTILINE) == [code.value for code in FindingCode]


def test_every_kind_is_explained() -> None:
    """The page says what every kind does to the verdict."""
    assert re.findall(r"^\| ([a-z]+) \|", PAGE.read_text().partition("## Classes")[0], re.MULTILINE)[1:] == [kind.value for kind in Kind]


def test_exit_codes() -> None:
    """Same is 0, different 1, could not tell 2."""
    assert [verdict.exit_code for verdict in (Verdict.SAME, Verdict.DIFFERENT, Verdict.COULD_NOT_TELL)] == [0, 1, 2]


def test_a_result_decodes_strictly() -> None:
    """A result with a wrong type is refused."""
    side = SideSummary(path="a")
    result = DiffResult(exit=0, verdict=Verdict.SAME, headline="Same", a=side, b=side)
    raw = msgspec.json.encode(result)
    assert msgspec.json.decode(raw, type=DiffResult) == result
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw.replace(b'"exit":0', b'"exit":"0"'), type=DiffResult)
