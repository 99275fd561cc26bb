"""What torch.distributed knows of one process, in process groups that never communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tracer.errors import CaptureError, Code, HostError
from tracer.hosts.torch_sharding import (
    chunk,
    cutting_axis,
    find_mesh,
    held_columns_of,
    held_spans,
    partial_axis,
    spans_of,
)


@contextmanager
def process(rank: int, world: int) -> Iterator[None]:
    """This process as one of a group that never communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def placed(shape: tuple[int, ...], mesh: DeviceMesh, placements: list[object], local: tuple[int, ...]) -> DTensor:
    """A DTensor of global ``shape`` whose local part has shape ``local``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)  # type: ignore[arg-type]


def on(mesh: DeviceMesh) -> torch.nn.Module:
    """A module whose only parameter lies on a mesh, replicated."""
    module = torch.nn.Linear(4, 4, bias=False)
    tensor = DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()] * mesh.ndim, run_check=False)
    module.weight = torch.nn.Parameter(tensor, requires_grad=False)
    return module


def axes_of(model: torch.nn.Module) -> list[tuple[str, int, int]]:
    return [(axis.name, axis.index, axis.size) for axis in find_mesh(model).axes]


def test_one_process_has_no_axes() -> None:
    """Without a process group, and in one of a single process, there is no mesh."""
    model = torch.nn.Linear(1, 1)
    assert axes_of(model) == []
    with process(0, 1):
        assert (find_mesh(model).world_size, find_mesh(model).axes) == (1, ())


def test_processes_without_a_mesh_are_data_parallel() -> None:
    """Copies of a plain model in a group are one data-parallel axis."""
    with process(2, 4):
        assert axes_of(torch.nn.Linear(1, 1)) == [("dp", 2, 4)]


def test_axes_are_those_of_the_whole_mesh() -> None:
    """A parameter on one dimension of a mesh tells of all its dimensions; those of size 1 are left out."""
    with process(3, 4):
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert axes_of(on(mesh["tp"])) == [("dp", 1, 2), ("tp", 1, 2)]


@pytest.mark.parametrize(("ranks", "index"), [([2, 3], 1), ([1, 3], 1)])
def test_a_mesh_of_some_processes_leaves_a_data_axis(ranks: list[int], index: int) -> None:
    """What a mesh does not cover is a data-parallel axis outside it, whether its groups follow each other or interleave."""
    with process(3, 4):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("tp",), _init_backend=False)
        assert axes_of(on(mesh)) == [("dp", index, 2), ("tp", 1, 2)]


def test_a_mesh_that_cannot_be_placed_is_refused() -> None:
    """A mesh of processes that neither follow each other nor interleave needs the user's word."""
    with process(3, 8):
        mesh = DeviceMesh("cpu", [0, 3], mesh_dim_names=("tp",), _init_backend=False)
        with pytest.raises(HostError) as caught:
            find_mesh(on(mesh))
    assert caught.value.code is Code.HOST_UNSUPPORTED
    assert "mesh=" in caught.value.remedy


@pytest.mark.parametrize("size", [1, 5, 6, 7, 8, 126])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    """A chunk is what ``torch.chunk`` gives, and empty where it gives fewer."""
    pieces = torch.arange(size).chunk(parts)
    for index in range(parts):
        start, stop = chunk(size, parts, index)
        assert list(range(start, stop)) == (pieces[index].tolist() if index < len(pieces) else [])


def test_runs_of_indices_become_spans() -> None:
    """Runs stay in local order."""
    assert spans_of(np.array([4, 5, 0, 1, 7])) == ((4, 6), (0, 2), (7, 8))
    assert spans_of(np.empty(0, np.int64)) == ()


def test_shards_are_placed_unevenly_and_nested() -> None:
    """Spans follow the placements: uneven, strided within a packed dimension, and two axes on one dimension."""
    with process(3, 4):
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        assert held_spans(placed((126, 3), line, [Shard(0)], (30, 3))) == ((((96, 126),), ()), "")
        packed = placed((2, 16), line, [_StridedShard(1, split_factor=2)], (2, 4))
        assert held_spans(packed) == (((), ((6, 8), (14, 16))), "")
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        nested = placed((8, 2), grid, [_StridedShard(0, split_factor=2), Shard(0)], (2, 2))
        assert held_spans(nested) == ((((6, 8),), ()), "")
        assert held_spans(nested, frozenset({"fsdp"})) == ((((4, 8),), ()), "")


def test_placements_that_cannot_be_told_have_a_reason() -> None:
    """Partial sums hold no part of a parameter, and a local part of another size than its placement says is not trusted."""
    with process(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert "placed as" in held_spans(placed((4, 2), mesh, [Partial()], (4, 2)))[1]
        assert "1 of 2 expected" in held_spans(placed((4, 2), mesh, [Shard(0)], (1, 2)))[1]


def test_columns_of_several_dimensions_are_flattened() -> None:
    """Heads held become runs of columns; rows that are cut leave the columns whole."""
    with process(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        heads = placed((2, 3, 4, 8), mesh, [Shard(2)], (2, 3, 2, 8))
        assert held_columns_of(heads, [2, 3]) == (32, ((16, 32),))
        assert (cutting_axis(heads, [2, 3]), cutting_axis(heads, [0])) == ("tp", "")
        inner = placed((2, 3, 2, 8), mesh, [Shard(3)], (2, 3, 2, 4))
        assert held_columns_of(inner, [2, 3]) == (16, ((4, 8), (12, 16)))
        assert held_columns_of(placed((2, 4, 8), mesh, [Shard(1)], (2, 2, 8)), [2]) == (8, ())
        assert held_columns_of(placed((2, 1), mesh, [Shard(1)], (2, 0)), [1]) == (1, ((0, 0),))


def test_only_plain_sums_are_partial() -> None:
    """A pending sum names its axis; a masked or averaged one cannot be added by hand and is refused with a remedy."""
    from torch.distributed.tensor._ops import _embedding_ops

    with process(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert partial_axis(placed((2, 4), mesh, [Partial()], (2, 4)), "attn.out") == "tp"
        assert partial_axis(placed((2, 4), mesh, [Replicate()], (2, 4)), "attn.out") == ""
        masked = _embedding_ops._MaskPartial(offset_shape=torch.Size([4, 4]), offset_dim=0)  # type: ignore[attr-defined, no-untyped-call]
        for pending in (Partial("avg"), masked):
            with pytest.raises(CaptureError) as caught:
                partial_axis(placed((2, 4), mesh, [pending], (2, 4)), "embedding")
            assert caught.value.code is Code.LEAF_NOT_TENSOR
            assert "parallelize_module" in caught.value.remedy
