"""What changes the model's computation on purpose: nudged embeddings, replaced block inputs, pinned choices.

Diagnosis and never a fix: every one of them is in the manifest. One that cannot be carried out as asked leaves the model's own
values, and its refusal (UsageError, intervention-refused) ends the recording: half an intervention says nothing. It is not
raised inside the forward: an engine's scheduler, and other processes that wait in a collective, would never come back. Only a
recomputation in backward is refused at once: it would give wrong gradients, in all processes alike. Everything happens in the
traced process, in hooks that come off with the others.

Suffixes: N rows of a leaf, C columns, K ids per row, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from tracer.errors import Code, MapError, UsageError
from tracer.format.reference import ReferenceRows
from tracer.format.token_keys import label_keys
from tracer.record.forward_record import ForwardRecord
from tracer.record.host import Host, Mesh, Placement, Rows
from tracer.record.readers import SourceReader
from tracer.record.recompute import in_backward
from tracer.record.tokens import SequenceRegistry

__all__ = ["Feed", "Intervention", "Nudge", "Pin", "Told", "nudge_values", "refuse_split_sequences", "unreached"]

U64 = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
Running = Callable[[], "ForwardRecord | None"]
"""The forward that is running, None outside any."""
Told = Callable[[Exception], None]
"""Hears of what could not be carried out."""

_MAGNITUDE = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def refuse_split_sequences(mesh: Mesh, what: str) -> None:
    """Token keys must be known in this process while it runs. Raises UsageError (intervention-refused), in all processes alike."""
    split = [f"{axis.name}={axis.size}" for axis in mesh.axes if axis.name in ("cp", "pp") and axis.size > 1]
    if split:
        raise _refused(
            f"{what} needs the token ids of every row in the process that computes it",
            expected="no pipeline stages and no context parallelism",
            found=", ".join(split),
            remedy="run this side on fewer processes for the diagnosis",
        )


@dataclass(eq=False)
class Intervention:
    """One boundary that is changed. ``executions``: how often it was, so that one that never happened is told."""

    reader: SourceReader
    host: Host
    running: Running
    registry: SequenceRegistry
    executions: int = field(default=0, init=False)
    left: dict[int, int] = field(default_factory=dict, init=False)
    """Sequence -> its first position that was left alone, because the other side never computed it."""
    left_rows: int = field(default=0, init=False)

    @property
    def boundary(self) -> str:
        """Its name."""
        return self.reader.source.boundary

    def install(self, module: torch.nn.Module, stack: ExitStack, told: Told) -> None:
        """Hooks onto ``module``; ``told`` hears of a refusal, after which ``running`` gives None."""

        def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changed = self._guarded(told, args, kwargs, None)
            return None if changed is None else changed[:2]

        def after(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            changed = self._guarded(told, args, kwargs, output)
            return None if changed is None else changed[2]

        if self.reader.before:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        else:
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def _guarded(self, told: Told, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        _refuse_recompute(self.boundary, told)
        try:
            return self._change(args, kwargs, output)
        except Exception as error:
            told(error)
            return None

    def pair(self, rows: Rows, theirs: ReferenceRows, source: str) -> tuple[Any, Any]:
        """Rows of a leaf that belong to a sequence, and the other side's line of each: both int64 (N,). What the other side never
        computed is left out where nothing that is paired follows it. Raises UsageError (intervention-refused)."""
        index_N, line_N = _pair(self.boundary, rows, self.registry, theirs, source)
        missing_N = line_N < 0
        sequence_N, position_N = rows.sequence_N[index_N], rows.position_N[index_N]
        for sequence, position in zip(sequence_N[missing_N].tolist(), position_N[missing_N].tolist(), strict=True):
            self.left[sequence] = min(position, self.left.get(sequence, position))
        for sequence, first in self.left.items():
            after_N = (sequence_N == sequence) & ~missing_N & (position_N > first)
            if after_N.any():
                raise _refused(
                    f"{self.boundary} cannot be replaced: {source} never computed some of its tokens, and later ones read them",
                    expected="rows of every token, as far as the sequence goes",
                    found=f"{_places(self.registry, sequence_N[after_N], np.array([first]))} missing",
                    remedy="let the other side compute them: no prefix cache, or an empty one, and the trace begun before the request",
                )
        self.left_rows += int(missing_N.sum())
        return index_N[~missing_N], line_N[~missing_N]

    def _change(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The call with the boundary changed; None outside any forward."""
        record = self.running()
        if record is None:
            return None
        copied = self.reader.copied(args, kwargs, output)
        rows_NC, row_shape = self.reader.rows_to_write(copied, len(record.forward.rows))
        rows = record.rows_of(self.reader, row_shape, self.host)
        rows_NC, placement = self.reader.place(rows_NC, copied)
        if len(rows) != len(rows_NC):
            raise MapError(Code.MAP_LAYOUT, f"the host labels other rows than {self.boundary} has", found=f"{len(rows_NC)} rows")
        with torch.no_grad():
            self.change(rows_NC, rows, placement)
        self.executions += 1
        return self.reader.replaced(args, kwargs, output, copied)

    def change(self, rows_NC: torch.Tensor, rows: Rows, placement: Placement) -> None:
        """Write new values into the rows. Raises UsageError (intervention-refused)."""
        raise NotImplementedError


