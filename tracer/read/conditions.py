"""What differs between the run conditions of two sides, and which of it says something about a divergence.

Conditions are leads, never proof: a difference here changes no verdict by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracer.read.findings import Class
from tracer.read.logical import LogicalTrace

__all__ = ["Lead", "differing_conditions", "flat_conditions", "leads"]

VOLATILE = frozenset(
    {
        "argv", "command", "created", "cwd", "date", "elapsed", "finished", "hostname", "out", "path", "pid", "run_id", "started", "time",
        "timings", "timestamp", "user", "working_directory",
    }
)  # fmt: skip
"""Names, at any depth, of what is another in every run and says nothing about what was computed."""


_BY_INDEX = "by_index"
"""Key under which a host lists values that are not the same in every layer."""
_INDICES_SHOWN = 8


@dataclass(frozen=True)
class Lead:
    """A condition that differs and bears on the class of a root. ``name``: of the rule; ``klass``: the class it makes a root
    that no input, weight or choice explains, None where it only adds evidence."""

    name: str
    text: str
    klass: Class | None = None


@dataclass(frozen=True)
class _Rule:
    """Which conditions a lead is made of: a component of the dotted name, and what the values of one side must be."""

    name: str
    components: tuple[str, ...]
    speaks: Callable[[Any], bool]
    say: str
    klass: Class | None = None


_RULES = (
    _Rule("dropout", ("dropout",), lambda value: value not in (None, 0, 0.0, "unknown", ""), "has active dropout", Class.INPUT),
    _Rule("training mode", ("mode",), lambda value: isinstance(value, str) and value not in ("eval", "unknown"), "is not in eval mode"),
    _Rule(
        "quantization",
        ("quantization", "quantization_config", "kv_cache_dtype"),
        lambda value: value not in (None, "", "none", "unknown", "auto"),
        "declares quantization",
    ),
)


def differing_conditions(a: LogicalTrace, b: LogicalTrace) -> dict[str, dict[str, Any]]:
    """Dotted name -> ``{"a": value, "b": value}``, for conditions that are not equal; ``unknown`` equals nothing but itself."""
    flat_a, flat_b = _flat(a), _flat(b)

    def telling(name: str) -> tuple[bool, bool, bool, str]:
        """Orders names: installed packages last, before them what one side alone has, the model and its mode first."""
        top = name.partition(".")[0]
        return top == "packages", name not in flat_a or name not in flat_b, top != "model", name

    return {
        name: {"a": flat_a.get(name), "b": flat_b.get(name)}
        for name in sorted(flat_a.keys() | flat_b.keys(), key=telling)
        if flat_a.get(name) != flat_b.get(name) and VOLATILE.isdisjoint(name.lower().split("."))
    }


def leads(conditions: Mapping[str, Mapping[str, Any]]) -> list[Lead]:
    """What the differing conditions suggest, in the order of the rules."""
    found = []
    for rule in _RULES:
        for side, other in (("a", "b"), ("b", "a")):
            names = [
                name for name, values in conditions.items()
                if not set(rule.components).isdisjoint(name.split(".")) and rule.speaks(values[side]) and not rule.speaks(values[other])
            ]  # fmt: skip
            if names:
                shown = ", ".join(f"{name} = {conditions[name][side]}" for name in names[:3]) + (", ..." if len(names) > 3 else "")
                found.append(Lead(rule.name, f"{side.upper()} {rule.say} ({shown}), {other.upper()} not", rule.klass))
    return found


def _flat(trace: LogicalTrace) -> dict[str, Any]:
    """Conditions of all processes, nested names joined by dots, empty ones left out. Where processes differ, a text says so."""
    flat = [dict(flat_conditions(manifest.conditions)) for manifest in trace.manifests]
    joined = dict(flat[0])
    for name in {name for one in flat[1:] for name in one.keys() | joined.keys()}:
        values = [one.get(name) for one in flat]
        if any(value != values[0] for value in values):
            joined[name] = "differs between processes: " + ", ".join(dict.fromkeys(map(str, values)))
    return joined


def flat_conditions(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested conditions as (dotted name, value), without what is None. Values by layer index are one text: ``2 at 0..2, 4 at 3``."""
    if isinstance(value, Mapping) and value.keys() == {_BY_INDEX} and isinstance(value[_BY_INDEX], Mapping):
        yield prefix, ", ".join(f"{item} at {_index_text(str(indices).split())}" for item, indices in value[_BY_INDEX].items())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat_conditions(item, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value


def _index_text(indices: Sequence[str]) -> str:
    """``0..2 5``: runs of numbers, a few of anything else."""
    if not all(index.isdigit() for index in indices):
        return " ".join(indices[:_INDICES_SHOWN]) + (f" and {len(indices) - _INDICES_SHOWN} more" if len(indices) > _INDICES_SHOWN else "")
    runs: list[list[int]] = []
    for index in sorted(map(int, indices)):
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return " ".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
