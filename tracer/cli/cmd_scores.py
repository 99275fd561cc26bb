"""``tracer scores compare | import | update``: log probabilities of saved tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracer.errors import Code, ScoreError, UsageError

if TYPE_CHECKING:
    from tracer.format.score_records import ScoreDefinition, ScoreInfo

__all__ = ["app"]

app = typer.Typer(help="Compare log probabilities of saved tokens: which half of the system to open first?", no_args_is_help=True)

_Records = Annotated[list[str], typer.Argument(metavar="RECORDS...", help="Score files, or folders of them; joined by request.")]
_Json = Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")]
_Html = Annotated[str, typer.Option("--html", metavar="FILE", help="Write a page to look at and to send on.")]
_PassMark = Annotated[float, typer.Option("--pass-mark", metavar="NATS", help="logprob_mae up to which a pair agrees.")]
_TailMark = Annotated[float, typer.Option("--tail-mark", metavar="NATS", help="A single token further apart than this is far off.")]


@app.command()
def compare(
    records: _Records,
    pass_mark: _PassMark = 0.01,
    tail_mark: _TailMark = 1.0,
    policy: Annotated[str, typer.Option("--policy", metavar="VERSION", help="Only tokens that this version of the weights sampled.")] = "",
    log: Annotated[
        list[str] | None, typer.Option("--log", metavar="FIELD=VALUE", help="Print [mismatch] log lines with this field (run=, step= ...).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every position, request and refit.")] = False,
    json: _Json = "",
    html: _Html = "",
) -> None:
    """Compare A (generated), B (replayed) and C (trainer): which half of the system to open first?

    Exit code 0: they agree. 1: they differ, and the branch says where to look. 2: could not tell, or refused.
    """
    from tracer.scores.score_comparison import compare_scores

    fields = None if log is None else dict(_pair(text) for text in log)
    try:
        result = compare_scores(*records, pass_mark=pass_mark, tail_mark=tail_mark, policy=policy, log=fields)
    except ScoreError as error:
        if html:
            from tracer.reports.page import write_page
            from tracer.reports.score_page import refusal_page

            write_page(refusal_page(error), html)
        raise
    if html:
        from tracer.reports.page import write_page
        from tracer.reports.score_page import score_page

        write_page(score_page(result), html)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.score_view import view_scores
        from tracer.reports.terminal import print_view

        print_view(view_scores(result, everything=everything))
    raise typer.Exit(result.exit)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(Code.BAD_ARGUMENT, "--log takes fields of the log line", expected="FIELD=VALUE, such as run=nightly", found=text)
    return name, value


@app.command("import")
def import_records(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="Batch saved with torch.save, or JSON (one object, or a list, or a line each).")
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Score file to write.")],
    layout: Annotated[
        str, typer.Option("--from", metavar="LAYOUT", help="verl, slime, trl, areal, pairs, or json (answers of an engine's server).")
    ],
    score: Annotated[str, typer.Option("--as", metavar="NAME", help="For pairs and json: which score it is, A, B0, B1, C0 or C1.")] = "",
    base: Annotated[
        str, typer.Option("--base", metavar="RECORDS", help="Records of the same requests, which say what tokens were scored.")
    ] = "",
    definition: Annotated[
        list[str] | None,
        typer.Option("--definition", metavar="NAME=KIND", help="raw, temperature:T or processed:key=value,..., for score NAME."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME=VERSION", help="Version of the weights of score NAME.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option("--model", metavar="NAME=DIGEST", help="Digest of the weights of score NAME.")] = None,
) -> None:
    """Make score records of a trainer's batch or an engine's answers. What is not said stays unknown.

    Exit code 0: written. 2: a field is missing, or does not fit.
    """
    from tracer.format.score_file import read_scores, write_scores
    from tracer.scores.importers import IMPORTERS, import_engine_json, import_pairs

    infos = _infos(definition or [], policy or [], model or [])
    known = read_scores(base) if base else []
    if layout not in {*IMPORTERS, "pairs", "json"}:
        raise UsageError(Code.BAD_ARGUMENT, "--from names a layout", expected=", ".join([*IMPORTERS, "pairs", "json"]), found=layout)
    if layout in ("pairs", "json") and score not in ("A", "B0", "B1", "C0", "C1"):
        raise UsageError(Code.BAD_ARGUMENT, f"--from {layout} needs --as", expected="A, B0, B1, C0 or C1", found=score or "nothing")
    batch = _load(source)
    if layout == "json":
        records = import_engine_json(batch if isinstance(batch, list) else [batch], score, infos, base=known)
    elif not isinstance(batch, Mapping):
        raise ScoreError(Code.SCORES_IMPORT, "the batch is no mapping", where=source, expected="fields by name", found=type(batch).__name__)
    else:
        records = import_pairs(batch, score, known, infos) if layout == "pairs" else IMPORTERS[layout](batch, infos)
    typer.echo(f"{write_scores(out, records)}: {len(records)} requests, {sum(len(record.response) for record in records)} response tokens")


def _load(source: str) -> Any:
    """JSON by its first character, else a file of torch."""
    try:
        raw = Path(source).read_bytes()
    except OSError as error:
        raise UsageError(Code.BAD_ARGUMENT, "the file cannot be read", where=source, found=error.strerror or str(error)) from error
    if raw.lstrip()[:1] not in (b"{", b"["):
        from tracer.hosts.torch_files import load_torch_file

        return load_torch_file(source)
    try:
        return json.loads(raw)
    except ValueError:
        try:
            return [json.loads(line) for line in raw.splitlines() if line.strip()]
        except ValueError as error:
            raise ScoreError(Code.SCORES_IMPORT, "the file is no JSON", where=source, found=str(error)) from error


def _infos(definitions: list[str], policies: list[str], models: list[str]) -> dict[str, ScoreInfo]:
    from tracer.format.score_records import PolicySegment, ScoreInfo, ScoreName

    given: dict[str, dict[str, Any]] = {}
    for what, texts in (("definition", definitions), ("policy", policies), ("model", models)):
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or name not in ScoreName.__members__:
                raise UsageError(
                    Code.BAD_ARGUMENT, f"--{what} is for one score", expected="NAME=..., NAME one of A, B0, B1, C0, C1", found=text
                )
            fields = given.setdefault(name, {})
            if what == "definition":
                fields["definition"] = _definition(value)
            elif what == "policy":
                fields["policies"] = (PolicySegment(start=0, version=value),)
            else:
                fields["model"] = value
    return {name: ScoreInfo(**fields) for name, fields in given.items()}


def _definition(text: str) -> ScoreDefinition:
    """``raw``, ``temperature:0.7``, ``processed:temperature=0.7,top_k=20``."""
    from tracer.format.score_records import ScoreDefinition, ScoreKind

    kind, _, more = text.partition(":")
    try:
        if kind == "temperature":
            return ScoreDefinition(kind=ScoreKind.TEMPERATURE, temperature=float(more))
        settings: dict[str, float | int | str | bool] = {
            name: float(value) for name, value in (part.split("=") for part in more.split(",") if part)
        }
        temperature = float(settings.pop("temperature", 1.0))
        return ScoreDefinition(kind=ScoreKind(kind), temperature=temperature, settings=settings)
    except ValueError as error:
        expected = "raw, temperature:0.7, processed:top_k=20,temperature=0.7, unknown"
        raise UsageError(Code.BAD_ARGUMENT, "--definition says what was done to the logits", expected=expected, found=text) from error


_Weights = Annotated[str, typer.Option(metavar="TRACE", help="A trace of that side at that time, for its weight fingerprints.")]


@app.command()
def update(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="Scores of the saved tokens before the update: B0 and C0, twice if you can.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same tokens after it.")],
    b_before: _Weights = "",
    b_after: _Weights = "",
    c_before: _Weights = "",
    c_after: _Weights = "",
    pass_mark: _PassMark = 0.01,
    json: _Json = "",
    html: _Html = "",
) -> None:
    """Did a weight update arrive? Skipped and partial updates are named; B is the rollout engine, C the trainer.

    Exit code 0: it arrived. 1: it was skipped, partial or wrong. 2: could not tell.
    """
    from tracer.scores.update_check import UpdateWeights, check_update

    weights = UpdateWeights(*(_fingerprints(path) for path in (b_before, b_after, c_before, c_after)))
    result = check_update(before, after, weights=weights, pass_mark=pass_mark)
    if html:
        from tracer.reports.page import write_page
        from tracer.reports.score_page import update_page

        write_page(update_page(result), html)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.score_view import view_update
        from tracer.reports.terminal import print_view

        print_view(view_update(result))
    raise typer.Exit(result.exit)


def _fingerprints(trace: str) -> dict[str, str] | None:
    """Weight name -> digest of a trace; what is unknown there is left out."""
    if not trace:
        return None
    from tracer.read.stitch import open_trace

    return {name: "".join(weight.digest) for name, weight in open_trace(trace).weights.items() if not weight.unknown and weight.digest[0]}
