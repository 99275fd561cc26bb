"""Views as text."""

from __future__ import annotations

import io
import re

import pytest

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.reports.terminal import print_view, render_plain
from tracer.reports.view import Block, Facts, Headline, Items, Table, view_diff

BLOCKS: list[Block] = [
    Headline("First divergence: layers.2.attn.out", "bad"),
    Facts((("class", "unlocalized"), ("", "second line"))),
    Table(("", "boundary", "empty"), (("first", "layers.2.attn.out", ""), ("", "x", "")), frozenset({0}), "not shown: 3"),
    Items("findings", ("one", "two")),
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


class Closed(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str, /) -> int:
        """Refused."""
        raise BrokenPipeError


def test_plain_text_is_whole_and_aligned() -> None:
    """Plain text has no escape codes, drops empty columns, and pads the others."""
    assert render_plain(BLOCKS) == (
        "First divergence: layers.2.attn.out\n"
        "\n"
        "class  unlocalized\n"
        "       second line\n"
        "\n"
        "       boundary\n"
        "first  layers.2.attn.out\n"
        "       x\n"
        "not shown: 3\n"
        "\n"
        "findings\n"
        "  one\n"
        "  two\n"
    )


def test_anything_but_a_terminal_gets_plain_text() -> None:
    """A pipe or file gets exactly the plain text."""
    out = io.StringIO()
    print_view(BLOCKS, out)
    assert out.getvalue() == render_plain(BLOCKS)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_is_never_overrun(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal no line is wider than it, nothing is cut off, and every word of the plain text is there."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    blocks = view_diff(diff_traces(Side().trace(), b.trace()))
    out = Terminal()
    print_view(blocks, out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert "unlocalized" in "".join(text.split())
    assert "layers.2.attn.out" in "".join(text.split())


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot draw gets plain text."""
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    print_view(BLOCKS, out)
    assert out.getvalue() == render_plain(BLOCKS)


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed pipe ends the output quietly, so that the exit code stays that of the verdict."""
    import sys

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_view(BLOCKS, Closed())
    sys.stdout.close()
