"""Run conditions that only the model knows: config, dtypes, backends, mode, dropout, scalar attributes. Plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tracer.hosts.module_conditions import active_dropout, count_dtypes, mode_of, module_attributes, plain

__all__ = ["model_conditions"]

_NO_CONFIG = {"_name_or_path", "transformers_version", "id2label", "label2id"}


def model_conditions(model: Any, modules: Mapping[str, torch.nn.Module], class_name: str) -> dict[str, Any]:
    """Conditions of ``model``, whose modules by clean path are ``modules``. Nothing is changed; no weight is read."""
    import transformers

    config = model.config
    text = config.get_text_config()
    quantization: Any = getattr(config, "quantization_config", None)
    return {
        "transformers": transformers.__version__,
        "model_class": class_name,
        "config": plain({name: value for name, value in config.to_dict().items() if name not in _NO_CONFIG}),
        "parameter_dtypes": count_dtypes(model.named_parameters()),
        "buffer_dtypes": count_dtypes(model.named_buffers()),
        "attention": text._attn_implementation or "unknown",
        "experts": getattr(text, "_experts_implementation", None) or "none",
        "mode": mode_of(modules),
        "dropout": active_dropout(modules),
        "quantization": plain(quantization.to_dict() if hasattr(quantization, "to_dict") else quantization),
        "adapters": _adapters(modules),
        "use_cache": plain(getattr(text, "use_cache", "unknown")),
        "gradient_checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in modules.values()),
        "attributes": module_attributes(modules),
    }


def _adapters(modules: Mapping[str, torch.nn.Module]) -> Any:
    """Active adapters of PEFT's layers: how many layers, merged into the weights or not, scale of each; ``none`` without any."""
    layers = [module for module in modules.values() if hasattr(module, "base_layer") and hasattr(module, "active_adapters")]
    if not layers:
        return "none"
    found: dict[str, Any] = {}
    layer: Any
    for layer in layers:
        scales: Any = getattr(layer, "scaling", {})
        for name in layer.active_adapters:
            known = found.setdefault(str(name), {"layers": 0, "merged": 0, "scaling": []})
            known["layers"] += 1
            known["merged"] += name in getattr(layer, "merged_adapters", ())
            known["scaling"] = sorted({*known["scaling"], *([scales[name]] if name in scales else [])})
    return found
