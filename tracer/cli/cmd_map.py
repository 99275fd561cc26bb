"""``tracer map list | show NAME | check NAME --config FILE | suggest --config FILE``: boundary maps, before any run."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from tracer.errors import Code, HostError, MapError, UsageError
from tracer.format.schema import BoundaryStatus
from tracer.hosts import HOST_NAMES
from tracer.record.boundaries import Plan, resolve
from tracer.record.boundary_maps import load_boundary_map, map_for_root_class, map_names, require_served
from tracer.record.map_entries import Binding, BoundaryMap

__all__ = ["app"]

app = typer.Typer(help="Boundary maps: list and show them, check one against a model's config, suggest one.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="Name of a map, or path to a YAML file.")]
_Host = Annotated[str, typer.Option("--host", help="Framework; by default the first one the map has bindings for.")]


@app.command("list")
def list_maps() -> None:
    """Every map that comes with the package, and the model classes it serves."""
    maps = [load_boundary_map(name) for name in map_names()]
    width = max(len(found.family) for found in maps)
    for found in maps:
        served = [f"{host}: {', '.join(section.classes)}" for host, section in found.hosts.items() if section.classes]
        typer.echo(f"{found.family:<{width}}  {found.about}")
        typer.echo(f"{'':<{width}}  {'; '.join(served) or 'a base, to be extended'}")


@app.command()
def show(name: _Name, host: _Host = "") -> None:
    """The boundaries of a map in causal order: level, name, what it is computed from, and where a host shows it."""
    found = load_boundary_map(name)
    section = found.hosts[_host_of(found, host)]
    typer.echo(f"{found.family}: {found.about}")
    typer.echo(f"file {found.file}, host {_host_of(found, host)}, classes {', '.join(section.classes) or 'none (a base)'}")
    for boundary, entry in found.boundaries.items():
        marks = [
            f"level {entry.level}",
            *([f"{entry.kind} layers"] if entry.kind else []),
            *(["mixes tokens"] if entry.mixes_tokens else []),
            *(["discrete"] if entry.discrete else []),
            *([f"rows: {entry.rows.value}"] if entry.rows.value != "all" else []),
        ]
        typer.echo(f"{boundary}  ({', '.join(marks)})")
        if entry.about:
            typer.echo(f"    {entry.about}")
        if entry.inputs:
            typer.echo(f"    from {', '.join(entry.inputs)}")
        typer.echo(f"    {_place(section.bindings[boundary])}")


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Name of a map, path to a YAML file, or auto to choose by the model's class.")],
    config: Annotated[Path, typer.Option("--config", help="The model's config.json, or a folder with one.")],
    host: _Host = "",
) -> None:
    """Resolve a map against a model built from its config, without weights. Exit 0 if every boundary resolved and the map
    serves the model's class, else 2."""
    wanted = host or (_building_host() if name == "auto" else "")
    found = None if name == "auto" else load_boundary_map(name)
    wanted = _host_of(found, wanted) if found else wanted
    modules = _modules(wanted, config)
    found = found or map_for_root_class(modules[""], wanted)
    plan = resolve(found, wanted, modules, level=2)
    typer.echo(f"map {found.family}, host {wanted}, model {modules['']}")
    foreign: MapError | None = None
    try:
        require_served(found, wanted, modules[""])
    except MapError as error:
        foreign = error
        typer.echo(error.text())
    _echo_reasons(plan)
    typer.echo(plan.summary)
    raise typer.Exit(2 if plan.unresolved or foreign else 0)


@app.command()
def suggest(
    config: Annotated[Path, typer.Option("--config", help="The model's config.json, or a folder with one.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; it must not exist. By default FAMILY.yaml.")] = None,
    family: Annotated[str, typer.Option("--family", help="Name of the map; by default the config's model type.")] = "",
) -> None:
    """Draft a map for an unknown decoder: build it small from its config, run one forward, and write what its numbers show."""
    host = _building_host()
    suggesting = importlib.import_module(f"tracer.hosts.{host}_suggest")
    draft = suggesting.suggest_map(suggesting.small_model(config), family)
    target = draft.save(out or Path(f"{draft.family}.yaml"))
    typer.echo(f"{len(draft.found)} boundaries found, each with its evidence in {target}")
    for text in draft.missing:
        typer.echo(f"not found: {text}")
    typer.echo(f"now check it: tracer map check {target} --config {config}")


def _building_host() -> str:
    """The first host that can build a model from a config."""
    return next(name for name in HOST_NAMES if importlib.util.find_spec(f"tracer.hosts.{name}_config"))


def _modules(host: str, config: Path) -> dict[str, str]:
    """Module names of the model a config describes, by the host's own means."""
    try:
        builder = importlib.import_module(f"tracer.hosts.{host}_config")
    except ModuleNotFoundError:
        raise HostError(
            Code.HOST_UNKNOWN,
            f"host {host!r} cannot build a model from a config",
            expected=", ".join(HOST_NAMES),
            found=host,
            remedy="choose a host with --host",
        ) from None
    modules: dict[str, str] = builder.modules_from_config(config)
    return modules


def _host_of(found: BoundaryMap, host: str) -> str:
    """The host asked for, or the map's first."""
    if host and host not in found.hosts:
        raise UsageError(
            Code.BAD_ARGUMENT, f"map {found.family} has no bindings for host {host}", expected=", ".join(found.hosts), found=host
        )
    return host or next(iter(found.hosts))


def _place(binding: Binding) -> str:
    """Where a host shows a boundary, in one line."""
    if binding.not_observable:
        return f"not observable: {binding.not_observable}"
    if binding.derived:
        return "given by the host" if binding.derived == "host" else f"derived: {binding.derived}"
    parts = [f"{part.module or 'root'} {part.leaf}" for part in binding.parts] or [f"{binding.module or 'root'} {binding.leaf}"]
    tap = f" ({binding.tap} tap)" if binding.tap else ""
    shards = "".join(f", {mesh} cuts {axis}" for mesh, axis in binding.shard.items())
    return f"at {' + '.join(parts)}{tap}, layout {binding.layout}{shards}"


def _echo_reasons(plan: Plan) -> None:
    """Every boundary that did not resolve, then what the host cannot show, once per reason."""
    for name, reason in plan.unresolved:
        typer.echo(f"unresolved: {name}: {reason}")
    hidden: dict[str, list[str]] = {}
    for boundary in plan.boundaries:
        if boundary.status in (BoundaryStatus.NOT_OBSERVABLE, BoundaryStatus.ELSEWHERE):
            hidden.setdefault(f"{boundary.status.value}: {boundary.reason}", []).append(boundary.name)
    for reason, names in hidden.items():
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        typer.echo(f"{names[0]}{more}: {reason}")
