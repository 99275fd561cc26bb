"""Where the columns and parameters that one vLLM worker holds lie in the whole model.

vLLM cuts column-parallel layers along their outputs (packed ones piece by piece), row-parallel ones along their inputs,
vocabularies along their rows, experts along the expert number or their intermediate size. The layers know their own
part; this module reads it off them by attribute, so that it needs nothing of vLLM imported.

Shape suffixes: none; spans count columns or rows of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tracer.format.schema import Span
from tracer.record.host import HostParameter, Placement

__all__ = ["Heads", "as_in_checkpoint", "cut_evenly", "experts_parallelism", "heads_of", "host_parameter", "merged_spans"]

Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Heads:
    """One attention layer's heads. ``query``, ``key``, ``value``: columns of the whole and the span held here. ``paired``: size of
    a head of q and k where loading put its even columns before its odd ones (Llama 4), else 0."""

    query: tuple[int, Span]
    key: tuple[int, Span]
    value: tuple[int, Span]
    paired: int = 0

    def of(self, boundary: str) -> tuple[int, Span]:
        """Columns and span of a boundary that is cut by heads."""
        name = boundary.rpartition(".")[2]
        return self.key if name.startswith("k") else self.value if name.startswith("v") else self.query

    def held(self, boundary: str) -> int:
        """Columns held here."""
        _, (start, stop) = self.of(boundary)
        return stop - start

    def placement(self, boundary: str) -> Placement:
        width, span = self.of(boundary)
        if self.paired and boundary.rpartition(".")[2].startswith(("q", "k")):
            return Placement(width, _even_then_odd(span, self.paired))
        return Placement(width, () if span == (0, width) else (span,))


def heads_of(packed: Any, paired: bool = False) -> Heads:
    """Heads of a ``QKVParallelLinear``: key and value heads are repeated where there are fewer than processes. ``paired``: loading
    reordered the rows of q and k."""

    def held(heads: int, whole: int, size: int, index: int) -> tuple[int, Span]:
        return whole * size, (index * heads * size, (index + 1) * heads * size)

    value_size = getattr(packed, "v_head_size", packed.head_size)
    shard = packed.tp_rank // packed.num_kv_head_replicas
    return Heads(
        held(packed.num_heads, packed.total_num_heads, packed.head_size, packed.tp_rank),
        held(packed.num_kv_heads, packed.total_num_kv_heads, packed.head_size, shard),
        held(packed.num_kv_heads, packed.total_num_kv_heads, value_size, shard),
        packed.head_size if paired else 0,
    )


def _even_then_odd(span: Span, size: int) -> Spans:
    """Columns of the checkpoint, in the order in which they are held: per head the even ones, then the odd ones."""
    start, stop = span
    return tuple((c, c + 1) for head in range(start, stop, size) for half in (0, 1) for c in range(head + half, head + size, 2))


def as_in_checkpoint(parameter: HostParameter, heads: Heads) -> HostParameter:
    """A packed projection's parameter, its rows counted as the checkpoint has them."""
    if not heads.paired:
        return parameter
    starts = (0, heads.query[0], heads.query[0] + heads.key[0])
    rows: Spans = ()
    for start, (name, (_, (first, last))) in zip(starts, (("q", heads.query), ("k", heads.key), ("v", heads.value)), strict=True):
        span = (start + first, start + last)
        rows += (span,) if name == "v" else _even_then_odd(span, heads.paired)
    return replace(parameter, spans=(rows, *(parameter.spans[1:] or ((),) * (len(parameter.shape) - 1))))


def cut_evenly(whole: int, index: int, parts: int, start: int = 0) -> Spans:
    """The ``index``-th of equal parts, counted from ``start``."""
    size = whole // parts
    return ((start + index * size, start + (index + 1) * size),)


def merged_spans(sizes: Sequence[int], index: int, parts: int) -> Spans:
    """The ``index``-th part of each of several pieces that lie side by side in the whole."""
    spans: list[Span] = []
    start = 0
    for size in sizes:
        spans.extend(cut_evenly(size, index, parts, start))
        start += size
    return tuple(spans)


