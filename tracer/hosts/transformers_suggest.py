"""A boundary map suggested from a transformers model: one tiny forward, watched whole, and the attention function with it.

From a config alone the model is built small: few layers, narrow, random weights, the same modules.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from tracer.errors import Code, UsageError
from tracer.hosts.module_conditions import active_dropout
from tracer.hosts.transformers import TransformersHost, create
from tracer.hosts.transformers_config import read_config
from tracer.hosts.transformers_taps import ATTENTION
from tracer.record.map_draft import MapDraft, draft_map
from tracer.record.observed_forward import Observation, TapLeaf, observe_forward
from tracer.record.suggested_blocks import find_boundaries

__all__ = ["small_model", "suggest_map"]

_BATCH, _COLUMNS = 2, 13
_SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "n_embd": 64, "n_head": 4, "n_inner": 96, "max_position_embeddings": 512, "n_positions": 512,
}  # fmt: skip
"""Config keys -> the size that a suggestion builds at most."""
_MAX_LAYERS = 8


def suggest_map(model: torch.nn.Module, family: str = "") -> MapDraft:
    """A map for the class of ``model``, drafted from one forward of 2 x 13 random tokens. Nothing of the model is changed.

    Raises HostError (host-unknown, host-unsupported), MapError map-unfit (no stack of layers), UsageError bad-argument (dropout
    is active)."""
    host = create(model, None)
    dropout = active_dropout(host.modules())
    if dropout:
        raise UsageError(
            Code.BAD_ARGUMENT,
            "a map cannot be suggested while dropout is active: sums would not add up",
            found=", ".join(dropout),
            remedy="call model.eval() first",
        )
    seen = _observe(host, model)
    config: Any = model.config
    family = family or str(getattr(config, "model_type", "")) or host.root_class().lower()
    model_types = (str(config.model_type),) if getattr(config, "model_type", "") else ()
    return draft_map(
        find_boundaries(seen), host.modules(), host=host.name, family=family, classes=(host.root_class(),), model_types=model_types
    )


def _observe(host: TransformersHost, model: torch.nn.Module) -> Observation:
    """One forward with every module and every call of the attention function watched."""
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(min(3, vocabulary - 1), vocabulary, (_BATCH, _COLUMNS), generator=generator)
    ids_BS = ids_BS.to(next(model.parameters()).device)
    taps: dict[str, list[TapLeaf]] = {}

    def listener(path: str) -> Any:
        def listen(leaf: str, tensor: torch.Tensor) -> None:
            layout = "b s h d" if leaf == "output" else "b h s d"  # q, k, v: heads first
            taps.setdefault(path, []).append(TapLeaf("attention", leaf, tensor.detach().clone(), layout))

        return listen

    listeners = {module: listener(path) for path, module in host.modules().items() if path}
    with contextlib.ExitStack() as stack:
        ATTENTION.add(listeners)
        stack.callback(ATTENTION.remove, listeners)
        try:
            seen = observe_forward(host.modules(), ids_BS, lambda: model(input_ids=ids_BS, use_cache=False), host.root())
        except Exception as error:  # whatever a model says about a plain call
            raise UsageError(
                Code.BAD_ARGUMENT,
                f"the model cannot run {_BATCH} x {_COLUMNS} token ids alone: {type(error).__name__}: {error}",
                where=host.root_class(),
                expected="a decoder that takes input_ids",
                remedy="build a small model that runs, and pass it to tracer.suggest_map(model)",
            ) from error
    seen.taps = {path: leaves for path, leaves in taps.items() if len(leaves) == len({leaf.leaf for leaf in leaves})}
    return seen


def small_model(config: Path) -> torch.nn.Module:
    """The model that a config describes, built small with random weights: at most eight layers, the kinds of layers in the order
    of the config. On the CPU, in float32, in eval mode.

    Raises HostError host-missing-package, UsageError bad-argument (no such file, or no config that can be built small)."""
    settings, build = read_config(config)
    shrunk = _shrink(settings.to_dict())
    try:
        model = build(type(settings).from_dict(shrunk))
    except Exception as error:  # whatever a model's constructor says about sizes that do not fit each other
        raise UsageError(
            Code.BAD_ARGUMENT,
            f"a small model of this config cannot be built: {type(error).__name__}: {error}",
            where=str(config),
            expected="a decoder whose config has the library's usual keys",
            remedy="build a small model yourself and pass it to tracer.suggest_map(model)",
        ) from error
    _randomise(model)
    return model.float().eval()  # type: ignore[no-any-return]


def _shrink(settings: dict[str, Any]) -> dict[str, Any]:
    """A config's values with every known size cut, nested configs too, and the keys that say where weights come from left out."""
    shrunk: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ("quantization_config", "_name_or_path", "architectures"):
            continue
        if isinstance(value, dict) and name.endswith("_config"):
            shrunk[name] = _shrink(value)
        elif name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            shrunk[name] = min(value, _SMALL[name])
        elif name in ("num_hidden_layers", "n_layer", "num_layers") and isinstance(value, int):
            shrunk[name] = min(value, _MAX_LAYERS)
        elif isinstance(value, list) and len(value) == settings.get("num_hidden_layers"):
            shrunk[name] = value[:_MAX_LAYERS]
        elif name.endswith("token_id") and isinstance(value, int):
            shrunk[name] = min(value, _SMALL["vocab_size"] - 1)
        else:
            shrunk[name] = value
    heads, keys = shrunk.get("num_attention_heads"), shrunk.get("num_key_value_heads")
    if heads and keys and settings["num_attention_heads"] == settings["num_key_value_heads"]:
        shrunk["num_key_value_heads"] = heads
    if "qk_rope_head_dim" in shrunk and "head_dim" in shrunk:  # latent attention: the rope table is as wide as the part that has positions
        shrunk["head_dim"] = shrunk["qk_rope_head_dim"]
    return shrunk


def _randomise(model: torch.nn.Module) -> None:
    """Weights by which operators can be told apart: what a library starts as zeros and ones would make many things equal."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else parameter.data.float() + 0.1 * noise
