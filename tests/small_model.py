"""A small real decoder, a host that knows it, and its map: what the recorder's own tests record.

Batches are padded ``[B, S]``; ``start`` continues the sequences of the batch (a cache of the user's). Nothing here is
a double: hooks, modules, rows and files are real.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tracer.format.schema import Axis, Block, Manifest, NotComputed
from tracer.format.store_read import read_shard
from tracer.record.boundaries import Source
from tracer.record.host import Forward, HostParameter, Mesh, Placement, Rows, SkippedForward, TapSink
from tracer.record.tokens import SequenceRegistry, documents_from_lengths, documents_from_mask, label_rows, visible_from, visible_keys

__all__ = ["MAP", "Recorded", "SmallHost", "SmallModel", "read_back", "small_map"]

MAP = """
family: small
boundaries:
  input.ids: {level: 0}
  input.visible_from: {level: 0}
  embedding: {level: 0, from: [input.ids]}
  layers.{layer}.attn.norm: {level: 2, from: ["layers.{previous}.residual"]}
  layers.{layer}.attn.out: {level: 1, from: ["layers.{layer}.attn.norm"], mixes_tokens: true}
  layers.{layer}.mlp.gate_up: {level: 2, from: ["layers.{layer}.attn.out"]}
  layers.{layer}.mlp.out: {level: 1, from: ["layers.{layer}.mlp.gate_up"]}
  layers.{layer}.residual: {level: 0, from: ["layers.{layer}.attn.out", "layers.{layer}.mlp.out"]}
  lm_head: {level: 0, from: ["layers.{last}.residual"], rows: sampled}
  scorer.logprobs: {level: 1, from: [lm_head, input.ids], rows: next}
hosts:
  small:
    classes: [SmallModel]
    layers: layers.{layer}
    bindings:
      input.ids: {derived: host}
      input.visible_from: {derived: host}
      embedding: {module: embed, layout: b s c}
      layers.{layer}.attn.norm: {module: "layers.{layer}.norm", layout: b s c}
      layers.{layer}.attn.out: {module: "layers.{layer}.attn", leaf: "output[0]", layout: b s c}
      layers.{layer}.mlp.gate_up: {parts: [{module: "layers.{layer}.mlp.gate"}, {module: "layers.{layer}.mlp.up"}], layout: b s c}
      layers.{layer}.mlp.out: {module: "layers.{layer}.mlp", layout: b s c}
      layers.{layer}.residual: {module: "layers.{layer}", layout: b s c}
      lm_head: {module: head, layout: b s c}
      scorer.logprobs: {derived: logprobs}
"""


class Attention(nn.Module):
    """Each token becomes the mean of its projected prefix; returns (values, None) as libraries do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        count = torch.arange(1, hidden_states.shape[1] + 1).unsqueeze(-1)
        return self.out(hidden_states.cumsum(1) / count), None


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """``checkpointed``: "" or the kind of activation checkpointing, "reentrant" or "non-reentrant". ``reuses_buffers``:
    overwrites what its MLP returned, as engines do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), Attention(width), Mlp(width)
        self.reuses_buffers = False
        self.checkpointed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self.compute(x)
        out: torch.Tensor = checkpoint(self.compute, x, use_reentrant=self.checkpointed == "reentrant")
        return out

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(hidden_states=self.norm(x))[0]
        mlp = self.mlp(x)
        out: torch.Tensor = x + mlp
        if self.reuses_buffers:
            mlp.fill_(7.0)
        return out


class SmallModel(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, width: int = 16, vocabulary: int = 40, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def checkpoint_layers(self, kind: str) -> SmallModel:
        for number in range(len(self.layers)):
            self.layer(number).checkpointed = kind
        return self

    def layer(self, number: int) -> Layer:
        layer = self.layers[number]
        assert isinstance(layer, Layer)
        return layer

    def forward(self, input_ids: torch.Tensor, **told_to_the_host: Any) -> dict[str, torch.Tensor]:
        """``mask`` and ``start`` are the host's business: nothing here attends to padding or to a cache."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


