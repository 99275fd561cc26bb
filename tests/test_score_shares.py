"""Shares of scores: any cut of the vocabulary gives the score of the whole."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracer.format.score_shares import SHARE_COLUMNS, join_shares
from tracer.record.next_token import score_rows


def shares_of(logits_NV: torch.Tensor, ids: list[int], cuts: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The shares that processes holding the columns between ``cuts`` write, side by side."""
    row_N, id_N = np.arange(len(ids)), np.array(ids, np.int64)
    parts = [score_rows(logits_NV[:, start:stop], row_N, id_N, (start, stop)).numpy() for start, stop in itertools.pairwise(cuts)]
    return np.concatenate(parts, axis=1)


@given(cuts=st.lists(st.integers(1, 39), min_size=1, max_size=5).map(sorted), seed=st.integers(0, 99))
def test_any_cut_gives_the_score_of_the_whole(cuts: list[int], seed: int) -> None:
    """Shares of uneven slices of the vocabulary, empty ones too, make what log softmax over all of it gives, up to float32 rounding."""
    logits_NV = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) * 20
    ids = [0, 39, 7, 20, 13, 1]
    share_NC = shares_of(logits_NV, ids, [0, *cuts, 40])
    assert share_NC.shape == (6, SHARE_COLUMNS * (len(cuts) + 1))
    wanted = logits_NV.double().log_softmax(-1)[range(6), ids]
    np.testing.assert_allclose(join_shares(share_NC), wanted.float().numpy(), rtol=1e-6, atol=1e-5)


def test_a_share_is_no_score_of_its_own() -> None:
    """What one process knows is never taken for the score: without the others' shares nobody may hold the token, which is NaN,
    and two processes that claim one token make NaN too."""
    logits_NV = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    share_NC = shares_of(logits_NV, [1, 6], [0, 4, 8])
    assert np.isnan(join_shares(share_NC[:, SHARE_COLUMNS:])).tolist() == [True, False]
    assert np.isnan(join_shares(np.concatenate([share_NC[:, :SHARE_COLUMNS]] * 2, axis=1))).all()


def test_columns_that_no_process_may_choose_do_not_disturb() -> None:
    """A slice whose logits are all minus infinity adds nothing to the normaliser."""
    logits_NV = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    logits_NV[:, 4:] = -torch.inf
    scores = join_shares(shares_of(logits_NV, [0, 1, 3], [0, 4, 8]))
    wanted = logits_NV.log_softmax(-1)[range(3), [0, 1, 3]]
    np.testing.assert_allclose(scores, wanted.numpy(), rtol=1e-6)


def test_half_precision_logits_are_scored_in_float32() -> None:
    """bfloat16 logits give the scores of their float32 values."""
    logits_NV = torch.randn(2, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    scores = join_shares(shares_of(logits_NV, [2, 5], [0, 3, 8]))
    np.testing.assert_allclose(scores, logits_NV.float().log_softmax(-1)[range(2), [2, 5]].numpy(), rtol=1e-6)
