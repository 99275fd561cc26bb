"""Tiny Megatron GPT models on a mesh, weights that are the same whatever the mesh, and what they are called with.

``make_gpt`` and ``load_hf`` run inside processes that called ``run_on_cpu`` and joined a process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["HIDDEN", "LAYERS", "VOCABULARY", "batch", "call", "load_hf", "make_gpt", "random_hf_weights"]

HIDDEN, LAYERS, VOCABULARY = 64, 2, 256
HEADS, SIZE, EXPERTS, TOP_K, DENSE, EXPERT_WIDTH = 4, 16, 8, 2, 128, 32
EPSILON, ROTARY_BASE = 1e-6, 10000

Weights = Mapping[str, torch.Tensor]


def batch(data_rank: int = 0) -> torch.Tensor:
    """Token ids, (2, 12)."""
    return torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(11 + data_rank))


def call(ids: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of one forward."""
    size = ids.shape[1]
    return {
        "input_ids": ids,
        "position_ids": torch.arange(size)[None].expand(ids.shape),
        "attention_mask": torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None],
    }


def make_gpt(
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    sequence_parallel: bool = False,
    moe: bool = False,
    groups: int = HEADS,
    dispatcher: str = "alltoall",
    qk_norm: bool = True,
    padded_vocabulary: int = VOCABULARY,
    rotary_base: int = ROTARY_BASE,
    **more: Any,
) -> Any:
    """A GPT model of this process's part of the mesh; joins the model-parallel groups. ``more``: config fields."""
    from megatron.core import parallel_state as groups_of
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups_of.destroy_model_parallel()
    expert_tp = {"expert_tensor_parallel_size": 1 if ep > 1 else tp} if moe else {}
    groups_of.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, **expert_tp
    )
    model_parallel_cuda_manual_seed(123)
    experts: dict[str, Any] = {}
    if moe:
        experts = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_ffn_hidden_size": EXPERT_WIDTH,
            "moe_token_dispatcher_type": dispatcher,
            "moe_grouped_gemm": False,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": False,
            "expert_model_parallel_size": ep,
            **expert_tp,
        }
    config = TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_query_groups": groups,
            "kv_channels": SIZE,
            "ffn_hidden_size": DENSE,
            "use_cpu_initialization": True,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": sequence_parallel,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "qk_layernorm": qk_norm,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "layernorm_epsilon": EPSILON,
            "pipeline_dtype": torch.float32,
            **experts,
            **more,
        }
    )
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if moe else None, moe_grouped_gemm=False, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    stage = groups_of.get_pipeline_model_parallel_rank()
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary,
        max_sequence_length=128,
        pre_process=stage == 0,
        post_process=stage == pp - 1,
        position_embedding_type="rope",
        rotary_base=rotary_base,
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    ).eval()


