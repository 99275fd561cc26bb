"""What torch.distributed knows of one process: mesh axes, and which part of a tensor a DTensor's placements keep here.

No collective is called: coordinates and placements are local knowledge. Shared by the hosts whose models are plain modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracer.errors import CaptureError, Code, HostError
from tracer.format.schema import Axis, Span
from tracer.record.host import Mesh

__all__ = ["DATA_AXES", "chunk", "cutting_axis", "data_axes", "find_mesh", "held_columns_of", "held_spans", "partial_axis", "spans_of"]

DATA_AXES = frozenset({"dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "dp_shard_cp", "efsdp"})
"""Mesh axes whose processes run whole sequences of their own."""

_SECOND_VIEW = frozenset({"ep", "efsdp"})
"""Axes that lay other groups over the same processes, for experts only."""

Index = npt.NDArray[np.int64]


def find_mesh(model: torch.nn.Module, meshes: Iterable[Any] = ()) -> Mesh:
    """This process among all: axes of the device meshes that parameters lie on, and of ``meshes``; what those do not cover
    is one data-parallel axis ``dp``. Axes of size 1 are left out.

    Raises HostError (host-unsupported) where this process is no part of a mesh, or the place of a mesh in the world cannot be told."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or torch.distributed.get_world_size() == 1:
        return Mesh()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    lain_on: list[Any] = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    given: list[Any] = [mesh for mesh in (*meshes, *lain_on) if mesh is not None]
    found = [mesh._get_root_mesh() for mesh in given]
    roots = sorted({id(mesh): mesh for mesh in found}.values(), key=lambda mesh: -mesh.size())
    axes: dict[str, Axis] = {}
    for axis in (axis for mesh in roots for axis in _axes(mesh) if axis.size > 1):
        axes.setdefault(axis.name, axis)
    if "ep" not in axes:
        axes.pop("efsdp", None)
    covered = math.prod(axis.size for axis in axes.values() if axis.name not in _SECOND_VIEW)
    if covered == 1 and axes:
        covered = math.prod(axis.size for axis in axes.values())
    if covered < world and world % covered == 0:
        index = _outer_index(rank, world, covered, roots[0] if roots else None)
        axes = {"dp": Axis(name="dp", index=index, size=world // covered), **axes}
    return Mesh(rank=rank, world_size=world, axes=tuple(axes.values()))


def data_axes(model: torch.nn.Module) -> frozenset[str]:
    """Names of the axes whose processes run sequences of their own: the usual ones, and those that FSDP was given."""
    names = set(DATA_AXES)
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            held: Any = module
            group = getattr(held._get_fsdp_state(), "_fsdp_param_group", None)
            mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
            names.update(getattr(mesh, "mesh_dim_names", None) or ())
    return frozenset(names)


def _axes(mesh: Any) -> list[Axis]:
    """The dimensions of a device mesh as axes of this process; unnamed ones are FSDP's default mesh."""
    if mesh.get_coordinate() is None:
        raise _unsupported("this process is no part of a device mesh its model lies on", str(mesh))
    coordinate = _places(mesh)
    names = mesh.mesh_dim_names or {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}.get(mesh.ndim)
    if names is None:
        raise _unsupported("a device mesh has no names for its dimensions", str(mesh))
    return [Axis(name=name, index=coordinate[n], size=mesh.size(n)) for n, name in enumerate(names)]


def _places(mesh: Any) -> list[int]:
    """This process's place on every axis, in the order in which torch cuts and gathers: that of the process groups, which are
    sorted. A mesh that lists its processes in another order has other coordinates (torch 2.9 to 2.13)."""
    try:
        return [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    except RuntimeError:  # a mesh without process groups, over which nothing is cut
        return list(mesh.get_coordinate())


def _outer_index(rank: int, world: int, covered: int, mesh: Any) -> int:
    """Which of the groups of ``covered`` processes this one is in: they lie one after the other, or interleaved."""
    if mesh is None or covered == 1:
        return rank
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(ranks[0], ranks[0] + covered)) and ranks[0] % covered == 0:
        return int(ranks[0] // covered)
    if ranks == list(range(ranks[0], world, world // covered)):
        return int(ranks[0])
    raise _unsupported("its device mesh covers a part of the processes that cannot be placed", str(ranks))


def chunk(size: int, parts: int, index: int) -> Span:
    """Part ``index`` of ``size`` as ``torch.chunk`` cuts it: the last parts may be short or empty."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def spans_of(index: Index) -> tuple[Span, ...]:
    """Consecutive runs of global indices, in local order."""
    edges = np.flatnonzero(np.diff(index) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(index, edges) if len(run))


def _held_index(size: int, mesh: Any, placements: Sequence[Any], dim: int, skip: frozenset[str]) -> Index:
    """Global indices of one dimension held here, in local order, cut the way torch cuts. ``skip``: axes that do not cut."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    index, coordinate, names = torch.arange(size), _places(mesh), mesh.mesh_dim_names or ("fsdp",) * mesh.ndim
    for axis, placement in enumerate(placements):
        if getattr(placement, "dim", None) != dim or names[axis] in skip:
            continue
        strided = isinstance(placement, _StridedShard)
        cut = _StridedShard(0, split_factor=placement.split_factor) if strided else Shard(0)
        index = cut._split_tensor(index, mesh.size(axis), with_padding=False)[0][coordinate[axis]]
    return index.numpy()


def held_spans(tensor: Any, skip: frozenset[str] = frozenset()) -> tuple[tuple[tuple[Span, ...], ...], str]:
    """Per dimension the global indices this process holds of a DTensor, empty for all; a reason where that cannot be told."""
    if any(not (placement.is_replicate() or hasattr(placement, "dim")) for placement in tensor.placements):
        return (), f"placed as {tensor.placements}"
    spans = []
    for dim, size in enumerate(tensor.shape):
        index = _held_index(size, tensor.device_mesh, tensor.placements, dim, skip)
        if not skip and len(index) != tensor._local_tensor.shape[dim]:
            found = f"{tensor._local_tensor.shape[dim]} of {len(index)} expected indices in dimension {dim}"
            return (), f"placed as {tensor.placements}, yet holds {found}"
        spans.append(() if np.array_equal(index, np.arange(size)) else spans_of(index))
    return tuple(spans), ""


def held_columns_of(tensor: Any, dims: Sequence[int]) -> tuple[int, tuple[Span, ...]]:
    """Width of the whole row and columns held, as ``Placement`` has them, of a DTensor whose dimensions ``dims``, in this order, are
    its columns."""
    width, column_C = 1, np.zeros(1, np.int64)
    for dim in dims:
        size = tensor.shape[dim]
        index = _held_index(size, tensor.device_mesh, tensor.placements, dim, frozenset())
        width, column_C = width * size, (column_C[:, None] * size + index[None, :]).reshape(-1)
    return width, () if np.array_equal(column_C, np.arange(width)) else spans_of(column_C) or ((0, 0),)


def cutting_axis(tensor: Any, dims: Sequence[int]) -> str:
    """The one mesh axis that cuts a DTensor's dimensions ``dims``, empty where none or several do."""
    names = tensor.device_mesh.mesh_dim_names or ("fsdp",) * tensor.device_mesh.ndim
    cut = [name for name, placement in zip(names, tensor.placements, strict=True) if getattr(placement, "dim", None) in dims]
    return str(cut[0]) if len(cut) == 1 else ""


def partial_axis(tensor: Any, boundary: str) -> str:
    """Mesh axis over which a DTensor's values are partial sums, empty where they are none.

    Raises CaptureError (leaf-not-tensor) where the parts do not add up to the whole: masked, averaged, or over several axes."""
    found = [(n, placement) for n, placement in enumerate(tensor.placements) if placement.is_partial()]
    if not found:
        return ""
    names: Mapping[int, str] = dict(enumerate(tensor.device_mesh.mesh_dim_names or ()))
    kinds = {type(placement).__name__ for _, placement in found}
    if len(found) > 1 or kinds != {"Partial"} or found[0][1].reduce_op != "sum":
        raise CaptureError(
            Code.LEAF_NOT_TENSOR,
            "leaf is a pending reduction whose parts cannot be added by hand",
            where=boundary,
            expected="sums over one mesh axis",
            found=str(tensor.placements),
            remedy="enter the trace after parallelize_module, so that its hooks see what the module gives on",
        )
    return names.get(found[0][0], "fsdp")


def _unsupported(what: str, found: str) -> HostError:
    return HostError(
        Code.HOST_UNSUPPORTED,
        f"the processes of this run cannot be laid out: {what}",
        found=found,
        remedy='give the mesh: trace(..., mesh={"dp": (index, size), "tp": (index, size)}), outermost axis first',
    )
