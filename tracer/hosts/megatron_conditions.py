"""Run conditions that only a Megatron model knows: config, parallel sizes, kernels, mode, dropout. Plain JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from tracer.hosts.module_conditions import active_dropout, count_dtypes, mode_of, module_attributes, plain

__all__ = ["model_conditions"]

_PART = re.compile(
    r"(_per_partition|_per_pipeline_rank|\.world_size|\.allreduce_dgrad|\.p(re|ost)_process|\.num_local_experts|\.vocab_(start|end)_index)$"
)
"""Attributes that only say which part of the mesh this is; ``parallel`` tells."""


def model_conditions(model: Any, modules: Mapping[str, torch.nn.Module], mesh: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """Conditions of ``model``, whose modules by path are ``modules``. Nothing is changed; no weight is read."""
    import megatron.core

    config = model.config
    experts = {type(module).__name__ for path, module in modules.items() if path.endswith(".mlp.experts")}
    return {
        "megatron": megatron.core.__version__,
        "model_class": type(model).__name__,
        "config": {field.name: _told(getattr(config, field.name)) for field in dataclasses.fields(config)},
        "positions": plain(getattr(model, "position_embedding_type", "unknown")),
        "rotary_base": plain(getattr(model, "rotary_base", "unknown")),
        "vocabulary": {"tokens": vocabulary, "padded": int(model.vocab_size)},
        "parallel": dict(mesh),
        "parameter_dtypes": count_dtypes(model.named_parameters()),
        "buffer_dtypes": count_dtypes(model.named_buffers()),
        "attention": _kinds(modules, ".core_attention"),
        "experts": ", ".join(sorted(experts)) or "none",
        "mode": mode_of(modules),
        "dropout": active_dropout(modules),
        "gradient_checkpointing": config.recompute_granularity or False,
        "attributes": {name: value for name, value in module_attributes(modules).items() if not _PART.search(name)},
    }


def _kinds(modules: Mapping[str, torch.nn.Module], ending: str) -> str:
    return ", ".join(sorted({type(module).__name__ for path, module in modules.items() if path.endswith(ending)})) or "unknown"


def _told(value: Any) -> Any:
    """A config value as JSON; functions and classes by name, since their text holds an address."""
    if callable(value):
        wrapped = getattr(value, "func", value)
        return f"{getattr(wrapped, '__module__', '?')}.{getattr(wrapped, '__qualname__', type(wrapped).__name__)}"
    return plain(value)