@dataclass(frozen=True)
class _Held:
    """What a layer says of one of its parameters. ``local``: shape it should have here; ``keep``: rows that are no padding."""

    shape: tuple[int, ...]
    spans: tuple[Spans, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    keep: int | None = None


def experts_parallelism(module: Any) -> dict[str, int]:
    """How a mixture's experts are cut along their intermediate size; 0 of 1 for any other module."""
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
    return {"tp_rank": getattr(parallel, "tp_rank", 0), "tp_size": getattr(parallel, "tp_size", 1)}


def host_parameter(
    path: str, name: str, module: Any, tensor: torch.Tensor, buffer: bool, unknown: str, experts: Mapping[str, int]
) -> HostParameter:
    """One parameter or buffer of a worker. ``unknown``: why its bytes cannot be trusted, if so. ``experts``: the mixture's
    own parallelism, ``tp_rank`` and ``tp_size``."""
    whole = f"{path}.{name}" if path else name
    held = None if buffer else _held(module, name, tensor, experts)
    if held is None:
        return HostParameter(whole, None if unknown else tensor.detach(), tuple(tensor.shape), buffer=buffer, unknown=unknown)
    spans = tuple(() if span == ((0, size),) else span for span, size in zip(held.spans, held.shape, strict=True))
    if tuple(tensor.shape) != held.local:
        unknown = unknown or f"the engine repacked it when loading: held as {list(tensor.shape)}, not {list(held.local)}"
    kept = None if unknown else tensor.detach() if held.keep is None else tensor.detach()[: held.keep]
    return HostParameter(whole, kept, held.shape, spans if any(spans) else (), buffer, unknown, sizes=held.sizes)


def _held(module: Any, name: str, tensor: torch.Tensor, experts: Mapping[str, int]) -> _Held | None:
    """What part of the whole a parameter is; None for one that every process has whole."""
    if name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
        return _held_experts(module, name, experts)
    if name == "sinks" and hasattr(module, "qkv_proj"):
        width, (start, stop) = heads_of(module.qkv_proj).query
        size = module.qkv_proj.head_size
        return _Held((width // size,), (((start // size, stop // size),),), ((stop - start) // size,))
    if name not in ("weight", "bias"):
        return None
    if hasattr(module, "shard_indices"):
        return _held_vocabulary(module, name)
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if not kinds & {"ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"}:
        return None
    rank, size, inputs = module.tp_rank, module.tp_size, int(module.input_size)
    if tensor.dim() > 2 and size == 1:  # a convolution's
        return None
    rows: Spans
    if hasattr(module, "num_kv_head_replicas"):
        heads = heads_of(module)
        sizes = (heads.query[0], heads.key[0], heads.value[0])
        starts = (0, sizes[0], sizes[0] + sizes[1])
        pieces = (heads.query[1], heads.key[1], heads.value[1])
        rows = tuple((start + first, start + last) for start, (first, last) in zip(starts, pieces, strict=True))
        return _matrix(name, sum(sizes), rows, inputs, sizes)
    if "ColumnParallelLinear" in kinds:
        sizes = tuple(getattr(module, "output_sizes", None) or (module.output_size,))
        return _matrix(name, sum(sizes), merged_spans(sizes, rank, size), inputs, sizes if len(sizes) > 1 else ())
    if name == "bias":
        return None
    if "RowParallelLinear" in kinds:
        columns = cut_evenly(inputs, rank, size)
        return _Held((module.output_size, inputs), (((0, module.output_size),), columns), (module.output_size, inputs // size))
    return _Held((module.output_size, inputs), (((0, module.output_size),), ((0, inputs),)), (module.output_size, inputs))


def _matrix(name: str, whole: int, rows: Spans, inputs: int, sizes: tuple[int, ...]) -> _Held:
    """A weight or bias cut along its outputs."""
    local = sum(stop - start for start, stop in rows)
    rows = ((0, whole),) if local == whole else rows
    if name == "bias":
        return _Held((whole,), (rows,), (local,), sizes)
    return _Held((whole, inputs), (rows, ((0, inputs),)), (local, inputs), sizes)


def _held_vocabulary(module: Any, name: str) -> _Held:
    """Rows of the vocabulary; rows that only pad it are left out."""
    rows, columns, indices = module.org_vocab_size, module.embedding_dim, module.shard_indices
    span = ((indices.org_vocab_start_index, indices.org_vocab_end_index),)
    keep = span[0][1] - span[0][0]
    if name == "bias":
        return _Held((rows,), (span,), (module.num_embeddings_per_partition,), keep=keep)
    return _Held((rows, columns), (span, ((0, columns),)), (module.num_embeddings_per_partition, columns), keep=keep)


def _held_experts(module: Any, name: str, experts: Mapping[str, int]) -> _Held:
    """Stacked experts: (expert, gate and up, hidden) and (expert, hidden, intermediate); GPT-OSS has biases too, and rows of gate
    and up alternate."""
    rank, size = experts["tp_rank"], experts["tp_size"]
    count, local = int(module.global_num_experts), int(module.local_num_experts)
    hidden, part = int(module.hidden_size), int(module.intermediate_size_per_partition)
    numbers = _expert_numbers(module, count, local)
    whole = part * size
    if name.startswith("w13"):
        alternate = type(module).__name__ == "GptOssRoutedExperts"
        pieces = (2 * whole,) if alternate else (whole, whole)
        gate_up = merged_spans(pieces, rank, size) if size > 1 else ((0, 2 * whole),)
        if name == "w13_bias":
            return _Held((count, 2 * whole), (numbers, gate_up), (local, 2 * part))
        return _Held((count, 2 * whole, hidden), (numbers, gate_up, ((0, hidden),)), (local, 2 * part, hidden), () if alternate else pieces)
    if name == "w2_bias":
        return _Held((count, hidden), (numbers, ((0, hidden),)), (local, hidden))
    return _Held((count, hidden, whole), (numbers, ((0, hidden),), cut_evenly(whole, rank, size)), (local, hidden, part))


def _expert_numbers(module: Any, count: int, local: int) -> Spans:
    """Global numbers of the experts held, in local order."""
    table = getattr(module, "_expert_map", None)
    if table is None or local == count:
        return ((0, count),)
    places = table.detach().cpu().numpy()
    order = sorted(range(count), key=lambda expert: (places[expert] < 0, places[expert]))[:local]
    return tuple((expert, expert + 1) for expert in order)
