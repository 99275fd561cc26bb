"""Causes that only full logits can show: what a score would be, were the logits turned into it in another way.

With the raw logits ``z`` of the row that predicts token ``y``, a raw score is ``z[y] - lse(z)``. Tried are: another
temperature (``log_softmax(z / T)``; dividing a score by T is not the same), a kept set (top-k or top-p), a log-sum-exp over
one shard of the vocabulary, extra columns of zeros in it, and the label of a neighbour. Everything is float64.

Shape suffixes: L rows with logits, V columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.format.score_records import ScoreName
from tracer.scores.aligning import ScoreTable
from tracer.scores.refits import FEWEST, REDUCTION, halves
from tracer.scores.results import Refit, RefitKind

__all__ = ["FullLogits", "gather_logits", "logit_refits"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_MOST_VALUES = 1 << 24
"""Logits looked at, rows times columns: 128 MiB as float64."""
_TEMPERATURES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)
_GOLDEN = (5**0.5 - 1) / 2
_STEPS = 22
_MOST_KEPT = 4096
_SHARDS = (2, 4, 8, 16, 32)


@dataclass(frozen=True, eq=False)
class FullLogits:
    """Rows of full logits of valid tokens. ``at_L``: token of the table; ``z_LV`` float64; ``lse_L`` their log-sum-exp;
    ``label_L`` the token scored; ``before_L`` and ``after_L`` its neighbours, -1 where there is none."""

    of: ScoreName
    at_L: I64
    z_LV: F64
    lse_L: F64
    label_L: I64
    before_L: I64
    after_L: I64

    def score(self, label_L: I64) -> F64:
        """Raw scores of these labels."""
        score_L: F64 = self.z_LV[np.arange(len(label_L)), label_L] - self.lse_L
        return score_L


def gather_logits(table: ScoreTable) -> FullLogits | None:
    """The full logits that the records kept, as far as their tokens are valid and in the vocabulary; None where there are none.

    Records may have kept those of several passes; the pass that most rows have is used."""
    found = [(q, logits) for q, logits in enumerate(table.logits) if logits is not None]
    if not found:
        return None
    passes = [logits.of for _, logits in found]
    of = max(sorted(set(passes)), key=passes.count)
    at, parts, before, after, taken = [], [], [], [], 0
    for q, logits in found:
        if logits.of is not of:
            continue
        n = table.start_Q[q] + logits.row_L
        keep = table.valid_N[n] & (table.token_N[n] < logits.value_LV.shape[1]) & np.isfinite(logits.value_LV).all(axis=1)
        room = max((_MOST_VALUES - taken) // max(logits.value_LV.shape[1], 1), 0)
        chosen = np.flatnonzero(keep)[:room]
        taken += len(chosen) * logits.value_LV.shape[1]
        ids, place = table.records[q].ids, table.position_N[n[chosen]]
        at.append(n[chosen])
        parts.append(logits.value_LV[chosen].astype(np.float64))
        before.append(ids[place - 1])
        after.append(np.where(place + 1 < len(ids), ids[np.minimum(place + 1, len(ids) - 1)], -1))
    z_LV = np.concatenate(parts)
    if not len(z_LV):
        return None
    at_L, width = np.concatenate(at), z_LV.shape[1]
    neighbours = (np.where(ids < width, ids, -1) for ids in (np.concatenate(before), np.concatenate(after)))
    return FullLogits(of, at_L, z_LV, _log_sum_exp(z_LV), table.token_N[at_L], *neighbours)


def logit_refits(table: ScoreTable, logits: FullLogits, x: ScoreName, limit: float) -> list[Refit]:
    """Every way of turning these logits into score ``x`` that is tried; matched or not.

    Where ``x`` is the pass the logits are of and differs from them, that alone is a match: it was extracted wrongly.
    """
    s_L = table.values[x][logits.at_L]
    half_L = halves(table, logits.at_L)
    fit, test = np.flatnonzero(half_L), np.flatnonzero(~half_L)
    if not len(fit) or not len(test):
        return []
    before = _mean(s_L - logits.score(logits.label_L))
    refits = []
    if logits.of is x:
        refits.append(
            Refit(
                kind=RefitKind.OWN_LOGITS,
                score=x,
                reference=f"logits of {x.value}",
                before=before,
                after=before,
                tokens=len(s_L),
                matched=before > limit,
                text=f"{x.value} as recorded is {before:.3g} nats from log_softmax of its own logits: it was extracted in another way"
                if before > limit
                else f"{x.value} as recorded is log_softmax of its own logits",
            )
        )
    if before <= limit:
        return refits
    for attempt in (_labels, _temperature, _kept_set, _shard, _extra_mass):
        for kind, parameter, error_L, text in attempt(logits, s_L, fit):
            error = error_L[test]
            known = error[np.isfinite(error)]
            after = _mean(known) if len(known) * 2 >= len(error) else float("inf")
            if np.isfinite(after):
                refits.append(
                    Refit(
                        kind=kind,
                        score=x,
                        reference=f"full logits of {logits.of.value}",
                        parameter=parameter,
                        before=_mean(s_L[test] - logits.score(logits.label_L)[test]),
                        after=after,
                        tokens=len(known),
                        matched=after <= limit and after * REDUCTION <= before and len(known) >= FEWEST,
                        text=f"{x.value} {text}",
                    )
                )
    return refits


_Attempt = Iterator[tuple[RefitKind, str, F64, str]]
"""Kind, parameter, score minus prediction per row (NaN where there is no prediction), text."""


def _log_sum_exp(z_LV: F64) -> F64:
    top = z_LV.max(axis=1)
    with np.errstate(under="ignore"):
        lse_L: F64 = top + np.log(np.exp(z_LV - top[:, None]).sum(axis=1))
    return lse_L


def _mean(values: F64) -> float:
    return float(np.abs(values).mean()) if len(values) else 0.0


def _labels(logits: FullLogits, s_L: F64, fit: I64) -> _Attempt:
    found = []
    for name, step, label_L in (("next", 1, logits.after_L), ("previous", -1, logits.before_L)):
        error_L = np.where(label_L >= 0, s_L - logits.score(np.maximum(label_L, 0)), np.nan)
        known = error_L[fit][np.isfinite(error_L[fit])]
        if len(known):
            found.append((_mean(known), name, step, error_L))
    if found:
        _, name, step, error_L = min(found, key=lambda entry: entry[0])
        yield (
            RefitKind.LABELS,
            f"{step:+d} token",
            error_L,
            f"is the score of the {name} token's id at each place: labels are shifted by one",
        )


def _temperature(logits: FullLogits, s_L: F64, fit: I64) -> _Attempt:
    y_L = logits.z_LV[np.arange(len(s_L)), logits.label_L]

    def errors(temperature: float, rows: I64) -> F64:
        return s_L[rows] - (y_L[rows] / temperature - _log_sum_exp(logits.z_LV[rows] / temperature))

    def cost(temperature: float) -> float:
        return _mean(errors(temperature, fit))

    best = int(np.argmin([cost(temperature) for temperature in _TEMPERATURES]))
    low, high = _TEMPERATURES[max(best - 1, 0)], _TEMPERATURES[min(best + 1, len(_TEMPERATURES) - 1)]
    found = _golden(cost, low, high)
    yield (
        RefitKind.TEMPERATURE,
        f"T = {found:.3g}",
        errors(found, np.arange(len(s_L))),
        f"is log_softmax(z / {found:.3g}): a temperature is in it",
    )


def _golden(cost: Callable[[float], float], low: float, high: float) -> float:
    """Least cost between two bounds, by golden section."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    cost_a, cost_b = cost(a), cost(b)
    for _ in range(_STEPS):
        if cost_a < cost_b:
            high, b, cost_b = b, a, cost_a
            a = high - _GOLDEN * (high - low)
            cost_a = cost(a)
        else:
            low, a, cost_a = a, b, cost_b
            b = low + _GOLDEN * (high - low)
            cost_b = cost(b)
    return (low + high) / 2


