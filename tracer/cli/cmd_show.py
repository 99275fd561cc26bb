"""``tracer show DIR``: what a trace holds."""

from __future__ import annotations

from typing import Annotated

import typer

from tracer.cli.progress import progress_bar

__all__ = ["show"]


def show(
    trace: Annotated[str, typer.Argument(metavar="DIR", help="Trace folder, finished or not.")],
    everything: Annotated[bool, typer.Option("--all", help="Boundaries that were not recorded, and every condition.")] = False,
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")] = "",
) -> None:
    """What a trace holds: boundaries, counts, conditions. Works on unfinished traces.

    Every checksum is verified on the way. Exit code 0: complete and unaltered. 2: not complete, altered, or not readable.
    """
    from tracer.read.inventory import take_inventory

    with progress_bar() as report:
        result = take_inventory(trace, progress=None if report is None else lambda done, total: report("hashing", done, total))
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_inventory

        print_view(view_inventory(result, everything=everything))
    raise typer.Exit(0 if result.complete else 2)
