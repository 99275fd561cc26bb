"""A model that plays back prepared tensors, and the host that knows what every row of it is.

Any layout of any rank can be recorded from full tensors: real modules, real hooks, no arithmetic in between.
``Full`` holds the logical tensors of one side, a ``Rank`` says which rows and columns of them one process
holds, ``play`` records the ranks one after the other into one trace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

import tracer
from tracer.errors import Code, MapError
from tracer.format.schema import Axis, NotComputed, Span
from tracer.record.boundaries import Source
from tracer.record.host import Forward, HostParameter, Mesh, Placement, Rows, SkippedForward, TapSink
from tracer.record.tokens import SequenceRegistry

Row = tuple[str, int]
"""(sequence, position)."""
Grid = list[list["Row | None"]]
"""Batch rows of one forward; None is padding. Ragged rows are not allowed."""
ExpertRow = tuple[str, int, int]
"""(sequence, position, expert)."""

LAYERS = 4
HIDDEN = 32
IDS = {"s0": list(range(11, 18)), "s1": list(range(21, 26))}


@dataclass(frozen=True)
class Point:
    """One boundary of the playback family, as its map states it."""

    name: str
    columns: int
    inputs: tuple[str, ...]
    level: int = 2
    mixes_tokens: bool = False
    discrete: bool = False
    scores: str = ""
    experts: bool = False
    dtype: torch.dtype = torch.bfloat16


L, P = "layers.{layer}.", "layers.{previous}."
POINTS = (
    Point("embedding", HIDDEN, ("input.ids",), 0),
    Point(L + "attn.norm", HIDDEN, (P + "residual",)),
    Point(L + "attn.q", 32, (L + "attn.norm",)),
    Point(L + "attn.k", 16, (L + "attn.norm",)),
    Point(L + "attn.v", 16, (L + "attn.norm",)),
    Point(L + "attn.out", HIDDEN, (L + "attn.q", L + "attn.k", L + "attn.v", "input.positions"), 1, mixes_tokens=True),
    Point(L + "mlp.gate_up", 96, (L + "attn.out",)),
    Point(L + "mlp.out", HIDDEN, (L + "mlp.gate_up",), 1),
    Point(L + "moe.router_logits", 8, (L + "attn.out",), 1),
    Point(L + "moe.topk_ids", 2, (L + "moe.router_logits",), 1, discrete=True, scores=L + "moe.router_logits", dtype=torch.int64),
    Point(L + "moe.topk_weights", 2, (L + "moe.router_logits", L + "moe.topk_ids"), 1),
    Point(L + "moe.expert_out", HIDDEN, (L + "attn.out", L + "moe.topk_ids"), experts=True),
    Point(L + "residual", HIDDEN, (L + "attn.out", L + "mlp.out", L + "moe.topk_weights", L + "moe.expert_out"), 0),
    Point("final_norm", HIDDEN, ("layers.{last}.residual",), 0),
    Point("lm_head", 40, ("final_norm",), 0),
)


def expand(points: Iterable[Point], layers: int = LAYERS) -> dict[str, Point]:
    """Full boundary names in causal order, inputs filled in."""

    def fill(name: str, layer: int) -> str:
        if "{previous}" in name:
            return name.replace("{previous}", str(layer - 1)) if layer else "embedding"
        return name.replace("{layer}", str(layer)).replace("{last}", str(layers - 1))

    listed = list(points)
    inner = [point for point in listed if point.name.startswith(L)]
    before = listed[: listed.index(inner[0])] if inner else listed
    after = listed[listed.index(inner[-1]) + 1 :] if inner else []
    spread = [(point, 0) for point in before]
    spread += [(point, layer) for layer in range(layers) for point in inner]
    spread += [(point, 0) for point in after]
    return {
        fill(point.name, layer): replace(
            point, name=fill(point.name, layer), inputs=tuple(fill(name, layer) for name in point.inputs), scores=fill(point.scores, layer)
        )
        for point, layer in spread
    }


def module_path(boundary: str) -> str:
    """``layers.2.attn.out`` is played by module ``layers.2.attn_out``; odd names by a running number."""
    head, _, rest = boundary.partition(".")
    if head == "layers":
        layer, _, leaf = rest.partition(".")
        return f"layers.{layer}.{leaf.replace('.', '_')}"
    plain = boundary.replace(".", "_")
    return plain if plain.isidentifier() and len(plain) < 100 else "odd_" + str(abs(hash(boundary)) % 10**8)


class Full:
    """The logical tensors of one side: ``values[boundary][row]`` is a (columns,) tensor, ``ids[sequence]`` its token ids.

    Rows are ``(sequence, position)``, or ``(sequence, position, expert)`` at expert boundaries."""

    def __init__(self, ids: Mapping[str, list[int]] = IDS, points: Iterable[Point] = POINTS, seed: int = 42, layers: int = LAYERS) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = layers
        self.templates = tuple(points)
        self.points = expand(self.templates, layers)
        self.ids = {name: list(tokens) for name, tokens in ids.items()}
        self.values: dict[str, dict[Any, torch.Tensor]] = {}
        for name, point in self.points.items():
            rows: list[Any] = [(seq, t) for seq, tokens in self.ids.items() for t in range(len(tokens))]
            if point.discrete:
                self.values[name] = {row: torch.randperm(8, generator=generator)[:2].sort().values for row in rows}
                continue
            if point.experts:
                chosen = self.values[name.replace("expert_out", "topk_ids")]
                rows = [(*row, int(e)) for row in rows for e in chosen[row]]
            block = torch.randn(len(rows), point.columns, generator=generator).to(point.dtype)
            self.values[name] = dict(zip(rows, block, strict=True))

    def rows(self, boundary: str) -> list[Any]:
        return list(self.values[boundary])

    def copy(self) -> Full:
        """Independent of this one, tensors too."""
        other = object.__new__(Full)
        other.layers, other.templates, other.points = self.layers, self.templates, self.points
        other.ids = {name: list(tokens) for name, tokens in self.ids.items()}
        other.values = {name: {row: value.clone() for row, value in rows.items()} for name, rows in self.values.items()}
        return other

    def nudge(self, boundary: str, row: Any, column: int = 17) -> Full:
        """One element one ulp up (in place); returns self."""
        value = self.values[boundary][row]
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
        value.view(integer)[column] += 1
        return self

    def carry(self, boundary: str, rows: Iterable[Any]) -> Full:
        """Change every value that is computed from ``rows`` of ``boundary``, as after a real fault (in place)."""
        tainted: dict[str, set[Any]] = {boundary: set(rows)}
        names = list(self.points)
        for name in names[names.index(boundary) + 1 :]:
            point = self.points[name]
            reached = [tainted.get(source, set()) for source in point.inputs]
            if point.discrete or not any(reached):
                continue
            hit = {cell[:2] for cells in reached for cell in cells}
            for row, value in self.values[name].items():
                if row[:2] in hit or (point.mixes_tokens and any(seq == row[0] and t <= row[1] for seq, t in hit)):
                    if value.dtype == torch.bfloat16:
                        value.view(torch.int16)[0] ^= 1
                    else:
                        value[0] += 1
                    tainted.setdefault(name, set()).add(row)
        return self

    def one_element(self, boundary: str = "layers.2.attn.out", row: Any = ("s0", 5), column: int = 17) -> Full:
        """A copy with one element one ulp up, carried on."""
        return self.copy().nudge(boundary, row, column).carry(boundary, [row])


def padded(full: Full, sequences: Iterable[str], left: bool = False, length: int = 0) -> Grid:
    """One forward of these sequences as a right- or left-padded batch."""
    names = list(sequences)
    longest = max([length, *(len(full.ids[name]) for name in names)])
    grid: Grid = []
    for name in names:
        rows: list[Row | None] = [(name, t) for t in range(len(full.ids[name]))]
        pad: list[Row | None] = [None] * (longest - len(rows))
        grid.append(pad + rows if left else rows + pad)
    return grid


def flat(full: Full, sequences: Iterable[str]) -> Grid:
    """One packed batch row."""
    return [[(name, t) for name in sequences for t in range(len(full.ids[name]))]]


def batch(full: Full) -> list[Grid]:
    """One forward of both sequences, as on the plain side."""
    return [padded(full, ["s0", "s1"])]


@dataclass(frozen=True)
class Cut:
    """How one process holds one boundary. ``columns``: logical columns of the local tensor, -1 is a padding column of
    random values; None is all. ``spans``: what the host declares, None for all. ``width``: what the host says the whole
    row has, None for the leaf's own. ``rows``: own rows (None is padding), else those of the grid. ``change``: last word
    on the local tensor. ``absent``: the leaf is never called. ``silent``: the host says nothing of the slice."""

    columns: tuple[int, ...] | None = None
    spans: tuple[Span, ...] = ()
    width: int | None = None
    partial: str = ""
    rows: tuple[Any, ...] | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    absent: bool = False
    silent: bool = False


def cut(*spans: Span, width: int, padding: int = 0, **more: Any) -> Cut:
    """A cut of half-open column spans."""
    columns = tuple(c for start, stop in spans for c in range(start, stop)) + (-1,) * padding
    return Cut(columns=columns, spans=spans, width=width, **more)


@dataclass
class Rank:
    """What one process plays. ``grids``: one per forward. ``cuts``: by boundary name. ``layouts``: by boundary name or
    template: how the leaf is shaped. ``ids_known``: whether this process is given input ids."""

    grids: list[Grid]
    rank: int = 0
    world_size: int = 1
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    positions: list[list[list[int]]] | None = None
    ids_known: bool = True
    not_computed: list[NotComputed] = field(default_factory=list)
    only: Callable[[str], bool] = lambda name: True
    ids_override: dict[str, list[int]] = field(default_factory=dict)


class Leaf(nn.Module):
    """Returns the n-th prepared object at its n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Any] = []
        self.calls = 0

    def forward(self, x: Any = None) -> Any:
        self.calls += 1
        return self.prepared[self.calls - 1]


