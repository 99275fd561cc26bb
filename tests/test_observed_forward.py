"""A forward watched whole: leaves, layouts, equal rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tracer.record.observed_forward import layout_of, observe_forward, rows_of


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 13), "b s"), ((1, 13), "b s"), ((2, 13, 8), "b s c"), ((2, 13, 4, 2), "b s h d"), ((2, 4, 13, 2), "b h s d"),
        ((13, 2, 8), "s b c"), ((26, 8), "t c"), ((26, 4, 2), "t h d"), ((104, 2), "(t h) d"), ((3, 2, 13), "p b s"),
        ((2, 8), ""), ((5, 7), ""), ((), ""),
    ],
)  # fmt: skip
def test_layouts_are_read_off_the_shape(shape: tuple[int, ...], layout: str) -> None:
    """Where batch and sequence stand says the layout; a shape that has them nowhere has none."""
    assert layout_of(shape, 2, 13) == layout


def test_rows_are_the_same_in_every_layout() -> None:
    """The same values laid out differently are the same rows by token."""
    x = torch.arange(2 * 13 * 8).reshape(2, 13, 8)
    views = {"b s c": x, "s b c": x.transpose(0, 1), "b s h d": x.reshape(2, 13, 4, 2), "b h s d": x.reshape(2, 13, 4, 2).transpose(1, 2)}
    for layout, view in {**views, "t c": x.reshape(26, 8)}.items():
        assert torch.equal(rows_of(view, layout), x.reshape(26, 8)), layout
    with pytest.raises(ValueError, match="no rows"):
        rows_of(x, "")


class Edits(nn.Module):
    """Changes what its parts returned, and calls one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.twice = nn.Identity()

    def forward(self, ids: torch.Tensor, *, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = self.norm(hidden)
        x.add_(1)
        return self.twice(self.twice(x).transpose(0, 1)).transpose(0, 1), None


def test_leaves_are_as_the_modules_saw_them() -> None:
    """Every tensor is kept as it was at that moment, by argument or output; of a module that runs twice the first call counts."""
    model, ids, hidden = Edits(), torch.zeros(2, 13, dtype=torch.long), torch.randn(2, 13, 4)
    seen = observe_forward(dict(model.named_modules()), ids, lambda: model(ids, hidden=hidden))
    assert [(leaf.module, leaf.leaf) for leaf in seen.leaves][:3] == [("", "input[0]"), ("", "kwargs.hidden"), ("norm", "input[0]")]
    assert [leaf.leaf for leaf in seen.of("") if not leaf.given] == ["output[0]"]
    assert seen.calls == {"": 1, "norm": 1, "twice": 2}
    norm, root = (next(leaf for leaf in seen.of(path) if not leaf.given) for path in ("norm", ""))
    assert torch.equal(norm.tensor, nn.functional.layer_norm(hidden, (4,)))
    assert norm.key != root.key
    assert seen.of("twice")[0].key == seen.of("twice")[-1].key == root.key
    assert (seen.batch, seen.columns, seen.tokens) == (2, 13, 26)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
