"""What the user gives a trace, checked before anything is touched: every refusal is a UsageError (bad-argument)."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from tracer.errors import Code, ScoreError, UsageError
from tracer.format.score_records import MOST_NATS
from tracer.record.forward_record import PositionFilter
from tracer.record.host import IntArray
from tracer.record.map_entries import BoundaryMap

__all__ = [
    "check_by_hand",
    "check_map",
    "check_name",
    "check_path",
    "check_pin",
    "position_filter",
    "read_boundaries",
    "read_count",
    "read_level",
    "read_tokens",
    "rows_by_hand",
    "weights_mode",
]


def read_tokens(tokens: object) -> slice | tuple[int, ...] | None:
    """``tokens=`` as a slice of whole numbers or ascending positions; at least one position."""
    remedy = "how long a sequence will be is not known while it runs: give positions from the start"
    try:
        if tokens is None:
            return None
        if isinstance(tokens, slice):
            start, stop, step = (None if edge is None else operator.index(edge) for edge in (tokens.start, tokens.stop, tokens.step))
            fits = (start or 0) >= 0 and (stop is None or stop > (start or 0)) and (step is None or step > 0)
            chosen: slice | tuple[int, ...] = slice(start, stop, step)
        else:
            chosen = tuple(sorted({operator.index(position) for position in tokens}))  # type: ignore[attr-defined]
            fits = bool(chosen) and chosen[0] >= 0
    except TypeError:
        fits, remedy = False, ""
    if not fits:
        raise _refused("tokens= chooses positions of every sequence", "a slice, range or list of positions from 0 on", tokens, remedy)
    return chosen


def position_filter(tokens: slice | tuple[int, ...] | None) -> PositionFilter | None:
    """What ``read_tokens`` gave, as a test of positions."""
    if tokens is None:
        return None
    if isinstance(tokens, slice):
        start, step = tokens.start or 0, tokens.step or 1
        stop = np.iinfo(np.int64).max if tokens.stop is None else tokens.stop
        return lambda position_N: (position_N >= start) & (position_N < stop) & ((position_N - start) % step == 0)
    listed = np.array(tokens, np.int64)
    return lambda position_N: np.isin(position_N, listed)


def weights_mode(weights: object) -> str:
    """``weights=`` as the manifest has it: digest, rows or none."""
    mode = "none" if weights is False or weights is None else "digest" if weights is True else weights
    if not isinstance(mode, str) or mode not in ("digest", "rows", "none"):
        raise _refused("weights= is not known", '"digest", "rows" or False', weights)
    return mode


def read_level(level: object) -> int:
    """``level=`` as a plain number."""
    if isinstance(level, bool) or not isinstance(level, (int, np.integer)) or level not in (0, 1, 2):
        raise _refused("level= is not known", "0, 1 or 2", level)
    return int(level)


def read_boundaries(boundaries: object, name: str = "boundaries") -> tuple[str, ...] | None:
    """``boundaries=`` or ``dump=`` as globs, None where none are given. One string is one glob."""
    given = [boundaries] if isinstance(boundaries, str) else boundaries
    if given is None:
        return None
    globs = tuple(given) if isinstance(given, Iterable) else ()
    if not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise _refused(f"{name}= takes globs over boundary names", 'one or a list of them: ["layers.*.attn.out"]', boundaries)
    return globs


def read_count(count: object, name: str) -> int:
    """A whole number, 0 or more."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
        raise _refused(f"{name}= is a count", "a whole number, 0 or more", count)
    return int(count)


def check_map(given: object) -> None:
    """``map=`` is a name, a path or a map."""
    if not isinstance(given, (str, os.PathLike, BoundaryMap)):
        raise _refused("map= is no boundary map", '"auto", a name, a path to a YAML file, or what load_boundary_map gave', given)


def check_path(path: object, name: str, remedy: str = "") -> None:
    """``out=``, ``against=`` and their like can be a path, or are None."""
    plain = os.fspath(path) if isinstance(path, os.PathLike) else path
    if plain is not None and (not isinstance(plain, str) or not plain or "\0" in plain):
        raise _refused(f"{name}= is no path", "a string or a Path that is not empty", path, remedy)


def check_pin(pin: object) -> None:
    """``pin=`` is a mapping of globs to paths, or None."""
    if pin is not None and not (isinstance(pin, Mapping) and pin and all(isinstance(glob, str) and glob for glob in pin)):
        raise _refused("pin= names the trace that choices are held to", '{"*.moe.topk_ids": DIR}', pin)
    for path in pin.values() if isinstance(pin, Mapping) else ():
        check_path(path, "pin")


_BOUNDARY_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


def check_name(name: object) -> None:
    """The name of a boundary of the user's own."""
    if not isinstance(name, str) or not _BOUNDARY_NAME.fullmatch(name):
        raise _refused("t.record needs the name of a boundary", "letters, digits, _ and -, with dots between parts: my.value_head", name)


def check_by_hand(name: str, values: torch.Tensor, position_N: IntArray, tokens: int) -> None:
    """What is recorded by hand of one sequence can be so. ``tokens``: how many it has, 0 where that is not known. Raises UsageError
    (bad-argument) for rows behind its last token, ScoreError (scores-positive) for log probabilities above 0."""
    if tokens and len(position_N) and position_N.max() >= tokens:
        raise UsageError(
            Code.BAD_ARGUMENT, f"{name} has rows behind the last token of the sequence", expected=f"positions from 0 to {tokens - 1}",
            found=f"{len(position_N)} rows, up to position {position_N.max()}", remedy="record after the forward, without padding",
        )  # fmt: skip
    most = float(values.detach().max()) if name == "scorer.logprobs" and values.numel() else 0.0
    if most > MOST_NATS.get(str(values.dtype).removeprefix("torch."), 0.0):
        raise ScoreError(
            Code.SCORES_POSITIVE, f"{name} is above 0, so it is no log probability", expected="0 or less", found=f"{most:.6g}",
            remedy="give log probabilities, not probabilities, logits or negative log-likelihoods",
        )  # fmt: skip


def rows_by_hand(values: object, positions: object) -> tuple[torch.Tensor, IntArray]:
    """What ``t.record`` was given: the tensor, (N,) or (N, ...), and the position of each row, (N,), by default 0 to N - 1."""
    try:
        rows = values if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise _refused("t.record needs numbers", "a tensor or array of shape (N,) or (N, ...)", values) from error
    if rows.dim() == 0:
        raise _refused("t.record needs rows", "a tensor of shape (N,) or (N, ...)", values)
    placed = positions.detach().cpu().numpy() if isinstance(positions, torch.Tensor) else positions
    position_N = np.arange(len(rows)) if placed is None else np.asarray(placed).reshape(-1)
    whole = position_N.dtype.kind in "iu" or not len(position_N)
    if not whole or len(position_N) != len(rows) or (position_N < 0).any():
        found = f"{len(position_N)}: {position_N[:8].tolist()}"
        raise UsageError(Code.BAD_ARGUMENT, "positions do not fit the rows", expected=f"{len(rows)} positions from 0 on", found=found)
    return rows, position_N.astype(np.int64)


def _refused(what: str, expected: str, found: object, remedy: str = "") -> UsageError:
    return UsageError(Code.BAD_ARGUMENT, what, expected=expected, found=repr(found)[:200], remedy=remedy)
