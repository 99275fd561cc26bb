"""Rows of shares become scores when a trace is stitched, and nothing else does."""

from __future__ import annotations

import numpy as np
import torch

from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import Boundary, RowScope
from tracer.format.score_shares import join_shares
from tracer.read.joined_scores import join_scores
from tracer.read.logical import LogicalBoundary
from tracer.record.next_token import score_rows


def boundary_of(values_RC: np.ndarray[tuple[int, ...], np.dtype[np.int64]], dtype: str = "int64") -> LogicalBoundary:
    rows = len(values_RC)
    return LogicalBoundary(
        info=Boundary(name="scorer.logprobs", level=1, rows=RowScope.NEXT, dtype=dtype, width=values_RC.shape[1]),
        dtype=dtype,
        width=values_RC.shape[1],
        token_R=np.arange(rows),
        expert_R=None,
        seen_R=np.ones(rows, np.int64),
        digest_R2=np.zeros((rows, 2), np.uint64),
        load_statistics=lambda: None,
        load_values=lambda: values_RC,
    )


def test_shares_become_scores() -> None:
    """Joined rows of shares have the digest and statistics that the scores recorded whole would have."""
    logits_NV, rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), np.arange(3)
    ids = np.array([1, 5, 7])
    shares = [score_rows(logits_NV[:, cut : cut + 4], rows, ids, (cut, cut + 4)).numpy() for cut in (0, 4)]
    share_NC = np.concatenate(shares, axis=1)
    joined = join_scores(boundary_of(share_NC))
    wanted = fingerprint_rows(join_shares(share_NC)[:, None], "float32", width=1)
    assert (joined.dtype, joined.width, joined.info.dtype, joined.info.width) == ("float32", 1, "float32", 1)
    np.testing.assert_array_equal(joined.digest_R2, wanted.digest_N2)
    statistics = joined.load_statistics()
    assert statistics is not None
    np.testing.assert_array_equal(statistics.abs_max_R, wanted.abs_max_N)
    assert joined.load_values() is None


def test_scores_recorded_whole_stay() -> None:
    """Float scores are left as they are."""
    boundary = boundary_of(np.zeros((3, 1), np.int64), dtype="float32")
    assert join_scores(boundary) is boundary
