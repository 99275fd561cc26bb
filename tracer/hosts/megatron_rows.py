"""What the rows of one Megatron call are: documents, positions, and the order rows have inside the model.

Megatron computes sequence first, (S, B, H); sequence parallelism keeps a piece of S per tensor-parallel process, context
parallelism is given a piece of S by the caller. Rotary positions are the columns themselves, whatever ``position_ids`` say.

Shape suffixes: B batch rows, S columns of this call, N = B * S rows, (batch, column) row-major, D documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracer.errors import Code, HostError
from tracer.hosts.megatron_layout import zigzag_slots
from tracer.record.host import Forward, IntArray, Rows
from tracer.record.tokens import (
    SequenceRegistry,
    document_rows,
    documents_from_cu_seqlens,
    documents_from_lengths,
    documents_from_mask,
    documents_from_positions,
    label_rows,
    offsets_in_documents,
    visible_from,
    visible_keys,
)

__all__ = ["RowOrder", "RowReader", "unsupported"]

BoolArray = npt.NDArray[np.bool_]


def unsupported(what: str, found: str) -> HostError:
    return HostError(
        Code.HOST_UNSUPPORTED,
        f"the megatron host cannot record this run: {what}",
        found=found,
        remedy="trace training and scoring forwards of one model chunk per process, without an inference context",
    )


@dataclass(frozen=True)
class RowReader:
    """Reads calls. ``scope``: data-parallel coordinate of the sequences. ``rotary``: positions are columns."""

    scope: str
    rotary: bool
    context: tuple[int, int] = (0, 1)
    """Index and size of the context-parallel axis."""

    def read(self, number: int, given: Mapping[str, Any], shape: tuple[int, int], sequences: SequenceRegistry) -> Forward:
        """Label the rows of a call of B x S tokens. Opens sequences, records ids. Raises HostError (host-unsupported)."""
        batch, columns = shape
        ids, mask, packed = given.get("input_ids"), given.get("attention_mask"), given.get("packed_seq_params")
        ids_N = None if ids is None else _array(ids).reshape(-1)
        position_ids = given.get("position_ids")
        slot_S = zigzag_slots(columns, *self.context)
        whole = self.context[1] == 1
        allowed = _allowed(mask, shape) if whole else None
        real_BS = np.ones(shape, bool)
        if isinstance(given.get("padding_mask"), torch.Tensor):
            real_BS &= _array(given["padding_mask"]).reshape(shape) == 0
        if allowed is not None:
            real_BS &= np.broadcast_to(allowed[:, np.arange(columns), np.arange(columns)], shape)
        edges = _packed_edges(packed)
        if not whole and edges is not None:
            raise unsupported("packed sequences under context parallelism", f"{self.context[1]} context-parallel processes")
        document_N = self._documents(edges, position_ids, real_BS, sequences, whole)
        document_D = document_rows(document_N, columns)
        rows = self._label(number, document_N, document_D, sequences)
        if not whole:
            rows = Rows(rows.sequence_N, np.where(rows.sequence_N >= 0, np.tile(slot_S, batch), 0))
        if ids_N is not None:
            sequences.record_rows(rows, ids_N)
        unseen: dict[str, str] = {}
        inputs = {"input.positions": self._positions(position_ids, slot_S, shape, edges)}
        if edges is not None:
            seen_N = offsets_in_documents(document_N) + 1
            inputs["input.visible_from"] = visible_from(rows, seen_N)
        elif whole:
            seen_BS = visible_keys(real_BS, columns) if allowed is None or _is_causal(allowed) else visible_keys(allowed, columns)
            inputs["input.visible_from"] = visible_from(rows, np.broadcast_to(seen_BS, shape))
            if isinstance(mask, torch.Tensor) and not _is_run(mask, allowed, real_BS):
                unseen["input.visible_from"] = "the attention mask shows more or less than a run of tokens up to the row's own"
        elif mask is None:
            inputs["input.visible_from"] = np.zeros(batch * columns, np.int64)
        padding = int((rows.sequence_N < 0).sum())
        skipped = {"padding": padding} if padding else {}
        return Forward(rows, ids_N, inputs, skipped, RowOrder(rows, batch, columns), unseen)

    def _documents(
        self, edges: tuple[IntArray, IntArray] | None, position_ids: Any, real_BS: BoolArray, sequences: SequenceRegistry, whole: bool
    ) -> IntArray:
        """Document of every row, -1 for padding: (N,)."""
        lengths = sequences.document_lengths(real_BS)
        if edges is not None:
            start_D, length_D = edges
            document_N = documents_from_cu_seqlens([*start_D, real_BS.size], real_BS.size)
            offset_N = offsets_in_documents(document_N)
            inside_N = offset_N < length_D[document_N.clip(0)]
            return np.where(inside_N & real_BS.reshape(-1), document_N, -1)
        if lengths is not None:
            return documents_from_lengths(lengths, real_BS.shape[1], real_BS)
        if isinstance(position_ids, torch.Tensor) and whole:
            return documents_from_positions(np.broadcast_to(_array(position_ids), real_BS.shape), real_BS)
        return documents_from_mask(real_BS)

    def _label(self, number: int, document_N: IntArray, document_D: IntArray, sequences: SequenceRegistry) -> Rows:
        """Rows with their sequences, opened under labels that are the same on every process of the scope."""
        names = sequences.take_requests(len(document_D))
        opened: dict[int, int] = {}
        sequence_D = []
        for name, b in zip(names, document_D.tolist(), strict=True):
            nth = opened[b] = opened.get(b, -1) + 1
            label = f"{number}.r{b}.d{nth}"
            sequence_D.append(sequences.open(label, request=name, scope=self.scope, row=f"{number}/{b}"))
        numbers, renumbered_N = np.unique(document_N, return_inverse=True)
        return label_rows(renumbered_N - int((numbers < 0).any()), sequence_D)

    def _positions(self, position_ids: Any, slot_S: IntArray, shape: tuple[int, int], edges: tuple[IntArray, IntArray] | None) -> IntArray:
        """Positions as the model uses them: (N,)."""
        if edges is not None:
            return offsets_in_documents(documents_from_cu_seqlens([*edges[0], shape[0] * shape[1]], shape[0] * shape[1]))
        if self.rotary or not isinstance(position_ids, torch.Tensor):
            return np.tile(slot_S, shape[0])
        return np.broadcast_to(_array(position_ids), shape).reshape(-1)


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows of one call in every order the model has them."""

    rows: Rows
    batch: int
    columns: int
    _known: dict[tuple[bool, tuple[int, int]], Rows] = field(default_factory=dict)

    def ordered(self, sequence_first: bool, piece: tuple[int, int] = (0, 1)) -> Rows:
        """All rows, or piece ``piece[0]`` of ``piece[1]`` equal ones along S. The same object for the same order."""
        if self.batch == 1 and piece[1] == 1:
            sequence_first = False
        if not sequence_first and piece[1] == 1:
            return self.rows
        key = (sequence_first, piece)
        if key not in self._known:
            index = np.arange(self.batch * self.columns).reshape(self.batch, self.columns)
            held = self.columns // piece[1]
            index = index[:, piece[0] * held : (piece[0] + 1) * held]
            index_N = (index.T if sequence_first else index).reshape(-1)
            self._known[key] = Rows(self.rows.sequence_N[index_N], self.rows.position_N[index_N])
        return self._known[key]


