"""The planters behind faults.md: each builds both sides of one row. The records are core.py's."""
from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from tests.planters import plant, tiny

from tests.planters.core import CORRECT, DISCRETE, INPUT, NORMAL, QUANT, UNLOC, WEIGHT, Registry, bf16, f32, same_inputs
from tests.planters.inputs import Inputs, chunks, left_padded, one
from tests.planters.scoring import PROMPT, lp, record, score_records

FAULTS = Registry()
fault = FAULTS.fault
DUAL = "both"


def padded_pair():
    x = tiny.ids(2, 48)
    return [x[0], x[1, :43]]


def decode(rows, steps, shared):
    """Left-padded prefill, then `steps` cached decode calls; shared=True gives every row the cache length as position."""
    pre = left_padded([r[:-steps] for r in rows]).calls[0]
    calls = [pre]
    n, mask, length = pre["input_ids"].shape[1], pre["attention_mask"], [len(r) - steps for r in rows]
    for s in range(steps):
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], 1)
        pos = torch.tensor([[n + s] if shared else [length[i] + s] for i in range(len(rows))])
        calls.append(dict(input_ids=torch.stack([r[len(r) - steps + s] for r in rows])[:, None], attention_mask=mask, position_ids=pos))
    return Inputs(calls, cached=True)


# ---------------------------------------------------------------- input
@fault("F01", "input", "qwen3", bf16, first=("input.positions",), klass=(INPUT,), tokens="some")
def f(dt):
    """left-pad rope"""
    a, b = tiny.pair("qwen3", dt)
    return a, b, left_padded(padded_pair()), left_padded(padded_pair(), positions=False)


@fault("F02", "input", "gpt2", bf16, optional=True, first=("input.positions",), klass=(INPUT,), tokens="some")
def f(dt):
    """left-pad absolute"""
    a, b = tiny.pair("gpt2", dt)
    return a, b, left_padded(padded_pair()), left_padded(padded_pair(), positions=False)


@fault("F03", "input", "qwen3", bf16, first=("input.positions",), klass=(INPUT,), tokens="from 37")
def f(dt):
    """decode shared position"""
    a, b = tiny.pair("qwen3", dt)
    r = padded_pair()
    return a, b, decode(r, 6, False), decode(r, 6, True)


def packed(x):
    n = x.shape[1]
    return dict(input_ids=x.reshape(1, -1), position_ids=torch.arange(n).repeat(x.shape[0])[None])


@fault("F04", "input", "qwen3", bf16, first=("layers.0.attn.core",), klass=(INPUT,), tokens="from 48")
def f(dt):
    """packed with all-ones mask"""
    a, b = tiny.pair("qwen3", dt)
    c = packed(tiny.ids())
    return a, b, Inputs([c]), Inputs([dict(c, attention_mask=torch.ones(1, 96, dtype=torch.long))])


@fault("F06", "input", "qwen3", bf16, first=("input.ids",), klass=(INPUT,), effect="input")
def f(dt):
    """retokenised"""
    a, b = tiny.pair("qwen3", dt)
    x = tiny.ids(1, 48)
    y = torch.cat([x[:, :20], torch.tensor([[99]]), x[:, 22:]], 1)
    return a, b, one(x), one(y)


@fault("F05", "input", "qwen3", bf16, first=("input.positions",), klass=(INPUT,), tokens="from 48")
def f(dt):
    """packed positions run on, second rope fault"""
    a, b = tiny.pair("qwen3", dt)
    c = packed(tiny.ids())
    at = tiny.attn(b, 0)

    def qk(q, k, pos):
        q = q.clone()
        q[:, :, 48:] = torch.cat([q[:, :, 48:, 8:], q[:, :, 48:, :8]], -1)
        return q, k
    plant.attention(at, qk=qk)
    return a, b, Inputs([c]), Inputs([dict(c, position_ids=torch.arange(96)[None])])


@fault("F05b", "rope", "qwen3", bf16, first=("layers.0.attn.q_rope",), klass=(CORRECT,), tokens="from 48")
def f(dt):
    """the same, positions forced equal"""
    a, b, xa, _ = FAULTS["F05"].build(dt)
    return a, b, xa, xa


@fault("F08", "input", "qwen3", bf16, first=("layers.0.attn.core",), klass=(INPUT,), tokens="all")
def f(dt):
    """attention dropout"""
    a = tiny.make("qwen3", dt)
    b = tiny.make("qwen3", dt, attention_dropout=0.1).train()
    torch.manual_seed(3)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F07", "input", "qwen3", bf16, first=("input.ids",), klass=(INPUT,), effect="input")
