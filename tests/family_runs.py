"""One traced and watched forward per family of tiny models, shared by all tests of a session."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import tracer
from tests.tiny_models import class_name, make_ids, make_model
from tracer.read.logical import LogicalTrace
from tracer.record.boundaries import Plan, Source, resolve
from tracer.record.boundary_maps import map_for_root_class
from tracer.record.map_entries import BoundaryMap

__all__ = ["HOST", "Run", "plan_of", "run_of", "tiny"]

HOST = "transformers"


@cache
def tiny(family: str) -> Any:
    """One tiny model per family and session; tests must not change it."""
    return make_model(family)


@dataclass(frozen=True)
class Run:
    """One forward of a family, traced at level 2 and watched by hooks of our own."""

    leaves: tuple[tuple[Source, torch.Tensor], ...]
    """What every module hook of the plan saw, cloned, in the plan's order."""
    logits: torch.Tensor
    untraced: torch.Tensor
    trace: LogicalTrace
    folder: TemporaryDirectory[str]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Leaves by boundary; of parts, the last."""
        return {source.boundary: leaf for source, leaf in self.leaves}


@cache
def run_of(family: str) -> Run:
    """The run of a family's tiny model, once per session."""
    model, plan, folder = tiny(family), plan_of(family), TemporaryDirectory()
    seen: dict[int, torch.Tensor] = {}
    modules = dict(model.named_modules())

    def watch(number: int, source: Source) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for leaf in source.leaf.split("|"):
                root, *steps = re.findall(r"\w+", leaf)
                value: Any = {"input": args, "kwargs": kwargs, "output": output}[root]
                for step in steps:
                    if step.isdigit():
                        value = value[int(step)] if len(value) > int(step) else None
                    else:
                        value = value.get(step) if isinstance(value, dict) else getattr(value, step)
                if isinstance(value, torch.Tensor):
                    seen[number] = value.clone()
                    return

        return modules[source.module].register_forward_hook(hook, with_kwargs=True)

    hooked = [(n, source) for n, source in enumerate(plan.sources) if not source.tap and source.derived != "host"]
    with torch.no_grad():
        untraced = model(input_ids=make_ids(), use_cache=False).logits
        handles = [watch(n, source) for n, source in hooked]
        try:
            with tracer.trace(model, out=Path(folder.name) / "t", level=2, strict=True):
                logits = model(input_ids=make_ids(), use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
    assert set(seen) == {n for n, _ in hooked}, [source.boundary for n, source in hooked if n not in seen]
    leaves = tuple((source, seen[n]) for n, source in hooked)
    return Run(leaves, logits, untraced, tracer.open_trace(Path(folder.name) / "t"), folder)


def plan_of(family: str, level: int = 2) -> Plan:
    """The packaged map of the family's class, resolved against the tiny model."""
    return plan_for(map_for_root_class(class_name(family), HOST), tiny(family), level)


def plan_for(boundary_map: BoundaryMap, model: torch.nn.Module, level: int = 2) -> Plan:
    """A map resolved against a transformers model."""
    modules = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    return resolve(boundary_map, HOST, modules, level=level)