@dataclass(eq=False)
class Nudge(Intervention):
    """Every value of a boundary one unit (or ``ulps``) in the last place up or down, by token key and column: the same for the
    same prefix, whatever batch or process it is in."""

    ulps: int = 1

    def change(self, rows_NC: torch.Tensor, rows: Rows, placement: Placement) -> None:
        real_N = np.flatnonzero(rows.sequence_N >= 0)
        sequence_N, position_N = rows.sequence_N[real_N], rows.position_N[real_N]
        key_N, known_N = self.registry.keys(sequence_N, position_N)
        for sequence in np.unique(sequence_N[~known_N]).tolist():
            here = np.flatnonzero((sequence_N == sequence) & ~known_N)
            named = self.registry[sequence]
            key_N[here] = label_keys(named.request or named.label, position_N[here])
        spans = placement.spans or ((0, placement.width),)
        column_C = np.concatenate([np.arange(start, stop, dtype=np.uint64) for start, stop in spans])
        away_NC = torch.from_numpy(_signs(key_N, column_C)).to(rows_NC.device)
        index_N = torch.from_numpy(real_N).to(rows_NC.device)
        rows_NC[index_N] = nudge_values(rows_NC[index_N], away_NC, self.ulps)


def _signs(key_N: U64, column_C: U64) -> BoolArray:
    """One bit per (token, column), (N, C): the lowest of splitmix64 over their sum."""
    with np.errstate(over="ignore"):
        bits = key_N[:, None] + (column_C + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    signs: BoolArray = (bits ^ (bits >> np.uint64(31))) & np.uint64(1) == 1
    return signs


def nudge_values(values: torch.Tensor, away: torch.Tensor, ulps: int) -> torch.Tensor:
    """Values moved by so many steps of their own dtype, away from zero where ``away``, else towards it; what would cross zero or
    overflow goes the other way, what is not finite stays. Raises UsageError (intervention-refused) for other dtypes than floats."""
    if values.dtype not in _MAGNITUDE:
        raise _refused(
            "only floating-point values can be nudged", expected="float64, float32, float16 or bfloat16", found=str(values.dtype)
        )
    kind = _MAGNITUDE[values.dtype]
    lowest = torch.iinfo(kind).min
    infinite = torch.full((), float("inf"), dtype=values.dtype).view(kind).item()
    bits = values.contiguous().view(kind)
    magnitude, sign = bits & ~torch.tensor(lowest, dtype=kind, device=bits.device), bits & lowest
    up = (away | (magnitude < ulps)) & ~(magnitude + ulps >= infinite)
    moved = torch.where(up, magnitude + ulps, magnitude - ulps)
    return torch.where(magnitude >= infinite, bits, moved | sign).view(values.dtype)


@dataclass(eq=False)
class Feed(Intervention):
    """The values of a boundary replaced by the other side's, after they were recorded: what follows starts from those."""

    theirs: ReferenceRows = field(default_factory=lambda: ReferenceRows("", 0, np.zeros(0, np.uint64), None))
    source: str = ""
    cast: str = field(default="", init=False)
    """The other side's dtype, where it is another than this side's."""

    def change(self, rows_NC: torch.Tensor, rows: Rows, placement: Placement) -> None:
        theirs, width = self.theirs, placement.width
        if placement.partial or placement.spans not in ((), ((0, width),)):
            raise _refused(
                f"{self.boundary} cannot be fed: this process holds a part of its values",
                expected="whole rows",
                found=f"partial sums over {placement.partial}" if placement.partial else f"columns {list(placement.spans)} of {width}",
                remedy="run this side without tensor parallelism for the diagnosis",
            )
        if theirs.width != width or theirs.raw_RB is None:
            raise _refused(f"{self.boundary} cannot be fed: its width is another", expected=f"{width} columns", found=f"{theirs.width}")
        index_N, line_N = self.pair(rows, theirs, self.source)
        dtype = getattr(torch, theirs.dtype)
        raw_NB = np.ascontiguousarray(theirs.raw_RB[line_N])
        values_NC = torch.from_numpy(raw_NB).view(dtype).reshape(len(line_N), width).to(rows_NC.device)
        if dtype is not rows_NC.dtype:
            self.cast = theirs.dtype
        rows_NC[torch.from_numpy(index_N).to(rows_NC.device)] = values_NC.to(rows_NC.dtype)


@dataclass(eq=False)
class Pin(Intervention):
    """A choice of experts held to the other side's. While the module that chooses runs, its ``torch.topk`` over all experts is
    answered with the other side's ids; weights follow from them in the module's own code. A token whose set of ids is the same
    keeps its own order, so that nothing of it changes."""

    theirs: ReferenceRows = field(default_factory=lambda: ReferenceRows("", 0, np.zeros(0, np.uint64), None))
    source: str = ""
    experts: int = 0
    changed: int = field(default=0, init=False)
    """Tokens whose choice was another, over all forwards."""

    def install(self, module: torch.nn.Module, stack: ExitStack, told: Told) -> None:
        modes: list[_AnswerTopK] = []

        def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                _refuse_recompute(self.boundary, told)
                mode = _AnswerTopK(self)
                mode.__enter__()  # type: ignore[no-untyped-call]
                modes.append(mode)

        def after(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling() or not modes:
                return
            mode = modes.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if mode.error is None and output is not None and not mode.answered and self.running() is not None:
                mode.error = _refused(
                    f"{self.boundary} cannot be pinned: the module that chooses runs no torch.topk over its {self.experts} experts",
                    found=type(module).__name__,
                    remedy="pin the side whose router is plain torch; fused routers cannot be",
                )
            if mode.error is not None:
                told(mode.error)

        # entered last and left first: whatever else hooks this module is not answered
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True).remove)

    def answer(self, scores_NE: torch.Tensor, values_NK: torch.Tensor, ids_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The other side's choice instead of ``values_NK, ids_NK``; None outside any forward. Raises UsageError."""
        record = self.running()
        if record is None:
            return None
        rows = record.rows_of(self.reader, (len(scores_NE),), self.host)
        index_N, line_N = self.pair(rows, self.theirs, self.source)
        assert self.theirs.raw_RB is not None
        wanted_NK = self.theirs.raw_RB[line_N].view(np.int64).reshape(len(line_N), -1)
        own_NK = ids_NK.detach().cpu().numpy()[index_N]
        differs_N = np.flatnonzero((np.sort(own_NK, axis=1) != np.sort(wanted_NK, axis=1)).any(axis=1))
        self.executions += 1
        self.changed += len(differs_N)
        if not len(differs_N):
            return values_NK, ids_NK
        new_NK = np.array([_in_place(own_NK[n], wanted_NK[n]) for n in differs_N], np.int64)
        at_N = torch.from_numpy(index_N[differs_N]).to(ids_NK.device)
        pinned_NK = ids_NK.clone()
        pinned_NK[at_N] = torch.from_numpy(new_NK).to(ids_NK.device, ids_NK.dtype)
        return scores_NE.gather(1, pinned_NK), pinned_NK


def _in_place(own_K: npt.NDArray[np.int64], wanted_K: npt.NDArray[np.int64]) -> list[int]:
    """The wanted ids, those that were chosen anyway where they were."""
    new = iter(sorted(set(wanted_K.tolist()) - set(own_K.tolist())))
    kept = set(wanted_K.tolist())
    return [expert if expert in kept else next(new) for expert in own_K.tolist()]


class _AnswerTopK(TorchFunctionMode):
    """Answers the call of ``topk`` that chooses the experts; everything else runs as it is."""

    def __init__(self, pin: Pin) -> None:
        super().__init__()
        self.answered = False
        self.error: Exception | None = None
        self._pin = pin

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or self.error is not None:
            return result
        scores, (values, ids) = args[0] if args else (kwargs or {})["input"], result
        columns = self._pin.theirs.width
        if scores.dim() != 2 or scores.shape[1] != self._pin.experts or ids.shape != (len(scores), columns):
            return result
        try:
            answer = self._pin.answer(scores, values, ids)
        except Exception as error:  # told where the module ends
            self.error = error
            return result
        self.answered = True
        return result if answer is None else torch.return_types.topk(answer)


def _pair(boundary: str, rows: Rows, registry: SequenceRegistry, theirs: ReferenceRows, source: str) -> tuple[Any, Any]:
    """Rows of a leaf that belong to a sequence, and the other side's line of each, -1 where it declares that it never computed
    the row: both int64 (N,).

    Raises UsageError (intervention-refused) where a row's token is not known here, or the other side does not have it."""
    index_N = np.flatnonzero(rows.sequence_N >= 0)
    sequence_N, position_N = rows.sequence_N[index_N], rows.position_N[index_N]
    key_N, known_N = registry.keys(sequence_N, position_N)
    if not known_N.all():
        raise _refused(
            f"{boundary} cannot be replaced: the token ids of its rows are not known in this process",
            found=_places(registry, sequence_N[~known_N], position_N[~known_N]),
        )
    line_N = theirs.find(key_N, None)
    absent_N = line_N < 0
    if theirs.never_K is not None:
        absent_N &= ~np.isin(key_N, theirs.never_K)
    if absent_N.any():
        raise _refused(
            f"{boundary} cannot be replaced: {source} does not have all of its tokens",
            expected=f"{len(line_N)} rows",
            found=f"{int(absent_N.sum())} missing, {_places(registry, sequence_N[absent_N], position_N[absent_N])}",
            remedy="give both sides the same tokens (an engine: as prompts, max_tokens=1; what it samples under an intervention may be "
            "another token), and dump whole boundaries on the other side: dump= without tokens=",
        )
    return index_N, line_N


def _places(registry: SequenceRegistry, sequence_N: npt.NDArray[np.int64], position_N: npt.NDArray[np.int64]) -> str:
    named = registry[int(sequence_N[0])]
    return f"first {named.request or named.label}:{int(position_N[0])}"


def _refuse_recompute(boundary: str, told: Told) -> None:
    """Raises UsageError (intervention-refused) while activations are recomputed."""
    if in_backward():
        error = _refused(
            f"{boundary} cannot be changed while activation checkpointing recomputes it",
            expected="forwards only",
            remedy="run the diagnosis under torch.no_grad()",
        )
        told(error)
        raise error


def unreached(interventions: Iterable[Intervention]) -> str:
    """Why a run was not the one that was asked for: boundaries that were never reached. Empty where all were."""
    names = [intervention.boundary for intervention in interventions if not intervention.executions]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the intervention never reached {', '.join(names[:4])}{more}" if names else ""


def _refused(what: str, *, expected: str = "", found: str = "", remedy: str = "") -> UsageError:
    return UsageError(Code.INTERVENTION_REFUSED, what, expected=expected, found=found, remedy=remedy)
