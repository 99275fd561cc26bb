"""Files written by ``torch.save``, as plain mappings. Loaded with ``weights_only``: tensors and plain containers, never code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from tracer.errors import Code, ScoreError

__all__ = ["load_torch_file"]


def load_torch_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What is in the file, tensors on the CPU. Raises ScoreError (scores-import) where it is no mapping of plain data."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ScoreError(
            Code.SCORES_IMPORT,
            "the file cannot be loaded without running code from it",
            where=os.fspath(path),
            expected="tensors, numbers, text, lists and dictionaries, written by torch.save",
            found=str(error).split("\n")[0],
            remedy="save the fields themselves: torch.save({name: tensor, ...}, FILE)",
        ) from error
    if not isinstance(found, Mapping):
        raise ScoreError(
            Code.SCORES_IMPORT, "the file holds no mapping", where=os.fspath(path), expected="a dictionary", found=type(found).__name__
        )
    return found
