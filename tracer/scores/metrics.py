"""What two scores of the same tokens differ by: numbers in nats, none of them clipped.

Definitions, as the field has them. ``x``, ``y``: log probabilities of the same valid token; n valid tokens.

- ``logprob_mae``: mean of |x - y|.
- ``probability_mae``: mean of |exp(x) - exp(y)|; what verl logs as ``training/rollout_probs_diff_mean``.
- ``k3``: mean of exp(d) - 1 - d with d = y - x, so d = lp_train - lp_rollout for A-C (Schulman 2020). It estimates the
  divergence KL(x || y) only where the tokens were sampled from ``x``.

Percentiles are those of |x - y|, the smallest value that at least that share of tokens does not exceed.

Shape suffixes: N response tokens of all requests, M the valid ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracer.format.score_records import ScoreName
from tracer.scores.aligning import ScoreTable
from tracer.scores.results import Histogram, PairResult, PairStatus, PositionBin, Subset, Thresholds, TokenPlace

__all__ = ["compare_pair", "limit_of", "token_place"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_WORST = 10
_EDGES = (0.0, *(10.0 ** (half / 2) for half in range(-18, 6)))
"""Bins of the histogram: half decades from 1e-9 to about 316 nats."""
_SINGLE_BINS = 16
_BIAS_SHARE, _BIAS_ERRORS = 0.5, 4.0
"""A mean of one sign: at least this share of logprob_mae, and this many standard errors."""
_TAIL_SEVERAL, _TAIL_ONE, _SEVERAL = 2.0, 8.0, 3
_FLOAT32_LOG_MAX = float(np.log(np.finfo(np.float32).max))


def limit_of(noise: float | None, thresholds: Thresholds) -> float:
    """The logprob_mae above which a pair is apart: twice the larger of its noise and the pass mark."""
    return 2 * max(noise or 0.0, thresholds.pass_mark)


def compare_pair(
    table: ScoreTable,
    x: ScoreName,
    y: ScoreName,
    thresholds: Thresholds,
    *,
    noise: float | None = None,
    tail_noise: float = 0.0,
    repeat: bool = False,
) -> PairResult:
    """All numbers of one pair.

    ``noise``: the largest logprob_mae of the repeats of the sides involved, ``tail_noise`` the largest difference in them.
    """
    valid_N = table.valid_N
    whole = bool(valid_N.all())
    x_M, y_M = (table.values[name] if whole else table.values[name][valid_N] for name in (x, y))
    d_M = x_M - y_M
    absolute_M = np.abs(d_M)
    count = len(d_M)
    mean, mae = float(d_M.mean()), float(absolute_M.mean())
    error = float(d_M.std() / np.sqrt(count))
    p95, p99 = _percentiles(absolute_M, (0.95, 0.99))
    probability_M = np.abs(np.exp(x_M) - np.exp(y_M))
    k3, overflow, overflow32 = _k3(-d_M)
    same_dtype = table.dtypes[x] == table.dtypes[y] != "mixed"
    differs_M = x_M.view(np.int64) != y_M.view(np.int64) if same_dtype else d_M != 0
    differing = int(np.count_nonzero(differs_M))
    place_M = None if whole else np.flatnonzero(valid_N)

    def place(m: int) -> TokenPlace:
        return token_place(table, m if place_M is None else int(place_M[m]), x, y)

    index_M = table.index_N if whole else table.index_N[valid_N]
    first_M = index_M == 0
    far = int(np.count_nonzero(absolute_M > thresholds.tail_mark))
    biased = abs(mean) > max(_BIAS_SHARE * mae, _BIAS_ERRORS * error, thresholds.pass_mark / 4)
    worst = np.argpartition(absolute_M, max(count - _WORST, 0))[max(count - _WORST, 0) :]
    worst = worst[np.argsort(-absolute_M[worst], kind="stable")]
    return PairResult(
        name=f"{x.value}-{y.value}" if repeat else f"{x.side}-{y.side}",
        x=x,
        y=y,
        status=_status(differing, mae, _tail_tells(absolute_M, tail_noise, thresholds), biased, noise, thresholds),
        noise=noise,
        tokens=count,
        signed_mean=mean,
        signed_mean_error=error,
        logprob_mae=mae,
        p95=p95,
        p99=p99,
        largest=float(absolute_M[worst[0]]),
        far=far,
        probability_mae=float(probability_M.mean()),
        probability_largest=float(probability_M.max()),
        k3=k3,
        k3_overflow=overflow,
        k3_overflow_float32=overflow32,
        bitwise_differing=differing if same_dtype else None,
        first_mismatch=place(int(np.argmax(differs_M))) if differing else None,
        first_token=_subset(d_M[first_M]),
        later_tokens=_subset(d_M[~first_M]),
        masked=_masked(table, x, y),
        biased=biased,
        positions=_positions(index_M, d_M, absolute_M),
        histogram=_histogram(d_M, absolute_M),
        worst=tuple(place(int(m)) for m in worst if absolute_M[m] > 0),
    )


def token_place(table: ScoreTable, n: int, x: ScoreName, y: ScoreName) -> TokenPlace:
    """Token ``n`` of the table, and what two scores say of it."""
    a, b = float(table.values[x][n]), float(table.values[y][n])
    return TokenPlace(
        request=table.requests[int(table.request_N[n])],
        response_index=int(table.index_N[n]),
        position=int(table.position_N[n]),
        token=int(table.token_N[n]),
        x=a,
        y=b,
        difference=a - b,
    )


def _tail_tells(absolute_M: F64, tail_noise: float, thresholds: Thresholds) -> bool:
    """Some tokens are further off than chance explains, given the largest difference of the repeats: in a heavy tail the largest
    of two samples are often twice as far apart, and seldom eight times; three tokens beyond twice it are as seldom."""
    several, one = (max(thresholds.tail_mark, times * tail_noise) for times in (_TAIL_SEVERAL, _TAIL_ONE))
    return bool(absolute_M.max() > one) or int(np.count_nonzero(absolute_M > several)) >= _SEVERAL


def _status(differing: int, mae: float, tail: bool, biased: bool, noise: float | None, thresholds: Thresholds) -> PairStatus:
    if not differing:
        return PairStatus.IDENTICAL
    if mae > limit_of(noise, thresholds) or tail or (biased and mae > 2 * (noise or 0.0)):
        return PairStatus.APART
    return PairStatus.AGREE if mae <= max(thresholds.pass_mark, 2 * (noise or 0.0)) else PairStatus.UNCLEAR


def _percentiles(values_M: F64, shares: tuple[float, ...]) -> list[float]:
    at = [min(int(np.ceil(share * len(values_M))), len(values_M)) - 1 for share in shares]
    parted = np.partition(values_M, at)
    return [float(parted[k]) for k in at]


def _k3(d_M: F64) -> tuple[float | None, int, int]:
    """Mean of exp(d) - 1 - d, and the tokens whose exp(d) is no float64 or float32."""
    with np.errstate(over="ignore"):
        terms_M = np.expm1(d_M) - d_M
    overflow = int(np.count_nonzero(np.isinf(terms_M)))
    return (None if overflow else float(terms_M.mean())), overflow, int(np.count_nonzero(d_M > _FLOAT32_LOG_MAX))


def _subset(d_K: F64) -> Subset:
    if not len(d_K):
        return Subset(tokens=0)
    return Subset(tokens=len(d_K), logprob_mae=float(np.abs(d_K).mean()), signed_mean=float(d_K.mean()))


def _masked(table: ScoreTable, x: ScoreName, y: ScoreName) -> Subset:
    """Masked tokens, for information: only those with finite numbers on both sides."""
    if not table.masked_N.any():
        return Subset(tokens=0)
    a_K, b_K = table.values[x][table.masked_N], table.values[y][table.masked_N]
    finite_K = np.isfinite(a_K) & np.isfinite(b_K)
    return _subset(a_K[finite_K] - b_K[finite_K])


def _positions(index_M: I64, d_M: F64, absolute_M: F64) -> tuple[PositionBin, ...]:
    """Error by place in the response: single places first, then bins that grow by half."""
    edges = list(range(_SINGLE_BINS + 1))
    last = int(index_M.max())
    while edges[-1] <= last:
        edges.append(max(edges[-1] + 1, int(edges[-1] * 1.5)))
    bin_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    bin_M = bin_of[index_M]
    counts = np.bincount(bin_M, minlength=len(edges) - 1)
    total, signed = (np.bincount(bin_M, weights=values, minlength=len(edges) - 1) for values in (absolute_M, d_M))
    largest = np.zeros(len(edges) - 1)
    np.maximum.at(largest, bin_M, absolute_M)
    return tuple(
        PositionBin(
            start=edges[k],
            stop=min(edges[k + 1], last + 1),
            tokens=int(counts[k]),
            logprob_mae=float(total[k] / counts[k]),
            signed_mean=float(signed[k] / counts[k]),
            largest=float(largest[k]),
        )
        for k in np.flatnonzero(counts).tolist()
    )


def _histogram(d_M: F64, absolute_M: F64) -> Histogram:
    zero = int(np.count_nonzero(absolute_M == 0))
    place_M = np.searchsorted(_EDGES, absolute_M, side="right") - 1
    counts = np.bincount(place_M, minlength=len(_EDGES))
    counts[0] -= zero
    return Histogram(
        zero=zero,
        edges=_EDGES,
        counts=tuple(int(count) for count in counts),
        above=int(np.count_nonzero(d_M > 0)),
        below=int(np.count_nonzero(d_M < 0)),
    )