def _packed_edges(packed: Any) -> tuple[IntArray, IntArray] | None:
    """Where documents start in memory and how long they are, both (D,); None where the call packs nothing."""
    lengths = getattr(packed, "cu_seqlens_q", None)
    if lengths is None:
        return None
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    length_D = np.diff(_array(lengths))
    start_D = _array(lengths if padded is None else padded)[:-1]
    return start_D[length_D > 0], length_D[length_D > 0]


def _is_causal(allowed: BoolArray) -> bool:
    columns = allowed.shape[-1]
    return bool((allowed == np.tri(columns, dtype=bool)).all())


def _is_run(mask: torch.Tensor, allowed: BoolArray | None, real_BS: BoolArray) -> bool:
    """Whether every real row sees exactly the real tokens from one on up to itself, in all heads alike."""
    if allowed is None or bool((mask != mask[:, :1]).any()):
        return False
    slots = np.arange(allowed.shape[-1])
    first = allowed.argmax(axis=-1)[..., None]
    run = (slots >= first) & (slots <= slots[:, None]) & real_BS[:, None]
    return not bool(((np.broadcast_to(allowed, run.shape) != run) & real_BS[..., None]).any())


def _allowed(mask: Any, shape: tuple[int, int]) -> BoolArray | None:
    """Where a row may attend to a column: (B or 1, S, S). Megatron's masks are True where it may not."""
    columns = shape[1]
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[-2:] != (columns, columns):
        return None
    hidden = mask[:, 0].detach()
    hidden = hidden if hidden.dtype == torch.bool else hidden > 0.5
    return ~hidden.cpu().numpy()


def _array(tensor: torch.Tensor) -> IntArray:
    return tensor.detach().to("cpu", torch.int64).numpy()
