"""Scores that processes recorded in shares become scores, with the normaliser of the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from tracer.format.fingerprint import fingerprint_rows
from tracer.format.score_shares import SHARE_COLUMNS, join_shares
from tracer.read.logical import LogicalBoundary, Statistics

__all__ = ["join_scores"]


def join_scores(boundary: LogicalBoundary) -> LogicalBoundary:
    """The boundary itself, or, where its rows are shares of scores laid side by side, the float32 scores they make."""
    if boundary.dtype != "int64" or boundary.width % SHARE_COLUMNS or not len(boundary):
        return boundary
    share_RC = boundary.load_values()
    if share_RC is None:
        return boundary
    made = fingerprint_rows(join_shares(share_RC)[:, None], "float32", width=1)
    assert made.sketch_N16 is not None
    assert made.sum_squares_N is not None
    assert made.abs_max_N is not None
    assert made.nonfinite_N is not None
    statistics = Statistics(made.sketch_N16, made.sum_squares_N, made.abs_max_N, made.nonfinite_N.astype(np.uint32))
    return replace(
        boundary,
        info=msgspec.structs.replace(boundary.info, dtype="float32", width=1),
        dtype="float32",
        width=1,
        digest_R2=made.digest_N2,
        load_statistics=lambda: statistics,
        load_values=lambda: None,
        load_nonfinite=lambda: statistics.nonfinite_R,
    )
