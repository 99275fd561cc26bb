"""One fault of the catalogue, taken through what a user would do: trace, diff, plan, trace again, control in float32.

Everything that is asked of the tool about a fault is asked of one run of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import tracer
from tests.planters.core import Fault
from tests.planters.faults import FAULTS
from tests.planters.inputs import Inputs
from tracer.format.dumps import DumpPlan, write_plan
from tracer.read.dump_plans import make_dump_plan
from tracer.read.findings import BoundaryResult, Class, DiffResult

__all__ = ["EXPLAINED", "FIRST_ALSO", "TOKENS", "TRACED", "FaultRun", "matches", "run_fault"]

TRACED = [fault for fault in FAULTS.values() if fault.kind == "trace"]

FIRST_ALSO = {
    "F04": ("input.visible_from",),  # this host shows it
    "F21": ("layers.1.attn.kv_latent_norm",),
    "F33": ("layers.0.linear_attn.*",),
}
TOKENS = {
    "F01": "all of f0.r1.d0",  # the padded sequence
    "F04": "all of f0.r0.d1",  # document 2 of a packed row is a sequence of its own
    "F05b": "all of f0.r0.d1",
    "F53": "all but 0",  # a single key leaves attention nothing to sum
}
DECLARED: dict[str, dict[str, Any]] = {
    "F48": {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
    "F49": {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
    "F50": {"kv_cache_dtype": "fp8_e4m3"},
}
"""What side B's config says of itself, where the catalogue lets the class depend on it."""

EXPLAINED = {
    "F01": r"B is A \+5 in all 43 rows",
    "F02": r"B is A \+5 in all 43 rows",
    "F03": r"B is A \+5 in all 6 rows",
    "F04": r"B is A -48 in all 48 rows",
    "F05": r"one side's document starts here, the other's runs on",
    "F05b": r"document 2 .* of a packed row",
    "F06": r"lengths 48 and 47, equal again after a shift of 1",
    "F07": r"A has id 101, B has id 17",
    "F08": r"B has active dropout.*0\.1",
    "F09": r"37 of 49 weights differ|trainable tensors differ",
    "F10": r"rope\.inv_freq: B is all zero",
    "F11": r"low rank: the difference has rank 16|columns 128\.\.255 of 256 differ",
    "F12": r"low rank: the difference has rank 8",
    "F48": r"B lies on the e4m3 grid times one scale per tensor \(dumps",
    "F49": r"both sides lie on the e4m3 grid times one scale; \d\.\d% of the codes differ in these rows, by at most 1 step",
    "F13": r"head of B is not its embedding although its config ties them",
    "F14": r"B is all zero",
    "F15": r"one constant vector",
    "F16": r"B is A plus 1 in every element",
    "F17": r"B is A rounded to bfloat16",
    "F18": r"rows permuted: B holds rows of its neighbours",
    "F19": r"experts permuted: B holds A's experts \[3, 0, 5, 1, 7, 2, 4, 6\]",
    "F20": r"one ratio per row: 0\.99\d* to 1\.00",
    "F21": r"one ratio per row.*always below 1",
    "F22": r"one-sided: no element of B is larger in magnitude, mean ratio 0\.998",
    "F23": r"grows with position",
    "F24": r"constant ratio: B is A times 1\.41",
    "F25": r"rotate pairs \(i, i\+8\) of every 16 columns; the angle of A is the angle of B / 8, at every pair",
    "F26": r"A rotates pairs \(i, i\+8\) of every 16 columns, B pairs \(2i, 2i\+1\)",
    "F27": r"order the norm and the rotation differently: A norms layers\.1\.attn\.q, B norms it after rotating",
    "F28": r"an equivalent order of operations",
    "F29": r"from position 8 on, which is the sliding_window",
    "F30": r"attn_logit_softcapping of model\.layers\.0\.self_attn: A 50\.0, B none",
    "F31": r"scaling of model\.layers\.2\.self_attn: A 0\.25, B 0\.2625",
    "F32": r"scaling of model\.layers\.0\.self_attn",
    "F33": r"from position 16 on, where B begins another forward",
    "F34": r"one ratio per row.*rows of A sum to 1, those of the other side to 0\.33 to 0\.78",
    "F35": r"constant ratio: B is A times 2\.5\b",
    "F36": r"a tie \(score gap 0 ulps\): both choices are valid",
    "F37": r"shared_expert: A adds it times one number per row, the sigmoid of layers\.1\.moe\.shared_gate, B times 1\b",
    "F38": r"constant ratio: B is A times 2\b",
    "F39": r"44 of 96.*distance of a token's two routing weights .* as exchanging them makes it in 44 rows",
    "F40": r"B's rows are A's of layer 0, bit for bit",
    "F41": r"A computes tanh GELU of gate times up, B exact GELU of gate times up",
    "F50": r"from position 24 on, where B begins another forward",
    "F51": r"what another order of float32 sums leaves",
    "F55": r"A is B rounded once to bfloat16",
    "F59": r"A is B rounded once to bfloat16",
    "F60": r"A is B rounded once to bfloat16",
    "F62": r"what another order of float32 sums leaves",
}
"""What the report on a fault must say, as a regular expression over its evidence."""