def f(dt):
    """stale draft ids"""
    a, b = tiny.pair("qwen3", dt)
    x = tiny.ids(2, 40)
    y = x.clone()
    y[1, 37:] = 17
    return a, b, chunks(x, [34] + [1] * 6), chunks(y, [34] + [1] * 6)


# ---------------------------------------------------------------- weights
@fault("F09", "weights", "qwen3", bf16, first=("embedding*", "*.weight"), klass=(WEIGHT,), weights=("*",))
def f(dt):
    """not synced"""
    a, b = tiny.pair("qwen3", dt)
    m = tiny.make("qwen3", f32)
    for p in m.parameters():
        p.requires_grad_(True)
    x = tiny.ids()
    m(input_ids=x, labels=x, use_cache=False).loss.backward()
    for p, q in zip(b.parameters(), m.parameters()):
        p.data = (p.data.float() - 0.1 * q.grad).to(dt)
    return same_inputs(a, b, one(x))


@fault("F10", "weights", "qwen3", bf16, first=("*inv_freq*", "layers.0.attn.[qk]_rope"), klass=(WEIGHT, CORRECT), tokens="all but 0")
def f(dt):
    """inv_freq lost"""
    a, b = tiny.pair("qwen3", dt)
    b.model.rotary_emb.inv_freq.zero_()
    return same_inputs(a, b, one(tiny.ids()))


@fault("F18", "layout", "qwen3", bf16, first=("layers.1.attn.[qkv].weight", "layers.1.attn.[qk]"), klass=(WEIGHT,),
       weights=("model.layers.1.self_attn.[qkv]_proj.weight",))
def f(dt):
    """qkv group layout"""
    a, b = tiny.pair("qwen3", dt)
    s = tiny.attn(b, 1)
    r = torch.cat([s.q_proj.weight.data, s.k_proj.weight.data, s.v_proj.weight.data]).split(16)
    s.q_proj.weight.data = torch.cat([r[0], r[1], r[4], r[5]])
    s.k_proj.weight.data = torch.cat([r[2], r[6]])
    s.v_proj.weight.data = torch.cat([r[3], r[7]])
    return same_inputs(a, b, one(tiny.ids()))


def delta(shape, rank, seed, scale):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape[0], rank, generator=g) @ torch.randn(rank, shape[1], generator=g)


@fault("F11", "weights", "qwen3", bf16, first=("layers.2.mlp.up*", "layers.2.mlp.gate_up*"), klass=(WEIGHT,),
       weights=("model.layers.2.mlp.up_proj.weight",))
def f(dt):
    """gate adapter in up slot"""
    a, b = tiny.pair("qwen3", dt)
    dg, du = delta((128, 64), 8, 1, 0.01), delta((128, 64), 8, 2, 0.01)
    for m, d in ((a, du), (b, dg)):
        mlp = m.model.layers[2].mlp
        mlp.gate_proj.weight.data = (mlp.gate_proj.weight.data.float() + dg).to(dt)
        mlp.up_proj.weight.data = (mlp.up_proj.weight.data.float() + d).to(dt)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F12", "weights", "qwen3", bf16, first=("layers.0.attn.q.weight", "layers.0.attn.q"), klass=(WEIGHT,),
       weights=("model.layers.*.self_attn.q_proj.weight",))
def f(dt):
    """rank-stabilised scale ignored"""
    a, b = tiny.pair("qwen3", dt)
    for i in range(4):
        d = delta((64, 64), 8, 10 + i, 0.005)
        for m, s in ((a, 16 / 8 ** 0.5), (b, 16 / 8)):
            w = tiny.attn(m, i).q_proj.weight
            w.data = (w.data.float() + s * d).to(dt)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F13", "weights", "qwen3", bf16, first=("lm_head.weight", "lm_head"), klass=(WEIGHT,))
def f(dt):
    """tied head not tied"""
    a, b = tiny.pair("qwen3", dt, tie_word_embeddings=True)
    b.lm_head.weight = torch.nn.Parameter((torch.randn(512, 64, generator=torch.Generator().manual_seed(1)) / 8).to(dt), requires_grad=False)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F14", "weights", "qwen3_moe", bf16, first=("layers.2.moe.router*", "layers.2.moe.gate.weight"), klass=(WEIGHT,), weights=("model.layers.2.mlp.gate.weight",))
def f(dt):
    """router zeroed"""
    a, b = tiny.pair("qwen3_moe", dt)
    b.model.layers[2].mlp.gate.weight.data.zero_()
    return same_inputs(a, b, one(tiny.ids()))


@fault("F15", "weights", "qwen2_moe", bf16, first=("layers.2.attn.q.bias", "layers.2.attn.q"), klass=(WEIGHT,), weights=("model.layers.2.self_attn.q_proj.bias",))
def f(dt):
    """q bias dropped"""
    a, b = tiny.pair("qwen2_moe", dt)
    tiny.attn(b, 2).q_proj.bias.data.zero_()
    return same_inputs(a, b, one(tiny.ids()))


