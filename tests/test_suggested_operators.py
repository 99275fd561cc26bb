"""Operators told by their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tracer.record.suggested_operators import activation_name, close, linear_kind, norm_kind, ratio_of

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def randomised(module: nn.Module) -> nn.Module:
    for number, parameter in enumerate(module.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number + 1))
    return module.requires_grad_(False)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class OnePlus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


@pytest.mark.parametrize(
    ("module", "kind"), [(nn.Linear(8, 5), "linear"), (nn.Linear(8, 8, bias=False), "linear"), (Transposed(), "transposed")]
)
def test_linear_maps_and_how_they_are_stored(module: nn.Module, kind: str) -> None:
    """A linear map is known by its own weight, stored either way; with another output, or no matrix, it is none."""
    randomised(module)
    assert linear_kind(module, X, module(X)) == kind
    assert linear_kind(module, X, module(X) * 1.01) == ""
    assert linear_kind(nn.LayerNorm(8), X, X) == ""


@pytest.mark.parametrize(
    ("module", "formula"),
    [
        (nn.RMSNorm(8, eps=1e-6), "x / rms(x) * w"),
        (OnePlus(), "x / rms(x) * (1 + w)"),
        (nn.LayerNorm(8), "(x - mean) / std * w + b"),
        (nn.LayerNorm(4), "(x - mean) / std * w + b"),
    ],
)
def test_norms_are_known_by_formula(module: nn.Module, formula: str) -> None:
    """RMS norms of both kinds and layer norms, over whole rows or over heads; what only looks like one is none."""
    randomised(module)
    width = next(module.parameters()).shape[0]
    returned = module(X.reshape(-1, width)).reshape(X.shape)
    assert norm_kind(module, X, returned) == formula
    assert norm_kind(module, X, returned + X) == ""
    assert norm_kind(nn.Linear(8, 8), X, X) == ""


def test_activations_with_and_without_a_gate() -> None:
    """The activation that makes the result is named; none where no known one does, or where gate and up are exchanged."""
    up = X.flip(0)
    assert activation_name(nn.functional.silu(X) * up, X, up) == "silu"
    assert activation_name(nn.functional.silu(X) * up, up, X) == ""
    assert activation_name(nn.functional.gelu(X, approximate="tanh"), X, None) == "gelu_tanh"
    assert activation_name(X.sin(), X, None) == ""


def test_closeness_is_that_of_the_dtype() -> None:
    """What rounding of its own dtype explains is close, what it does not explain is not; shapes must agree."""
    assert close(X.bfloat16(), X)
    assert not close(X.bfloat16().float(), X)
    assert not close(X, X[:3])
    assert ratio_of(3 * X, X) == pytest.approx(3)
    assert ratio_of(X.sin(), X) is None
    assert ratio_of(X, torch.zeros_like(X)) is None
