"""Log probabilities whose logits are cut over processes: what each process writes, and how the shares become a score.

The normaliser of a row needs all its columns, and no process has them. So each process writes, under the boundary of the
scores, a *share* of every row: the largest of its logits, the sum of ``exp(logit - largest)``, and the logit of the
scored token where that column is its own. Shares are two int64 columns per process (four float32 side by side), so they are
kept as raw values and stitching lays them next to each other; the score follows from the whole row of shares. Scores
themselves are floats: an int64 row of such a boundary is always a row of shares.

Shape suffixes: N rows, P processes that share a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SHARE_COLUMNS", "join_shares", "pack_shares"]

SHARE_COLUMNS = 2

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def pack_shares(largest_N: F32, sum_N: F32, logit_N: F32, held_N: npt.NDArray[np.bool_]) -> I64:
    """(N, 2): this process's share of every row. ``logit_N`` counts only where ``held_N``."""
    share_N4 = np.stack([largest_N, sum_N, np.where(held_N, logit_N, 0), held_N], axis=1).astype("<f4")
    return np.ascontiguousarray(share_N4).view("<i8").astype(np.int64)


def join_shares(share_NC: I64) -> F32:
    """(N,) float32: log probability of the scored token, from the shares of all processes, (N, 2 P); NaN where none of
    them, or more than one, has the token's column. Added up in float64."""
    share_NP4 = np.ascontiguousarray(share_NC.astype("<i8")).view("<f4").reshape(len(share_NC), -1, 4).astype(np.float64)
    largest_NP, sum_NP, logit_NP, held_NP = np.moveaxis(share_NP4, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        top_N = largest_NP.max(axis=1)
        normaliser_N = top_N + np.log((sum_NP * np.exp(largest_NP - top_N[:, None])).sum(axis=1))
        score_N = (logit_NP * held_NP).sum(axis=1) - normaliser_N
    return np.where(held_NP.sum(axis=1) == 1, score_N, np.nan).astype(np.float32)