@fault("F16", "weights", "gemma2", bf16, first=("layers.1.attn.norm.weight", "layers.1.attn.norm"), klass=(WEIGHT,), weights=("model.layers.1.input_layernorm.weight",))
def f(dt):
    """norm +1 folded twice"""
    a, b = tiny.pair("gemma2", dt)
    b.model.layers[1].input_layernorm.weight.data += 1
    return same_inputs(a, b, one(tiny.ids()))


@fault("F17", "weights", "deepseek_v3", f32, first=("layers.1.moe.*bias*", "layers.1.moe.topk_ids", "layers.1.moe.topk_weights"), klass=(WEIGHT,), tokens="some")
def f(dt):
    """correction bias rounded"""
    a, b = tiny.pair("deepseek_v3", dt)
    for m in (a, b):
        for layer in m.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias += 7
            if m is b:
                layer.mlp.gate.e_score_correction_bias.copy_(layer.mlp.gate.e_score_correction_bias.to(bf16).float())
    return same_inputs(a, b, one(tiny.ids()))


@fault("F19", "layout", "qwen3_moe", bf16, first=("layers.1.moe.router*", "layers.1.moe.gate.weight", "layers.1.moe.expert*"), klass=(WEIGHT,),
       weights=("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.*"))
def f(dt):
    """experts and router relabelled"""
    a, b = tiny.pair("qwen3_moe", dt)
    m, p = b.model.layers[1].mlp, torch.tensor([3, 0, 5, 1, 7, 2, 4, 6])
    m.gate.weight.data = m.gate.weight.data[p]
    m.experts.gate_up_proj.data, m.experts.down_proj.data = m.experts.gate_up_proj.data[p], m.experts.down_proj.data[p]
    return same_inputs(a, b, one(tiny.ids()))


# ---------------------------------------------------------------- norm, embedding
@fault("F20", "norm", "qwen3", f32, first=("layers.0.attn.norm",), klass=(CORRECT,))
def f(dt):
    """low-precision variance, outlier channel"""
    a, b = tiny.pair("qwen3", dt)
    for m in (a, b):
        m.model.embed_tokens.weight.data[:, 17] *= 200
    for n in tiny.norms(b):
        def fn(x, w, eps):
            h = x.float()
            return w * (h * torch.rsqrt(h.to(bf16).pow(2).mean(-1, keepdim=True).float() + eps)).to(x.dtype)
        plant.rms_norm(n, fn)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F21", "norm", "deepseek_v3", f32, first=("layers.1.attn.latent_norm",), klass=(CORRECT,))
def f(dt):
    """latent norm eps"""
    a, b = tiny.pair("deepseek_v3", dt, init="D")
    tiny.attn(b, 1).kv_a_layernorm.variance_epsilon = 1e-4
    return same_inputs(a, b, one(tiny.ids()))


@fault("F22", "norm", "gemma2", bf16, first=("embedding",), klass=(CORRECT,), effect="biased rounding", tokens="all")
def f(dt):
    """embedding normaliser not rounded"""
    a, b = tiny.pair("gemma2", dt)
    e = b.model.embed_tokens
    plant.around(e, lambda orig, ids: (F.embedding(ids, e.weight).float() * 48 ** 0.5).to(e.weight.dtype))
    return same_inputs(a, b, one(tiny.ids()))