def _kept_set(logits: FullLogits, s_L: F64, fit: I64) -> _Attempt:
    """top-k: one k for all rows. top-p: the smallest set that reaches a mass, one p for all rows."""
    kept = min(_MOST_KEPT, logits.z_LV.shape[1])
    top_LK = -np.partition(-logits.z_LV, kept - 1, axis=1)[:, :kept]
    top_LK = -np.sort(-top_LK, axis=1)
    lse_LK = top_LK[:, :1] + np.log(np.cumsum(np.exp(top_LK - top_LK[:, :1]), axis=1))
    y_L = logits.z_LV[np.arange(len(s_L)), logits.label_L]
    wanted_L = y_L - s_L
    nearest = np.array([min(int(np.searchsorted(lse_LK[row], wanted_L[row])), kept - 1) for row in fit])
    cost = {
        k: _mean(s_L[fit] - (y_L[fit] - lse_LK[fit, k]))
        for k in sorted({near + step for near in nearest.tolist() for step in (-1, 0, 1)})
        if 0 <= k < kept
    }
    k = min(cost, key=lambda candidate: cost[candidate])
    yield RefitKind.KEPT_SET, f"top_k = {k + 1}", s_L - (y_L - lse_LK[:, k]), f"is renormalised over the {k + 1} most likely tokens"
    mass_LK = np.exp(lse_LK - logits.lse_L[:, None])
    # With a mass p, a row keeps up to its nearest k exactly if mass[k - 1] < p <= mass[k].
    upper = np.sort(mass_LK[fit, nearest])
    guesses = np.unique(np.quantile(upper, np.linspace(0, 1, 33)))

    def errors(p: float, rows: I64) -> F64:
        k_R = np.minimum((mass_LK[rows] < p - 1e-9).sum(axis=1), kept - 1)
        error_R: F64 = s_L[rows] - (y_L[rows] - lse_LK[rows, k_R])
        return error_R

    p = min(guesses.tolist(), key=lambda guess: _mean(errors(guess, fit)))
    yield (
        RefitKind.KEPT_SET,
        f"top_p = {p:.3g}",
        errors(p, np.arange(len(s_L))),
        f"is renormalised over the tokens that reach a mass of {p:.3g}",
    )


