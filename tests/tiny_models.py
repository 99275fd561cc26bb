"""Tiny random-weight transformers models of every family that has a boundary map.

Initialised so that nothing is trivially equal: matrices N(0, 1/fan_in), norm weights 1 + 0.2 N (0.2 N where the code
multiplies by 1 + w), biases and correction biases 0.1 N. Two models made alike are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "class_name", "make_config", "make_ids", "make_model", "make_vision_language"]

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_MLA: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_LINEAR: dict[str, Any] = {
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
}
_HALF_SLIDING = ["sliding_attention", "full_attention"] * 2
_LLAMA4: dict[str, Any] = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 1, 0, 0],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "olmo2": ("Olmo2", {}),
    "gemma2": (
        "Gemma2",
        {
            "hidden_size": 48,
            "sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": None}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "norm_topk_prob": False}),
    "deepseek_v3": ("DeepseekV3", _MLA),
    "qwen3_next": ("Qwen3Next", _LINEAR),
    "gpt2": ("GPT2", {}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "lm_head_bias": True}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8}),
    "gemma3": ("Gemma3", {"hidden_size": 48, "sliding_window": 8, "layer_types": _HALF_SLIDING, "query_pre_attn_scalar": 16}),
    "llama4": ("Llama4", _LLAMA4),
}
"""Family -> stem of the library's class names, and what its config adds."""

_DERIVED_HEAD_DIM = {"olmoe", "olmo2", "llama", "phimoe"}


def class_name(family: str) -> str:
    """Class of the causal language model of a family."""
    return "GPT2LMHeadModel" if family == "gpt2" else f"{FAMILIES[family][0]}ForCausalLM"


def make_config(family: str, attention: str = "eager", **changes: Any) -> Any:
    """The tiny config of a family, eager attention and experts."""
    name, extra = FAMILIES[family]
    settings = dict(_GPT2) if family == "gpt2" else {**_BASE, **extra}
    if family in _DERIVED_HEAD_DIM:
        del settings["head_dim"]
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**settings, **changes})
    config._attn_implementation = attention
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    return config


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 7, attention: str = "eager", **changes: Any) -> Any:
    """A tiny model of a family in eval mode, no gradients. Parameters have ``dtype``, buffers stay as the library made them."""
    torch.manual_seed(seed)
    config = make_config(family, attention, **changes)
    model = getattr(transformers, class_name(family))(config).eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    _initialise(model, seed + 1)
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if not any(part in name for part in keep):
            parameter.data = parameter.data.to(dtype)
    return model


def _initialise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one_plus = type(model).__name__.startswith(("Gemma", "Qwen3Next"))

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "dt_bias":
            continue
        if leaf == "A_log":  # slow decay, else the recurrent state forgets within three tokens
            parameter.data = torch.log(0.02 + 0.18 * torch.rand(parameter.shape, generator=generator))
        elif leaf.endswith("bias") or leaf == "sinks":
            parameter.data = 0.1 * normal(parameter)
        elif "norm" in name or ".ln_" in name:
            parameter.data = (0.0 if one_plus and "linear_attn.norm" not in name else 1.0) + 0.2 * normal(parameter)
        elif "embed_tokens" in name or ".wte." in name or ".wpe." in name:
            scale = parameter.shape[-1] ** -0.5 if type(model).__name__.startswith("Gemma") else 1.0
            parameter.data = scale * normal(parameter)
        else:  # a Conv1D, and the experts of some families, keep (in, out)
            turned = any(f".{part}." in name for part in ("c_attn", "c_proj", "c_fc")) or (
                name.endswith(("experts.gate_up_proj", "experts.down_proj")) and type(model).__name__.startswith(("GptOss", "Llama4"))
            )
            fan_in = parameter.shape[-2 if turned else -1]
            parameter.data = fan_in**-0.5 * normal(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * normal(buffer))


def make_vision_language(name: str, attention: str = "eager") -> Any:
    """A tiny vision-language model (``Qwen2VL``, ``Qwen2_5_VL``, ``Qwen3VL``, ``Gemma3``): two layers, one of vision; an image of
    four tokens is written as id 500 four times."""
    text: dict[str, Any] = {**_BASE, "num_hidden_layers": 2}
    vision: dict[str, Any] = {"hidden_size": 32, "patch_size": 4}
    tokens = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
    if name == "Gemma3":
        text |= {"hidden_size": 48, "sliding_window": 8, "layer_types": _HALF_SLIDING[:2], "query_pre_attn_scalar": 16}
        vision |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
        tokens = {"image_token_id": 500, "boi_token_index": 502, "eoi_token_index": 503, "mm_tokens_per_image": 4}
    else:
        del text["head_dim"]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        vision |= {"depth": 1, "num_heads": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}
        sizes: dict[str, dict[str, Any]] = {
            "Qwen2VL": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            "Qwen2_5_VL": {"out_hidden_size": 64, "intermediate_size": 32, "window_size": 16, "fullatt_block_indexes": [0]},
            "Qwen3VL": {"out_hidden_size": 64, "intermediate_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        }
        vision |= sizes[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **tokens)
    config._attn_implementation = attention
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().requires_grad_(False)
    _initialise(model, 8)
    return model


def make_ids(batch: int = 2, length: int = 12, seed: int = 3) -> torch.Tensor:
    """Random token ids, no special ones."""
    return torch.randint(3, 512, (batch, length), generator=torch.Generator().manual_seed(seed))
