"""Precision control: the same pair once more in float32, which tells semantics from rounding.

What is an error survives in float32, what is rounding of a coarser dtype falls to about 1e-7. Shape suffixes: R matched
rows, K tokens of side A.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.read.compare import Method, compare_boundary
from tracer.read.findings import Control, ControlOutcome, Kind
from tracer.read.logical import LogicalTrace
from tracer.read.outcomes import Judged
from tracer.read.pairing import pair_sides
from tracer.read.wording import count, short

__all__ = ["FALLEN", "check_control", "measure_control"]

Bools = npt.NDArray[np.bool_]

FALLEN = 2.0**-10
"""A difference that falls below this share of itself in float32 was rounding: bfloat16 rounds 2^16 times as coarsely."""
_SURVIVED = 2.0**-6
_FLOAT32_NOISE = 2.0**-17
"""Relative differences up to this are what other orders of float32 sums leave."""
_WIDE = ("float32", "float64")


def check_control(control: tuple[LogicalTrace, LogicalTrace], a: LogicalTrace, b: LogicalTrace) -> None:
    """Refuse a pair that can control nothing. Raises ``UsageError`` (bad-argument)."""
    for side, trace, role in ((a, control[0], "A32"), (b, control[1], "B32")):
        unreadable = [finding.text for finding in trace.findings if finding.kind is Kind.UNREADABLE]
        if unreadable:
            raise UsageError(Code.BAD_ARGUMENT, f"--control {role} cannot be read as a whole", where=trace.path, found=unreadable[0])
        if trace.manifest.host != side.manifest.host:
            raise UsageError(
                Code.BAD_ARGUMENT, f"--control {role} is no trace of that side's program", where=trace.path,
                expected=f"host {side.manifest.host}", found=f"host {trace.manifest.host}",
            )  # fmt: skip
        if not pair_sides(side, trace).matched:
            raise UsageError(
                Code.BAD_ARGUMENT, f"--control {role} shares no token with its side", where=trace.path,
                expected=f"the requests of {side.path}", found="0 tokens in common", remedy="record it with the same token ids",
            )  # fmt: skip
        dtypes = {boundary.dtype for name, boundary in trace.boundaries.items() if name in ("embedding", "final_norm", "lm_head")}
        if dtypes and dtypes.isdisjoint(_WIDE):
            raise UsageError(
                Code.BAD_ARGUMENT, f"--control {role} was not run in float32", where=trace.path, expected="float32 or float64",
                found=", ".join(sorted(dtypes)), remedy="load the same weights in float32 and trace again",
            )  # fmt: skip


def measure_control(
    control: tuple[LogicalTrace, LogicalTrace], a: LogicalTrace, judged: Judged, inputs: tuple[str, ...], among_K: Bools
) -> Control:
    """Hold the rows of a difference against the same rows in float32. ``inputs``: boundaries it is computed from, whose own
    difference in the control must be rounding. ``among_K``: tokens of A whose rows count."""
    name, (wide_a, wide_b) = judged.name, control
    unclear = ControlOutcome.UNCLEAR
    if name not in wide_a.boundaries or name not in wide_b.boundaries:
        return Control(boundary=name, outcome=unclear, text=f"the control pair did not record {name}")
    x, y = wide_a.boundaries[name], wide_b.boundaries[name]
    if judged.comparison.values is None and (x.dtype not in _WIDE or y.dtype not in _WIDE):
        return Control(boundary=name, outcome=unclear, text=f"the control pair has {x.dtype} and {y.dtype} here, not float32")
    across = pair_sides(a, wide_a).tokens.b_of_a
    between = pair_sides(wide_a, wide_b).tokens
    wanted = across[np.flatnonzero(among_K)]
    wanted = wanted[wanted >= 0]

    def furthest(boundary: str) -> tuple[float, int, int]:
        """Largest distance at these tokens, how many rows, how many of them differ."""
        comparison = compare_boundary(wide_a.boundaries[boundary], wide_b.boundaries[boundary], between)
        if comparison.method is Method.NONE:
            return float("nan"), 0, 0
        rows = int(np.isin(comparison.token_R, wanted).sum())
        pairs = comparison.differing[np.isin(comparison.token_R[comparison.differing], wanted)]
        distance = comparison.distances(pairs) if comparison.values is None else np.ones(len(pairs))
        comparison.release()
        return float(np.nanmax(distance, initial=0.0)), rows, len(pairs)

    largest, rows, differing = furthest(name)
    if not rows or np.isnan(largest):
        return Control(boundary=name, outcome=unclear, text="none of these rows is in the control pair")
    if judged.comparison.values is not None:
        outcome = ControlOutcome.SURVIVES if differing else ControlOutcome.FALLS
        text = f"in float32 {differing or 'none'} of {count(rows, 'row')} differ"
        text += "" if differing else ": rounding flipped these choices"
        return Control(boundary=name, outcome=outcome, rows=rows, text=text)
    own = judged.comparison.distances(judged.above[among_K[judged.comparison.token_R[judged.above]]])
    native = float(np.nanmax(own, initial=0.0))
    inherited = [(source, furthest(source)[0]) for source in inputs if source in wide_a.boundaries and source in wide_b.boundaries]
    apart = [(source, size) for source, size in inherited if size > max(_FLOAT32_NOISE, FALLEN * native)]
    sizes = f"{short(largest)} in float32, {short(native)} here"
    if apart:
        text = f"{sizes}, but in the control pair its input {apart[0][0]} differs by {short(apart[0][1])} already"
        outcome = unclear
    elif largest <= max(FALLEN * native, 2.0**-22):
        outcome, text = ControlOutcome.FALLS, f"falls to rounding in float32: {sizes}"
    elif largest >= _SURVIVED * native and largest > _FLOAT32_NOISE:
        outcome, text = ControlOutcome.SURVIVES, f"survives in float32: {sizes}"
    else:
        outcome, text = unclear, f"neither survives nor falls to rounding in float32: {sizes}"
    return Control(boundary=name, outcome=outcome, distance=largest, native=native, rows=rows, text=text)
