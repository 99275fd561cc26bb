"""Sources of boundaries, ready to read (``tracer.record.readers``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.small_model import SmallHost, SmallModel
from tracer.errors import MapError
from tracer.record.boundaries import Source
from tracer.record.host import Placement
from tracer.record.readers import SourceReader, canonical_order

ROWS = torch.arange(48.0).reshape(6, 8)


class Sized(SmallHost):
    """Knows the columns of what lies packed, and counts how often it is asked to place."""

    asked = 0

    def local_columns(self, boundary: str) -> int | None:
        return {"q": 4, "k": 2, "v": 2}.get(boundary)

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        self.asked += 1
        return super().placement(source, columns, leaf)


def reader(host: SmallHost | None = None, **fields: Any) -> SourceReader:
    return SourceReader(Source(**{"boundary": "q", "module": "m", "layout": "b s c", **fields}), host or Sized(SmallModel()))


def rows_of(source: SourceReader, output: Any) -> torch.Tensor:
    return source.rows(source.leaf((), {}, output), 6, (), {}, output)[0]


LEAF = ROWS.reshape(2, 3, 8)


def test_a_source_of_inputs_is_read_before_the_module_runs() -> None:
    """Arguments are read before the module can change them; anything that needs the output, after."""
    assert reader(leaf="kwargs.x|input[0]").before
    assert not reader(leaf="output[0]").before
    assert not reader(leaf="input[0]", add="output[1]").before


def test_selection_comes_before_splitting() -> None:
    """Chosen columns first, then this boundary's share of them, in the order of the list."""
    source = reader(boundary="v", split=("q", "k", "v"), select="0:8")
    assert torch.equal(rows_of(source, torch.cat([LEAF, LEAF], dim=-1)), ROWS[:, 6:8])
    assert torch.equal(rows_of(reader(boundary="k", split=("q", "k"), shares=(3, 1), host=SmallHost(SmallModel())), LEAF), ROWS[:, 6:])


def test_a_deferred_residual_is_added_in_the_leafs_dtype() -> None:
    """The sum is rounded as the next norm's own addition rounds it; nothing to add is the leaf itself."""
    leaf, residual = LEAF.to(torch.bfloat16), torch.full((2, 3, 8), 0.001)
    source = reader(leaf="output[0]", add="output[1]")
    assert torch.equal(rows_of(source, (leaf, residual.to(torch.bfloat16))), (leaf + residual.to(torch.bfloat16)).reshape(6, 8))
    assert rows_of(source, (leaf, residual)).dtype is torch.bfloat16
    assert torch.equal(rows_of(source, (leaf, None)), leaf.reshape(6, 8))


def test_parts_are_placed_beside_each_other() -> None:
    """The host places a part as if it were the whole; the recorder shifts it, slices of a rank too."""
    host = Sized(SmallModel())
    host.placements = {"gate_up": Placement(16, ((4, 12),))}
    for part, spans in ((0, ((4, 12),)), (1, ((20, 28),))):
        placed = reader(host, boundary="gate_up", part=part, parts=2).place(ROWS, LEAF)[1]
        assert (placed.width, placed.spans) == (32, spans)
    assert reader(boundary="up", part=1, parts=2).place(ROWS, LEAF)[1] == Placement(16, ((8, 16),))


def test_padding_columns_are_dropped_and_the_host_is_asked_once() -> None:
    """Columns behind the declared spans do not belong to the row; the same number of columns is placed once."""
    host = Sized(SmallModel())
    host.placements = {"lm_head": Placement(6)}
    source = reader(host, boundary="lm_head")
    for _ in range(3):
        assert source.place(ROWS, LEAF)[0].shape == (6, 6)
    assert host.asked == 1


def test_wrong_selectors_and_layouts_are_refused_at_once() -> None:
    """A source that makes no sense is an error before anything runs."""
    with pytest.raises(MapError):
        reader(leaf="outputs")
    with pytest.raises(MapError):
        reader(layout="c d")


def test_ids_ascend() -> None:
    """The canonical order sorts every row's ids; equal ids keep their order."""
    ids = torch.tensor([[5, 2, 9], [1, 1, 0]])
    order = canonical_order(ids)
    assert ids.gather(1, order).tolist() == [[2, 5, 9], [0, 1, 1]]
    assert order[1].tolist() == [2, 0, 1]
