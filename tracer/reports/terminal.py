"""Views as text: coloured and folded to the width on a terminal, plain and whole everywhere else.

Nothing is said by colour alone. The package that draws tables is loaded only for a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from tracer.errors import visible
from tracer.reports.view import Block, Facts, Headline, Items, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["print_view", "render_plain"]

_FOLDING = ("tokens", "note", "rows that differ", "mesh")
"""Columns that may fold; all others stay whole."""
_FOLDED = 12
_STYLES = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}


def print_view(blocks: Sequence[Block], file: TextIO | None = None) -> None:
    """Write a view. A reader that has gone away (``| head``) is no error."""
    out = sys.stdout if file is None else file
    blocks = [_visible(block) for block in blocks]
    try:
        if out.isatty() and os.environ.get("TERM") != "dumb":
            _print_rich(blocks, out)
        else:
            out.write(render_plain(blocks))
            out.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until exit, so that the final flush has somewhere to go


def _visible(block: Block) -> Block:
    """The block with every control character in it written out."""
    match block:
        case Headline():
            return replace(block, text=visible(block.text))
        case Facts():
            return Facts(tuple((visible(label), visible(text)) for label, text in block.lines))
        case Items():
            return Items(visible(block.title), tuple(visible(item) for item in block.items))
        case Table():
            return replace(block, rows=tuple(tuple(visible(cell) for cell in row) for row in block.rows), rest=visible(block.rest))


def render_plain(blocks: Sequence[Block]) -> str:
    """A view as plain text: no colour, no folding, columns padded with spaces."""
    return "\n".join(_plain(block) for block in blocks)


def _plain(block: Block) -> str:
    match block:
        case Headline(text=text):
            return f"{text}\n"
        case Facts(lines=lines):
            width = max((len(label) for label, _ in lines), default=0)
            return "".join(f"{label:<{width}}  {text}\n" for label, text in lines)
        case Items(title=title, items=items):
            return f"{title}\n" + "".join(f"  {item}\n" for item in items)
        case Table():
            return _plain_table(block)


def _plain_table(table: Table) -> str:
    used = _used(table)
    widths = [max(len(table.columns[at]), *(len(row[at]) for row in table.rows)) for at in used]
    lines = []
    for row in (table.columns, *table.rows):
        lines.append("  ".join(f"{row[at]:<{width}}" for at, width in zip(used, widths, strict=True)).rstrip())
    return "\n".join(lines) + "\n" + (f"{table.rest}\n" if table.rest else "")


def _print_rich(blocks: Sequence[Block], out: TextIO) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=out, highlight=False)
    for number, block in enumerate(blocks):
        if number:
            console.print()
        match block:
            case Headline(text=text, tone=tone):
                console.print(Text(text, style=_STYLES[tone]))
            case Facts(lines=lines):
                grid = RichTable.grid(padding=(0, 2))
                grid.add_column(style="bold", no_wrap=True)
                grid.add_column(overflow="fold")
                for label, text in lines:
                    grid.add_row(Text(label), Text(text))
                console.print(grid)
            case Items(title=title, items=items):
                console.print(Text(title, style="bold"))
                for item in items:
                    console.print(Padding(Text(item), (0, 0, 0, 2)))
            case Table(rest=rest):
                if _needs(block) <= console.width:
                    console.print(_drawn_table(block))
                else:
                    for name, rest_of_row in _stacked(block):
                        console.print(Text(name))
                        console.print(Padding(Text(rest_of_row), (0, 0, 0, 2)))
                if rest:
                    console.print(Text(rest, style="dim"))


def _used(table: Table) -> list[int]:
    """Columns in which any row says something."""
    return [at for at in range(len(table.columns)) if any(row[at] for row in table.rows)]


def _needs(table: Table) -> int:
    """Least width at which a table is readable: columns that fold may be narrow, all others are whole."""
    widths = []
    for at in _used(table):
        longest = max(len(table.columns[at]), *(len(row[at]) for row in table.rows))
        widths.append(min(longest, _FOLDED) if table.columns[at] in _FOLDING else longest)
    return sum(widths) + 2 * len(widths)


def _drawn_table(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    used = _used(table)
    for at in used:
        folds = table.columns[at] in _FOLDING
        drawn.add_column(Text(table.columns[at]), overflow="fold", no_wrap=not folds, min_width=_FOLDED if folds else None)
    for number, row in enumerate(table.rows):
        drawn.add_row(*(Text(row[at]) for at in used), style="bold" if number in table.marked else None)
    return drawn


def _stacked(table: Table) -> list[tuple[str, str]]:
    """A table as a name and a short paragraph per row, for a terminal too narrow for columns."""
    name = next(at for at, column in enumerate(table.columns) if column)
    lines = []
    for row in table.rows:
        said = ", ".join(f"{table.columns[at]} {row[at]}" for at in range(name + 1, len(row)) if row[at])
        lines.append((f"{row[name]}" + (f" ({row[0]})" if name and row[0] else ""), said))
    return lines