class Elsewhere(nn.Module):
    """Stands in for what another pipeline stage holds."""


class Block(nn.Module):
    """A layer: calls its leaves in order, skipping those that have nothing to return."""

    def forward(self, x: Any = None) -> Any:
        for leaf in self.children():
            if isinstance(leaf, Leaf) and leaf.calls < len(leaf.prepared):
                leaf(x)
        return x


class PlaybackModel(nn.Module):
    """Embedding, layers, final norm and head, none of which computes anything."""

    def __init__(self, full: Full) -> None:
        super().__init__()
        self.steps: list[str] = []
        if any(name.startswith("layers.") for name in full.points):
            self.layers = nn.ModuleList(Block() for _ in range(full.layers))
        for name in full.points:
            path = module_path(name)
            parent, _, leaf = path.rpartition(".")
            self.get_submodule(parent).add_module(leaf, Leaf())
            step = ".".join(path.split(".")[:2]) if parent else path
            if step not in self.steps:
                self.steps.append(step)

    def leaf(self, boundary: str) -> Leaf:
        module = self.get_submodule(module_path(boundary))
        assert isinstance(module, Leaf)
        return module

    def run(self, step: str, x: Any) -> Any:
        """One leaf or one layer."""
        return self.get_submodule(step)(x)

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, attention_mask: Any = None, cu_seqlens: Any = None, past: Any = None
    ) -> Any:
        for step in self.steps:
            module = self.get_submodule(step)
            if isinstance(module, Block) or (isinstance(module, Leaf) and module.calls < len(module.prepared)):
                self.run(step, past)
        return None


