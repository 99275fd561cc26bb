"""Weights as they were loaded, before the engine repacked them.

After loading, a backend may reorder a weight, or hide it in an object of its own and leave an empty tensor. The bytes of
the checkpoint are then no longer in the model. So while tracing is installed, every parameter's rows are fingerprinted
before that step and compared after it; what changed is remembered, with what identifies its repacked form. A weight that
has been exchanged since is unknown, never equal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash

from tracer.format.fingerprint import Fingerprints
from tracer.hosts.vllm_layers import experts_parallelism, host_parameter
from tracer.record.fingerprint_tensors import fingerprint_tensor
from tracer.record.host import HostParameter

__all__ = ["LoadedWeights", "loaded_weights", "watch_loading"]

_BLOCK_ITEMS = 1 << 22


@dataclass(frozen=True, eq=False)
class _Loaded:
    """One parameter as it was loaded; its memory is not kept."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Fingerprints


@dataclass(frozen=True, eq=False)
class _Repacked:
    """One parameter that repacking changed. ``rows``: fingerprints as loaded. ``now``: its memory afterwards.
    ``owned``: what the module held besides tensors, by identity, where the memory says nothing."""

    dtype: torch.dtype
    rows: Fingerprints
    now: _Memory
    module: torch.nn.Module
    owned: dict[str, Any]


@dataclass(frozen=True)
class _Memory:
    """A tensor's shape, dtype and digest."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes


@dataclass(eq=False)
class LoadedWeights:
    """What loading did to one model's parameters. ``made``: those that came into being behind it, from others. ``failed``: why
    that is not known."""

    made: frozenset[str] = frozenset()
    repacked: dict[str, _Repacked] = field(default_factory=dict)
    failed: str = ""

    def as_loaded(self, parameter: HostParameter, tensor: torch.Tensor) -> HostParameter:
        """The parameter with the rows it was loaded with, if it was repacked then and has not changed since."""
        if self.failed:
            return parameter if parameter.buffer else replace(parameter, tensor=None, unknown=self.failed)
        if parameter.parameter in self.made:
            return replace(parameter, buffer=True)  # no checkpoint has it
        known = self.repacked.get(parameter.parameter)
        if known is None:
            return parameter
        if _memory(tensor) != known.now or not _still_owned(known):
            return replace(parameter, tensor=None, unknown="exchanged after the engine had repacked it when loading")
        if parameter.sizes and len(parameter.shape) == 1:
            return replace(parameter, tensor=None, unknown="packed and repacked: its parts cannot be told apart any more")
        return replace(parameter, tensor=None, unknown="", rows=known.rows, dtype=str(known.dtype).removeprefix("torch."))


_LOADED: WeakKeyDictionary[torch.nn.Module, LoadedWeights] = WeakKeyDictionary()


def loaded_weights(model: torch.nn.Module) -> LoadedWeights | None:
    """What loading did to this model, None where nothing watched it load."""
    return _LOADED.get(model)


def watch_loading() -> None:
    """From now on, models that this process loads are watched. Safe to call again."""
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading
    if hasattr(process, "watched_by_tracer"):
        return

    @functools.wraps(process)
    def watched(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        loaded = LoadedWeights()
        before: dict[str, _Loaded] = {}
        names = _names(model)
        try:
            before = {parameter.parameter: _loaded(parameter) for parameter in _parameters(model)}
        except Exception as error:  # loading must go on
            loaded.failed = f"the weights could not be read while they were loaded: {type(error).__name__}: {error}"
        result = process(model, *args, **kwargs)
        try:
            if not loaded.failed:
                loaded.repacked = dict(_changed(model, before))
                loaded.made = _names(model) - names
        except Exception as error:
            loaded.failed = f"the weights could not be read after they were loaded: {type(error).__name__}: {error}"
        _LOADED[model] = loaded
        return result

    watched.watched_by_tracer = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = watched


def _names(model: torch.nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))


def _parameters(model: torch.nn.Module) -> Iterator[HostParameter]:
    """Parameters with readable memory."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._parameters.items():
            if tensor is None or tensor.device.type == "meta" or tensor.layout != torch.strided:
                continue
            parameter = host_parameter(path, name, module, tensor, False, "", experts_parallelism(module))
            if parameter.tensor is not None:
                yield parameter


def _loaded(parameter: HostParameter) -> _Loaded:
    assert parameter.tensor is not None
    return _Loaded(parameter.tensor.dtype, parameter.shape, _row_prints(parameter))


def _row_prints(parameter: HostParameter) -> Fingerprints:
    """Fingerprints of all rows held: every dimension but the last counts rows."""
    tensor = parameter.tensor
    assert tensor is not None
    columns = tensor.shape[-1] if tensor.dim() else 1
    rows_RC = tensor.reshape(-1, columns) if tensor.numel() else tensor.new_zeros((0, max(columns, 1)))
    width = parameter.shape[-1] if parameter.shape else 1
    spans = parameter.spans[-1] if parameter.spans else ()
    step = max(1, _BLOCK_ITEMS // max(columns, 1))
    blocks = [rows_RC[start : start + step] for start in range(0, len(rows_RC), step)]
    taken = [fingerprint_tensor(block, width=width, spans=spans).resolve() for block in blocks]
    return _joined(taken) if taken else Fingerprints(np.zeros((0, 2), np.uint64))


def _joined(parts: list[Fingerprints]) -> Fingerprints:
    """One after the other; all parts have the same kinds of fields."""
    names = ("sketch_N16", "sum_squares_N", "abs_max_N", "nonfinite_N")
    statistics = {name: [getattr(part, name) for part in parts] for name in names}
    return Fingerprints(
        np.concatenate([part.digest_N2 for part in parts]),
        **{name: None if held[0] is None else np.concatenate(held) for name, held in statistics.items()},
    )


def _changed(model: torch.nn.Module, before: dict[str, _Loaded]) -> Iterator[tuple[str, _Repacked]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._parameters.items():
            whole = f"{path}.{name}" if path else name
            if tensor is None or whole not in before:
                continue
            loaded = before[whole]
            now = host_parameter(path, name, module, tensor, False, "", experts_parallelism(module))
            same = now.tensor is not None and now.tensor.dtype == loaded.dtype and now.shape == loaded.shape
            if not (same and np.array_equal(_row_prints(now).digest_N2, loaded.rows.digest_N2)):
                yield whole, _Repacked(loaded.dtype, loaded.rows, _memory(tensor), module, {} if tensor.numel() else _owned(module))


def _memory(tensor: torch.Tensor) -> _Memory:
    flat = tensor.detach().contiguous().reshape(-1)
    memory = flat.view(torch.uint8).cpu().numpy().data if len(flat) else b""
    return _Memory(tuple(tensor.shape), tensor.dtype, xxhash.xxh3_128_digest(memory))


def _owned(module: torch.nn.Module) -> dict[str, Any]:
    """Everything else that the module holds and that is no plain value: weights of which no tensor is left live there."""
    return {name: value for name, value in vars(module).items() if not isinstance(value, bool | int | float | str | dict | None)}


def _still_owned(known: _Repacked) -> bool:
    now = vars(known.module)
    return all(now.get(name) is value for name, value in known.owned.items())