@dataclass
class FaultRun:
    """What the tool said of one fault. ``first``: after the first two traces; ``last``: with dumps and, where the dtype is coarse,
    the control pair."""

    fault: Fault
    first: DiffResult
    last: DiffResult
    planned: bool = False
    controlled: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def place_right(self) -> bool:
        """The first divergence is where the catalogue has it."""
        found = self.first.first
        return found is not None and matches(found.boundary, self.fault.first + FIRST_ALSO.get(self.fault.id, ()))

    @property
    def klass(self) -> Class | None:
        """The class at the end."""
        return None if self.last.classification is None else self.last.classification.klass

    @property
    def class_right(self) -> bool:
        """The class is one that the catalogue allows."""
        return self.klass is not None and self.klass.value in self.fault.klass

    @property
    def tokens_right(self) -> bool:
        """The rows that differ are those that the catalogue states. Changed inputs and weights alone have none."""
        found = self.entry
        if found is None or self.fault.effect == "input" or self.fault.id == "F05":
            return True
        expected = TOKENS.get(self.fault.id, self.fault.tokens)
        if expected == "all":
            return found.tokens == "all"
        if expected == "all but 0":
            return found.tokens == "all but position 0"
        if expected.startswith("from "):
            return found.tokens.startswith(f"from position {expected.removeprefix('from ')}")
        return 0 < found.rows_differing < found.rows_compared if expected == "some" else found.tokens == expected

    @property
    def entry(self) -> BoundaryResult | None:
        """The boundary of the first divergence; None of a weight."""
        name = self.first.first.boundary if self.first.first is not None else ""
        return next((found for found in self.first.boundaries if found.name == name), None)

    @property
    def said(self) -> str:
        """Everything that the report gives as evidence."""
        found = self.last.classification
        return "\n".join([self.last.headline, *(found.evidence if found is not None else ())])

    @property
    def explained(self) -> bool | None:
        """The report explains the fault; None where the catalogue lists no explanation."""
        pattern = EXPLAINED.get(self.fault.id)
        return None if pattern is None else re.search(pattern, self.said, re.DOTALL) is not None


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name fits any of some globs."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def run_fault(fault: Fault, folder: Path) -> FaultRun:
    """Trace both sides at level 2 and compare them; if values differ, trace both again with the plan; if the class still
    hangs on the precision, trace both in float32 as well."""
    sides = fault.build()
    for name, value in DECLARED.get(fault.id, {}).items():
        setattr(sides[1].config, name, value)
    _trace(sides, folder, ("a", "b"), weights="rows")
    a, b = tracer.open_trace(folder / "a"), tracer.open_trace(folder / "b")
    first = tracer.diff_traces(a, b)
    run = FaultRun(fault, first, first)
    if first.exit != 1 or first.first is None or fault.effect == "input":
        return run
    plan = make_dump_plan(a, b, first)
    paths = folder / "a", folder / "b"
    if isinstance(plan, DumpPlan):
        write_plan(plan, folder / "plan.json")
        _trace(sides, folder, ("a-again", "b-again"), weights="rows", plan=folder / "plan.json")
        run.planned, paths = True, (folder / "a-again", folder / "b-again")
    control = None
    if (
        fault.dtype is not torch.float32 and isinstance(plan, DumpPlan) and plan.boundaries
        and first.first.boundary == plan.boundaries[0].boundary
    ):  # fmt: skip
        near = [found.boundary for found in plan.boundaries]
        near += [info.name for info in a.catalogue if plan.boundaries[0].boundary in info.inputs]
        _trace(fault.build(torch.float32), folder, ("a32", "b32"), weights=False, boundaries=near)
        run.controlled, control = True, (folder / "a32", folder / "b32")
    if run.planned:
        run.last = tracer.diff_traces(*paths, control=control)
    return run


def _trace(sides: tuple[Any, Any, Inputs, Inputs], folder: Path, names: tuple[str, str], **options: Any) -> None:
    model_a, model_b, inputs_a, inputs_b = sides
    for name, model, inputs in ((names[0], model_a, inputs_a), (names[1], model_b, inputs_b)):
        with tracer.trace(model, out=folder / name, **{"level": 2, **options}):
            inputs.run(model)