@dataclass
class SmallHost:
    """Labels every batch row ``r0``, ``r1`` ... of the current batch; ``start=0`` begins new sequences."""

    model: nn.Module
    axes: tuple[Axis, ...] = ()
    rank: int = 0
    world_size: int = 1
    ids_known: bool = True
    declared: list[NotComputed] = field(default_factory=list)
    skip: str = ""
    """Reason for which every forward is skipped."""
    placements: dict[str, Placement] = field(default_factory=dict)
    compiled: str = ""
    name: str = "small"
    batches: int = 0

    def root(self) -> nn.Module:
        return self.model

    def root_class(self) -> str:
        return type(self.model).__name__

    def modules(self) -> Mapping[str, nn.Module]:
        return dict(self.model.named_modules(remove_duplicate=False))

    def mesh(self) -> Mesh:
        return Mesh(self.rank, self.world_size, self.axes)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequences: SequenceRegistry) -> Forward | SkippedForward:
        if self.skip:
            return SkippedForward(self.skip)
        ids_BS = (args[0] if args else kwargs["input_ids"]).numpy()
        mask, start = kwargs.get("mask"), kwargs.get("start", 0)
        mask_BS = np.ones_like(ids_BS) if mask is None else mask.numpy()
        self.batches += not start
        lengths = None if start else sequences.document_lengths(mask_BS)
        document_N = documents_from_mask(mask_BS) if lengths is None else documents_from_lengths(lengths, ids_BS.shape[1], mask_BS)
        count = int(document_N.max(initial=-1)) + 1
        names = sequences.take_requests(count) if not start else [""] * count
        sequence_D = [sequences.open(f"b{self.batches}.r{d}", request=names[d]) for d in range(count)]
        rows = label_rows(document_N, sequence_D, [start] * count)
        if self.ids_known:
            sequences.record_rows(rows, ids_BS)
        padding = int((rows.sequence_N < 0).sum())
        visible_N = visible_from(rows, visible_keys(np.concatenate([np.ones((len(ids_BS), start), int), mask_BS], axis=1), ids_BS.shape[1]))
        return Forward(
            rows,
            ids_BS.reshape(-1) if self.ids_known else None,
            {"input.visible_from": visible_N},
            {"padding": padding} if padding else {},
        )

    def finish_forward(self, forward: Forward, output: Any) -> None:
        pass

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        return forward.rows if int(np.prod(row_shape)) == len(forward.rows) or "e" in source.layout.split() else None

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        return self.placements.get(source.boundary, Placement(columns))

    def local_columns(self, boundary: str) -> int | None:
        return None

    def taps(self, sources: Iterable[Source], sink: TapSink) -> AbstractContextManager[None]:
        return nullcontext()

    def not_computed(self) -> Iterable[NotComputed]:
        return self.declared

    def parameters(self) -> Iterator[HostParameter]:
        for name, parameter in self.model.named_parameters():
            yield HostParameter(name, parameter, tuple(parameter.shape))

    def conditions(self) -> dict[str, Any]:
        return {"model": "small"}

    def compiled_reason(self, module_path: str) -> str:
        return self.compiled


def small_map(folder: Path, text: str = MAP) -> str:
    """The map as a file."""
    path = folder / "small.yaml"
    path.write_text(text)
    return str(path)


@dataclass
class Recorded:
    """One committed shard, read back. ``rows[boundary]``: (sequence, position, forward, expert) -> two digest lanes or raw
    values, of first passes, all occurrences; ``again``: the same of recomputations."""

    manifest: Manifest
    rows: dict[str, dict[tuple[str, int, int, int], tuple[int, ...]]]
    again: dict[str, dict[tuple[str, int, int, int], tuple[int, ...]]]
    blocks: list[Block]
    ids: dict[str, dict[int, int]]

    def boundary(self, name: str) -> Any:
        return next(boundary for boundary in self.manifest.boundaries if boundary.name == name)

    def at(self, name: str) -> dict[tuple[str, int], tuple[int, ...]]:
        """By (sequence, position) alone."""
        return {key[:2]: value for key, value in self.rows[name].items()}


def read_back(out: str | Path, rank: int = 0) -> Recorded:
    """Read one shard of a trace with the store's own reader. Every file must be whole."""
    shard = read_shard(Path(out) / f"shard-{rank:05d}")
    assert shard.manifest is not None
    assert not shard.problems
    names = [sequence.label for sequence in shard.sequences]
    recorded = Recorded(shard.manifest, {}, {}, [], {})
    for segment in shard.segments:
        for sequence, position, token in zip(segment.ids_sequence, segment.ids_position, segment.ids_token, strict=True):
            recorded.ids.setdefault(names[sequence], {})[int(position)] = int(token)
    for segment, block in shard.blocks():
        recorded.blocks.append(block)
        lines = segment.lists[block.row_start : block.row_start + block.row_count]
        digest = segment.block_digest(block)
        kept_BC = segment.block_values(block)
        found = recorded.again if block.recompute else recorded.rows
        into = found.setdefault(block.boundary, {})
        for k, line in enumerate(lines):
            key = (
                names[segment.rows_sequence[line]],
                int(segment.rows_position[line]),
                int(segment.rows_forward[line]),
                int(segment.rows_expert[line]),
            )
            value = tuple(int(lane) for lane in digest[k])
            if kept_BC is not None:
                value = tuple(int(v) for v in kept_BC[k])
            if block.spans and key in into:
                value = tuple((a + b) % 2**64 for a, b in zip(value, into[key], strict=True))
            into[key] = value
    return recorded