# ---------------------------------------------------------------- rope
@fault("F23", "rope", "qwen3", f32, first=("layers.0.attn.q_rope",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """phases in bfloat16"""
    a, b = tiny.pair("qwen3", dt)
    r = b.model.rotary_emb

    def forward(orig, x, position_ids):
        p = (position_ids[..., None].to(bf16) * r.inv_freq.to(bf16)).float()
        e = torch.cat((p, p), -1)
        return e.cos().to(x.dtype), e.sin().to(x.dtype)
    plant.around(r, forward)
    return same_inputs(a, b, one(tiny.ids(1, 300)))


@fault("F24", "rope", "qwen3", bf16, first=("layers.0.attn.q_rope",), klass=(CORRECT,))
def f(dt):
    """attention factor"""
    a, b = tiny.pair("qwen3", dt)
    b.model.rotary_emb.attention_scaling = 1.4159
    return same_inputs(a, b, one(tiny.ids()))


@fault("F25", "rope", "gemma2", bf16, first=("layers.1.attn.q_rope",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """scaling on global layers only"""
    a, b = tiny.pair("gemma2", dt)

    def rope(cos, sin):
        p = torch.arange(cos.shape[1])[:, None] / 8.0 * a.model.rotary_emb.inv_freq
        e = torch.cat((p, p), -1)[None]
        return e.cos().to(cos.dtype), e.sin().to(sin.dtype)
    for i in (1, 3):
        plant.attention(tiny.attn(a, i), rope=rope)
    return same_inputs(a, b, one(tiny.ids(1, 200)))


@fault("F26", "rope", "qwen3", bf16, first=("layers.0.attn.q_rope",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """interleaved pairing"""
    a, b = tiny.pair("qwen3", dt)

    def rotate(q, k, cos, sin):
        h = cos.shape[-1] // 2
        c, s = cos[:, None, :, :h], sin[:, None, :, :h]

        def r(x):
            x1, x2 = x[..., 0::2], x[..., 1::2]
            return torch.stack([x1 * c - x2 * s, x2 * c + x1 * s], -1).flatten(-2)
        return r(q), r(k)
    for i in range(4):
        plant.attention(tiny.attn(b, i), rotate=rotate)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F27", "rope", "qwen3", bf16, first=("layers.1.attn.q_norm", "layers.1.attn.q_rope"), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """rotate before norm"""
    a, b = tiny.pair("qwen3", dt)
    plant.attention(tiny.attn(b, 1), order="rope_norm")
    return same_inputs(a, b, one(tiny.ids()))


@fault("F28", "rope", "qwen3", bf16, first=("layers.1.attn.q_norm", "layers.1.attn.q_rope"), klass=(NORMAL,), tokens="all but 0")
def f(dt):
    """rotate before norm, unit weights"""
    a, b = tiny.pair("qwen3", dt)
    for m in (a, b):
        tiny.attn(m, 1).q_norm.weight.data.fill_(1)
        tiny.attn(m, 1).k_norm.weight.data.fill_(1)
    plant.attention(tiny.attn(b, 1), order="rope_norm")
    return same_inputs(a, b, one(tiny.ids()))


# ---------------------------------------------------------------- attention
@fault("F29", "attention", "gemma2", bf16, first=("layers.0.attn.core",), klass=(CORRECT,), tokens="from 8")
def f(dt):
    """window 8 -> 9"""
    return same_inputs(tiny.make("gemma2", dt), tiny.make("gemma2", dt, sliding_window=9), one(tiny.ids()))


@fault("F30", "attention", "gemma2", f32, first=("layers.0.attn.core",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """softcap dropped"""
    a, b = tiny.pair("gemma2", dt)
    for i in range(4):
        tiny.attn(b, i).attn_logit_softcapping = None
    return same_inputs(a, b, one(tiny.ids()))


@fault("F31", "attention", "qwen3", bf16, first=("layers.2.attn.core",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """scale x 1.05"""
    a, b = tiny.pair("qwen3", dt)
    tiny.attn(b, 2).scaling *= 1.05
    return same_inputs(a, b, one(tiny.ids()))


@fault("F32", "attention", "deepseek_v3", f32, first=("layers.0.attn.core",), klass=(CORRECT,), tokens="all but 0")
def f(dt):
    """MLA scale x 1.59"""
    a, b = tiny.pair("deepseek_v3", dt)
    for i in range(4):
        tiny.attn(b, i).scaling *= 1.59
    return same_inputs(a, b, one(tiny.ids()))


@fault("F33", "attention", "qwen3_next", bf16, optional=True, first=("layers.0.linear_attn.core",), klass=(CORRECT,), tokens="from 16", threshold=5e-6)
def f(dt):
    """state transposed between chunks"""
    a, b = tiny.pair("qwen3_next", dt)
    la = b.model.layers[0].linear_attn

    def forward(orig, *args, **kw):
        cache = kw.get("cache", kw.get("past_key_values"))
        st = cache.get_recurrent_state(la.layer_idx, state_idx=0) if cache is not None else None
        if st is not None:
            st.copy_(st.transpose(-1, -2).clone())
        return orig(*args, **kw)
    plant.around(la, forward)
    x = tiny.ids(2, 48)
    return a, b, one(x), chunks(x, [16, 32])


# ---------------------------------------------------------------- MoE, mlp
@fault("F34", "MoE", "qwen3_moe", bf16, first=("layers.2.moe.topk_weights",), klass=(CORRECT,))
def f(dt):
    """renormalisation missing"""
    a, b = tiny.pair("qwen3_moe", dt)
    b.model.layers[2].mlp.gate.norm_topk_prob = False
    return same_inputs(a, b, one(tiny.ids()))


@fault("F35", "MoE", "deepseek_v3", f32, first=("layers.1.moe.topk_weights",), klass=(CORRECT,))
def f(dt):
    """scaling factor twice"""
    a, b = tiny.pair("deepseek_v3", dt)
    for layer in b.model.layers[1:]:
        layer.mlp.gate.routed_scaling_factor *= 2.5
    return same_inputs(a, b, one(tiny.ids()))


@fault("F36", "MoE", "qwen3_moe", bf16, first=("layers.0.moe.topk_ids", "layers.0.moe.topk_weights"), klass=(DISCRETE,), tokens="some")
def f(dt):
    """exact ties"""
    a, b = tiny.pair("qwen3_moe", dt)
    for m, flip in ((a, False), (b, True)):
        for layer in m.model.layers:
            layer.mlp.gate.weight.data[5] = layer.mlp.gate.weight.data[2]

            def fn(z, g, flip=flip):
                p = z.float().softmax(-1)
                q = p.flip(-1) if flip else p
                i = torch.sort(q, dim=-1, descending=True, stable=True)[1][:, :g.top_k]
                i = p.shape[-1] - 1 - i if flip else i
                w = p.gather(1, i)
                return z, (w / w.sum(-1, keepdim=True)).to(z.dtype), i
            plant.softmax_router(layer.mlp.gate, fn)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F37", "MoE", "qwen2_moe", bf16, first=("layers.1.moe.combine", "layers.1.moe.shared_out"), klass=(CORRECT,))
def f(dt):
    """shared gate dropped"""
    a, b = tiny.pair("qwen2_moe", dt)
    s = b.model.layers[1].mlp

    def forward(hidden_states):
        h = hidden_states.view(-1, hidden_states.shape[-1])
        shared, (_, w, i) = s.shared_expert(h), s.gate(h)
        s.shared_expert_gate(h)
        return (s.experts(h, i, w) + shared).reshape(hidden_states.shape)
    s.forward = forward
    return same_inputs(a, b, one(tiny.ids()))


@fault("F38", "MoE", "qwen3_moe", bf16, first=("layers.0.moe.combine",), klass=(CORRECT,))
def f(dt):
    """expert output reduced twice"""
    a, b = tiny.pair("qwen3_moe", dt)
    for layer in b.model.layers:
        plant.output(layer.mlp, lambda y: y * 2)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F39", "MoE", "qwen3_moe", bf16, first=("layers.0.moe.expert_out", "layers.0.moe.combine"), klass=(CORRECT,), tokens="some")
def f(dt):
    """combine with dispatched ids"""
    a, b = tiny.pair("qwen3_moe", dt)
    for layer in b.model.layers:
        def forward(orig, h, ids, w):
            away = (ids // 2 != (torch.arange(len(ids)) % 4)[:, None]).all(-1)      # both experts on another of four ranks
            w = torch.where(away[:, None], w.flip(-1), w)
            return orig(h, ids, w)
        plant.around(layer.mlp.experts, forward)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F40", "MoE", "qwen3_moe", bf16, first=("layers.1.moe.topk_ids", "layers.1.moe.topk_weights"), klass=(DISCRETE,), tokens="some")
def f(dt):
    """replayed ids off by one layer"""
    a, b = tiny.pair("qwen3_moe", dt)
    box = {}
    for n, layer in enumerate(b.model.layers):
        def fn(z, g, n=n):
            p = z.float().softmax(-1)
            live = torch.topk(p, g.top_k, -1)[1]
            ids = box[n - 1] if n else live
            box[n] = live
            w = p.gather(1, ids)
            return z, (w / w.sum(-1, keepdim=True)).to(z.dtype), ids
        plant.softmax_router(layer.mlp.gate, fn)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F41", "mlp", "gemma2", f32, first=("layers.0.mlp.act",), klass=(CORRECT,))
def f(dt):
    """exact for tanh GELU"""
    a, b = tiny.pair("gemma2", dt)
    for layer in b.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    return same_inputs(a, b, one(tiny.ids()))


# ---------------------------------------------------------------- quantization
def quantise(m, src=lambda w: w):
    """Per-tensor e4m3 fake quantisation of src(w); the scale always comes from the bfloat16 values."""
    for n, p in m.named_parameters():
        if "_proj" in n and p.dim() == 2:
            scale = p.data.to(bf16).float().abs().max() / 448.0
            p.data = ((src(p.data).float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(p.dtype)


@fault("F48", "quantization", "qwen3", bf16, first=("layers.0.attn.q.weight", "layers.0.attn.q"), klass=(QUANT, WEIGHT), weights=("*_proj.weight",))
def f(dt):
    """fp8 weights on one side"""
    a, b = tiny.pair("qwen3", dt)
    quantise(b)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F49", "quantization", "qwen3", f32, first=("layers.0.attn.q.weight", "layers.0.attn.q"), klass=(QUANT, WEIGHT), weights=("*_proj.weight",))
def f(dt):
    """fp8 of rounded master weights"""
    a, b = tiny.pair("qwen3", f32)
    quantise(a)
    quantise(b, lambda w: w.to(bf16).float())
    return same_inputs(a, b, one(tiny.ids()))


@fault("F50", "quantization", "qwen3", bf16, first=("layers.0.attn.core",), klass=(QUANT,), tokens="from 24", threshold=5e-6)
def f(dt):
    """fp8 key/value cache"""
    a, b = tiny.pair("qwen3", dt)

    def kv(k, v, new):
        q = lambda x: torch.cat([x[:, :, :-new].to(torch.float8_e4m3fn).to(x.dtype), x[:, :, -new:]], 2) if x.shape[2] > new else x
        return q(k), q(v)
    for i in range(4):
        plant.attention(tiny.attn(b, i), kv=kv)
    x = tiny.ids(2, 32)
    return a, b, one(x), chunks(x, [24] + [1] * 8)


# ---------------------------------------------------------------- ordinary numerics
def norm_variant(m, which):
    for name, n in m.named_modules():
        if "RMSNorm" in type(n).__name__ and which(name):
            def fn(x, w, eps):
                h = x.float()
                return (w.float() * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
            plant.rms_norm(n, fn)


@fault("F53", "control", "qwen3", bf16, first=("layers.0.attn.core",), klass=(NORMAL,), effect="rounding", tokens="all")
def f(dt):
    """C sdpa"""
    return same_inputs(tiny.make("qwen3", dt), tiny.make("qwen3", dt, attn_implementation="sdpa"), one(tiny.ids()))


@fault("F54", "control", "qwen3", bf16, first=("layers.0.attn.norm",), klass=(NORMAL,), effect="rounding", tokens="all")
def f(dt):
    """C norm cast order"""
    a, b = tiny.pair("qwen3", dt)
    norm_variant(b, lambda n: True)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F55", "control", "qwen3", bf16, first=("layers.0.attn.residual",), klass=(NORMAL,), effect="rounding", tokens="all")
def f(dt):
    """C float32 residual"""
    a, b = tiny.pair("qwen3", dt)
    for n in tiny.norms(b):
        def fn(x, w, eps):
            h = x.float()
            return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(dt)
        plant.rms_norm(n, fn)
    for layer in b.model.layers:
        plant.around(layer, lambda orig, h, *args, **kw: orig(h.float(), *args, **kw))
    return same_inputs(a, b, one(tiny.ids()))


def two_parts(p, x, dtype):
    return [F.linear(xi.to(dtype), wi.to(dtype)) for xi, wi in zip(x.chunk(2, -1), p.weight.chunk(2, -1))]


@fault("F56", "control", "qwen3", bf16, first=("layers.0.attn.out",), klass=(NORMAL,), effect="rounding", tokens="all")
def f(dt):
    """C two rounded partial sums"""
    a, b = tiny.pair("qwen3", dt)
    for layer in b.model.layers:
        for p in (layer.self_attn.o_proj, layer.mlp.down_proj):
            plant.around(p, lambda orig, x, p=p: sum(two_parts(p, x, dt)))
    return same_inputs(a, b, one(tiny.ids()))


@fault("F57", "control", "qwen3", bf16, first=("layers.0.attn.residual",), klass=(NORMAL,), effect="rounding", tokens="all")
def f(dt):
    """C fused reduce and add"""
    a, b = tiny.pair("qwen3", dt)
    for m in (a, b):
        for layer in m.model.layers:
            plant.around(layer.self_attn.o_proj, lambda orig, x, p=layer.self_attn.o_proj: sum(two_parts(p, x, f32)).to(dt))
    for layer in b.model.layers:
        box = {}
        o = layer.self_attn.o_proj
        o_fwd = o.forward

        def keep(orig, x, p=o, box=box):
            box["sum"] = sum(two_parts(p, x, f32))
            return orig(x)

        def whole(orig, h, *args, layer=layer, box=box, **kw):
            att = layer.self_attn(hidden_states=layer.input_layernorm(h), *args, **kw)[0]
            mid = (h.float() + box["sum"]).to(dt)
            return mid + layer.mlp(layer.post_attention_layernorm(mid))
        plant.around(o, keep)
        plant.around(layer, whole)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F58", "control", "qwen3_moe", bf16, first=("layers.0.moe.expert_out", "layers.0.moe.combine"), klass=(NORMAL, DISCRETE), effect="rounding", tokens="all")
def f(dt):
    """C experts in reverse"""
    a, b = tiny.pair("qwen3_moe", dt, num_experts_per_tok=4)

    def acc(parts, total):
        t = total.float()
        for token, y in reversed(parts):
            t.index_add_(0, token, y.float())
        return t.to(total.dtype)
    for layer in b.model.layers:
        plant.experts(layer.mlp.experts, accumulate=acc)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F59", "control", "qwen3_moe", bf16, first=("layers.0.moe.router_logits",), klass=(NORMAL, DISCRETE), effect="rounding", tokens="all")
def f(dt):
    """C float32 router"""
    a, b = tiny.pair("qwen3_moe", dt)
    for layer in b.model.layers:
        g = layer.mlp.gate

        def forward(h, g=g):
            z = F.linear(h.reshape(-1, g.hidden_dim).float(), g.weight.float())
            w, i = torch.topk(z.softmax(-1), g.top_k, -1)
            return z, (w / w.sum(-1, keepdim=True)).to(h.dtype), i
        g.forward = forward
    return same_inputs(a, b, one(tiny.ids(4, 48)))


@fault("F60", "control", "qwen3", bf16, first=("lm_head",), klass=(NORMAL,), effect="rounding", tokens="all")
def f(dt):
    """C float32 head"""
    a, b = tiny.pair("qwen3", dt)
    plant.around(b.lm_head, lambda orig, x: F.linear(x.float(), b.lm_head.weight.float()))
    return same_inputs(a, b, one(tiny.ids()))


@fault("F61", "control", "qwen3", bf16, first=("layers.0.attn.q_rope",), klass=(NORMAL,), effect="rounding", tokens="all but 0")
def f(dt):
    """C rope rounded once"""
    a, b = tiny.pair("qwen3", dt)
    mod = sys.modules[type(tiny.attn(a, 0)).__module__]
    for i in range(4):
        plant.attention(tiny.attn(b, i), rotate=lambda q, k, c, s: tuple(t.to(q.dtype) for t in mod.apply_rotary_pos_emb(q.float(), k.float(), c.float(), s.float())))
    return same_inputs(a, b, one(tiny.ids()))


@fault("F51", "control", "qwen3_moe", f32, first=("layers.*.moe.expert_out", "layers.*.moe.combine"), klass=(NORMAL,), effect="rounding", tokens="some")
def f(dt):
    """C batch of two against two of one"""
    a, b = tiny.pair("qwen3_moe", dt)
    x = tiny.ids()
    return a, b, one(x), Inputs([dict(input_ids=x[:1]), dict(input_ids=x[1:])])


@fault("F62", "control", "qwen3_moe", f32, first=("layers.*",), klass=(NORMAL,), effect="rounding", tokens="some")
def f(dt):
    """C decode against prefill"""
    a, b = tiny.pair("qwen3_moe", dt)
    x = tiny.ids(2, 40)
    return a, b, one(x), chunks(x, [34] + [1] * 6)


# ---------------------------------------------------------------- same
@fault("F63", "control", "qwen3_moe", bf16, effect="same", exit=(0,), tokens="none")
def f(dt):
    """S twice"""
    a, b = tiny.pair("qwen3_moe", dt)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F67", "control", "qwen3", bf16, effect="same", exit=(0,), tokens="none")
def f(dt):
    """S decode against prefill bf16"""
    a, b = tiny.pair("qwen3", dt)
    x = tiny.ids(2, 40)
    return a, b, one(x), chunks(x, [34] + [1] * 6)


@fault("F64", "control", "qwen3", bf16, effect="same", exit=(0,), tokens="none")
def f(dt):
    """S padding side"""
    a, b = tiny.pair("qwen3", dt)
    r = padded_pair()
    left = left_padded(r)
    right = {k: torch.stack([t.roll(-int((m == 0).sum())) for t, m in zip(v, left.calls[0]["attention_mask"])]) for k, v in left.calls[0].items()}
    return a, b, left, Inputs([right])


@fault("F65", "control", "qwen3", bf16, effect="same", exit=(0,), tokens="none")
def f(dt):
    """S padded against alone"""
    a, b = tiny.pair("qwen3", dt)
    r = padded_pair()
    return a, b, left_padded(r), Inputs([dict(input_ids=t[None]) for t in r])


@fault("F66", "control", "qwen3", bf16, effect="same", exit=(0,), tokens="none")
def f(dt):
    """S packed against padded"""
    a, b = tiny.pair("qwen3", dt)
    x = tiny.ids()
    return a, b, one(x), Inputs([packed(x)])


@fault("F68", "control", "qwen3", bf16, effect="same", exit=(0,), tokens="none")
def f(dt):
    """in-place scorer after the forward"""
    a, b = tiny.pair("qwen3", dt)
    x = one(tiny.ids())

    def scorer(out):
        out.logits.sub_(out.logits.max(-1, keepdim=True)[0])
    return a, b, x, Inputs(x.calls, after=scorer)


# ---------------------------------------------------------------- could not tell
@fault("F69", "control", "qwen3", bf16, first=("layers.2.attn.norm",), effect="absent", exit=(2,), tokens="none")
def f(dt):
    """a module called past its hooks"""
    a, b = tiny.pair("qwen3", dt)
    layer = b.model.layers[2]

    def whole(orig, h, *args, **kw):
        mid = h + layer.self_attn(hidden_states=layer.input_layernorm.forward(h), *args, **kw)[0]
        return mid + layer.mlp(layer.post_attention_layernorm(mid))
    plant.around(layer, whole)
    return same_inputs(a, b, one(tiny.ids()))


@fault("F70", "control", "qwen3", bf16, first=("*",), effect="absent", exit=(2,), tokens="none")
def f(dt):
    """no token in common"""
    a, b = tiny.pair("qwen3", dt)
    return a, b, one(tiny.ids(seed=3)), one(tiny.ids(seed=4))


# ---------------------------------------------------------------- scores
def score(id, **kw):
    return fault(id, "scorer", "qwen3", bf16, kind="scores", effect="scores", **kw)


@score("F42", first=("scoring", "scorer.logprobs", "A"), klass=(CORRECT,), explain="temperature 0.70")
def f():
    """temperature on A only"""
    ids, za, zb, zc = score_records()
    return record(ids, za, zb, zc, A=lp(za / 0.7, ids))


@score("F43", first=("scoring", "scorer.logprobs", "A"), klass=(CORRECT,), explain="one-sided: -log of the kept mass")
def f():
    """top-20 renormalised on A"""
    ids, za, zb, zc = score_records(top_k=20)
    z = za.masked_fill(za < za.topk(20, -1)[0][..., -1:], float("-inf"))
    a = lp(z, ids)
    d = a - lp(zc, ids)
    print("    -inf in A:", int(torch.isinf(a).sum()), "A-C finite: min", float(d[torch.isfinite(d)].min()), "mean", float(d[torch.isfinite(d)].mean()))
    return record(ids, za, zb, zc, A=a)


@score("F44", first=("generation bookkeeping", "input", "scorer.logprobs", "A"), klass=(INPUT, CORRECT), explain="exact zeros")
def f():
    """zeros on A"""
    ids, za, zb, zc = score_records()
    a = lp(za, ids)
    a[1, 7] = a[2, 3] = a[2, 30] = 0.0
    return record(ids, za, zb, zc, A=a)


@score("F45", first=("scoring", "scorer.logprobs", "C"), klass=(CORRECT,), explain="one-sided: log(1 + pad mass)")
def f():
    """64 vocabulary pads on C"""
    ids, za, zb, zc = score_records()
    c = lp(torch.cat([zc, torch.zeros(*zc.shape[:2], 64)], -1), ids)
    return record(ids, za, zb, zc, C0=c, C1=c.clone())


@score("F46", first=("scoring", "scorer.logprobs", "C"), klass=(CORRECT,), explain="tokens 12 and 36 of every request")
def f():
    """labels cut at chunk edges on C"""
    ids, za, zb, zc = score_records()
    full = zc.log_softmax(-1)
    lab = ids.roll(-1, 1)
    n = ids.shape[1] // 4
    for parts in ((0, 3), (1, 2)):                       # each rank rolls its own concatenated chunks
        idx = torch.cat([torch.arange(p * n, p * n + n) for p in parts])
        lab[:, idx] = ids[:, idx].roll(-1, 1)
    c = full.gather(-1, lab[..., None])[:, PROMPT - 1:-1, 0]
    d = (c - lp(zc, ids)).abs() > 1e-6
    print("    wrong positions (token index of the predicted token):", sorted({int(t) + PROMPT for t in d.nonzero()[:, 1]}))
    return record(ids, za, zb, zc, C0=c, C1=c.clone())


@score("F47", first=("scoring", "scorer.logprobs", "C"), klass=(CORRECT, INPUT), explain="chunks permuted [0, 3, 1, 2]")
def f():
    """chunks not put back on C"""
    ids, za, zb, zc = score_records()
    c = lp(zc, ids)
    n = c.shape[1] // 4
    c = torch.cat([c[:, i * n:i * n + n] for i in (0, 3, 1, 2)], 1)
    return record(ids, za, zb, zc, C0=c, C1=c.clone())


@score("F52", first=("*",), klass=(NORMAL,), exit=(0, 1), explain="last bits")
def f():
    """log-softmax in split reduction on A (two runs)"""
    ids, za, zb, zc = score_records()
    z = za.double()
    s = torch.cat([z[..., :200].float().logsumexp(-1, keepdim=True), z[..., 200:].float().logsumexp(-1, keepdim=True)], -1).logsumexp(-1)
    a = (za.gather(-1, ids.roll(-1, 1)[..., None])[..., 0] - s.float())[:, PROMPT - 1:-1]
    print("    A-A' max", float((a - lp(za, ids)).abs().max()))
    return record(ids, za, zb, zc, A=a)