class PlaybackHost:
    """Answers what an engine knows of the forwards it plays."""

    name = "playback"

    def __init__(self, model: PlaybackModel, full: Full, rank: Rank) -> None:
        self.model, self.full, self.rank = model, full, rank
        self.forwards = 0
        self.rows_cache: dict[Any, Rows] = {}

    def root(self) -> nn.Module:
        return self.model

    def root_class(self) -> str:
        return "PlaybackModel"

    def modules(self) -> Mapping[str, nn.Module]:
        return dict(self.model.named_modules())

    def mesh(self) -> Mesh:
        axes = tuple(Axis(name=name, index=index, size=size) for name, (index, size) in self.rank.axes.items())
        return Mesh(self.rank.rank, self.rank.world_size, axes)

    def _label(self, rows: Iterable[Any], sequences: SequenceRegistry) -> Rows:
        scope = f"dp={self.rank.axes['dp'][0]}" if "dp" in self.rank.axes else ""
        listed = list(rows)
        sequence = [-1 if row is None else sequences.open(row[0], scope=scope) for row in listed]
        position = [0 if row is None else row[1] for row in listed]
        experts = [row[2] for row in listed if row is not None and len(row) > 2]
        return Rows(np.array(sequence, np.int64), np.array(position, np.int64), np.array(experts, np.int64) if experts else None)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequences: SequenceRegistry) -> Forward | SkippedForward:
        grid = self.rank.grids[self.forwards]
        self.forwards += 1
        listed = [row for line in grid for row in line]
        rows = self._label(listed, sequences)
        self.sequences = sequences
        ids = {**self.full.ids, **self.rank.ids_override}
        known: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if self.rank.ids_known:
            known = np.array([0 if row is None else ids[row[0]][row[1]] for row in listed], np.int64)
            last: dict[int, Row] = {}
            for index, row in zip(rows.sequence_N.tolist(), listed, strict=True):
                if row is not None and row[1] >= last.get(index, row)[1]:
                    last[index] = row
            for index, (name, position) in last.items():
                sequences.record_ids(index, 0, np.array(ids[name][: position + 1], np.int64))
            for declared in self.rank.not_computed:
                sequences.record_ids(sequences.open(declared.sequence, scope=declared.scope), 0, np.array(ids[declared.sequence], np.int64))
        padding = sum(row is None for row in listed)
        self.grid_rows = rows
        return Forward(rows=rows, ids_N=known, skipped={"padding": padding} if padding else {})

    def finish_forward(self, forward: Forward, output: Any) -> None:
        pass

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        held = self.rank.cuts.get(source.boundary, Cut())
        if held.rows is None and not self.full.points.get(source.boundary, Point("", 0, ())).experts:
            return forward.rows if math.prod(row_shape) == len(forward.rows) else None
        rows = held.rows if held.rows is not None else expert_rows(self.full, source.boundary, self.rank.grids[self.forwards - 1])
        key = (self.forwards, rows)
        if key not in self.rows_cache:
            self.rows_cache[key] = self._label(rows, self.sequences)
        return self.rows_cache[key]

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        held = self.rank.cuts.get(source.boundary, Cut())
        point = self.full.points.get(source.boundary)
        if held.silent:
            name, (_, size) = next(iter(self.rank.axes.items()))
            raise MapError(
                Code.MAP_AXIS,
                f"{source.boundary} is cut over {name} (size {size}) and the map does not say how",
                expected=f"`shard`, `replicated` or `partial` for {name}",
                found=f"{columns} of {point.columns if point else '?'} columns",
                remedy=f"declare {name} for this boundary in the map",
            )
        if source.parts > 1 and held.columns is None:
            return Placement(columns * source.parts, ((columns * source.part, columns * (source.part + 1)),))
        return Placement(held.width if held.width is not None else columns, held.spans, held.partial)

    def local_columns(self, boundary: str) -> int | None:
        held = self.rank.cuts.get(boundary, Cut())
        if held.columns is not None:
            return len(held.columns)
        return self.full.points[boundary].columns if boundary in self.full.points else None

    def taps(self, sources: Iterable[Source], sink: TapSink) -> AbstractContextManager[None]:
        return nullcontext()

    def not_computed(self) -> Iterable[NotComputed]:
        return self.rank.not_computed

    def parameters(self) -> Iterator[HostParameter]:
        return iter(())

    def conditions(self) -> dict[str, Any]:
        return {"engine": "playback"}

    def compiled_reason(self, module_path: str) -> str:
        return ""


