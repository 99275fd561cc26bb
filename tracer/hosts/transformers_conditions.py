"""Run conditions that only the model knows: config, dtypes, backends, mode, dropout, scalar attributes. Plain JSON."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["model_conditions", "module_attributes", "plain_json"]

_SHAPES = {"in_features", "out_features", "num_embeddings", "embedding_dim", "padding_idx", "normalized_shape", "nf", "nx"}
"""Attributes that the weights tell already."""

_PLACES = {"layer_idx", "layer_id", "training", "gradient_checkpointing", "name_or_path"}
"""Attributes that say where a module stands, or that are told elsewhere."""

_NO_CONFIG = {"_name_or_path", "transformers_version", "id2label", "label2id"}

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def model_conditions(model: Any, modules: Mapping[str, torch.nn.Module], class_name: str) -> dict[str, Any]:
    """Conditions of ``model``, whose modules by clean path are ``modules``. Nothing is changed; no weight is read."""
    import transformers

    config = model.config
    text = config.get_text_config()
    quantization: Any = getattr(config, "quantization_config", None)
    return {
        "transformers": transformers.__version__,
        "model_class": class_name,
        "config": plain_json({name: value for name, value in config.to_dict().items() if name not in _NO_CONFIG}),
        "parameter_dtypes": _dtypes(model.named_parameters()),
        "buffer_dtypes": _dtypes(model.named_buffers()),
        "attention": text._attn_implementation or "unknown",
        "experts": getattr(text, "_experts_implementation", None) or "none",
        "mode": _mode(modules),
        "dropout": _dropout(modules),
        "quantization": plain_json(quantization.to_dict() if hasattr(quantization, "to_dict") else quantization),
        "use_cache": plain_json(getattr(text, "use_cache", "unknown")),
        "gradient_checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in modules.values()),
        "attributes": module_attributes(modules),
    }


def module_attributes(modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Scalar attributes of all modules by path with ``*`` for numbers: ``model.layers.*.self_attn.scaling``.

    One value where all modules of that path agree, else ``{"by_index": {value as text: indices}}`` with the first number of
    the path."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, module in modules.items():
        for name, value in vars(module).items():
            if name.startswith("_") or name in _PLACES or name in _SHAPES or not isinstance(value, bool | int | float | str | None):
                continue
            place = f"{path}.{name}" if path else name
            found[_INDEX.sub("*", place)][place] = plain_json(value)
    attributes: dict[str, Any] = {}
    for pattern, values in sorted(found.items()):
        distinct = {repr(value): value for value in values.values()}
        if len(distinct) > 1:
            by_value: dict[str, list[str]] = defaultdict(list)
            for place, value in values.items():
                by_value[str(value)].append(".".join(_INDEX.findall(place)))
            attributes[pattern] = {"by_index": {value: " ".join(dict.fromkeys(places)) for value, places in by_value.items()}}
        elif next(iter(distinct.values())) is not None:
            attributes[pattern] = next(iter(distinct.values()))
    return attributes


def _mode(modules: Mapping[str, torch.nn.Module]) -> str:
    training = sum(module.training for module in modules.values())
    if training in (0, len(modules)):
        return "train" if training else "eval"
    return f"mixed: {training} of {len(modules)} modules in train mode"


def _dropout(modules: Mapping[str, torch.nn.Module]) -> dict[str, float]:
    """Dropout probabilities that take effect: above zero, in a module that is in train mode."""
    active: dict[str, float] = {}
    for path, module in modules.items():
        if not module.training:
            continue
        held = {"p": module.p} if isinstance(module, torch.nn.modules.dropout._DropoutNd) else vars(module)
        for name, value in held.items():
            told = name == "p" or "dropout" in name or name.endswith("_pdrop")
            if told and isinstance(value, float) and value > 0:
                active[_INDEX.sub("*", f"{path}.{name}")] = value
    return active


def _dtypes(tensors: Any) -> dict[str, int]:
    return dict(sorted(Counter(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors).items()))


def plain_json(value: Any) -> Any:
    """``value`` as JSON can hold it; what has no such form becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    return str(value).removeprefix("torch.")
