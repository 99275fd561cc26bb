"""Tests of ``tracer.hosts.torch_files``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tracer.errors import Code, ScoreError
from tracer.hosts.torch_files import load_torch_file


class Foreign:
    """A class that only its own code could load."""


def test_plain_data_is_loaded(tmp_path: Path) -> None:
    """Tensors and containers come back."""
    torch.save({"r0": (torch.tensor([-1.0]), torch.tensor([1]))}, tmp_path / "a.pt")
    assert load_torch_file(tmp_path / "a.pt")["r0"][0].tolist() == [-1.0]


@pytest.mark.parametrize("content", [{"r0": Foreign()}, [1, 2]], ids=["code", "list"])
def test_anything_else_is_refused(content: Any, tmp_path: Path) -> None:
    """A file that would run code, or holds no mapping, is refused; so is what is no such file."""
    torch.save(content, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"not a file of torch")
    for name in ("a.pt", "b.pt", "nowhere.pt"):
        with pytest.raises(ScoreError) as refused:
            load_torch_file(tmp_path / name)
        assert refused.value.code is Code.SCORES_IMPORT
