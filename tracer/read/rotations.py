"""Rows that one or both sides rotate pair by pair (rotary positions): which columns form pairs, and by which angles.

A side's rows are held against the boundary they are computed from. Angles are found on every other head and tested on the
heads between; frequencies on every other row and tested on the rows between.

Shape suffixes: N rows, H heads, C columns, P pairs of a head, F frequencies tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.read.findings import Shape
from tracer.read.matched import MatchedRows
from tracer.read.shapes import Found

__all__ = ["Rotation", "find_rotation", "norm_order", "rotation_shape"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
C128 = npt.NDArray[np.complex128]

_ROUNDINGS = 16
"""So many roundings a rotated head may be off: of cosine, sine, products and their sum."""
_COHERENT = 0.95
_NEAR = 512
"""Positions within which a frequency is found first; farther ones refine it."""
_SAME = 0.05
_TURNED = 0.05
"""Radians by which a pair must have turned somewhere for its frequency to count."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rows are their inputs with pairs of columns turned. ``columns``: of a head that are turned, the first ones. ``adjacent``: pairs
    are (2i, 2i+1), else (i, i + columns/2). ``turn_NP``: unit complex numbers. ``error``: relative, on heads not used to find them."""

    head: int
    columns: int
    adjacent: bool
    turn_NP: C128
    error: float

    def text(self) -> str:
        pairs = "(2i, 2i+1)" if self.adjacent else f"(i, i+{self.columns // 2})"
        return f"pairs {pairs}" + (f" of the first {self.columns}" if self.columns < self.head else "")


def find_rotation(x_NC: F64, y_NC: F64, head: int, epsilon: float) -> Rotation | None:
    """How ``y_NC`` is ``x_NC`` turned, by the same angles in every head; None where it is not, or there are no two heads."""
    if head < 2 or x_NC.shape != y_NC.shape or x_NC.shape[1] % head or x_NC.shape[1] < 2 * head:
        return None
    x_NHC, y_NHC = (side.reshape(len(side), -1, head) for side in (x_NC, y_NC))
    most = min(_ROUNDINGS * epsilon, 0.25)
    best = None
    for columns in (head, head // 2, head // 4):
        if columns < 2 or columns % 2 or _error(x_NHC[..., columns:], y_NHC[..., columns:]) > most:
            continue
        for adjacent in (False, True):
            x_NHP, y_NHP = (_complex(side[..., :columns], adjacent) for side in (x_NHC, y_NHC))
            product_NP = (y_NHP[:, ::2] * x_NHP[:, ::2].conj()).sum(axis=1)
            size_NP = np.abs(product_NP)
            turn_NP = np.divide(product_NP, size_NP, out=np.ones_like(product_NP), where=size_NP > 0)
            error = _error(x_NHP[:, 1::2] * turn_NP[:, None], y_NHP[:, 1::2])
            if error <= most and (best is None or error < best.error):
                best = Rotation(head, columns, adjacent, turn_NP, error)
    return best


def _complex(values_NHC: F64, adjacent: bool) -> C128:
    half = values_NHC.shape[-1] // 2
    parts = (values_NHC[..., ::2], values_NHC[..., 1::2]) if adjacent else (values_NHC[..., :half], values_NHC[..., half:])
    return np.asarray(parts[0] + 1j * parts[1])


def _error(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / size if size > 0 else 0.0 if not wanted.size or not np.any(found) else np.inf


def rotation_shape(rows: MatchedRows, x_NC: F64, source: str) -> Found | None:
    """How the sides turn the same input. ``x_NC``: rows of boundary ``source``, of which both are computed."""
    a, b = (find_rotation(x_NC, side, rows.head, rows.epsilon) for side in (rows.a_NC, rows.b_NC))
    tested = len(rows) // 2
    for side, turned, still in (("A", a, rows.b_NC), ("B", b, rows.a_NC)):
        if turned is not None and np.array_equal(still, x_NC):
            other = "B" if side == "A" else "A"
            text = f"{side} rotates {turned.text()} of every {turned.head} columns, {other} gives {source} unchanged"
            return _found(text, rows, tested, max(turned.error, 0.0), {"turned": side.lower()})
    if a is None or b is None:
        return None
    parameters: dict[str, Any] = {"head": a.head, "adjacent_a": a.adjacent, "adjacent_b": b.adjacent}
    if (a.columns, a.adjacent) != (b.columns, b.adjacent):
        text = f"A rotates {a.text()} of every {a.head} columns, B {b.text()}"
        return _found(text, rows, tested, max(a.error, b.error), parameters)
    if float(np.sqrt((np.abs(a.turn_NP - b.turn_NP) ** 2).mean())) <= _ROUNDINGS * rows.epsilon:
        return None
    text = f"both sides rotate {a.text()} of every {a.head} columns, by other angles"
    angles = _angles(a.turn_NP, b.turn_NP, rows.position_N, rows.epsilon)
    if angles is not None:
        said, more = angles
        text, parameters = f"both sides rotate {a.text()} of every {a.head} columns; {said}", {**parameters, **more}
    return _found(text, rows, tested, max(a.error, b.error), parameters)


def _found(text: str, rows: MatchedRows, tested: int, error: float, parameters: dict[str, Any]) -> Found:
    return Found(Shape.ROTATION, text, len(rows) - tested, tested, error, parameters)


def _angles(turn_a_NP: C128, turn_b_NP: C128, position_N: I64, epsilon: float) -> tuple[str, dict[str, Any]] | None:
    """What the angles of both sides have to do with each other, where both grow linearly with the position."""
    frequencies = [_frequencies(turn_NP, position_N) for turn_NP in (turn_a_NP, turn_b_NP)]
    if frequencies[0] is None or frequencies[1] is None:
        return None
    a_P, b_P = frequencies[0], frequencies[1]
    reach = float(position_N.max())
    least_P = np.minimum(np.abs(a_P), np.abs(b_P)) * reach
    telling = np.flatnonzero(least_P > _TURNED)
    if len(telling) < 2:
        return None
    ratio = b_P[telling] / a_P[telling]
    middle = float(ratio[least_P[telling].argmax()])
    unsure = np.maximum(_SAME, _ROUNDINGS * epsilon / least_P[telling])  # slow pairs are known less well
    if (np.abs(ratio / middle - 1) <= unsure).all():
        if abs(middle - 1) <= 0.01:
            return None
        slow, fast, factor = ("A", "B", middle) if abs(middle) > 1 else ("B", "A", 1 / middle)
        whole = round(factor)
        shown = f"{whole}" if abs(factor - whole) <= 0.02 * abs(factor) else f"{factor:.4g}"
        if abs(factor - whole) <= 0.02 * abs(factor):
            turns = (turn_a_NP, turn_b_NP) if slow == "A" else (turn_b_NP, turn_a_NP)
            if float((turns[0] ** whole * turns[1].conj()).real.mean()) < _COHERENT:
                return None
        text = f"the angle of {slow} is the angle of {fast} / {shown}, at every pair and position"
        return text, {"factor": factor, "slow": slow.lower()}
    bases = [_base(side_P) for side_P in (a_P, b_P)]
    if bases[0] is not None and bases[1] is not None and abs(bases[0] / bases[1] - 1) > _SAME:
        return f"the rotary base is about {bases[0]:.3g} on A and {bases[1]:.3g} on B", {"base_a": bases[0], "base_b": bases[1]}
    moved = telling[np.abs(ratio - 1) > _SAME]
    text = f"the frequencies of {len(moved)} of {len(a_P)} pairs differ, B's are {ratio.min():.3g} to {ratio.max():.3g} times A's"
    return text, {"pairs": moved.tolist()[:64]}


def _frequencies(turn_NP: C128, position_N: I64) -> F64 | None:
    """Radians per position of every pair, (P,); None where the angles do not grow linearly with the position."""
    order = np.argsort(position_N, kind="stable")
    turn_NP, position_N = turn_NP[order], position_N[order]
    fit, test = slice(0, None, 2), slice(1, None, 2)
    near = max(int(np.searchsorted(position_N, position_N[0] + _NEAR)), min(16, len(position_N)))
    if near < 4 or len(position_N) < 8:
        return None
    found_P = np.zeros(turn_NP.shape[1])
    reach = int(position_N[near - 1]) + 1
    width = np.pi
    for last in (near, near, len(position_N)):
        reach = max(reach, int(position_N[last - 1]) + 1)
        steps = int(min(max(np.ceil(width * reach / 0.5), 8), 4096))
        offset_F = np.linspace(-width, width, 2 * steps + 1)
        rows_NP, place_N = turn_NP[:last:2], position_N[:last:2].astype(np.float64)
        based_NP = rows_NP * np.exp(-1j * place_N[:, None] * found_P)
        score_FP = (np.exp(-1j * offset_F[:, None] * place_N) @ based_NP).real
        found_P = found_P + offset_F[score_FP.argmax(axis=0)]
        width = 2 * width / steps
    place_N1 = position_N.astype(np.float64)[:, None]
    for _ in range(3):  # what is left of the angles is small
        phase_NP = np.angle(turn_NP[fit] * np.exp(-1j * place_N1[fit] * found_P))
        found_P = found_P + (place_N1[fit] * phase_NP).sum(axis=0) / (place_N1[fit] ** 2).sum()
    left = turn_NP * np.exp(-1j * place_N1 * found_P)
    coherent = min(float(np.median(left[half].real.mean(axis=0))) for half in (fit, test))
    return found_P if coherent >= _COHERENT else None


def _base(frequency_P: F64) -> float | None:
    """The base of frequencies base^(-i/P); None where they are no such row."""
    size_P = np.abs(frequency_P)
    known = np.flatnonzero(size_P > 1e-6)
    if len(known) < 4:
        return None
    slope, start = np.polyfit(known, np.log(size_P[known]), 1)
    left = np.log(size_P[known]) - (slope * known + start)
    return float(np.exp(-slope * len(frequency_P))) if np.abs(left).max() < 0.2 else None


def norm_order(rows: MatchedRows, x_NC: F64, source: str) -> Found | None:
    """One side norms its input head by head, the other the same input after turning it. ``x_NC``: rows of boundary ``source``."""
    if rows.head < 2 or x_NC.shape != rows.a_NC.shape or x_NC.shape[1] % rows.head:
        return None
    x_NHC = x_NC.reshape(len(x_NC), -1, rows.head)
    rms_NH1 = np.sqrt((x_NHC**2).mean(axis=2, keepdims=True))
    if not (rms_NH1 > 0).all():
        return None
    for side, plain, other in (("A", rows.a_NC, rows.b_NC), ("B", rows.b_NC, rows.a_NC)):
        plain_NHC = plain.reshape(x_NHC.shape)
        scaled_NHC = x_NHC / rms_NH1
        weight_C = (plain_NHC * scaled_NHC).sum(axis=(0, 1)) / np.maximum((scaled_NHC**2).sum(axis=(0, 1)), 1e-30)
        if not (np.abs(weight_C) > 1e-3).all() or _error(scaled_NHC * weight_C, plain_NHC) > _ROUNDINGS * rows.epsilon:
            continue
        turned = find_rotation(x_NC, (other.reshape(x_NHC.shape) * rms_NH1 / weight_C).reshape(x_NC.shape), rows.head, rows.epsilon)
        if turned is None:
            continue
        ahead = "B" if side == "A" else "A"
        text = (
            f"the sides order the norm and the rotation differently: {side} norms {source}, "
            f"{ahead} norms it after rotating {turned.text()} of every {turned.head} columns"
        )
        tested = len(rows) // 2
        return _found(text, rows, tested, turned.error, {"rotates_first": ahead.lower()})
    return None
