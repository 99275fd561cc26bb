"""How rows, tokens and sets of them are written for people.

Shape suffixes: K tokens of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracer.read.findings import Place
from tracer.read.logical import LogicalTrace

__all__ = ["by_sequence", "bytes_text", "count", "place_text", "row_text", "sequence_name", "short", "token_name", "token_profile"]

I64 = npt.NDArray[np.int64]
_NAMES_SHOWN = 3


def count(number: int, what: str) -> str:
    """``1 row``, ``2 rows``, ``1234 rows``; ``2 boundaries``, ``2 processes``."""
    if number == 1:
        return f"1 {what}"
    if what.endswith("y") and what[-2:-1] not in "aeiou":
        return f"{number} {what[:-1]}ies"
    return f"{number} {what}es" if what.endswith("s") else f"{number} {what}s"


def bytes_text(number_of_bytes: int) -> str:
    """``312 bytes``, ``4.5 KiB``, ``1.2 MiB``, in the largest unit of which there is one."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number_of_bytes >= 1 << power:
            return f"{number_of_bytes / (1 << power):.1f} {unit}"
    return count(number_of_bytes, "byte")


def short(value: float) -> str:
    """A number to two digits: ``0``, ``0.37``, ``2.8e-03``."""
    if value == 0:
        return "0"
    return f"{value:.2g}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def sequence_name(trace: LogicalTrace, index: int) -> str:
    """Request or label of a sequence, with its scope where another scope has a sequence of that name."""
    sequence = trace.sequences[index]
    name = sequence.name
    if sequence.scope and any(other.name == name and other.scope != sequence.scope for other in trace.sequences):
        return f"{sequence.scope}/{name}"
    return name


def token_name(trace: LogicalTrace, token: int, shift: int = 0) -> tuple[str, int]:
    """Request or label, and position, of one token; ``shift``: 1 for rows that speak of the next token."""
    table = trace.tokens
    return sequence_name(trace, int(table.sequence_K[token])), int(table.position_K[token]) - shift


def row_text(request: str, position: int | None, expert: int | None = None) -> str:
    """``s0:3``, ``s0:3/e5``."""
    text = request if position is None else f"{request}:{position}"
    return text if expert is None else f"{text}/e{expert}"


def place_text(place: Place) -> str:
    """``layers.2.attn.out, request step7-p2-s3, token 41``."""
    text = place.boundary
    if place.position is not None:
        text += f", request {place.request}, token {place.position}"
    if place.expert is not None:
        text += f", expert {place.expert}"
    return text


def by_sequence(trace: LogicalTrace, tokens: I64, shift: int = 0) -> str:
    """How many of some tokens each sequence has: ``s0 4 (3..6), s1 5 (0..4)``; a single one is ``s0:3``."""
    if len(tokens) == 1:
        return row_text(*token_name(trace, int(tokens[0]), shift))
    sequence = trace.tokens.sequence_K[tokens]
    position = trace.tokens.position_K[tokens] - shift
    parts = []
    distinct = np.unique(sequence)
    for index in distinct[: 2 * _NAMES_SHOWN]:
        own = position[sequence == index]
        span = f"{own.min()}..{own.max()}" if len(own) > 1 else f"{own[0]}"
        parts.append(f"{sequence_name(trace, int(index))} {len(own)} ({span})")
    hidden = len(distinct) - len(parts)
    return ", ".join(parts) + (f", and {count(hidden, 'more sequence')}" if hidden else "")


def token_profile(trace: LogicalTrace, compared: I64, differing: I64, shift: int = 0) -> str:
    """Which tokens differ among those compared: ``all``, ``all but position 0``, ``from position 8``, ``all of s0``,
    ``s0:5``, ``12 of 96``. Both are token indices, in any order, repeats allowed."""
    among_K, apart_K = np.zeros(len(trace.tokens), np.bool_), np.zeros(len(trace.tokens), np.bool_)
    among_K[compared] = True
    apart_K[differing] = True
    compared, differing = np.flatnonzero(among_K), np.flatnonzero(apart_K)
    if not len(differing):
        return ""
    if len(differing) == len(compared):
        return "all"
    position = trace.tokens.position_K[compared] - shift
    differs = apart_K[compared]
    if np.array_equal(differs, position > 0):
        return "all but position 0"
    sequence = trace.tokens.sequence_K[compared]
    touched = np.unique(sequence[differs])
    every = len(touched) == len(np.unique(sequence))
    where = "" if every else f" of {_names(trace, touched)}"
    within = np.isin(sequence, touched)
    first = {int(index): int(position[differs & (sequence == index)].min()) for index in touched}
    start = np.array([first.get(int(index), 0) for index in sequence]) if len(touched) <= 1024 else None
    if start is not None and np.array_equal(differs, within & (position >= start)):
        starts = set(first.values())
        if starts == {0}:
            return f"all{where}"
        if len(starts) == 1:
            return f"from position {starts.pop()}{where}"
        if len(first) <= _NAMES_SHOWN:
            return "from " + ", ".join(row_text(sequence_name(trace, index), at) for index, at in first.items())
    if not every and np.array_equal(differs, within & (position > 0)):
        return f"all but position 0{where}"
    if len(differing) <= _NAMES_SHOWN:
        return ", ".join(row_text(*token_name(trace, int(token), shift)) for token in differing)
    return f"{len(differing)} of {len(compared)}" + ("" if every else f" ({_names(trace, touched)})")


def _names(trace: LogicalTrace, sequences: Sequence[int] | I64) -> str:
    if len(sequences) > _NAMES_SHOWN:
        return f"{len(sequences)} sequences"
    return ", ".join(sequence_name(trace, int(index)) for index in sequences)
