"""Honest logprob records of three engines over the same sampled tokens, to be damaged by the scorer faults."""
from __future__ import annotations

import torch

from tests.planters import plant, tiny

from tests.planters.core import bf16
from tests.planters.inputs import one


def _logits(family="qwen3", dtype=bf16, variant="plain", ids=None):
    m = tiny.make(family, dtype, attn_implementation="sdpa" if variant == "sdpa" else "eager")
    if variant == "norm":
        for n in tiny.norms(m):
            def fn(x, w, eps):
                h = x.float()
                return (w.float() * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
            plant.rms_norm(n, fn)
    return one(ids).run(m).logits.float()


PROMPT = 8


def score_records(noise: bool = True, top_k: int | None = None):
    """Four requests of 48 tokens, 8 of them prompt. Honest records: A eager, B sdpa, C another norm cast order, all bfloat16.

    Returned: dict(tokens, response_start, temperature, A, B0, B1, C0, C1 -> list of per-request lists of response logprobs,
    logits_B, logits_C -> per request float32 [response, vocab] of the positions that predict the response tokens).
    Sampled tokens are drawn from the model, so that logprobs are those of plausible tokens.
    """
    g = torch.Generator().manual_seed(21)
    ids = tiny.ids(4, PROMPT, seed=13)
    m = tiny.make("qwen3", bf16)
    for _ in range(40):
        z = one(ids).run(m).logits[:, -1].float()
        if top_k:
            z = z.masked_fill(z < z.topk(top_k, -1)[0][..., -1:], float("-inf"))
        ids = torch.cat([ids, torch.multinomial(z.softmax(-1), 1, generator=g)], 1)
    za = _logits(ids=ids)
    zb = _logits(ids=ids, variant="sdpa") if noise else za
    zc = _logits(ids=ids, variant="norm") if noise else za
    return ids, za, zb, zc


def lp(z, ids):
    """[request][response] logprobs of the response tokens."""
    full = z.log_softmax(-1)[:, PROMPT - 1:-1]
    return full.gather(-1, ids[:, PROMPT:, None])[..., 0]


def record(ids, za, zb, zc, **over):
    a, b, c = lp(za, ids), lp(zb, ids), lp(zc, ids)
    d = dict(A=a, B0=b, B1=b.clone(), C0=c, C1=c.clone())
    d.update(over)
    return dict(tokens=ids.tolist(), response_start=PROMPT, temperature=1.0,
                **{k: v.tolist() for k, v in d.items()},
                logits_B=zb[:, PROMPT - 1:-1].clone(), logits_C=zc[:, PROMPT - 1:-1].clone())
