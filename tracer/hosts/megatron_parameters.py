"""Parameters of a Megatron process: which rows and columns of the whole it holds, under paths that are the same everywhere.

Layers and experts are numbered over the whole model. Rows of ``linear_qkv`` are counted as all of q, all of k, all of v, rows of
a gated ``linear_fc1`` as all of gate, all of up, whatever the order in memory; rows that pad the vocabulary are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tracer.format.schema import Span
from tracer.hosts.megatron_layout import Heads, contiguous, gate_up
from tracer.record.host import HostParameter, Mesh

__all__ = ["ParameterReader"]

_LOCAL_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.(?:weight))\d+$")


@dataclass(frozen=True)
class ParameterReader:
    """Reads the parameters of one model chunk. ``vocabulary``: rows of the embedding that stand for tokens."""

    config: Any
    heads: Heads
    mesh: Mesh
    vocabulary: int

    def read(self, modules: Mapping[str, torch.nn.Module], tied_head: torch.Tensor | None) -> Iterator[HostParameter]:
        """Every parameter and buffer. ``tied_head``: the output layer's weight where the embedding lends it."""
        for path, module in modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield from self._parameter(f"{path}.{name}", parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield HostParameter(f"{path}.{name}", buffer.detach(), tuple(buffer.shape), buffer=True)
            table = vars(module).get("inv_freq")
            if isinstance(table, torch.Tensor):  # no buffer here, but what positions are computed with
                yield HostParameter(f"{path}.inv_freq", table.detach(), tuple(table.shape), buffer=True)
        if tied_head is not None:
            yield from self._parameter("output_layer.weight", tied_head)

    def _parameter(self, path: str, tensor: torch.Tensor) -> Iterator[HostParameter]:
        """The part of one parameter that this process holds; none where all of it pads the vocabulary."""
        held = tensor.detach()
        expert = ".experts." in path and ".shared_experts." not in path
        if expert:
            path, known = self._global_expert(path)
            if not known:
                yield HostParameter(path, None, tuple(held.shape), unknown="experts stored in one tensor, in an order of its own")
                return
        if type(held) is not torch.Tensor:
            yield HostParameter(path, None, tuple(held.shape), unknown=f"stored as {type(held).__name__}")
            return
        cut: int = getattr(tensor, "partition_dim", -1) if getattr(tensor, "tensor_model_parallel", False) else -1
        rank, size = self._place("etp" if expert else "tp") if cut >= 0 else (0, 1)
        shape = list(held.shape)
        if cut >= 0:
            shape[cut] *= size
        spans: list[tuple[Span, ...]] = [(contiguous(whole, rank, size),) if n == cut and size > 1 else () for n, whole in enumerate(shape)]
        layout = self._row_layout(path)
        if layout is not None and cut <= 0:
            spans[0] = layout(shape[0], rank, size)
        if path.endswith(("word_embeddings.weight", "output_layer.weight")) and shape[0] > self.vocabulary:
            start, stop = (min(edge, self.vocabulary) for edge in (spans[0] or ((0, shape[0]),))[0])
            if start == stop:
                return
            shape[0], spans[0], held = self.vocabulary, ((start, stop),), held[: stop - start]
        yield HostParameter(path, held, tuple(shape), tuple(spans))

    def _row_layout(self, path: str) -> Callable[[int, int, int], tuple[Span, ...]] | None:
        """Where local rows lie, for parameters whose memory holds several projections interleaved."""
        if ".linear_qkv." in path and "layer_norm" not in path:
            return lambda whole, rank, size: self.heads.packed_spans(rank, size)
        if ".linear_fc1." in path and "layer_norm" not in path and self.config.gated_linear_unit:
            return lambda whole, rank, size: gate_up(whole // 2, rank, size)
        return None

    def _global_expert(self, path: str) -> tuple[str, bool]:
        """``path`` with the expert numbered over the whole model, and whether it names one."""
        found = _LOCAL_EXPERT.search(path)
        if found is None:
            return path, False
        rank, size = self._place("ep")
        number = int(found[0]) + rank * (self.config.num_moe_experts // size)
        return path[: found.start()] + str(number) + path[found.end() :], True

    def _place(self, axis: str) -> tuple[int, int]:
        found = self.mesh.axis(axis)
        return (0, 1) if found is None else (found.index, found.size)
