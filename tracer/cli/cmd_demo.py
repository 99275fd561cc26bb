"""``tracer demo``: two copies of a tiny model, a fault in the second, and the search for it."""

from __future__ import annotations

from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracer.errors import Code, UsageError

if TYPE_CHECKING:
    from tracer.hosts.demo_model import DemoFault
    from tracer.read.findings import DiffResult

__all__ = ["demo"]

_REQUESTS = ("long", "short")


def demo(
    fault: Annotated[
        str, typer.Option("--fault", metavar="NAME", help="What to plant in side B: a name, none, or list.")
    ] = "attention-scale",
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the two traces; default traces/demo-FAULT-UTC.")] = "",
    level: Annotated[int, typer.Option("--level", help="0 coarse, 1, 2 everything.")] = 2,
) -> None:
    """Trace a tiny model twice, the second time with a fault, and find the fault.

    Both traces stay, to try the other commands on. Exit code 0: the diff found what was planted (with --fault none: nothing).
    2: it did not.
    """
    from tracer.hosts.demo_model import FAULTS, build_pair, find_fault

    if fault == "list":
        for planted in FAULTS.values():
            typer.echo(f"{planted.name:<16}  {planted.what}")
        return
    chosen = find_fault(fault)
    if level not in (0, 1, 2):
        raise UsageError(Code.BAD_ARGUMENT, "--level is not known", expected="0, 1 or 2", found=str(level))
    folder = Path(out) if out else Path("traces") / f"demo-{fault}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}"

    typer.echo("Two copies of a random Qwen3-MoE (bfloat16, 4 layers, 8 experts) read the same two prompts.")
    typer.echo(f"Planted in B: {chosen.what}.\n")
    pair = build_pair(chosen)
    _record(pair.a, pair.inputs_a, folder / "a", level)
    _record(pair.b, pair.inputs_b, folder / "b", level)
    result = _compare(folder)

    found = _finds(result, chosen, level)
    typer.echo(f"\ntracer diff ends with {result.exit} here ({result.verdict.value}). {_judgement(chosen, level, found)}")
    typer.echo("Both traces are yours to play with:")
    for command in (f"diff {folder}/a {folder}/b --all", f"show {folder}/a", f"weights {folder}/a {folder}/b", "demo --fault list"):
        typer.echo(f"  tracer {command}")
    raise typer.Exit(0 if found else 2)


def _record(model: Any, inputs: dict[str, Any], out: Path, level: int) -> None:
    """Trace one forward: what a user writes."""
    from tracer import trace

    with trace(model, out=out, level=level, strict=True) as recording:
        recording.requests(_REQUESTS)
        model(**inputs, use_cache=False)


def _compare(folder: Path) -> DiffResult:
    """The public diff of the two traces, printed as ``tracer diff`` prints it."""
    from tracer.read.diff import diff_traces
    from tracer.reports.terminal import print_view
    from tracer.reports.view import view_diff

    result = diff_traces(folder / "a", folder / "b")
    print_view(view_diff(result))
    return result


def _finds(result: DiffResult, fault: DemoFault, level: int) -> bool:
    """Whether the diff says what it must say of this fault."""
    expected = fault.expected_at(level)
    if not expected:
        return result.exit == 0
    return result.exit == 1 and result.first is not None and fnmatchcase(result.first.boundary, expected)


def _judgement(fault: DemoFault, level: int, found: bool) -> str:
    expected = fault.expected_at(level) or "nothing"
    if not found:
        return f"It should have found {expected}: that is a bug of tracer, please report it."
    if expected == "nothing":
        return "Nothing was planted, and nothing differs."
    return f"That is where level {level} can see what was planted."
