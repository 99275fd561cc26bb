"""``tracer diff A B``: where two traces part first."""

from __future__ import annotations

from typing import Annotated

import typer

from tracer.cli.progress import progress_bar

__all__ = ["diff"]


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Trace folder of one side (trainer).")],
    b: Annotated[str, typer.Argument(metavar="B", help="Trace folder of the other side (rollout engine).")],
    floor_a: Annotated[
        list[str] | None, typer.Option("--floor-a", metavar="DIR", help="Another trace of side A: its own noise. Repeatable.")
    ] = None,
    floor_b: Annotated[list[str] | None, typer.Option("--floor-b", metavar="DIR", help="Another trace of side B. Repeatable.")] = None,
    floor: Annotated[
        list[str] | None,
        typer.Option("--floor", metavar="DIR|self", help="For the side with that host, mesh and weights; self: siblings and repeats."),
    ] = None,
    tolerance: Annotated[
        str,
        typer.Option("--tolerance", metavar="relative=X", help="Largest relative distance that passes; also BOUNDARY=X, comma separated."),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every boundary, finding and condition.")] = False,
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")] = "",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write a page to look at and to send on.")] = "",
) -> None:
    """Compare two traces: where do they part first, and in what way?

    Exit code 0: same (identical, or within what was given). 1: different. 2: could not tell.
    """
    from tracer.read.diff import diff_traces
    from tracer.read.floor import parse_tolerance

    limit = parse_tolerance(tolerance) if tolerance else None
    with progress_bar() as report:
        result = diff_traces(a, b, floor_a=floor_a or (), floor_b=floor_b or (), floor=floor or (), tolerance=limit, progress=report)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if html:
        from tracer.reports.page import diff_page, write_page

        write_page(diff_page(result), html)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_diff

        print_view(view_diff(result, everything=everything))
    raise typer.Exit(result.exit)
