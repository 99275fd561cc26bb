"""``tracer diff A B``: where two traces part first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracer.cli.progress import progress_bar

if TYPE_CHECKING:
    from tracer.format.dumps import DumpPlan

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
        typer.Option("--tolerance", metavar="relative=X", help="Largest relative distance that passes; also BOUNDARY=X, ulps=N."),
    ] = "",
    control: Annotated[
        tuple[str, str] | None,
        typer.Option("--control", metavar="A32 B32", help="The same pair in float32: an error survives there, rounding falls."),
    ] = None,
    plan: Annotated[
        str, typer.Option("--plan", metavar="FILE", help="Write what a second run of both sides should save (TRACER_PLAN=FILE).")
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
    from tracer.read.opening import opened

    limit = parse_tolerance(tolerance) if tolerance else None
    with progress_bar() as report:
        side_a, side_b = opened(a, "A", report), opened(b, "B", report)
        result = diff_traces(
            side_a,
            side_b,
            floor_a=floor_a or (),
            floor_b=floor_b or (),
            floor=floor or (),
            control=control,
            tolerance=limit,
            progress=report,
        )
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
    if plan:
        from tracer.read.dump_plans import make_dump_plan

        _write_plan(make_dump_plan(side_a, side_b, result), plan)
    raise typer.Exit(result.exit)


def _write_plan(plan: DumpPlan | str, file: str) -> None:
    """Write the plan and say what to do with it, or say why there is none. On standard error: the result may be on the other."""
    from tracer.format.dumps import write_plan

    if isinstance(plan, str):
        typer.echo(f"no plan written: {plan}", err=True)
        return
    write_plan(plan, Path(file))
    for weight in plan.weights:
        size = len(weight.rows)
        told = f"{weight.differing} differing and {size - weight.differing} equal" if weight.differing else f"{size}"
        typer.echo(f"plan: {told} rows of {weight.name}", err=True)
    if not plan.boundaries:
        return
    output, inputs = plan.boundaries[0], [rows.boundary for rows in plan.boundaries[1:]]
    rows = f"{output.differing} differing and {len(output.keys) - output.differing} equal rows of {output.boundary}"
    typer.echo(f"plan: {rows}, and its inputs {', '.join(inputs) or '(none can be shown)'}", err=True)
    typer.echo(f"run each side again with TRACER_PLAN={file} TRACER_OUT=NEW, then: tracer diff NEW_A NEW_B", err=True)