def _shard(logits: FullLogits, s_L: F64, fit: I64) -> _Attempt:
    """The normaliser of one of n equal shards of the vocabulary: always the same one, or the one that holds the label."""
    width = logits.z_LV.shape[1]
    y_L = logits.z_LV[np.arange(len(s_L)), logits.label_L]
    best: tuple[float, str, F64] | None = None
    for parts in _SHARDS:
        size = -(-width // parts)
        if parts > width:
            break
        lse_LP = np.stack([_log_sum_exp(logits.z_LV[:, p * size : (p + 1) * size]) for p in range(-(-width // size))], axis=1)
        owner_L = logits.label_L // size
        options = {f"shard {p} of {parts}": lse_LP[:, p] for p in range(lse_LP.shape[1])}
        options[f"the label's shard of {parts}"] = lse_LP[np.arange(len(s_L)), owner_L]
        for name, lse_L in options.items():
            error_L = s_L - (y_L - lse_L)
            cost = _mean(error_L[fit])
            if best is None or cost < best[0]:
                best = (cost, name, error_L)
    if best is not None:
        yield RefitKind.SHARD, best[1], best[2], f"has a normaliser over {best[1]} of the vocabulary instead of all columns"


def _extra_mass(logits: FullLogits, s_L: F64, fit: I64) -> _Attempt:
    """lse over more columns than the vocabulary has: exp(lse) grows by a constant, the number of columns of zeros."""
    y_L = logits.z_LV[np.arange(len(s_L)), logits.label_L]
    if float(logits.lse_L.max()) > 600:
        return
    mass_L = np.exp(y_L - s_L) - np.exp(logits.lse_L)
    mass = float(np.median(mass_L[fit]))
    if mass <= 0:
        return
    yield (
        RefitKind.EXTRA_MASS,
        f"{mass:.3g} columns of zeros",
        s_L - (y_L - np.logaddexp(logits.lse_L, np.log(mass))),
        f"has a normaliser with {mass:.3g} columns of zeros too many: padding of the vocabulary",
    )
