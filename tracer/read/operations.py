"""What each side computes from the same inputs, where a few candidates can be tried: activations, weighted sums, exchanged weights.

A candidate counts for a side where it gives that side's own rows up to roundings of their dtype, also on rows and columns that
were not used to find it. It explains a difference where the two sides have different candidates.

Shape suffixes: N rows, C columns, K inputs or chosen experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tracer.read.findings import Shape
from tracer.read.matched import MatchedRows, spread
from tracer.read.shapes import Found
from tracer.read.wording import count

__all__ = ["activation", "exchanged_weights", "weighted_sum"]

F64 = npt.NDArray[np.float64]

_ROUNDINGS = 4
_VALUES = 1 << 16
"""Values that activations are tried on."""
_CLEARLY = 4
_GOES_WITH = 0.9
_MOST_INPUTS = 4


def _sigmoid(x: F64) -> F64:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -700, 700))))


def _erf(x: F64) -> F64:
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


ACTIVATIONS: Mapping[str, Callable[[F64], F64]] = {
    "silu": lambda x: x * _sigmoid(x),
    "exact GELU": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "tanh GELU": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "squared ReLU": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": _sigmoid,
    "no activation": lambda x: x,
}
"""By the names that people use."""


def activation(rows: MatchedRows, x_NC: F64) -> Found | None:
    """Other activations of the same gate and up. ``x_NC``: gate, then up, twice as many columns as the rows."""
    columns = rows.a_NC.shape[1]
    if x_NC.shape != (len(rows), 2 * columns):
        return None
    chosen = spread(np.arange(len(rows)), max(_VALUES // columns, 2))
    gate_NC, up_NC = x_NC[chosen, :columns], x_NC[chosen, columns:]
    made = {f"{name} of gate times up": act(gate_NC) * up_NC for name, act in ACTIVATIONS.items()}
    made |= {f"{name} of up times gate": act(up_NC) * gate_NC for name, act in ACTIVATIONS.items() if name != "no activation"}
    errors, names = [], []
    for side in (rows.a_NC, rows.b_NC):
        errors.append({name: max(_error(values[half], side[chosen][half]) for half in _HALVES) for name, values in made.items()})
        names.append(min(errors[-1], key=lambda name: errors[-1][name]))
        if errors[-1][names[-1]] > max(_ROUNDINGS * rows.epsilon, 1e-6):
            return None
    if any(errors[side][names[1 - side]] < _CLEARLY * errors[side][names[side]] or names[0] == names[1] for side in (0, 1)):
        return None  # what roundings of this dtype cannot tell apart
    tested = len(chosen) // 2
    text = f"another activation: A computes {names[0]}, B {names[1]}"
    return Found(Shape.OPERATION, text, len(chosen) - tested, tested, None, {"a": names[0], "b": names[1]})


_HALVES = (slice(0, None, 2), slice(1, None, 2))


def _error(found: F64, wanted: F64) -> float:
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / size if size > 0 else math.inf


def weighted_sum(rows: MatchedRows, inputs: Mapping[str, F64], scalars: Mapping[str, F64]) -> Found | None:
    """Both sides add the same rows with other factors, one per row and input. ``inputs``: rows of as many columns, ``scalars``: one
    number per row, by boundary."""
    names = list(inputs)
    if not 1 < len(names) <= _MOST_INPUTS or rows.a_NC.shape[1] < 8 * len(names):
        return None
    x_NKC = np.stack([inputs[name] for name in names], axis=1)
    factors = []
    for side in (rows.a_NC, rows.b_NC):
        found_NK = _solve(x_NKC[:, :, ::2], side[:, ::2])
        if found_NK is None:
            return None
        predicted = np.einsum("nk,nkc->nc", found_NK, x_NKC[:, :, 1::2])
        if _error(predicted, side[:, 1::2]) > max(_ROUNDINGS * rows.epsilon, 1e-6):
            return None
        factors.append(found_NK)
    noise = 4 * _ROUNDINGS * rows.epsilon
    moved = [k for k in range(len(names)) if float(np.median(np.abs(factors[1][:, k] - factors[0][:, k]))) > noise]
    if not moved:
        return None
    texts = []
    for k in moved:
        sides = [_factor_text(factors[side][:, k], scalars, noise) for side in (0, 1)]
        texts.append(f"{names[k]}: A adds it times {sides[0]}, B times {sides[1]}")
    tested = len(rows) // 2
    text = "the same rows added with other factors: " + "; ".join(texts)
    return Found(Shape.OPERATION, text, len(rows) - tested, tested, None, {"inputs": [names[k] for k in moved]})


def _solve(x_NKC: F64, y_NC: F64) -> F64 | None:
    """Least squares per row, (N, K)."""
    gram_NKK = np.einsum("nkc,nlc->nkl", x_NKC, x_NKC)
    right_NK = np.einsum("nkc,nc->nk", x_NKC, y_NC)
    try:
        return np.asarray(np.linalg.solve(gram_NKK, right_NK[..., None])[..., 0])
    except np.linalg.LinAlgError:
        return None


def _factor_text(factor_N: F64, scalars: Mapping[str, F64], noise: float) -> str:
    """One number, or one per row, and where that comes from."""
    if float(np.abs(factor_N - np.median(factor_N)).max()) <= noise * max(1.0, abs(float(np.median(factor_N)))):
        return f"{np.median(factor_N):.3g}"
    for name, scalar_N in scalars.items():
        for what, values in ((f"sigmoid of {name}", _sigmoid(scalar_N)), (name, scalar_N)):
            if all(float(np.abs(factor_N[half] - values[half]).max()) <= noise for half in _HALVES):
                return f"one number per row, the {what}"
    return f"one number per row, {factor_N.min():.3g} to {factor_N.max():.3g}"


def exchanged_weights(rows: MatchedRows, weight_N2: F64) -> Found | None:
    """The difference of a sum over two experts is as large as exchanging their weights makes it, row by row.

    The experts' own rows are not known, so that this is told by size alone: |B - A| / |A| against sqrt(2) |w1 - w2| / |w|, which it
    is for experts of about the same size."""
    size_a = np.linalg.norm(rows.a_NC, axis=1)
    if weight_N2.shape != (len(rows), 2) or len(rows) < 16 or not (size_a > 0).all():
        return None
    seen = np.linalg.norm(rows.b_NC - rows.a_NC, axis=1) / size_a
    wanted = math.sqrt(2) * np.abs(weight_N2[:, 0] - weight_N2[:, 1]) / np.maximum(np.linalg.norm(weight_N2, axis=1), 1e-30)
    goes = [float(np.corrcoef(seen[half], wanted[half])[0, 1]) for half in _HALVES]
    if min(goes) < _GOES_WITH or not 1 / 2 < float(np.median(seen[wanted > 0] / wanted[wanted > 0])) < 2:
        return None
    text = (
        f"the size of the difference goes with the distance of a token's two routing weights (correlation {goes[1]:.2f}), "
        f"as exchanging them makes it in {count(rows.total, 'row')}; what the experts gave is not known here"
    )
    tested = len(rows) // 2
    return Found(Shape.OPERATION, text, len(rows) - tested, tested, None, {"correlation": goes[1]})
