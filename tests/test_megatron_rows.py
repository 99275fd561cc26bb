"""What the rows of a Megatron call are; no Megatron is needed to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tracer.errors import HostError
from tracer.hosts.megatron_rows import RowOrder, RowReader
from tracer.record.host import Forward
from tracer.record.tokens import SequenceRegistry

IDS = torch.arange(100, 112).reshape(2, 6)


def read(reader: RowReader | None = None, registry: SequenceRegistry | None = None, ids: torch.Tensor = IDS, **given: Any) -> Forward:
    """One call, the first of the run."""
    reader = reader or RowReader("", rotary=True)
    return reader.read(0, {"input_ids": ids, **given}, (ids.shape[0], ids.shape[1]), SequenceRegistry() if registry is None else registry)


def causal(columns: int = 6) -> torch.Tensor:
    """Megatron's causal mask: True where a row may not attend."""
    return torch.triu(torch.ones(columns, columns, dtype=torch.bool), 1)[None, None]


@pytest.mark.parametrize("mask", [None, causal(), causal().expand(2, 1, 6, 6)])
def test_batch_rows_are_sequences(mask: torch.Tensor | None) -> None:
    """Without packing every batch row is one sequence, with its ids, seen from its first token on."""
    registry = SequenceRegistry()
    registry.name_requests(["p0", "p1"])
    forward = read(registry=registry, attention_mask=mask)
    assert forward.rows.sequence_N.tolist() == [0] * 6 + [1] * 6
    assert forward.rows.position_N.tolist() == [*range(6), *range(6)]
    assert [(registry[n].label, registry[n].request) for n in range(2)] == [("0.r0.d0", "p0"), ("0.r1.d0", "p1")]
    assert registry.look_up(np.array([1]), np.array([2]))[0].tolist() == [108]
    assert forward.inputs["input.visible_from"].tolist() == [0] * 12
    assert forward.inputs["input.positions"].tolist() == [*range(6), *range(6)]


def test_packed_documents_come_from_cu_seqlens() -> None:
    """Documents of a packed row, with padding between them, have rows, positions and sight of their own."""
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 3, 8]), cu_seqlens_q_padded=torch.tensor([0, 4, 4, 10]))
    forward = read(ids=IDS.reshape(1, 12), packed_seq_params=packed)
    assert forward.rows.sequence_N.tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1]
    assert forward.rows.position_N.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert forward.inputs["input.visible_from"].tolist() == [0] * 12
    assert forward.inputs["input.positions"].tolist()[4:9] == [0, 1, 2, 3, 4]
    assert forward.skipped == {"padding": 4}


def test_restarting_positions_begin_documents_that_rotary_ignores() -> None:
    """Position ids that restart begin a document; rotary positions stay the columns, learned ones are the ids."""
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    forward = read(position_ids=position_ids)
    assert forward.rows.sequence_N.tolist() == [0, 0, 0, 1, 1, 1] + [2] * 6
    assert forward.inputs["input.positions"].tolist()[:6] == [0, 1, 2, 3, 4, 5]
    assert forward.inputs["input.visible_from"].tolist()[:6] == [0, 0, 0, -3, -3, -3]
    learned = read(RowReader("", rotary=False), position_ids=position_ids)
    assert learned.inputs["input.positions"].tolist()[:6] == [0, 1, 2, 0, 1, 2]


def test_a_mask_that_keeps_documents_apart_is_read() -> None:
    """Where the mask hides earlier documents, rows see only their own."""
    mask = causal().clone()
    mask[..., 3:, :3] = True
    forward = read(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2), attention_mask=mask)
    assert forward.inputs["input.visible_from"].tolist() == [0] * 12


def test_padding_is_left_out_and_counted() -> None:
    """Rows of a padding mask, or that the attention mask hides from themselves, belong to no sequence."""
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    forward = read(padding_mask=padding)
    assert forward.rows.sequence_N.tolist() == [0] * 6 + [1] * 4 + [-1] * 2
    assert forward.skipped == {"padding": 2}
    mask = causal().expand(2, 1, 6, 6).clone()
    mask[0, 0, :, :2] = True
    left = read(attention_mask=mask)
    assert left.rows.sequence_N.tolist()[:6] == [-1, -1, 0, 0, 0, 0]
    assert left.inputs["input.visible_from"].tolist()[2:6] == [0, 0, 0, 0]


def test_lengths_of_the_user_come_first() -> None:
    """``sequences=`` tells documents that neither positions nor masks show, of the tokens that are no padding."""
    registry = SequenceRegistry()
    registry.give_lengths([[2, 4], [6]])
    forward = read(registry=registry)
    assert forward.rows.sequence_N.tolist() == [0, 0, 1, 1, 1, 1] + [2] * 6


def test_later_stages_know_no_ids() -> None:
    """Without ids the rows are labelled alike, and the ids are left to the stage that has them."""
    forward = RowReader("dp=1", rotary=True).read(3, {"input_ids": None}, (2, 6), SequenceRegistry())
    assert forward.ids_N is None
    assert forward.rows.sequence_N.tolist() == [0] * 6 + [1] * 6


def test_context_parallel_rows_have_their_global_positions() -> None:
    """A context-parallel process labels its mirrored chunks by their place in the whole sequence; packing is refused."""
    reader = RowReader("", rotary=True, context=(1, 2))
    forward = read(reader, ids=IDS[:, :4])
    assert forward.rows.position_N.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    assert forward.inputs["input.positions"].tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    with pytest.raises(HostError, match="packed sequences"):
        read(reader, ids=IDS[:1, :4], packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4])))


def test_rows_in_every_order() -> None:
    """Sequence-first rows are transposed, sequence parallelism takes a piece of them, and equal orders are one object."""
    rows = read().rows
    order = RowOrder(rows, 2, 6)
    assert order.ordered(False) is rows
    transposed = order.ordered(True)
    assert transposed.sequence_N.tolist() == [0, 1] * 6
    assert transposed.position_N.tolist() == np.repeat(np.arange(6), 2).tolist()
    piece = order.ordered(True, (1, 3))
    assert piece is order.ordered(True, (1, 3))
    assert piece.position_N.tolist() == [2, 2, 3, 3]
    assert RowOrder(rows, 1, 12).ordered(True) is rows
