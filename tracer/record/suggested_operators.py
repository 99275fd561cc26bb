"""Which operator a module is, told by its numbers: linear map, norm, activation. For ``suggested_blocks``.

Shape suffixes: N tokens, C columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["activation_name", "close", "linear_kind", "norm_kind", "ratio_of"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu squared": lambda x: functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether ``found`` is ``expected`` up to the rounding of its own dtype."""
    if found.shape != expected.shape:
        return False
    coarse = 1e-4 if found.dtype in (torch.float32, torch.float64) else 0.02
    found, expected = found.float(), expected.float()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((found - expected).abs() <= coarse * (expected.abs() + 0.05 * scale)).all())


def linear_kind(module: torch.nn.Module, given_NC: torch.Tensor, returned_NC: torch.Tensor) -> str:
    """``linear`` where the output is input x weight^T + bias with the module's own weight, ``transposed`` where the weight is
    stored (in, out), else ""."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.dim() != 2 or not given_NC.is_floating_point():
        return ""
    stored = weight.detach().float()
    for kind, matrix in (("linear", stored), ("transposed", stored.t())):
        if matrix.shape == (returned_NC.shape[1], given_NC.shape[1]):
            expected = functional.linear(given_NC.float(), matrix, None if bias is None else bias.detach().float())
            if close(returned_NC, expected):
                return kind
    return ""


def norm_kind(module: torch.nn.Module, given_NC: torch.Tensor, returned_NC: torch.Tensor) -> str:
    """The formula of a norm over the columns, or over every block of the weight's width, or ""."""
    if given_NC.shape != returned_NC.shape or not given_NC.is_floating_point() or list(module.children()):
        return ""
    weight = module._parameters.get("weight")
    if weight is not None and (weight.dim() != 1 or given_NC.shape[1] % len(weight)):
        return ""
    width = given_NC.shape[1] if weight is None else len(weight)
    given, returned = given_NC.float().reshape(-1, width), returned_NC.reshape(-1, width)
    scale = torch.ones(width) if weight is None else weight.detach().float()
    bias = module._parameters.get("bias")
    shift = 0.0 if bias is None else bias.detach().float()
    eps = next((float(value) for name, value in vars(module).items() if "eps" in name and isinstance(value, float)), 1e-6)
    unit = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + eps)
    centred = functional.layer_norm(given, (width,), eps=eps)
    for formula, expected in (
        ("x / rms(x) * w", unit * scale + shift),
        ("x / rms(x) * (1 + w)", unit * (1 + scale) + shift),
        ("(x - mean) / std * w + b", centred * scale + shift),
        ("(x - mean) / std * (1 + w) + b", centred * (1 + scale) + shift),
    ):
        if close(returned, expected):
            return formula
    return ""


def activation_name(result_NC: torch.Tensor, gate_NC: torch.Tensor, up_NC: torch.Tensor | None) -> str:
    """The activation f with result = f(gate) * up (f(gate) without ``up``), or ""."""
    for name, function in _ACTIVATIONS.items():
        expected = function(gate_NC.float())
        if close(result_NC, expected if up_NC is None else expected * up_NC.float()):
            return name
    return ""


def ratio_of(whole: torch.Tensor, part: torch.Tensor) -> float | None:
    """The number c with whole = c * part, None where there is none."""
    squares = float((part.float() * part.float()).sum())
    if not squares:
        return None
    factor = float((whole.float() * part.float()).sum()) / squares
    return factor if close(whole, factor * part) and factor else None
