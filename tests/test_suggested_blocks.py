"""Boundaries found by numbers in small decoders written for the purpose: every part of a layer, and what is left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tracer.errors import Code, MapError
from tracer.record.observed_forward import observe_forward
from tracer.record.suggested_blocks import find_boundaries
from tracer.record.suggestions import Findings, Guess

WIDTH = 8


class Mixer(nn.Module):
    """Stands for attention: a causal mean between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.proj(self.q_proj(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


class Experts(nn.Module):
    """Four experts as one stacked matrix; ids come in as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        return torch.einsum("tki,tk->ti", torch.einsum("th,tkhi->tki", x, self.stack[ids]), weights)


class Mixture(nn.Module):
    """A router that returns its logits alone; who chose is only seen by the experts."""

    def __init__(self, hidden_router: bool = False) -> None:
        super().__init__()
        self.gate, self.experts, self.hidden_router = nn.Linear(WIDTH, 4, bias=False), Experts(), hidden_router

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, 1)
        logits = rows @ self.gate.weight.t() if self.hidden_router else self.gate(rows)
        weights, ids = logits.softmax(-1).topk(2)
        return self.experts(rows, ids, weights).view_as(x)


class Gated(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = functional.silu) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), act

    def forward(self, x: Any) -> Any:
        return self.c(self.act(self.b(x)) * self.a(x))


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.one, self.mix, self.two, self.mlp, self.scale = nn.RMSNorm(WIDTH, eps=1e-6), Mixer(), nn.RMSNorm(WIDTH, eps=1e-6), mlp, scale

    def forward(self, x: Any) -> Any:
        x = x + self.scale * self.mix(self.one(x))
        return x + self.mlp(self.two(x))


class Decoder(nn.Module):
    def __init__(self, layers: list[nn.Module], tanh: bool = False) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(32, WIDTH), nn.ModuleList(layers)
        self.last, self.head, self.tanh = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), tanh

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return logits.tanh() if self.tanh else logits


def find(model: nn.Module) -> Findings:
    """What is found in a model with random weights."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(0, 32, (2, 13), generator=generator)
    return find_boundaries(observe_forward(dict(model.named_modules()), ids, lambda: model(ids)))


def at(found: Findings, name: str) -> Guess:
    return next(iter(found.guesses[name].values()))


def test_a_plain_decoder_is_found_whole() -> None:
    """Embedding, norms, both parts, residuals, activation with the gate first, final norm and head, whatever they are called."""
    found = find(Decoder([Layer(Gated()), Layer(Gated())]))
    assert found.layers == "blocks.{layer}"
    places = {name.removeprefix("layers.{layer}."): guess.binding.get("module") for name in found.guesses for guess in [at(found, name)]}
    assert places == {
        "input.ids": None, "input.visible_from": None, "input.positions": None, "embedding": "blocks.0", "residual": "blocks.{layer}",
        "attn.residual": "blocks.{layer}.two", "attn.norm": "blocks.{layer}.one", "mlp.norm": "blocks.{layer}.two",
        "attn.out": "blocks.{layer}.mix", "attn.core": "blocks.{layer}.mix.proj", "attn.q": "blocks.{layer}.mix.q_proj",
        "mlp.out": "blocks.{layer}.mlp", "mlp.act": "blocks.{layer}.mlp.c", "mlp.gate_up": None, "final_norm": "last", "lm_head": "head",
        "scorer.logprobs": None,
    }  # fmt: skip
    parts = at(found, "layers.{layer}.mlp.gate_up").binding["parts"]
    assert [part["module"] for part in parts] == ["blocks.{layer}.mlp.b", "blocks.{layer}.mlp.a"]
    assert "BY ITS NAME ALONE" in at(found, "layers.{layer}.attn.q").evidence
    assert found.weights["table.weight"].names == ("embedding.weight",)
    assert found.weights["blocks.{layer}.mlp.b.bias"].names == ("layers.{layer}.mlp.gate.bias",)
    assert any(text.startswith("attn.k: ") for text in found.missing)


def test_a_head_that_changes_its_logits_has_a_raw_one() -> None:
    """Where the model returns other logits than the projection, the projection is the raw head."""
    found = find(Decoder([Layer(Gated()), Layer(Gated())], tanh=True))
    assert at(found, "lm_head.raw").binding["module"] == "head"
    assert at(found, "lm_head").binding == {"module": "", "layout": "b s c"}


def test_choices_are_found_where_the_experts_are_given_them() -> None:
    """Ids and weights that no router returns are taken from the experts' arguments, logits from the linear map whose top they are."""
    found = find(Decoder([Layer(Mixture()), Layer(Gated())]))
    assert set(found.guesses["layers.{layer}.moe.combine"]) == {0}
    assert set(found.guesses["layers.{layer}.mlp.out"]) == {1}
    ids = at(found, "layers.{layer}.moe.topk_ids")
    assert (ids.binding["module"], ids.binding["leaf"]) == ("blocks.{layer}.mlp.experts", "input[1]")
    assert "the top 2 of moe.router_logits" in ids.evidence
    assert at(found, "layers.{layer}.moe.router_logits").binding["module"] == "blocks.{layer}.mlp.gate"
    assert found.weights["blocks.{layer}.mlp.experts.stack"].names == ("layers.{layer}.moe.experts.{expert}.stack",)


def test_a_mixture_whose_router_is_hidden_is_no_plain_mlp() -> None:
    """Stacked experts without a router that shows itself are a mixture all the same, and the missing choice is said."""
    found = find(Decoder([Layer(Mixture(hidden_router=True)), Layer(Mixture(hidden_router=True))]))
    assert "layers.{layer}.moe.combine" in found.guesses
    assert not {"layers.{layer}.mlp.out", "layers.{layer}.moe.topk_ids"} & set(found.guesses)
    assert any("nothing in it shows who chooses" in text for text in found.missing)


def test_what_numbers_do_not_show_is_left_out() -> None:
    """A scaled residual leaves the parts of a layer open, an unknown activation the gate: said, not guessed."""
    scaled = find(Decoder([Layer(Gated(), scale=0.3), Layer(Gated(), scale=0.3)]))
    assert not [name for name in scaled.guesses if ".attn." in name or ".mlp." in name]
    assert any("not its input plus two parts" in text for text in scaled.missing)
    odd = find(Decoder([Layer(Gated(torch.sin)), Layer(Gated(torch.sin))]))
    assert "layers.{layer}.mlp.gate_up" not in odd.guesses
    assert "layers.{layer}.mlp.act" in odd.guesses
    assert any("no known activation" in text for text in odd.missing)


def test_no_stack_of_layers_is_an_error() -> None:
    """A model without a chain of layers is refused, saying what was looked for."""
    with pytest.raises(MapError) as caught:
        find(nn.Sequential(nn.Embedding(32, WIDTH)))
    assert caught.value.code is Code.MAP_UNFIT
    assert "numbered modules" in caught.value.expected
