"""Causal roots: cells that differ although everything they are computed from is equal.

The graph is the merged catalogue of both sides: boundaries in causal order, each with the boundaries (``from:``) and
weights it is computed from. A *state* is a mask over A's tokens: True where the value of a boundary is known, or has
to be taken, to differ. A boundary that was not compared takes its state from its inputs, so that its nearest recorded
ancestors stand for it.

Shape suffixes: K tokens of side A.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.schema import Boundary, RowScope
from tracer.read.logical import TokenTable

__all__ = ["Causes", "Cells", "Graph", "Prefixes", "RootCells", "find_causes", "merge_catalogues"]

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def merge_catalogues(a: Sequence[Boundary], b: Sequence[Boundary]) -> tuple[Boundary, ...]:
    """Both sides' boundaries in one causal order: A's, with what only B has right after what precedes it there.

    A boundary of both keeps A's fields, and the inputs and weights of whichever side names any.
    """
    known_b = {boundary.name: boundary for boundary in b}
    names_a = {boundary.name for boundary in a}
    insert: dict[str, list[Boundary]] = {}
    anchor = ""
    for boundary in b:
        if boundary.name in names_a:
            anchor = boundary.name
        else:
            insert.setdefault(anchor, []).append(boundary)
    merged = list(insert.get("", ()))
    for boundary in a:
        other = known_b.get(boundary.name)
        if other is not None:
            boundary = msgspec.structs.replace(
                boundary,
                inputs=boundary.inputs or other.inputs,
                weights=tuple(dict.fromkeys((*boundary.weights, *other.weights))),
                mixes_tokens=boundary.mixes_tokens or other.mixes_tokens,
                discrete=boundary.discrete or other.discrete,
                scores=boundary.scores or other.scores,
            )
        merged.append(boundary)
        merged += insert.get(boundary.name, ())
    return tuple(merged)


@dataclass(frozen=True)
class Graph:
    """The merged catalogue as a graph. ``inputs``: per boundary the indices of its inputs, all smaller than its own
    (an input that is unknown or later in the order is left out). ``last_reader``: index of the last boundary that
    reads each, or its own index."""

    boundaries: tuple[Boundary, ...]
    index: Mapping[str, int]
    inputs: tuple[tuple[int, ...], ...]
    last_reader: tuple[int, ...]

    @classmethod
    def of(cls, boundaries: Sequence[Boundary], implicit_inputs: Iterable[str] = ()) -> Graph:
        """``implicit_inputs``: ``input.*`` boundaries that differ. Where no boundary names one of them as its input,
        it is taken to reach every boundary that is no input itself."""
        index = {boundary.name: at for at, boundary in enumerate(boundaries)}
        named = {name for boundary in boundaries for name in boundary.inputs}
        everywhere = [index[name] for name in implicit_inputs if name in index and name not in named]
        inputs, last_reader = [], list(range(len(boundaries)))
        for at, boundary in enumerate(boundaries):
            own = [index[name] for name in boundary.inputs if index.get(name, at) < at]
            if not boundary.name.startswith("input."):
                own += [extra for extra in everywhere if extra < at]
            inputs.append(tuple(own))
            for source in own:
                last_reader[source] = at
        return cls(tuple(boundaries), index, tuple(inputs), tuple(last_reader))

    def ancestors_compared(self, at: int, stands: Iterable[int]) -> tuple[str, ...]:
        """Nearest ancestors of a boundary among those that ``stands`` allows, in causal order."""
        allowed, found, seen = set(stands), set(), set()
        stack = list(self.inputs[at])
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in allowed:
                found.add(source)
            else:
                stack += self.inputs[source]
        return tuple(self.boundaries[source].name for source in sorted(found))

    def readers(self) -> list[list[int]]:
        """Per boundary the indices of the boundaries that read it."""
        readers: list[list[int]] = [[] for _ in self.boundaries]
        for at, own in enumerate(self.inputs):
            for source in own:
                readers[source].append(at)
        return readers

    def cut_after(self, at: int) -> int:
        """First later boundary that everything computed from this one passes through, or the number of boundaries."""
        reached, reach = {at}, self.last_reader[at]
        if reach == at:
            return len(self.boundaries)
        for later in range(at + 1, len(self.boundaries)):
            if reached.isdisjoint(self.inputs[later]):
                continue
            if reach <= later:
                return later
            reached.add(later)
            reach = max(reach, self.last_reader[later])
        return len(self.boundaries)


class Prefixes:
    """The prefix tree of a token table, for "at or before this token"."""

    def __init__(self, tokens: TokenTable) -> None:
        self.previous_K = tokens.previous_K
        count = len(tokens)
        follows = np.zeros(count, np.bool_)
        follows[1:] = self.previous_K[1:] == np.arange(count - 1)
        starts = np.flatnonzero(~follows)
        self._starts = starts
        self._run_K = np.cumsum(~follows) - 1
        branches = np.flatnonzero(self.previous_K[starts] >= 0)
        self._branches = [(int(run), int(self.previous_K[starts[run]])) for run in branches]

    def at_or_before(self, mask_K: Mask) -> Mask:
        """True where the token or any token before it in its prefix is. A prefix comes before its tokens in the table."""
        if not len(mask_K):
            return mask_K
        total: I64 = np.cumsum(mask_K, dtype=np.int64)
        before_run: I64 = total[self._starts] - mask_K[self._starts]
        spread: Mask = (total - before_run[self._run_K]) > 0
        for run, parent in self._branches:
            if spread[parent]:
                stop = self._starts[run + 1] if run + 1 < len(self._starts) else len(mask_K)
                spread[self._starts[run] : stop] = True
        return spread

    def before(self, mask_K: Mask) -> Mask:
        """The mask at the token before each, for rows that speak of the next token."""
        moved = mask_K[np.maximum(self.previous_K, 0)]
        moved[self.previous_K < 0] = False
        result: Mask = moved
        return result


@dataclass(frozen=True)
class Cells:
    """What is known of one boundary, per token. ``compared_K``: all rows of the token were compared; None means every
    token's. ``differs_K``: any of them differs (above the floor); None means none does. ``within_K``: rows differ, all of them
    within floor or tolerance: no difference of their own, and not equal either, so that what they inherit lives on."""

    compared_K: Mask | None
    differs_K: Mask | None
    within_K: Mask | None = None


@dataclass(frozen=True)
class RootCells:
    """Cells of one boundary that differ. ``root_K``: with equal inputs; ``inherited_K``: with inputs that differ.
    ``between``: recorded ancestors that stand for inputs not compared, empty where every input was. ``unobserved``:
    an input was not compared and no ancestor of it was either."""

    root_K: Mask
    inherited_K: Mask
    between: tuple[str, ...] = ()
    unobserved: bool = False


@dataclass(frozen=True)
class Causes:
    """``cells``: boundary -> its differing cells. ``healed``: boundary -> the boundary where all of it is equal again.
    ``harmless``: boundary -> where its *roots* are equal again, if they never reached a coarse boundary (level 0) or a
    choice: they are the cause of nothing."""

    cells: Mapping[str, RootCells] = field(default_factory=dict)
    healed: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)


def find_causes(graph: Graph, cells: Mapping[str, Cells], tokens: TokenTable, weights: Iterable[str] = ()) -> Causes:
    """Tell roots from consequences. ``cells``: boundaries that were compared; ``weights``: those that differ.

    After a choice differs, what follows for that token is its consequence, up to the first boundary that everything
    computed from the choice passes through.
    """
    if not any(cell.differs_K is not None for cell in cells.values()):
        return Causes()
    prefixes, apart = Prefixes(tokens), set(weights)
    states: dict[int, Mask | None] = {}
    chosen: list[tuple[int, Mask]] = []  # (cut, tokens whose choice differs)
    found: dict[str, RootCells] = {}
    compared = {graph.index[name] for name, cell in cells.items() if name in graph.index}
    for at, boundary in enumerate(graph.boundaries):
        chosen = [(cut, mask) for cut, mask in chosen if cut >= at]
        weight_differs = not apart.isdisjoint(boundary.weights)
        inherited = _inherited(graph, at, states, prefixes, [mask for _, mask in chosen], weight_differs, len(tokens))
        cell = cells.get(boundary.name)
        if cell is None:
            states[at] = inherited
        else:
            states[at] = _state(cell, inherited)
            if cell.differs_K is not None:
                blamed = np.zeros(len(tokens), np.bool_) if inherited is None else inherited
                root_K = cell.differs_K & ~blamed
                between, unobserved = _between(graph, at, root_K, cells, compared) if root_K.any() else ((), False)
                found[boundary.name] = RootCells(root_K, cell.differs_K & blamed, between, unobserved)
                if boundary.discrete:
                    chosen.append((graph.cut_after(at), cell.differs_K))
        for source in graph.inputs[at]:
            if graph.last_reader[source] == at:
                states.pop(source, None)
    readers = graph.readers()
    harmless = {
        name: where
        for name, cell in found.items()
        if cell.root_K.any() and (where := _harmless_at(graph, graph.index[name], cell.root_K, cells, prefixes))
    }
    return Causes(found, _healed(graph, cells, readers, prefixes), harmless)


def _inherited(
    graph: Graph, at: int, states: Mapping[int, Mask | None], prefixes: Prefixes, chosen: Sequence[Mask], weight_differs: bool, count: int
) -> Mask | None:
    """Tokens at which anything the boundary is computed from differs; None where nothing does."""
    if weight_differs:
        return np.ones(count, np.bool_)
    boundary = graph.boundaries[at]
    sources = [state for source in graph.inputs[at] if (state := states.get(source)) is not None]
    sources += [] if boundary.name.startswith("input.") else chosen
    inherited = _any(sources)
    return None if inherited is None else _carried(boundary, inherited, prefixes)


def _carried(boundary: Boundary, source_K: Mask, prefixes: Prefixes) -> Mask:
    """Tokens whose rows of ``boundary`` are computed from its inputs at any of ``source_K``."""
    if boundary.rows is RowScope.NEXT:
        source_K = prefixes.before(source_K)
    return prefixes.at_or_before(source_K) if boundary.mixes_tokens else source_K


def _any(masks: Sequence[Mask]) -> Mask | None:
    if not masks:
        return None
    union = masks[0]
    for mask in masks[1:]:
        union = union | mask
    return union


def _state(cell: Cells, inherited: Mask | None) -> Mask | None:
    """A compared cell that is equal or differs speaks for itself, any other for what it inherits."""
    open_K = _any([mask for mask in (None if cell.compared_K is None else ~cell.compared_K, cell.within_K) if mask is not None])
    inherits = None
    if open_K is not None and inherited is not None:
        inherits = inherited & open_K
        inherits = inherits if inherits.any() else None
    return _any([mask for mask in (cell.differs_K, inherits) if mask is not None])


def _between(graph: Graph, at: int, root_K: Mask, cells: Mapping[str, Cells], compared: set[int]) -> tuple[tuple[str, ...], bool]:
    """Nothing if every direct input was compared at the root's tokens, else the nearest ancestors that were, and
    whether there are none. Equal token keys are equal ids, so inputs of the model need no standing in."""

    def covers(source: int) -> bool:
        if graph.boundaries[at].rows is RowScope.NEXT:  # keyed by the next token: its rows do not line up with those of its inputs
            return True
        covered = cells[graph.boundaries[source].name].compared_K
        return covered is None or not (root_K & ~covered).any()

    standing = {source for source in compared if source < at and covers(source)}
    if all(source in standing or graph.boundaries[source].name.startswith("input.") for source in graph.inputs[at]):
        return (), False
    between = graph.ancestors_compared(at, standing)
    within = tuple(name for name in between if not name.startswith("input."))
    return within or between, not between


def _healed(graph: Graph, cells: Mapping[str, Cells], readers: Sequence[Sequence[int]], prefixes: Prefixes) -> dict[str, str]:
    """Boundaries that differ while everything recorded that depends on them is equal again at what they reach."""
    healed: dict[str, str] = {}
    for at in range(len(graph.boundaries) - 1, -1, -1):
        name = graph.boundaries[at].name
        cell = cells.get(name)
        if cell is None or cell.differs_K is None or name.startswith("input."):
            continue
        where = _heals_at(graph, at, cell.differs_K, cells, healed, readers, prefixes)
        if where:
            healed[name] = where
    return healed


def _harmless_at(graph: Graph, at: int, root_K: Mask, cells: Mapping[str, Cells], prefixes: Prefixes) -> str:
    """Where the last of some roots' differences is equal again, empty where any reaches a coarse boundary or a choice, lives
    on at the end of the graph, or is lost from sight."""
    boundary = graph.boundaries[at]
    if boundary.level == 0 or boundary.discrete or boundary.name.startswith("input."):
        return ""
    live: dict[int, Mask] = {at: root_K}
    equal_at = -1
    for later in range(at + 1, len(graph.boundaries)):
        reach = _any([live[source] for source in graph.inputs[later] if source in live])
        if reach is None:
            continue
        boundary = graph.boundaries[later]
        reach = _carried(boundary, reach, prefixes)
        cell = cells.get(boundary.name)
        if cell is not None:
            apart = _any([mask for mask in (cell.differs_K, cell.within_K) if mask is not None])
            lives = np.zeros_like(reach) if apart is None else reach & apart
            if lives.any() and (boundary.level == 0 or boundary.discrete):
                return ""
            if not lives.all() and (reach & ~lives).any():
                equal_at = later
            reach = lives if cell.compared_K is None else lives | (reach & ~cell.compared_K)
        if reach.any():
            if graph.last_reader[later] == later:
                return ""
            live[later] = reach
    return graph.boundaries[equal_at].name if equal_at >= 0 and graph.last_reader[at] > at else ""


def _heals_at(
    graph: Graph,
    at: int,
    differs_K: Mask,
    cells: Mapping[str, Cells],
    healed: Mapping[str, str],
    readers: Sequence[Sequence[int]],
    prefixes: Prefixes,
) -> str:
    """Where all of a boundary's differences are equal again, empty where any of them lives on."""
    stack = [(reader, differs_K) for reader in readers[at]]
    passed: dict[int, Mask] = {}
    equal_at = -1
    while stack:
        reader, reach = stack.pop()
        boundary = graph.boundaries[reader]
        reach = _carried(boundary, reach, prefixes)
        cell = cells.get(boundary.name)
        if cell is not None:
            if cell.within_K is not None and (cell.within_K & reach).any():
                return ""
            if cell.differs_K is not None and (cell.differs_K & reach).any():
                if boundary.name not in healed:
                    return ""
                equal_at = max(equal_at, graph.index[healed[boundary.name]])
            elif (reach if cell.compared_K is None else reach & cell.compared_K).any():  # else no row here depends on it
                equal_at = max(equal_at, reader)
            reach = np.zeros_like(reach) if cell.compared_K is None else reach & ~cell.compared_K
        before = passed.get(reader)
        passed[reader] = reach if before is None else before | reach
        if reach.any() and (before is None or (reach & ~before).any()):  # what was not compared here may live on
            stack += [(later, passed[reader]) for later in readers[reader]]
    return graph.boundaries[equal_at].name if equal_at >= 0 else ""
