"""Run conditions that only the engine knows: versions, config, parallelism, scheduling, backends, compilation. Plain JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tracer.hosts.module_conditions import module_attributes, plain

__all__ = ["engine_conditions"]

_NO_CONFIG = {"_name_or_path", "transformers_version", "id2label", "label2id"}


def engine_conditions(runner: Any, modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Conditions of the engine that ``runner`` belongs to. Nothing is changed; no weight is read."""
    import vllm

    config, model = runner.vllm_config, modules[""]
    compilation, parallel, scheduler = config.compilation_config, config.parallel_config, config.scheduler_config
    held = config.model_config.hf_text_config.to_dict() | {"dtype": config.model_config.dtype}  # the checkpoint may have another
    return {
        "vllm": vllm.__version__,
        "model_class": type(model).__name__,
        "config": plain({name: value for name, value in held.items() if name not in _NO_CONFIG}),
        "parameter_dtypes": _dtypes(model.named_parameters()),
        "buffer_dtypes": _dtypes(model.named_buffers()),
        "attention": _backend(modules),
        "experts": _experts(modules),
        "mode": "train" if model.training else "eval",
        "dropout": {},
        "quantization": plain(config.model_config.quantization),
        "engine": plain(
            {
                "runner": type(runner).__module__.rpartition(".")[2] + "." + type(runner).__name__,
                "compilation_mode": getattr(compilation.mode, "name", "unknown"),
                "graphs": getattr(compilation.cudagraph_mode, "name", "unknown"),
                "tensor_parallel": parallel.tensor_parallel_size,
                "pipeline_parallel": parallel.pipeline_parallel_size,
                "data_parallel": parallel.data_parallel_size,
                "expert_parallel": parallel.enable_expert_parallel,
                "batched_tokens": scheduler.max_num_batched_tokens,
                "requests": scheduler.max_num_seqs,
                "async_scheduling": getattr(scheduler, "async_scheduling", "unknown"),
                "prefix_caching": config.cache_config.enable_prefix_caching,
                "cache_dtype": config.cache_config.cache_dtype,
                "block_size": config.cache_config.block_size,
                "logprobs": getattr(config.model_config, "logprobs_mode", "unknown"),
                "seed": config.model_config.seed,
            }
        ),
        "attributes": module_attributes(modules),
    }


def _backend(modules: Mapping[str, torch.nn.Module]) -> str:
    """Attention implementations in use."""
    kinds = {type(module.impl).__name__ for module in modules.values() if hasattr(module, "impl")}
    return ", ".join(sorted(kinds)) or "unknown"


def _experts(modules: Mapping[str, torch.nn.Module]) -> str:
    """How mixtures run their experts."""
    kinds = {type(module.quant_method).__name__ for module in modules.values() if "w13_weight" in module._parameters}
    return ", ".join(sorted(kinds)) or "none"


def _dtypes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return dict(sorted(Counter(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors).items()))