def expert_rows(full: Full, boundary: str, grid: Grid) -> tuple[ExpertRow, ...]:
    """(token, expert) rows of a forward in token order, experts as chosen."""
    chosen = full.values[boundary.replace("expert_out", "topk_ids")] if "expert_out" in boundary else {}
    return tuple((*row, int(e)) for line in grid for row in line if row is not None for e in chosen[row])


def local_tensor(full: Full, boundary: str, grid: Grid, held: Cut, noise: torch.Generator) -> torch.Tensor:
    """(rows, columns) of one boundary as one process holds it; padding rows and columns are random."""
    point = full.points[boundary]
    rows: Iterable[Any] = held.rows if held.rows is not None else [row for line in grid for row in line]
    if point.experts and held.rows is None:
        rows = expert_rows(full, boundary, grid)
    random = torch.randn(point.columns, generator=noise)
    lines = []
    for row in rows:
        whole = full.values[boundary][row] if row is not None else (random * 8).to(point.dtype)
        if held.columns is not None:
            at = torch.tensor(held.columns)
            whole = torch.where(at < 0, (random[at.clamp(min=0)] + 3).to(whole.dtype), whole[at.clamp(min=0)])
        lines.append(whole)
    columns = len(held.columns) if held.columns is not None else point.columns
    tensor = torch.stack(lines) if lines else torch.zeros(0, columns, dtype=point.dtype)
    return held.change(tensor) if held.change else tensor


