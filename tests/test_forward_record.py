"""Rows of one forward: selections, missing ones, experts (``tracer.record.forward_record``)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.small_model import SmallHost, SmallModel
from tracer.errors import MapError
from tracer.record.boundaries import Source
from tracer.record.forward_record import ForwardRecord, PositionFilter, expert_rows
from tracer.record.host import Forward, Rows
from tracer.record.readers import SourceReader

ROWS = Rows(np.array([0, 0, -1, 1, 1, 1]), np.array([0, 1, 0, 0, 1, 2]))
TENSOR = torch.arange(12).reshape(6, 2)


def record(rows: Rows = ROWS, wanted: PositionFilter | None = None) -> ForwardRecord:
    return ForwardRecord(3, Forward(rows), wanted)


def test_rows_without_a_sequence_are_left_out() -> None:
    """Only labelled rows are taken; the same row object gives the same selection."""
    forward = record()
    assert forward.main.take(TENSOR)[:, 0].tolist() == [0, 2, 6, 8, 10]
    assert (forward.main.rows.forward, len(forward.main.rows)) == (3, 5)
    assert forward.select(ROWS) is forward.main


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_any_dtype_can_be_taken(dtype: torch.dtype) -> None:
    """Rows apart are copied whatever their dtype; rows in one piece are a view."""
    tensor = TENSOR.to(dtype)
    taken = record().main.take(tensor)
    assert (taken.dtype, taken.shape) == (dtype, (5, 2))
    together = record(Rows(np.array([-1, 0, 0, -1]), np.array([0, 0, 1, 0]))).main
    assert together.take(tensor[:4]).data_ptr() == tensor[1:].data_ptr()
    assert len(record(Rows(np.array([-1]), np.array([0]))).main.take(tensor[:1])) == 0


def test_wanted_positions_only() -> None:
    """A position filter takes part in the selection."""
    forward = record(wanted=lambda position_N: position_N == 1)
    assert forward.main.take(TENSOR)[:, 0].tolist() == [2, 8]


def test_missing_rows_are_those_no_execution_showed() -> None:
    """Rows add up over the executions of a boundary; what none of them showed is missing."""
    forward = record()
    first = forward.select(Rows(np.array([0, 1, 1]), np.array([0, 0, 2])))
    assert forward.missing("b") is not None
    forward.shown["b"] = [first]
    missing = forward.missing("b")
    assert missing is not None
    assert list(zip(missing[0].tolist(), missing[1].tolist(), strict=True)) == [(0, 1), (1, 1)]
    forward.shown["b"] = [first, forward.select(Rows(np.array([1, 0]), np.array([1, 1])))]
    assert forward.missing("b") is None
    forward.shown["b"] = [forward.main]
    assert forward.missing("b") is None


def test_a_host_that_cannot_label_is_named() -> None:
    """Rows that the host cannot explain are an error with boundary and shape."""
    host = SmallHost(SmallModel())
    reader = SourceReader(Source("q", "m", layout="b s c"), host)
    assert record().rows_of(reader, (2, 3), host) is ROWS
    with pytest.raises(MapError, match="cannot say what the rows of q are"):
        record().rows_of(reader, (5,), host)


TOKENS = Rows(np.array([0, 0, 1]), np.array([0, 1, 0]))


def test_an_expert_axis_counts_experts() -> None:
    """Every token once per expert, wherever the axis stands and whether or not the host counted it in."""
    rows = expert_rows(TOKENS, ("t", "e"), (3, 2), None, "b")
    assert rows.expert_N is not None
    assert rows.expert_N.tolist() == [0, 1, 0, 1, 0, 1]
    assert rows.position_N.tolist() == [0, 0, 1, 1, 0, 0]
    major = expert_rows(TOKENS, ("e", "t"), (2, 3), None, "b")
    assert major.expert_N is not None
    assert major.expert_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert major.sequence_N.tolist() == [0, 0, 1, 0, 0, 1]
    spread = Rows(np.tile(TOKENS.sequence_N, 2), np.tile(TOKENS.position_N, 2))
    assert expert_rows(spread, ("e", "t"), (2, 3), None, "b").sequence_N.tolist() == [0, 0, 1, 0, 0, 1]


def test_slots_are_keyed_by_the_expert_they_hold() -> None:
    """Where the axis counts slots of a choice, the ids say which expert a row is."""
    ids = torch.tensor([[5, 2], [1, 7], [0, 3]])
    rows = expert_rows(TOKENS, ("t", "e"), (3, 2), ids, "b")
    assert rows.expert_N is not None
    assert rows.expert_N.tolist() == [5, 2, 1, 7, 0, 3]
    major = expert_rows(TOKENS, ("e", "t"), (2, 3), ids, "b")
    assert major.expert_N is not None
    assert major.expert_N.tolist() == [5, 1, 0, 2, 7, 3]


def test_experts_that_do_not_fit_are_refused() -> None:
    """Neither tokens x experts, nor the shape of the choice."""
    with pytest.raises(MapError, match="not tokens x experts"):
        expert_rows(TOKENS, ("t", "e"), (4, 2), None, "b")
    with pytest.raises(MapError, match="not slots of its choice"):
        expert_rows(TOKENS, ("t", "e"), (3, 2), torch.zeros(3, 3), "b")
