"""Which columns of a boundary this process holds of a transformers model, and how wide the whole row is.

The library's own tensor parallelism leaves plain tensors at module boundaries: nothing on them says that they are slices.
What says it are the parameters (DTensors with placements), the config (sizes of the whole model) and the boundary map
(which mesh axis cuts what). ``parallelize_module`` leaves DTensors, which say it themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tracer.errors import Code, MapError
from tracer.format.schema import Span
from tracer.hosts.torch_sharding import DATA_AXES, chunk, cutting_axis, held_columns_of, held_spans, partial_axis
from tracer.record.boundaries import Source
from tracer.record.host import Mesh, Placement
from tracer.record.map_entries import ROW_AXES, layout_axes

__all__ = ["Placer", "attention_columns"]

_HIDDEN = (
    "embedding", "final_norm", "residual", "attn.norm", "attn.out", "attn.post_norm", "mlp.norm", "mlp.out", "mlp.post_norm",
    "moe.combine", "moe.routed_out", "moe.shared_out",
)  # fmt: skip
_QUERY = ("attn.q", "attn.q_norm", "attn.q_rope")
_KEY = ("attn.k", "attn.k_norm", "attn.k_rope", "attn.v")


class Placer:
    """Answers ``Host.placement``. Sizes and cuts of the linear modules are read once, before FSDP gathers anything."""

    def __init__(self, config: Any, mesh: Mesh, modules: Mapping[str, torch.nn.Module], data: frozenset[str] = DATA_AXES) -> None:
        """``data``: axes whose processes run sequences of their own, which cut no boundary."""
        self._config = config
        self._cutting = [axis for axis in mesh.axes if axis.size > 1 and axis.name not in data and axis.name not in ("pp", "cp")]
        self._experts = {path for path, module in modules.items() if self._cutting and _on_axis(module, "ep")}
        self._linear: dict[str, tuple[tuple[int, ...], tuple[tuple[Span, ...], ...]]] = {}
        for path, module in modules.items() if self._cutting else ():
            weight = module._parameters.get("weight")
            if isinstance(module, torch.nn.Linear) and weight is not None and weight.dim() == 2:
                spans = held_spans(weight, data)[0] if hasattr(weight, "placements") else ()
                self._linear[path] = tuple(weight.shape), spans or ((), ())

    def place(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        """Where ``columns`` columns lie. Raises MapError (map-axis), CaptureError (leaf-not-tensor)."""
        if not self._cutting or not _column_dims(source):
            return Placement(width=columns)
        if hasattr(leaf, "placements"):
            return self._of_dtensor(source, columns, leaf)
        roles = {axis.name: self._role(source, axis.name) for axis in self._cutting}
        partial = next((name for name, role in roles.items() if role == "partial"), "")
        width, spans = self._known(source)
        if width is None and all(roles.values()) and "shard" not in roles.values():
            width = columns
        if width == columns:
            return Placement(width, partial=partial)
        cut = [axis for axis in self._cutting if roles[axis.name] == "shard"]
        if width is not None and not spans and len(cut) == 1:
            spans = (chunk(width, cut[0].size, cut[0].index),)
        if width is None or sum(stop - start for start, stop in spans) != columns:
            raise self._unfit(source, columns, width, roles)
        return Placement(width, spans, partial, cut[0].name if len(cut) == 1 else "")

    def _of_dtensor(self, source: Source, columns: int, leaf: Any) -> Placement:
        dims = _column_dims(source)
        width, spans = held_columns_of(leaf, dims)
        if (source.select or source.split) and spans:
            raise self._unfit(source, columns, width, {axis.name: "" for axis in self._cutting})
        if source.select or source.split:
            width = columns
        return Placement(width, spans, partial_axis(leaf, source.boundary), cutting_axis(leaf, dims) if spans else "")

    def _role(self, source: Source, axis: str) -> str:
        """What an axis does to this boundary's columns, as the map says, or as the library never does otherwise: what the
        experts of several processes give is whole again outside the module that holds them. Empty where nobody says."""
        if any(name == axis and cut not in ROW_AXES for name, cut in source.shard):
            return "shard"
        if axis == source.partial:
            return "partial"
        if axis in source.replicated or axis in dict(source.shard):
            return "replicated"
        return "" if axis != "ep" or any(source.module.startswith(f"{path}.") for path in self._experts) else "replicated"

    def _known(self, source: Source) -> tuple[int | None, tuple[Span, ...]]:
        """Width of the whole row and what is held of it by the module's own weight; None where the width is not known."""
        if source.split or source.select:
            return None, ()
        linear = None if source.tap else self._linear.get(source.module)
        if linear is not None:
            dim = 0 if source.leaf.startswith("output") else 1
            return linear[0][dim], linear[1][dim]
        return self._configured(source.boundary), ()

    def _configured(self, boundary: str) -> int | None:
        name = ".".join(boundary.split(".")[2:]) if boundary.startswith("layers.") else boundary
        if name in _HIDDEN or name == "attn.residual":
            return int(self._config.hidden_size)
        if name in ("lm_head", "lm_head.raw"):
            return int(self._config.vocab_size)
        return attention_columns(self._config, name)

    def _unfit(self, source: Source, columns: int, width: int | None, roles: Mapping[str, str]) -> MapError:
        sizes = ", ".join(f"{axis.name}={axis.index} of {axis.size}" for axis in self._cutting)
        silent = [name for name, role in roles.items() if not role]
        return MapError(
            Code.MAP_AXIS,
            f"which columns of {source.boundary} this process holds cannot be told ({sizes})",
            where=source.describe(),
            expected=f"the map to say what {', '.join(silent)} does to it" if silent else f"columns of a row of {width or 'known width'}",
            found=f"{columns} of {width} columns" if width is not None else f"{columns} columns",
            remedy="add shard:, replicated: or partial: for that mesh axis to this boundary's binding",
        )


def _on_axis(module: torch.nn.Module, axis: str) -> bool:
    """Whether a module's own parameters lie on a mesh with this axis."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in module._parameters.values())
    return any(axis in (getattr(mesh, "mesh_dim_names", None) or ()) for mesh in meshes)


def attention_columns(config: Any, name: str) -> int | None:
    """Columns of all heads of q, k or v (``attn.q``, ``attn.k_norm`` ...) in the whole model; None for other boundaries."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or name not in (*_QUERY, *_KEY):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int((heads if name in _QUERY else getattr(config, "num_key_value_heads", None) or heads) * size)


def _column_dims(source: Source) -> list[int]:
    """Dimensions of the leaf that hold columns; none where every row is one number."""
    return [n for n, axes in enumerate(layout_axes(source.layout) or ()) if not any(axis in ROW_AXES for axis in axes)]