def shape_leaf(tensor: torch.Tensor, layout: str, grid: Grid, heads: int = 0) -> torch.Tensor:
    """A (rows, columns) tensor in the shape that ``layout`` names: b and s from the grid, h heads of 8 columns."""
    batch, time = len(grid), len(grid[0]) if grid else 0
    columns = tensor.shape[1]
    match layout:
        case "t c" | "t (h d)":
            return tensor
        case "b s c" | "b s (h d)":
            return tensor.reshape(batch, time, columns)
        case "s b c":
            return tensor.reshape(batch, time, columns).transpose(0, 1).contiguous()
        case "b s h d":
            return tensor.reshape(batch, time, columns // 8, 8)
        case "t 1 c":
            return tensor[:, None]
    raise ValueError(layout)


def write_map(
    path: Path, full: Full, layouts: Mapping[str, str], bindings: Mapping[str, dict[str, Any]], entries: Mapping[str, dict[str, Any]]
) -> Path:
    """The playback family's map as YAML, with these changes."""
    boundaries: dict[str, Any] = {"input.ids": {"level": 0}, "input.positions": {"level": 0}}
    bound: dict[str, Any] = {
        "input.ids": {"derived": "host"},
        "input.positions": {"module": "", "leaf": "kwargs.position_ids", "layout": "b s"},
    }
    for point in full.templates:
        entry: dict[str, Any] = {
            "level": point.level,
            "from": list(point.inputs),
            "mixes_tokens": point.mixes_tokens,
            "discrete": point.discrete,
        }
        if point.scores:
            entry["scores"] = point.scores
        if point.experts:
            entry["rows"] = "experts"
        boundaries[point.name] = {**entry, **entries.get(point.name, {})}
        module = module_path(point.name.replace("{layer}", "LAYER")).replace("LAYER", "{layer}")
        layout = layouts.get(point.name, "e c" if point.experts else "b s c")
        bound[point.name] = bindings.get(point.name, {"module": module, "layout": layout})
    for name in entries:
        boundaries.setdefault(name, entries[name])
    for name in bindings:
        bound.setdefault(name, bindings[name])
    document = {
        "family": "playback",
        "boundaries": boundaries,
        "hosts": {"playback": {"classes": ["PlaybackModel"], "layers": "layers.{layer}", "elsewhere": ["Elsewhere"], "bindings": bound}},
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=1000))
    return path


