"""The same numbers in another place: columns, heads and experts permuted, rows shifted or exchanged.

Columns are told by their values over half of the rows and tested on the other half. Rows are told by their digests, so
that a shift by one token is proven without a single value.

Shape suffixes: N rows, C columns, K tokens.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tracer.read.compare import Comparison
from tracer.read.findings import Shape
from tracer.read.logical import TokenTable
from tracer.read.matched import MatchedRows
from tracer.read.shapes import Found, spans_text

__all__ = ["column_permutation", "layout_text", "row_permutation"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_MOST_COLUMNS = 16384
_ALIKE = 1 - 2.0**-14
"""Correlation of two columns that are one up to rounding."""
_MOST_SHIFT = 64


def column_permutation(rows: MatchedRows) -> Found | None:
    """Columns of B that are other columns of A, bit for bit or up to rounding; columns that agree in place may be among them."""
    columns = rows.a_NC.shape[1]
    if not rows.exact or len(rows) < 4 or not 2 <= columns <= _MOST_COLUMNS:
        return None
    fit, test = slice(0, None, 2), slice(1, None, 2)
    source_C, near = _sources(rows.a_NC[fit], rows.b_NC[fit])
    if source_C is None or np.array_equal(source_C, np.arange(columns)):
        return None
    left = np.abs(rows.b_NC[test] - rows.a_NC[test][:, source_C])
    allowed = (
        8 * rows.epsilon * np.maximum(np.abs(rows.b_NC[test]), np.abs(rows.a_NC[test]).max(axis=1, keepdims=True) / 16) if near else 0.0
    )
    if (left > allowed).mean() > (1 / 64 if near else 0):
        return None
    text, parameters = layout_text(source_C, rows.name, rows.head)
    tested = len(rows.a_NC[test])
    return Found(Shape.COLUMNS_PERMUTED, text, len(rows) - tested, tested, 0.0, parameters)


def _sources(a_NC: F64, b_NC: F64) -> tuple[I64 | None, bool]:
    """Per column of B the column of A that it is, a permutation; and whether it is so only up to rounding."""
    keys_a = {column.tobytes(): at for at, column in reversed(list(enumerate(np.ascontiguousarray(a_NC.T))))}
    source_C = np.array([keys_a.get(column.tobytes(), -1) for column in np.ascontiguousarray(b_NC.T)])
    if len(np.unique(source_C)) == len(source_C) and source_C.min() >= 0:
        return source_C, False
    if len(a_NC) < 8 or a_NC.shape[1] > 1024:
        return None, False
    lengths = [np.linalg.norm(side, axis=0) for side in (a_NC, b_NC)]
    if not all(length.all() for length in lengths):
        return None, False
    alike = (b_NC / lengths[1]).T @ (a_NC / lengths[0])
    source_C = alike.argmax(axis=1)
    if len(np.unique(source_C)) < len(source_C) or alike[np.arange(len(source_C)), source_C].min() < _ALIKE:
        return None, True
    return source_C, True


def layout_text(source_C: I64, boundary: str, head: int = 0) -> tuple[str, dict[str, object]]:
    """A permutation in the words of its largest blocks: heads, experts, halves within heads, single columns.

    ``source_C``: per place of B the place of A that it holds. ``head``: columns of one head, 0 where unknown."""
    columns = len(source_C)
    what = _unit_of(boundary)
    for block in sorted((size for size in range(1, columns) if columns % size == 0), reverse=True):
        if block < head and what.endswith("heads"):
            break  # parts of heads, rather than heads
        blocks = source_C.reshape(-1, block)
        if (blocks[:, 0] % block == 0).all() and (blocks == blocks[:, :1] + np.arange(block)).all():
            order = (blocks[:, 0] // block).tolist()
            if block == 1:
                break
            moved = [at for at, source in enumerate(order) if at != source]
            shown = order if len(order) <= 16 else [f"{at} <- {order[at]}" for at in moved[:8]]
            name = what or "blocks"
            return f"{name} permuted: B holds A's {shown} (blocks of {block} columns)", {"block": block, "order": order[:256]}
    for block in sorted(size for size in range(2, columns) if columns % size == 0):
        blocks = source_C.reshape(-1, block) - np.arange(0, columns, block)[:, None]
        if (blocks == blocks[0]).all() and blocks.min() >= 0 and blocks.max() < block:
            return f"columns permuted within every block of {block}: {_inner_text(blocks[0])}", {
                "block": block,
                "order": blocks[0].tolist()[:256],
            }
    moved_C = np.flatnonzero(source_C != np.arange(columns))
    name = what if what in ("experts",) else "columns"
    order = source_C.tolist()
    shown = order if columns <= 16 else f"{len(moved_C)} of {columns} moved ({spans_text(moved_C)})"
    return f"{name} permuted: B holds A's {shown}", {"order": order[:256]}


def _unit_of(boundary: str) -> str:
    """What the columns of a boundary are made of, for people."""
    leaf = re.sub(r"^layers\.\d+\.", "", boundary).partition("#")[0].removesuffix(".weight")
    if re.fullmatch(r"attn\.(k|v|k_norm|k_rope)", leaf):
        return "KV heads"
    if re.fullmatch(r"attn\.(q|q_norm|q_rope|core)", leaf):
        return "heads"
    return "experts" if leaf in ("moe.router_logits", "moe.router") else ""


def _inner_text(order_C: I64) -> str:
    """How the columns of one block lie: halves exchanged, pairs against halves, or the order itself."""
    block = len(order_C)
    at = np.arange(block)
    if block % 2 == 0:
        half = block // 2
        if np.array_equal(order_C, (at + half) % block):
            return "its halves are exchanged"
        interleaved = at // 2 + (at % 2) * half
        if np.array_equal(order_C, interleaved):
            return "B interleaves what A keeps in halves"
        if np.array_equal(order_C, np.argsort(interleaved)):
            return "A interleaves what B keeps in halves"
    return f"order {order_C.tolist()}" if block <= 16 else "one order in all blocks"


def row_permutation(comparison: Comparison, pairs: I64, tokens: TokenTable) -> Found | None:
    """Rows of B that are rows of A at another token: shifted by so many positions, or exchanged between sequences.

    By digest, of rows of one dtype; rows that A has several times tell nothing. ``pairs``: those that differ. ``tokens``: A's."""
    a, b = comparison.a, comparison.b
    if a.dtype != b.dtype or a.partial_axis or b.partial_axis or a.expert_R is not None or len(pairs) < 2:
        return None
    source_D = _sources_of_rows(comparison, pairs)
    known = source_D >= 0
    if known.sum() < max(2, len(pairs) // 2):
        return None
    sequence_R, position_R = tokens.sequence_K[comparison.token_R], tokens.position_K[comparison.token_R]
    step_D = position_R[pairs] - position_R[source_D]
    within = np.flatnonzero(known & (sequence_R[pairs] == sequence_R[source_D]))
    if len(within) > 1:
        steps, many = np.unique(step_D[within[::2]], return_counts=True)
        shift = int(steps[many.argmax()])
        partners = int((position_R[pairs] >= shift).sum())  # the first rows of a shifted sequence have none
        if 0 < abs(shift) <= _MOST_SHIFT and (step_D[within[1::2]] == shift).all() and len(within) >= 0.9 * min(partners, int(known.sum())):
            text = f"token shift: B's row at token t is A's at t {'-' if shift > 0 else '+'} {abs(shift)}, bit for bit"
            tested = len(within) // 2
            return Found(Shape.TOKEN_SHIFT, text, len(within) - tested, tested, 0.0, {"shift": shift})
    if known.sum() < 0.9 * len(pairs):
        return None
    text = f"rows permuted: {int(known.sum())} of {len(pairs)} differing rows of B are A's rows of another token, bit for bit"
    if (step_D[known] == 0).all():
        text = "sequences exchanged: B's rows are A's rows of another sequence at the same position, bit for bit"
    return Found(Shape.ROWS_PERMUTED, text, 0, int(known.sum()), 0.0)


def _sources_of_rows(comparison: Comparison, pairs: I64) -> I64:
    """Per differing pair the one pair whose row on A has the bits of this row on B, -1 where there is none or more than one."""
    rows_a, _ = comparison.sides(np.arange(len(comparison)))
    _, rows_b = comparison.sides(pairs)
    distinct, first, many = np.unique(comparison.a.digest_R2[rows_a], axis=0, return_index=True, return_counts=True)
    place = {row.tobytes(): int(at) for row, at, count in zip(distinct, first, many, strict=True) if count == 1}
    return np.array([place.get(row.tobytes(), -1) for row in comparison.b.digest_R2[rows_b]])
