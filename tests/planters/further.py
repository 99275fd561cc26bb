"""Faults that the tool was not tuned on: other models, layers, sizes and dtypes than those of the catalogue."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.planters import plant, tiny
from tests.planters.core import CORRECT, NORMAL, QUANT, WEIGHT, Registry, bf16, f32, same_inputs
from tests.planters.inputs import one

FURTHER = Registry()
fault = FURTHER.fault
f16 = torch.float16
WIDE = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)


@fault(
    "N01",
    "rope",
    "llama",
    bf16,
    first=("layers.3.attn.q_rope",),
    klass=(CORRECT,),
    tokens="all but 0",
    says=r"A rotates pairs \(i, i\+8\) of every 16 columns, B pairs \(2i, 2i\+1\)",
)
def f(dt):
    """interleaved pairing in layer 3"""
    a, b = tiny.pair("llama", dt, **WIDE)

    def rotate(q, k, cos, sin):
        def turn(x):
            half = x.shape[-1] // 2
            c, s = cos[:, None, :, :half], sin[:, None, :, :half]
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

        return turn(q), turn(k)

    plant.attention(tiny.attn(b, 3), rotate=rotate)
    return same_inputs(a, b, one(tiny.ids(3, 40, seed=11)))


@fault(
    "N02",
    "rope",
    "mistral",
    f32,
    first=("layers.2.attn.q_rope",),
    klass=(CORRECT,),
    tokens="all but 0",
    says=r"rotary base is about 1e\+04 on A and 5e\+05 on B|rotary base is about 9\.\d+e\+03 on A and [45]\.\d+e\+05 on B",
)
def f(dt):
    """another rotary base in layer 2"""
    a, b = tiny.pair("mistral", dt, **WIDE, head_dim=32)

    def rope(cos, sin):
        inverse = 5e5 ** (-torch.arange(0, cos.shape[-1], 2) / cos.shape[-1])
        angle = torch.arange(cos.shape[1])[:, None] * inverse
        angle = torch.cat((angle, angle), -1)[None]
        return angle.cos().to(cos.dtype), angle.sin().to(sin.dtype)

    plant.attention(tiny.attn(b, 2), rope=rope)
    return same_inputs(a, b, one(tiny.ids(1, 120, seed=12)))


@fault(
    "N03",
    "residual",
    "qwen2",
    bf16,
    first=("layers.2.attn.residual",),
    klass=(CORRECT,),
    says=r"layers\.2\.attn\.out: A adds it times 1, B times 0\.5",
)
def f(dt):
    """attention added at half its size"""
    a, b = tiny.pair("qwen2", dt, **WIDE)
    layer = tiny.layers(b)[2]

    def forward(hidden_states, **kw):
        h = hidden_states + 0.5 * layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kw)[0]
        return h + layer.mlp(layer.post_attention_layernorm(h))

    layer.forward = forward
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=13)))


@fault("N04", "MoE", "mixtral", bf16, first=("layers.1.moe.topk_weights",), klass=(CORRECT,), says=r"one ratio per row")
def f(dt):
    """routing weights not renormalised, 20 experts"""
    a, b = tiny.pair("mixtral", dt, num_local_experts=20, num_hidden_layers=3)
    router = tiny.layers(b)[1].mlp.gate

    def unscaled(logits, module):
        weights, ids = logits.float().softmax(-1).topk(2, dim=-1)
        return logits, weights.to(logits.dtype), ids

    plant.softmax_router(router, unscaled)
    return same_inputs(a, b, one(tiny.ids(2, 56, seed=14)))


@fault("N05", "MoE", "olmoe", f32, first=("layers.2.moe.router_logits",), klass=(CORRECT,), says=r"B is A rounded once to bfloat16")
def f(dt):
    """router logits through bfloat16, 40 experts, in a float32 model"""
    a, b = tiny.pair("olmoe", dt, num_experts=40, num_experts_per_tok=4)
    router = tiny.layers(b)[2].mlp.gate
    orig = router.forward

    def forward(h):
        logits, _, _ = orig(h)
        logits = logits.bfloat16().float()
        weights, ids = logits.softmax(-1).topk(4, dim=-1)
        return logits, weights, ids

    router.forward = forward
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=15)))


@fault("N06", "attention", "qwen3", f32, first=("layers.4.attn.core",), klass=(CORRECT,), says=r"only columns 32\.\.47 of 128 differ")
def f(dt):
    """one head of eight is zero"""
    a, b = tiny.pair("qwen3", dt, **WIDE)

    def core(out, q, k, m):
        out = out.clone()
        out[:, :, 2] = 0
        return out

    plant.attention(tiny.attn(b, 4), core=core)
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=16)))


@fault("N07", "head", "gemma2", bf16, first=("lm_head",), klass=(CORRECT,), says=r"softcap|survives in float32")
def f(dt):
    """final softcap left out"""
    a, b = tiny.pair("gemma2", dt)
    b.config.final_logit_softcapping = None
    b.lm_head.weight.data *= 1
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=17)))


@fault("N08", "MoE", "qwen3_moe", f32, first=("layers.2.moe.combine",), klass=(CORRECT,), tokens="some", says=r"expert 5\b")
def f(dt):
    """expert 5 of 32 gives 1.1 times what it should"""
    a, b = tiny.pair("qwen3_moe", dt, num_experts=32, num_experts_per_tok=4)
    for model, factor in ((a, 1.0), (b, 1.1)):
        plant.experts(tiny.layers(model)[2].mlp.experts, per_expert=lambda e, y, *_, factor=factor: y * factor if e == 5 else y)
    return same_inputs(a, b, one(tiny.ids(2, 56, seed=18)))


@fault("N09", "norm", "llama", f16, first=("layers.1.attn.norm",), klass=(CORRECT,), says=r"one ratio per row.*always below 1")
def f(dt):
    """norm eps 1e-3 for 1e-5, float16"""
    a, b = tiny.pair("llama", dt, init="D", **WIDE)
    tiny.layers(b)[1].input_layernorm.variance_epsilon = 1e-3
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=19)))


@fault(
    "N10",
    "MoE",
    "qwen2_moe",
    f32,
    first=("layers.2.moe.combine", "layers.2.moe.shared_out"),
    klass=(CORRECT,),
    says=r"B times one number per row, the layers\.2\.moe\.shared_gate",
)
def f(dt):
    """shared gate without its sigmoid, 24 experts"""
    a, b = tiny.pair("qwen2_moe", dt, num_experts=24, num_experts_per_tok=3)
    s = tiny.layers(b)[2].mlp

    def forward(hidden_states):
        h = hidden_states.view(-1, hidden_states.shape[-1])
        shared, (_, w, i) = s.shared_expert(h), s.gate(h)
        return (s.experts(h, i, w) + s.shared_expert_gate(h) * shared).reshape(hidden_states.shape)

    s.forward = forward
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=20)))


@fault(
    "N11",
    "mlp",
    "qwen3",
    bf16,
    first=("layers.3.mlp.act",),
    klass=(CORRECT,),
    says=r"A computes silu of gate times up, B exact GELU of gate times up",
)
def f(dt):
    """GELU for SiLU in layer 3"""
    a, b = tiny.pair("qwen3", dt, **WIDE)
    tiny.layers(b)[3].mlp.act_fn = torch.nn.GELU()
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=21)))


@fault("N12", "attention", "olmo2", bf16, first=("layers.1.attn.core",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """the first token is masked away"""
    a, b = tiny.pair("olmo2", dt, **WIDE)

    def mask(m, q_len, k_len):
        m = m.clone()
        m[..., 1:, 0] = torch.finfo(m.dtype).min
        return m

    plant.attention(tiny.attn(b, 1), mask=mask)
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=22)))


@fault(
    "N13",
    "quantization",
    "qwen3",
    bf16,
    first=("layers.2.mlp.down.weight",),
    klass=(QUANT,),
    says=r"B lies on the int8 grid times one scale per row",
)
def f(dt):
    """int8 per row, one projection, declared"""
    a, b = tiny.pair("qwen3", dt, **WIDE)
    w = tiny.layers(b)[2].mlp.down_proj.weight
    scale = w.data.float().abs().amax(1, keepdim=True) / 127
    w.data = ((w.data.float() / scale).round().clamp(-127, 127) * scale).to(w.dtype)
    b.config.quantization_config = {"quant_method": "int8", "granularity": "channel"}
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=23)))


@fault(
    "N14",
    "quantization",
    "llama",
    bf16,
    first=("layers.0.attn.q.weight",),
    klass=(WEIGHT,),
    says=r"e4m3 grid times one scale per tensor, but only \d+% of its values",
)
def f(dt):
    """declared e4m3 weights with the scale of another tensor: on a grid, and not A's values"""
    a, b = tiny.pair("llama", dt, **WIDE)
    for n, p in b.named_parameters():
        if "_proj" in n:
            scale = p.data.float().abs().max() / 448
            p.data = ((p.data.float() / scale).to(torch.float8_e4m3fn).float() * scale * 1.25).to(p.dtype)
    b.config.quantization_config = {"quant_method": "fp8", "fmt": "e4m3"}
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=24)))


@fault("N15", "control", "mistral", bf16, first=("layers.2.mlp.gate_up",), klass=(NORMAL,), effect="rounding")
def f(dt):
    """a projection summed in two halves"""
    a, b = tiny.pair("mistral", dt, **WIDE)
    linear = tiny.layers(b)[2].mlp.gate_proj

    def halves(orig, x):
        n = x.shape[-1] // 2
        return F.linear(x[..., :n], linear.weight[:, :n]) + F.linear(x[..., n:], linear.weight[:, n:])

    plant.around(linear, halves)
    return same_inputs(a, b, one(tiny.ids(2, 40, seed=25)))