def random_hf_weights(*, moe: bool = False, groups: int = HEADS, qk_norm: bool = True) -> dict[str, torch.Tensor]:
    """Weights under the names of a transformers Qwen3 (or Qwen3-MoE, or Llama) model, from one seed."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(*shape, generator=draw) / shape[-1] ** 0.5
        return drawn

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=draw)

    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=draw), "lm_head.weight": normal(VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        weights[at + "input_layernorm.weight"] = gain(HIDDEN)
        weights[at + "post_attention_layernorm.weight"] = gain(HIDDEN)
        if qk_norm:
            weights[at + "self_attn.q_norm.weight"], weights[at + "self_attn.k_norm.weight"] = gain(SIZE), gain(SIZE)
        for name, heads in (("q", HEADS), ("k", groups), ("v", groups)):
            weights[f"{at}self_attn.{name}_proj.weight"] = normal(heads * SIZE, HIDDEN)
        weights[at + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * SIZE)
        if moe:
            weights[at + "mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
            weights[at + "mlp.experts.gate_up_proj"] = normal(EXPERTS, 2 * EXPERT_WIDTH, HIDDEN)
            weights[at + "mlp.experts.down_proj"] = normal(EXPERTS, HIDDEN, EXPERT_WIDTH)
        else:
            weights[at + "mlp.gate_proj.weight"], weights[at + "mlp.up_proj.weight"] = normal(DENSE, HIDDEN), normal(DENSE, HIDDEN)
            weights[at + "mlp.down_proj.weight"] = normal(HIDDEN, DENSE)
    weights["model.norm.weight"] = gain(HIDDEN)
    return weights


def load_hf(model: Any, weights: Weights, *, regroup: bool = True, expert_offset: int = 0) -> None:
    """Copy this process's part of ``weights`` into ``model``.

    Planted faults: ``regroup=False`` packs q, k and v one after another instead of per key-value group; ``expert_offset``
    gives every process the experts that many places further on."""
    from megatron.core import parallel_state as at

    tp, tp_rank = at.get_tensor_model_parallel_world_size(), at.get_tensor_model_parallel_rank()
    held = dict(model.named_parameters())
    groups = model.config.num_query_groups

    def rows(whole: torch.Tensor, size: int = tp, rank: int = tp_rank) -> torch.Tensor:
        return whole.chunk(size, 0)[rank]

    def columns(whole: torch.Tensor, size: int = tp, rank: int = tp_rank) -> torch.Tensor:
        return whole.chunk(size, 1)[rank]

    def put(name: str, value: torch.Tensor) -> None:
        if name in held:  # else another pipeline stage has it
            assert held[name].shape == value.shape, (name, held[name].shape, value.shape)
            held[name].data.copy_(value)

    def padded(table: torch.Tensor) -> torch.Tensor:
        missing = int(model.vocab_size) - len(table)
        return torch.cat([table, table.new_full((missing, table.shape[1]), 0.25)])

    put("embedding.word_embeddings.weight", rows(padded(weights["model.embed_tokens.weight"])))
    put("output_layer.weight", rows(padded(weights["lm_head.weight"])))
    put("decoder.final_layernorm.weight", weights["model.norm.weight"])
    for n, layer in enumerate(model.decoder.layers):
        hf, mcore = f"model.layers.{layer.layer_number - 1}.", f"decoder.layers.{n}."
        put(mcore + "input_layernorm.weight", weights[hf + "input_layernorm.weight"])
        put(mcore + "pre_mlp_layernorm.weight", weights[hf + "post_attention_layernorm.weight"])
        for name in "qk":
            if f"{hf}self_attn.{name}_norm.weight" in weights:
                put(f"{mcore}self_attention.{name}_layernorm.weight", weights[f"{hf}self_attn.{name}_norm.weight"])
        q, k, v = (weights[f"{hf}self_attn.{name}_proj.weight"].view(groups, -1, HIDDEN) for name in "qkv")
        packed = torch.cat([q, k, v], 1) if regroup else torch.cat([part.reshape(-1, HIDDEN) for part in (q, k, v)])
        put(mcore + "self_attention.linear_qkv.weight", rows(packed.reshape(-1, HIDDEN)))
        put(mcore + "self_attention.linear_proj.weight", columns(weights[hf + "self_attn.o_proj.weight"]))
        if hf + "mlp.gate.weight" not in weights:
            gate, up = rows(weights[hf + "mlp.gate_proj.weight"]), rows(weights[hf + "mlp.up_proj.weight"])
            put(mcore + "mlp.linear_fc1.weight", torch.cat([gate, up]))
            put(mcore + "mlp.linear_fc2.weight", columns(weights[hf + "mlp.down_proj.weight"]))
            continue
        put(mcore + "mlp.router.weight", weights[hf + "mlp.gate.weight"])
        local = EXPERTS // at.get_expert_model_parallel_world_size()
        etp, etp_rank = at.get_expert_tensor_parallel_world_size(), at.get_expert_tensor_parallel_rank()
        for j in range(local):
            expert = (at.get_expert_model_parallel_rank() * local + j + expert_offset) % EXPERTS
            gate, up = weights[hf + "mlp.experts.gate_up_proj"][expert].chunk(2, 0)
            name = f"{mcore}mlp.experts.local_experts.{j}."
            put(name + "linear_fc1.weight", torch.cat([rows(gate, etp, etp_rank), rows(up, etp, etp_rank)]))
            put(name + "linear_fc2.weight", columns(weights[hf + "mlp.experts.down_proj"][expert], etp, etp_rank))
