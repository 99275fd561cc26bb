"""``tracer bisect``: a session that narrows a divergence down by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tracer.sessions.bisection import Bisection, Session

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="The session's folder.")]


@app.command()
def start(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder; it keeps every step.")],
    a: Annotated[str, typer.Option("--a", metavar="COMMAND", help="Shell command that traces side A once.")],
    b: Annotated[str, typer.Option("--b", metavar="COMMAND", help="Shell command that traces side B once.")],
    map: Annotated[str, typer.Option("--map", metavar="MAP", help="Name or file of the boundary map; by default the scripts' own.")] = "",
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="SECONDS", help="End a command that runs longer than this.", min=0.001)
    ] = None,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="relative=X", help="Largest relative distance that passes; also BOUNDARY=X.")
    ] = "",
    floor_a: Annotated[
        list[str] | None, typer.Option("--floor-a", metavar="DIR", help="Another trace of side A, level 2: its own noise. Repeatable.")
    ] = None,
    floor_b: Annotated[list[str] | None, typer.Option("--floor-b", metavar="DIR", help="Another trace of side B. Repeatable.")] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Look into all blocks in the fine step, not only the one found.")] = False,
) -> None:
    """Begin a session. Nothing runs yet.

    Each command must do the same every time and hold one trace(...): its folder, level and boundaries are set from outside
    (TRACER_OUT, TRACER_LEVEL, TRACER_BOUNDARIES, TRACER_PLAN).
    """
    from tracer.sessions.bisection import Bisection, Session

    for command in (a, b):
        if not command.strip():
            raise typer.BadParameter("a command is empty")
    floors = [tuple(os.path.abspath(path) for path in given or ()) for given in (floor_a, floor_b)]
    session = Session(
        map=map, command_a=a, command_b=b, cwd=os.getcwd(), budget_seconds=budget, thorough=thorough, tolerance=tolerance,
        floor_a=floors[0], floor_b=floors[1],
    )  # fmt: skip
    Bisection.start(Path(folder), session)
    typer.echo(f"session in {folder}: up to three steps, each runs both commands once")
    typer.echo(f"next  tracer bisect run {folder}")


@app.command()
def run(folder: Folder) -> None:
    """Step until the answer is there or a step fails.

    Exit code 0: the sides are the same. 1: different, and where. 2: a step failed; the session can be resumed.
    """
    _go_on(folder, every=True)


@app.command(name="next")
def next_step(folder: Folder) -> None:
    """Carry out one step. Resumes a step that was interrupted or failed."""
    _go_on(folder, every=False)


def _go_on(folder: str, *, every: bool) -> None:
    from tracer.sessions.bisection import SessionStatus

    bisection = _opened(folder)
    session = (bisection.run if every else bisection.next)(lambda text: typer.echo(text, err=True))
    _print(bisection)
    if session.status is SessionStatus.OPEN:
        raise typer.Exit(0)
    raise typer.Exit(session.exit)


@app.command()
def status(folder: Folder) -> None:
    """Where the session stands: the steps, what each found, and what comes next. Changes nothing."""
    bisection = _opened(folder)
    _print(bisection)
    raise typer.Exit(_exit(bisection.session))


@app.command()
def log(folder: Folder) -> None:
    """Every run of every step with its command, status, time and evidence. Changes nothing."""
    from tracer.reports.session_view import view_archive
    from tracer.reports.terminal import print_view

    print_view(view_archive(_opened(folder).archive))


@app.command()
def skip(folder: Folder, boundary: Annotated[str, typer.Argument(metavar="BOUNDARY", help="What to leave out of the search.")]) -> None:
    """Leave a boundary out: what was concluded so far is marked, and the session goes on without it."""
    bisection = _opened(folder)
    bisection.skip(boundary)
    typer.echo(f"{boundary} is left out; next  tracer bisect run {folder}")


@app.command()
def reset(
    folder: Folder,
    a: Annotated[str, typer.Option("--a", metavar="COMMAND", help="Another command for side A, for one with a mistake in it.")] = "",
    b: Annotated[str, typer.Option("--b", metavar="COMMAND", help="Another command for side B.")] = "",
) -> None:
    """Start the search anew, with other commands where they are given. Earlier steps stay in the folder, marked."""
    _opened(folder).reset(a.strip(), b.strip())
    typer.echo(f"the search starts anew; next  tracer bisect run {folder}")


@app.command()
def report(
    folder: Folder,
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="The last comparison as JSON; - for standard output.")] = "",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write a page: the last comparison and every step.")] = "",
) -> None:
    """What the session found: the last comparison whose conclusion holds.

    Exit code: that of the session, 2 while there is no answer.
    """
    bisection = _opened(folder)
    result = bisection.result()
    if result is None:
        typer.echo("no step has finished yet", err=True)
        raise typer.Exit(2)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if html:
        from tracer.reports.page import write_page
        from tracer.reports.session_view import session_page

        write_page(session_page(bisection.session, bisection.archive, result), html)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_diff

        print_view(view_diff(result))
    raise typer.Exit(_exit(bisection.session))


def _opened(folder: str) -> Bisection:
    from tracer.sessions.bisection import Bisection

    return Bisection(Path(folder))


def _exit(session: Session) -> int:
    from tracer.sessions.bisection import SessionStatus

    return session.exit if session.status is SessionStatus.DONE else 2


def _print(bisection: Bisection) -> None:
    from tracer.reports.session_view import view_session
    from tracer.reports.terminal import print_view

    print_view(view_session(bisection.session, str(bisection.folder)))
