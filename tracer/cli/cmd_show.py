"""``tracer show DIR``: what a trace holds."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["show"]


def show(
    trace: Annotated[str, typer.Argument(metavar="DIR", help="Trace folder, finished or not.")],
    everything: Annotated[bool, typer.Option("--all", help="Boundaries that were not recorded, and every condition.")] = False,
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")] = "",
) -> None:
    """What a trace holds: boundaries, counts, conditions. Works on unfinished traces.

    Exit code 0: complete. 2: not complete, or not readable.
    """
    from tracer.read.inventory import take_inventory

    result = take_inventory(trace)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_inventory

        print_view(view_inventory(result, everything=everything))
    raise typer.Exit(0 if result.complete else 2)
