"""One module on dumped inputs: does it give what the run it was dumped from gave?

Suffixes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracer.errors import Code, UsageError
from tracer.format.reference import ReferenceRows

__all__ = ["ReplayResult", "replay_rows"]


@dataclass(frozen=True)
class ReplayResult:
    """What a module made of another run's values. An intervention: it says how this module computes, and repairs nothing.

    ``rows``: rows that were run; ``rows_equal``: those with the dumped bits. ``largest_error``: the largest absolute difference;
    ``relative_error``: |difference| / |dumped output| over all rows, None where that is undefined (a zero norm, something not finite).
    ``cast``: what dtype the inputs were brought to, empty where none was changed."""

    boundary: str
    inputs: tuple[str, ...]
    run: str
    rows: int
    rows_equal: int
    largest_error: float | None
    relative_error: float | None
    dtype: str
    dumped_dtype: str
    cast: str = ""

    @property
    def intervention(self) -> str:
        """How to name it in a report."""
        return f"replay_operator {self.boundary}={self.run}"

    def __str__(self) -> str:
        if self.rows_equal == self.rows:
            found = "all with the dumped bits"
        else:
            size = "undefined" if self.relative_error is None else f"{self.relative_error:.2e}"
            found = f"{self.rows_equal} with the dumped bits, relative error {size}"
        cast = f" (inputs cast to {self.cast})" if self.cast else ""
        made = f", {self.dtype} where {self.dumped_dtype} was dumped" if self.dtype != self.dumped_dtype else ""
        return f"INTERVENTION: {self.boundary} from {', '.join(self.inputs)} of run {self.run}{cast}: {self.rows} rows, {found}{made}"


def replay_rows(
    module: torch.nn.Module,
    boundary: str,
    output: ReferenceRows,
    inputs: Mapping[str, ReferenceRows],
    *,
    run: str,
    batched: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> ReplayResult:
    """Run ``module`` on the rows that the inputs and the output share, without gradients, in the order of the output's keys.

    Each input is one positional argument, (1, R, C), or (R, C) if not ``batched``, on the module's device, floats in the dtype of its
    parameters. The module's mode is left as it is.
    Raises ``UsageError`` (intervention-refused) where no rows are shared, the module holds a part of its parameters, or it gives other
    rows or columns.
    """
    _refuse_sharded(module, boundary)
    line_R = np.arange(len(output.key_R))
    for rows in inputs.values():
        line_R = line_R[rows.find(output.key_R[line_R], None) >= 0]
    if not len(line_R):
        raise _refused(
            f"the dump holds no rows of {boundary} together with {', '.join(inputs)}", expected="a dump of both at the same tokens"
        )
    parameter = next((entry for entry in module.parameters() if entry.is_floating_point()), None)
    cast, arguments = "", []
    for rows in inputs.values():
        value_RC = _tensor(rows, rows.find(output.key_R[line_R], None))
        if parameter is not None:
            value_RC = value_RC.to(parameter.device)
            if value_RC.is_floating_point() and value_RC.dtype is not parameter.dtype:
                value_RC, cast = value_RC.to(parameter.dtype), str(parameter.dtype).removeprefix("torch.")
        arguments.append(value_RC[None] if batched else value_RC)
    with torch.no_grad():
        found = _first_tensor(module(*arguments, **(kwargs or {})), boundary)
    if found.numel() != len(line_R) * output.width:
        expected = f"{len(line_R)} rows of {output.width} columns"
        raise _refused(f"the module does not compute {boundary}", expected=expected, found=f"shape {list(found.shape)}")
    found_RC, dumped_RC = found.detach().reshape(len(line_R), output.width).cpu(), _tensor(output, line_R)
    same = found_RC.dtype is dumped_RC.dtype
    bits = [value.contiguous().view(torch.uint8).numpy() for value in (found_RC, dumped_RC)]
    equal_R = (bits[0] == bits[1]).all(axis=1) if same else np.zeros(len(line_R), np.bool_)
    x, y = found_RC.double().numpy(), dumped_RC.double().numpy()
    finite = bool(np.isfinite(x).all() and np.isfinite(y).all())
    norm = float(np.linalg.norm(y)) if finite else 0.0
    return ReplayResult(
        boundary=boundary,
        inputs=tuple(inputs),
        run=run,
        rows=len(line_R),
        rows_equal=int(equal_R.sum()),
        largest_error=float(np.abs(x - y).max()) if finite else None,
        relative_error=float(np.linalg.norm(x - y)) / norm if norm else None,
        dtype=str(found_RC.dtype).removeprefix("torch."),
        dumped_dtype=output.dtype,
        cast=cast,
    )


def _refuse_sharded(module: torch.nn.Module, boundary: str) -> None:
    """A part of an operator gives a part of its rows, and the other parts would have to be called in the other processes."""
    cut = any(hasattr(entry, "device_mesh") or getattr(entry, "tensor_model_parallel", False) for entry in module.parameters())
    parallel = max((int(getattr(entry, "tp_size", 1) or 1) for entry in module.modules()), default=1)
    if parallel > 1 or (cut and _processes() > 1):
        raise UsageError(
            Code.INTERVENTION_REFUSED,
            f"{boundary} cannot be replayed on this module: its parameters are cut over processes",
            expected="a module with whole parameters",
            found=type(module).__name__,
            remedy="build the model in one process for the replay",
        )


def _processes() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def _tensor(rows: ReferenceRows, lines: Any) -> torch.Tensor:
    assert rows.raw_RB is not None
    raw = torch.from_numpy(np.ascontiguousarray(rows.raw_RB[lines]))
    return raw.view(getattr(torch, rows.dtype)).reshape(len(lines), rows.width)


def _first_tensor(value: Any, boundary: str) -> torch.Tensor:
    """The output itself, or the first tensor of it."""
    parts: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else [value]
    found = next((part for part in parts if isinstance(part, torch.Tensor)), None)
    if found is None:
        raise _refused(f"the module gives no tensor for {boundary}", found=type(value).__name__)
    return found


def _refused(what: str, *, expected: str = "", found: str = "") -> UsageError:
    return UsageError(Code.INTERVENTION_REFUSED, what, expected=expected, found=found)
