"""A tiny real Qwen3-MoE, and faults to plant in its twin: the two sides that ``tracer demo`` compares.

Both sides are built from one seed and are bitwise equal until a fault is planted. The initialisation is
stronger than the library's own: with its near-zero scores and unit norms many faults would not show.
Faults sit on module instances, as a wrong engine would compute, never in hooks.

Shape suffixes: T tokens of a forward, E experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracer.errors import Code, HostError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["FAULTS", "DemoFault", "Pair", "build_pair", "find_fault"]

LENGTHS = (48, 43)
"""Tokens of the two prompts; the shorter one is padded on the left."""


@dataclass
class Pair:
    """The two models, and the keyword arguments each of them is called with."""

    a: Any
    b: Any
    inputs_a: dict[str, torch.Tensor]
    inputs_b: dict[str, torch.Tensor]


@dataclass(frozen=True)
class DemoFault:
    """One thing that can be wrong with side B.

    ``first``: where a diff at level 0, 1 and 2 must find it (``fnmatch`` patterns); a coarse level sees a
    fault inside a block only at the block's next recorded boundary. Empty where nothing differs.
    """

    name: str
    what: str
    first: tuple[str, str, str]
    plant: Callable[[Pair], None]

    def expected_at(self, level: int) -> str:
        """Where the fault must be found at this level; empty where nothing differs."""
        return self.first[min(max(level, 0), 2)]


def _scale_attention(pair: Pair) -> None:
    pair.b.model.layers[2].self_attn.scaling *= 1.05


def _keep_routing_weights(pair: Pair) -> None:
    pair.b.model.layers[2].mlp.gate.norm_topk_prob = False


def _miss_an_update(pair: Pair) -> None:
    down_EDI = pair.b.model.layers[1].mlp.experts.down_proj.data
    down_EDI[5] = (down_EDI[5].float() * 0.99).to(down_EDI.dtype)


def _count_padding(pair: Pair) -> None:
    del pair.inputs_b["position_ids"]


def _scale_rope(pair: Pair) -> None:
    pair.b.model.rotary_emb.attention_scaling = 1.4159


def _add_experts_twice(pair: Pair) -> None:
    block = pair.b.model.layers[1].mlp
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def _break_ties_apart(pair: Pair) -> None:
    for model, prefer_high in ((pair.a, False), (pair.b, True)):
        router = model.model.layers[1].mlp.gate
        router.weight.data[5] = router.weight.data[2]
        router.forward = _tie_breaking_router(router, prefer_high)


def _tie_breaking_router(router: Any, prefer_high: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A router forward that sends equal scores to the lowest expert id, or to the highest. Both are valid top-k."""
    import torch

    def forward(hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE = torch.nn.functional.linear(hidden_TD.reshape(-1, router.hidden_dim), router.weight)
        scores_TE = logits_TE.float().softmax(-1)
        order_TE = scores_TE.flip(-1) if prefer_high else scores_TE
        ids_TK = order_TE.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
        ids_TK = router.num_experts - 1 - ids_TK if prefer_high else ids_TK
        weights_TK = scores_TE.gather(1, ids_TK)
        return logits_TE, (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype), ids_TK

    return forward


def _use_another_kernel(pair: Pair) -> None:
    pair.b.set_attn_implementation("sdpa")


def _plant_nothing(pair: Pair) -> None:
    del pair


_FAULTS = (
    DemoFault(
        "attention-scale",
        "the softmax scale of layer 2's attention is 5 % too large",
        ("layers.2.residual", "layers.2.attn.out", "layers.2.attn.core"),
        _scale_attention,
    ),
    DemoFault(
        "routing-weights",
        "layer 2 does not renormalise the weights of the chosen experts",
        ("layers.2.residual", "layers.2.moe.topk_weights", "layers.2.moe.topk_weights"),
        _keep_routing_weights,
    ),
    DemoFault(
        "stale-expert",
        "expert 5 of layer 1 missed the last weight update: its down projection is 1 % off",
        ("layers.1.moe.experts.5.down.weight",) * 3,
        _miss_an_update,
    ),
    DemoFault(
        "left-padding",
        "side B forgets position ids, so the left-padded prompt counts its padding",
        ("input.positions",) * 3,
        _count_padding,
    ),
    DemoFault(
        "rope-factor",
        "the rotary embedding is multiplied by an attention factor of 1.4159 that the checkpoint does not have",
        ("layers.0.residual", "layers.0.attn.out", "layers.0.attn.[qk]_rope"),
        _scale_rope,
    ),
    DemoFault(
        "experts-twice",
        "the expert output of layer 1 is reduced twice, so it is doubled",
        ("layers.1.residual", "layers.1.moe.combine", "layers.1.moe.combine"),
        _add_experts_twice,
    ),
    DemoFault(
        "tie",
        "two experts of layer 1 score exactly the same (on both sides); A takes the lower id, B the higher",
        ("layers.1.residual", "layers.1.moe.topk_ids", "layers.1.moe.topk_ids"),
        _break_ties_apart,
    ),
    DemoFault(
        "other-kernel",
        "nothing is wrong: B computes attention with another kernel (sdpa, A: eager), which rounds differently",
        ("layers.0.residual", "layers.0.attn.out", "layers.0.attn.core"),
        _use_another_kernel,
    ),
    DemoFault("none", "nothing is wrong: both sides are the same", ("", "", ""), _plant_nothing),
)

FAULTS: Mapping[str, DemoFault] = {fault.name: fault for fault in _FAULTS}
"""The faults by name, in the order they are listed."""


def find_fault(name: str) -> DemoFault:
    """The fault of that name. Raises ``UsageError`` (bad-argument) with the names there are."""
    if name not in FAULTS:
        raise UsageError(
            Code.BAD_ARGUMENT,
            f"there is no fault called {name!r}",
            expected=", ".join(FAULTS),
            found=name,
            remedy="tracer demo --fault list prints what each of them does",
        )
    return FAULTS[name]


def build_pair(fault: DemoFault, *, seed: int = 7) -> Pair:
    """Two models of one seed (bfloat16, 4 layers, 8 experts, 2 per token) on the CPU, with ``fault`` planted in B.

    Raises ``HostError`` (host-missing-package) where transformers is not installed.
    """
    pair = Pair(_build_model(seed), _build_model(seed), _batch(seed), _batch(seed))
    fault.plant(pair)
    return pair


def _build_model(seed: int) -> Any:
    import torch

    try:
        import transformers
    except ImportError as error:
        raise HostError(
            Code.HOST_MISSING_PACKAGE,
            "the demo needs transformers, which is not installed",
            found=str(error),
            remedy="pip install 'boundary-tracer[transformers]'",
        ) from error
    config_class: Any = transformers.Qwen3MoeConfig
    config = config_class(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif "embed_tokens" not in name:
            noise = noise * parameter.shape[-1] ** -0.5
        parameter.data = noise.to(torch.bfloat16)
    return model


def _batch(seed: int) -> dict[str, torch.Tensor]:
    """Two random prompts, left-padded, with the positions a careful caller passes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    length = max(LENGTHS)
    input_ids = torch.randint(3, 512, (len(LENGTHS), length), generator=generator)
    attention_mask = torch.stack([(torch.arange(length) >= length - tokens).long() for tokens in LENGTHS])
    return {
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }
