"""From what the user asked for to interventions on this model, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracer.errors import Code, UsageError
from tracer.format.reference import Reference
from tracer.format.schema import Axis, Boundary, BoundaryStatus
from tracer.record.boundaries import Plan, matches
from tracer.record.host import Host, KeepsState
from tracer.record.interventions import Feed, Intervention, Nudge, Pin, Running, refuse_split_sequences
from tracer.record.map_entries import ROW_AXES
from tracer.record.options import TraceOptions
from tracer.record.readers import SourceReader
from tracer.record.tokens import SequenceRegistry

__all__ = ["BLOCK_INPUTS", "needed_boundaries", "plan_interventions", "told_interventions"]

BLOCK_INPUTS = ("embedding", "layers.*.residual")
"""Globs of the boundaries that enter blocks: a block's output is the next one's input."""


def needed_boundaries(options: TraceOptions) -> tuple[str, ...]:
    """Globs of boundaries that the interventions must find, whatever the level."""
    return (
        *(("embedding",) if options.perturb_ulps else ()),
        *(BLOCK_INPUTS if options.feed is not None else ()),
        *(options.pin or {}),
    )


def plan_interventions(options: TraceOptions, host: Host, plan: Plan, running: Running, registry: SequenceRegistry) -> list[Intervention]:
    """Everything that is changed in this process. Raises UsageError (intervention-refused, bad-argument)."""
    found: list[Intervention] = []
    wanted = bool(options.perturb_ulps) or options.feed is not None or bool(options.pin)
    if wanted and isinstance(host, KeepsState) and (why := host.keeps_state()):
        raise _refused(
            "an intervention would meet what this program remembers of earlier runs, and stay in what later ones remember",
            expected="a program that computes every token of the run",
            found=why[0],
            remedy=why[1],
        )
    boundaries = {boundary.name: boundary for boundary in plan.boundaries if boundary.status is BoundaryStatus.RECORDED}
    if options.perturb_ulps and _must_be_shown("embedding", plan):
        found.append(Nudge(_reader("embedding", plan, host), host, running, registry, ulps=options.perturb_ulps))
    if options.feed is not None:
        refuse_split_sequences(host.mesh(), "feed=")
        for name in [entry.name for entry in plan.boundaries if any(matches(entry.name, glob) for glob in BLOCK_INPUTS)]:
            _must_be_shown(name, plan)
            _refuse_sharded(name, plan, host.mesh().axes)
            theirs = options.feed.load(name)
            if theirs is None or theirs.raw_RB is None or theirs.expert_R is not None:
                raise _refused(
                    f"feed= needs the values of every block's input, and {options.feed.name} has none of {name}",
                    expected="a trace recorded with dump=" + repr(list(BLOCK_INPUTS)),
                    found="no dumped rows",
                    remedy="record the other side with that dump=, and a max_dump_bytes= that holds it",
                )
            found.append(Feed(_reader(name, plan, host), host, running, registry, theirs, options.feed.name))
    for glob, reference in (options.pin or {}).items():
        refuse_split_sequences(host.mesh(), "pin=")
        names = [name for name in boundaries if matches(name, glob)]
        if not names:
            raise _refused(
                f"pin={glob!r} matches no boundary that is recorded here", expected="a choice such as *.moe.topk_ids", found=glob
            )
        found += [_pin(name, boundaries, reference, plan, host, running, registry) for name in names]
    return found


def _pin(
    name: str,
    boundaries: Mapping[str, Boundary],
    reference: Reference,
    plan: Plan,
    host: Host,
    running: Running,
    registry: SequenceRegistry,
) -> Pin:
    theirs, scores = reference.load(name), reference.load(boundaries[name].scores)
    if not boundaries[name].discrete or not boundaries[name].scores:
        raise _refused(f"{name} is no choice: only choices can be pinned", expected="a boundary that the map marks discrete, with scores")
    if theirs is None or theirs.raw_RB is None or scores is None:
        raise _refused(
            f"{name} cannot be pinned: {reference.name} has not recorded it with its scores",
            expected=f"rows of {name} and {boundaries[name].scores}",
            remedy="record the other side at level 1",
        )
    return Pin(_reader(name, plan, host), host, running, registry, theirs, reference.name, experts=scores.width)


def told_interventions(options: TraceOptions, interventions: Sequence[Intervention]) -> tuple[str, ...]:
    """What was done, for the manifest."""
    told = [f"perturb_ulps={options.perturb_ulps}"] if options.perturb_ulps else []
    feeds = [entry for entry in interventions if isinstance(entry, Feed)]
    if options.feed is not None:
        cast = sorted({entry.cast for entry in feeds} - {""})
        aside = [f"cast from {', '.join(cast)}"] if cast else []
        aside += _left_alone(feeds)
        told.append(f"feed={options.feed.name}" + (f" ({'; '.join(aside)})" if aside else ""))
    for glob, reference in (options.pin or {}).items():
        pins = [entry for entry in interventions if isinstance(entry, Pin) and matches(entry.boundary, glob)]
        aside = [f"{sum(pin.changed for pin in pins)} choices changed", *_left_alone(pins)]
        told.append(f"pin {glob}={reference.name} ({'; '.join(aside)})")
    return tuple(told)


def _left_alone(interventions: Sequence[Intervention]) -> list[str]:
    """Rows that keep their own values, as a remark."""
    rows = max((entry.left_rows for entry in interventions), default=0)
    return [f"{rows} rows that the other side never computed keep their own"] if rows else []


def _must_be_shown(name: str, plan: Plan) -> bool:
    """Whether this process has the boundary; another stage may. Raises UsageError (intervention-refused) where the host cannot show it."""
    found = next((boundary for boundary in plan.boundaries if boundary.name == name), None)
    if found is None or found.status not in (BoundaryStatus.RECORDED, BoundaryStatus.ELSEWHERE):
        why = "the map has no such boundary" if found is None else f"{found.status.value}: {found.reason}"
        raise _refused(f"{name} cannot be changed on this host", expected="a boundary that the host shows", found=why)
    return found.status is BoundaryStatus.RECORDED


def _reader(name: str, plan: Plan, host: Host) -> SourceReader:
    """The one place where this host shows the boundary."""
    sources = [source for source in plan.sources if source.boundary == name]
    if len(sources) != 1 or sources[0].derived or sources[0].after_root:
        raise _refused(
            f"{name} cannot be changed on this host", expected="one output or input of one module", found=f"{len(sources)} places"
        )
    return SourceReader(sources[0], host)


def _refuse_sharded(name: str, plan: Plan, axes: Sequence[Axis]) -> None:
    """In all processes alike, before any of them begins. Raises UsageError (intervention-refused)."""
    sizes = {axis.name: axis.size for axis in axes}
    for source in plan.sources:
        for mesh_axis, layout_axis in source.shard if source.boundary == name else ():
            if sizes.get(mesh_axis, 1) > 1 and layout_axis not in ROW_AXES:
                raise _refused(
                    f"{name} cannot be fed: its columns are sharded", expected="whole rows", found=f"{mesh_axis}={sizes[mesh_axis]}"
                )


def _refused(what: str, *, expected: str = "", found: str = "", remedy: str = "") -> UsageError:
    return UsageError(Code.INTERVENTION_REFUSED, what, expected=expected, found=found, remedy=remedy)