@contextmanager
def run_id(name: str) -> Iterator[None]:
    """Give the processes of one run the same id, as a launcher does."""
    before = os.environ.get("TRACER_RUN_ID")
    os.environ["TRACER_RUN_ID"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRACER_RUN_ID"]
        else:
            os.environ["TRACER_RUN_ID"] = before


@dataclass
class Stage:
    """Records sides into ``folder``; ``maps`` and ``traces`` are named after the side."""

    folder: Path

    def play(
        self,
        side: str,
        full: Full,
        ranks: Rank | list[Rank],
        *,
        bindings: Mapping[str, dict[str, Any]] | None = None,
        entries: Mapping[str, dict[str, Any]] | None = None,
        wrap: Callable[[str, torch.Tensor], Any] | None = None,
        model: Callable[[Full], PlaybackModel] = PlaybackModel,
        around: Callable[[PlaybackModel, Rank], AbstractContextManager[None]] | None = None,
        prepare: Callable[[PlaybackModel, Rank], None] | None = None,
        level: int = 2,
        fill: bool = True,
        check: bool = True,
        **options: Any,
    ) -> Path:
        """Record every rank in turn. ``wrap(boundary, tensor)`` gives what the leaf returns, ``prepare`` changes the built
        model, ``bindings`` and ``entries`` change the map, ``options`` are those of ``trace``. Returns the trace directory."""
        listed = ranks if isinstance(ranks, list) else [ranks]
        out = self.folder / side
        for rank in listed:
            noise = torch.Generator().manual_seed(1000 + rank.rank)
            built = model(full)
            here = [name for name in full.points if rank.only(name)]
            for name in full.points:
                if not rank.only(name):
                    parent, _, leaf = module_path(name).rpartition(".")
                    setattr(built.get_submodule(parent), leaf, Elsewhere())
            for grid in rank.grids if fill else []:
                for name in here:
                    held = rank.cuts.get(name, Cut())
                    if held.absent:
                        continue
                    tensor = local_tensor(full, name, grid, held, noise)
                    template = _template(name)
                    layout = rank.layouts.get(name, rank.layouts.get(template, ""))
                    if not layout:
                        layout = "t c" if full.points[name].experts or held.rows is not None else "b s c"
                    shaped = shape_leaf(tensor, layout, grid) if grid and grid[0] else tensor.reshape(0, 0, tensor.shape[1])
                    built.leaf(name).prepared.append(wrap(name, shaped) if wrap else shaped)
            if prepare:
                prepare(built, rank)
            host = PlaybackHost(built, full, rank)
            layouts = {template: layout for template, layout in rank.layouts.items() if template in {p.name for p in full.templates}}
            for name, held in rank.cuts.items():
                if held.rows is not None and not full.points[name].experts:
                    layouts.setdefault(_template(name), "t c")
            map_file = write_map(self.folder / f"{side}-{rank.rank}.yaml", full, layouts, bindings or {}, entries or {})
            with run_id(f"run-{side}"), around(built, rank) if around else nullcontext():
                recorder = tracer.trace(built, map=str(map_file), out=out, level=level, host=host, **options)
                with recorder:
                    self.drive(built, full, rank)
        return out

    def drive(self, model: PlaybackModel, full: Full, rank: Rank) -> None:
        """Run every forward of one rank."""
        ids = {**full.ids, **rank.ids_override}
        for number, grid in enumerate(rank.grids):
            tokens = torch.tensor([[0 if row is None else ids[row[0]][row[1]] for row in line] for line in grid], dtype=torch.int64)
            positions = torch.tensor([[0 if row is None else row[1] for row in line] for line in grid], dtype=torch.int64)
            if rank.positions is not None:
                positions = torch.tensor(rank.positions[number], dtype=torch.int64)
            shape = (len(grid), len(grid[0]) if grid else 0)
            model(
                input_ids=tokens.reshape(shape) if rank.ids_known else None,
                position_ids=positions.reshape(shape),
                attention_mask=torch.tensor([[row is not None for row in line] for line in grid]).reshape(shape),
            )

    def plain(self, side: str, full: Full, sequences: Iterable[str] = ("s0", "s1"), **more: Any) -> Path:
        """The plain side: one process, one right-padded forward."""
        return self.play(side, full, Rank([padded(full, sequences)]), **more)


def _template(name: str) -> str:
    head, _, rest = name.partition(".")
    return L + rest.partition(".")[2] if head == "layers" else name


def layered(cuts: Mapping[str, Cut], layers: int = LAYERS) -> dict[str, Cut]:
    """Cuts by template (``attn.q`` for every layer) or by full name."""
    spread: dict[str, Cut] = {}
    for name, held in cuts.items():
        if name.split(".")[0] in ("attn", "mlp", "moe", "residual"):
            spread.update({f"layers.{layer}.{name}": held for layer in range(layers)})
        else:
            spread[name] = held
    return spread


def tensor_parallel(grids: list[Grid], size: int, cuts: Callable[[int], Mapping[str, Cut]], axis: str = "tp", **more: Any) -> list[Rank]:
    """``size`` ranks along one axis; ``cuts(rank)`` gives what each holds, everything else is replicated."""
    return [Rank(grids, rank, size, {axis: (rank, size)}, layered(cuts(rank)), **more) for rank in range(size)]


def even(rank: int, size: int, columns: int) -> Cut:
    """The rank-th of ``size`` equal column slices."""
    step = columns // size
    return cut((rank * step, rank * step + step), width=columns)
