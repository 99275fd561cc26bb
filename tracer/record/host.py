"""What a framework must tell the recorder: the Host protocol.

The recorder knows boundaries, leaves, fingerprints and files. A host knows one framework: which
modules there are, what every row of a forward *is* (sequence and position, or padding), which slice
of a boundary this process holds, and what only a function tap can show. Everything engine-specific
lives behind this protocol in ``tracer.hosts``; the recorder never names a framework.

Shape suffixes: N rows of one forward in flattened order, C columns held here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Axis, NotComputed, Span

if TYPE_CHECKING:
    import torch

    from tracer.record.boundaries import Source
    from tracer.record.tokens import SequenceRegistry

__all__ = [
    "Forward",
    "Host",
    "HostParameter",
    "KeepsState",
    "Mesh",
    "Placement",
    "Rows",
    "SkippedForward",
    "TapSink",
]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """This process among all processes of the run."""

    rank: int = 0
    world_size: int = 1
    axes: tuple[Axis, ...] = ()

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, or None where the run has none."""
        return next((axis for axis in self.axes if axis.name == name), None)


@dataclass(frozen=True)
class Rows:
    """What each row of a leaf is, in the leaf's own flattened row order.

    ``sequence_N``: index from ``SequenceRegistry.open``; -1 marks a row that must not be recorded
    (its reason is in ``Forward.skipped``). ``position_N``: index of the token in its sequence, from 0,
    which is not necessarily the position id the model was given. ``expert_N``: expert id of
    (token, expert) rows, else None. Arrays are int64 and never written to after construction.
    """

    sequence_N: IntArray
    position_N: IntArray
    expert_N: IntArray | None = None

    def __len__(self) -> int:
        return len(self.sequence_N)


@dataclass(frozen=True)
class Forward:
    """One forward of the root module that will be recorded.

    ``rows`` covers the flattened token axes of the call ((batch, time) row-major, or packed time).
    ``ids_N``: input ids at those rows, None where this process is not given them.
    ``inputs``: derived integer inputs by boundary name (``input.positions``, ``input.visible_from``),
    (N,) or (N, C) int64, for boundaries that the map binds to ``host``.
    ``skipped``: reason -> number of rows with sequence -1 (padding, outside ``tokens=``).
    ``state``: whatever the host wants to find again in ``leaf_rows`` and ``finish_forward``.
    ``unseen``: inputs that the host is given and cannot put into numbers, with the reason: not observable in this forward.
    """

    rows: Rows
    ids_N: IntArray | None = None
    inputs: Mapping[str, IntArray] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    state: Any = None
    unseen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SkippedForward:
    """A forward that is no part of the run: dummy, warm-up, profiling. Counted under its reason."""

    reason: str


@dataclass(frozen=True)
class Placement:
    """Where a leaf's columns lie in the whole logical row.

    ``width``: columns of the whole row. ``spans``: logical columns held, in local column order; empty
    means all of them; one empty span means none. Local columns beyond the spans are padding (vocabulary padding) and are dropped.
    ``partial``: mesh axis over which the values are partial sums, else empty. ``axis``: the mesh axis that cuts the
    columns, one part per coordinate in order; empty where none does, or it takes more than its name to tell.
    """

    width: int
    spans: tuple[Span, ...] = ()
    partial: str = ""
    axis: str = ""


@dataclass(frozen=True)
class HostParameter:
    """One parameter or buffer this process holds, under the host's own name.

    ``tensor``: the local part as stored; None where its bytes cannot be trusted, with the reason in
    ``unknown``. ``shape``: shape of the whole parameter. ``spans``: per dimension the global indices
    held, in local order; empty means all of that dimension. Semantic names, transposition and the
    splitting of packed or stacked parameters are the map's business (``record.weights``).
    """

    parameter: str
    tensor: torch.Tensor | None
    shape: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...] = ()
    buffer: bool = False
    unknown: str = ""
    rows: Fingerprints | None = None
    """Fingerprints of the rows held (all dimensions but the last), taken while its bytes could be read; ``tensor`` is then
    None and ``dtype`` is what they were taken of."""
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    """Rows of the whole parameter that each of its names has, where it packs several and the host knows."""


TapSink = Callable[[str, str, "torch.Tensor"], None]
"""``sink(module_path, leaf, tensor)``: a function tap shows ``leaf`` of the module at ``module_path``."""


class Host(Protocol):
    """One framework. Implementations live in ``tracer.hosts`` (or in user code, passed as ``host=``)."""

    name: str
    """Short name, and the key of this host's bindings in a boundary map."""

    def root(self) -> torch.nn.Module:
        """The module whose ``forward`` delimits one forward of the run."""

    def root_class(self) -> str:
        """Class name of the loaded root module, wrappers looked through; picks the map with ``map="auto"``. What tells
        families of one class apart may follow in brackets. Where no map knows the class, those it derives from are tried."""

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Module by path as maps write it (wrapper prefixes stripped), shared modules under every name."""

    def mesh(self) -> Mesh:
        """This process's rank and coordinates."""

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequences: SequenceRegistry) -> Forward | SkippedForward:
        """Label the rows of a forward that is about to run. Opens sequences and records the ids it knows,
        those of tokens before this forward too. Must not change or keep the arguments."""

    def finish_forward(self, forward: Forward, output: Any) -> None:
        """The same forward returned; ``output`` must not be changed or kept."""

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        """What the rows of this leaf are. ``row_shape``: sizes of its row axes in layout order.
        None where the host cannot say, which makes the boundary vacuous with that reason.
        The same object may be returned for many leaves, which saves space in the trace. Asked once per forward and shape,
        for a source ``after_root`` at every call."""

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        """Where ``columns`` columns of this source lie, ``select`` and ``split`` applied before. A source that is one of
        several ``parts`` is placed as if it were the whole boundary: the recorder puts the parts side by side. ``leaf``
        is the tensor as the module saw it, wrappers (DTensor) and all. Asked once per source and number of columns.
        Raises ``MapError`` (map-axis) where a mesh axis cuts the boundary and neither map nor host says how."""

    def local_columns(self, boundary: str) -> int | None:
        """Columns of ``boundary`` this process holds, for ``split`` leaves; None where the map's sizes serve."""

    def taps(self, sources: Iterable[Source], sink: TapSink) -> AbstractContextManager[None]:
        """Install function taps for points that no module shows; removed when the context ends."""

    def not_computed(self) -> Iterable[NotComputed]:
        """Rows declared never computed, each with its reason; asked once, when the trace ends."""

    def parameters(self) -> Iterator[HostParameter]:
        """Every parameter and buffer (persistent or not), under the host's own clean names, each tied tensor under every name."""

    def conditions(self) -> dict[str, Any]:
        """What the framework knows of the run: versions, config, dtype, backends, mode. Plain JSON."""

    def compiled_reason(self, module_path: str) -> str:
        """Why hooks on this module may stay silent (compiled region, graph replay), else empty."""


@runtime_checkable
class KeepsState(Protocol):
    """A host that may know why the model must not be changed while it runs."""

    def keeps_state(self) -> tuple[str, str] | None:
        """What of one run the next one reads, such as a prefix cache, and the remedy; None where there is nothing."""
