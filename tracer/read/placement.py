"""Where a difference lies: which tokens, documents, experts.

Everything here follows from which rows differ and how far; no value is needed. Shape suffixes: R matched rows, D
differing rows, K tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.read.findings import Shape
from tracer.read.logical import LogicalTrace
from tracer.read.shapes import Found
from tracer.read.wording import sequence_name, short

__all__ = ["document", "experts_only", "from_position", "grows"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FEW_DOCUMENTS = 4


def from_position(
    a: LogicalTrace, b: LogicalTrace, position_R: I64, differs_R: Bools, conditions: Mapping[str, Mapping[str, Any]], attends: bool
) -> Found | None:
    """Only the first token, or every token from one position on, alike in all sequences that reach it. Found on half of the
    tokens, tested on the others. What begins there is named: a window, a chunk of the cache. ``attends``: the boundary mixes tokens."""
    fit, test = slice(0, None, 2), slice(1, None, 2)
    if np.array_equal(differs_R, position_R == 0) and differs_R.any() and not differs_R.all():
        return Found(Shape.FIRST_TOKEN, "only at token 0", len(position_R[fit]), len(position_R[test]), 0.0)
    clean, apart = position_R[~differs_R], position_R[differs_R]
    if not len(clean) or not len(apart) or clean.max() >= apart.min() or apart.min() == 0:
        return None
    first = int(apart.min())
    fitted = position_R[fit][differs_R[fit]]
    if not len(fitted) or (position_R[test][differs_R[test]] < clean.max()).any():
        return None
    text, parameters = f"from position {first} on", {"position": first}
    if first == 1:
        text = "every token but the first" + (": a single key leaves attention nothing to weigh" if attends else "")
    else:
        begun = [side for side, trace in (("A", a), ("B", b)) if _forward_begins(trace, first)]
        windows = _settings_equal_to(first, a, conditions)
        if begun:
            text += f", where {' and '.join(begun)} begins another forward (a chunk, or decoding)"
        if windows:
            text += f", which is {windows}"
        if not begun and not windows:
            text += ": a window, a chunk or a document begins there"
    return Found(Shape.FROM_POSITION, text, len(position_R[fit]), len(position_R[test]), 0.0, parameters)


def _forward_begins(trace: LogicalTrace, position: int) -> bool:
    """Whether the token at this position was first computed in a later forward than the one before it, in every sequence that
    has both."""
    forward_K = trace.load_forwards()
    if forward_K is None or not position:
        return False
    seen = 0
    for sequence in trace.sequences:
        if len(sequence.token) > position and sequence.token[position] >= 0 and sequence.token[position - 1] >= 0:
            if forward_K[sequence.token[position]] == forward_K[sequence.token[position - 1]]:
                return False
            seen += 1
    return seen > 0


def _settings_equal_to(value: int, a: LogicalTrace, conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """A window, chunk or block size of either side that has this value."""
    for name, sides in conditions.items():
        if re.search(r"window|chunk|block|page", name) and value in (sides.get("a"), sides.get("b")):
            return f"the {name.rpartition('.')[2]} of {'A' if sides.get('a') == value else 'B'} (A {sides.get('a')}, B {sides.get('b')})"
    config = a.manifest.conditions.get("model", {})
    config = config.get("config", {}) if isinstance(config, dict) else {}
    for name, held in config.items() if isinstance(config, dict) else ():
        if re.search(r"window|chunk|block|page", name) and held == value and not isinstance(held, bool):
            return f"the {name} of both sides"
    return ""


def document(a: LogicalTrace, token_R: I64, differs_R: Bools) -> Found | None:
    """Only later documents of packed rows differ, as wholes; the first of every row is clean."""
    rows: dict[str, list[int]] = {}
    for index, sequence in enumerate(a.sequences):
        if sequence.row:
            rows.setdefault(sequence.row, []).append(index)
    packed = [members for members in rows.values() if len(members) > 1]
    if not packed:
        return None
    sequence_R = a.tokens.sequence_K[token_R]
    later = {index: number for members in packed for number, index in enumerate(members) if number}
    touched = sorted(set(sequence_R[differs_R].tolist()))
    if not touched or not set(touched) <= later.keys():
        return None
    own = np.isin(sequence_R, touched)
    share = float(differs_R[own].mean())
    if share < 0.5:
        return None
    names = ", ".join(f"document {later[index] + 1} ({sequence_name(a, index)})" for index in touched[:_FEW_DOCUMENTS])
    whole = "" if share == 1 else f", {int(differs_R[own].sum())} of {int(own.sum())} tokens"
    text = f"only {names} of a packed row{whole}; the documents before are clean"
    return Found(Shape.DOCUMENT, text, int(own.sum()), int((~own).sum()), 0.0, {"documents": [later[index] + 1 for index in touched]})


def grows(position_D: I64, distance_D: F64) -> Found | None:
    """The distance grows with the position, over at least a factor of ten. Found on every other row, tested on the rest."""
    known = np.isfinite(distance_D) & (distance_D > 0)
    position, distance = position_D[known], distance_D[known]
    if len(np.unique(position)) < 16:
        return None
    order = np.argsort(position, kind="stable")
    position, distance = position[order], distance[order]
    correlations = [_rank_correlation(position[start::2], distance[start::2]) for start in (0, 1)]
    if min(correlations) < 0.7:
        return None
    ends = [float(np.median(part)) for part in (distance[: max(4, len(distance) // 16)], distance[-max(4, len(distance) // 16) :])]
    if ends[1] < 4 * ends[0]:
        return None
    at = [0, len(position) // 32, len(position) // 4, len(position) - 1]
    shown = ", ".join(f"{short(float(distance[i]))} at {position[i]}" for i in dict.fromkeys(at))
    tested = len(position) // 2
    text = f"grows with position: {shown}"
    return Found(Shape.GROWS, text, len(position) - tested, tested, None, {"rank_correlation": min(correlations)})


def _rank_correlation(x: I64 | F64, y: F64) -> float:
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64) for values in (x, y)]
    if len(ranks[0]) < 3:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def experts_only(expert_RE: I64, differs_R: Bools, experts: int) -> Found | None:
    """Exactly the rows that went to some experts differ. ``expert_RE``: the experts of each row, one or several.

    An expert is to blame if every row of it differs; together they must explain every differing row, and be few."""
    if not differs_R.any() or differs_R.all():
        return None
    fit_R = np.zeros(len(differs_R), np.bool_)  # half of those that differ and half of the others
    for rows in (np.flatnonzero(differs_R), np.flatnonzero(~differs_R)):
        fit_R[rows[::2]] = True
    clean = np.unique(expert_RE[fit_R & ~differs_R])
    blamed = np.setdiff1d(np.unique(expert_RE[fit_R & differs_R]), clean)
    if not len(blamed) or 2 * len(blamed) > experts or not (differs_R & ~fit_R).any():
        return None
    if not np.array_equal(np.isin(expert_RE, blamed).any(axis=1), differs_R):
        return None
    names = blamed.tolist()
    text = f"expert{'s' * (len(names) > 1)} {', '.join(map(str, names[:8]))} only: exactly the tokens routed there"
    return Found(Shape.SOME_EXPERTS, text, int(fit_R.sum()), int((~fit_R).sum()), 0.0, {"experts": names[:64]})
