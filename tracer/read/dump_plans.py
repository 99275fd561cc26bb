"""From a comparison to what to save in a second run: the rows of the earliest boundary that differs, and what it is computed from.

Suffixes: D differing rows, R matched rows, K tokens of side A, S rows chosen.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import DTYPES
from tracer.format.dumps import DumpPlan, PlanBoundary, PlanSide, PlanWeight
from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import FORMAT_VERSION, Boundary, BoundaryStatus, RowScope
from tracer.read.causes import merge_catalogues
from tracer.read.compare import Comparison, compare_boundary
from tracer.read.findings import DiffResult, Verdict
from tracer.read.logical import LogicalBoundary, LogicalTrace
from tracer.read.matched import spread
from tracer.read.pairing import Pairing, pair_sides

__all__ = ["PLAN_BYTES", "make_dump_plan"]

I64 = npt.NDArray[np.int64]

PLAN_BYTES = 64 << 20
_MOST_ROWS = 1024
_LARGEST = 32
_NEIGHBOURS = 8
_OBSERVABLE = (BoundaryStatus.RECORDED, BoundaryStatus.NOT_SELECTED)


def make_dump_plan(a: LogicalTrace, b: LogicalTrace, result: DiffResult, max_bytes: int = PLAN_BYTES) -> DumpPlan | str:
    """What to save in a second run of both sides, or in one sentence why there is nothing to save.

    ``result``: of comparing ``a`` with ``b``. Chosen are the differing rows of the first divergence, evenly spread where there are more
    than fit into ``max_bytes``, the largest among them, a few equal neighbours, and the rows of its inputs at the same tokens (of their
    whole prefix where tokens are mixed), back to the nearest boundary that was recorded the first time.
    """
    first = result.first
    if result.verdict is not Verdict.DIFFERENT or first is None:
        return "no value is proven to differ"
    name = first.boundary
    catalogue = {info.name: info for info in merge_catalogues(a.catalogue, b.catalogue)}
    weights: tuple[PlanWeight, ...] = ()
    if name in a.weights:  # of a weight that differs: its rows, and what is computed with it
        weights = _weight_rows(name, a, b, max_bytes // 2)
        apart = (entry.name for entry in result.boundaries if entry.rows_above_floor)
        name = next((entry for entry in apart if name in catalogue[entry].weights), name)
    if weights and (name not in a.boundaries or name not in b.boundaries):
        sides = (PlanSide(run_id=trace.manifest.run_id, host=trace.manifest.host) for trace in (a, b))
        return DumpPlan(format=FORMAT_VERSION, boundaries=(), weights=weights, max_bytes=max_bytes, a=next(sides), b=next(sides))
    if name not in a.boundaries or name not in b.boundaries or name.startswith("input."):
        return f"the first divergence is {name}, which has no rows of values to save"
    pairing = pair_sides(a, b)
    comparison = compare_boundary(a.boundaries[name], b.boundaries[name], pairing.tokens)
    if not len(comparison.differing):
        return f"no row of {name} differs between the sides"
    inputs = _inputs(catalogue[name], catalogue, a, b)
    fits = max_bytes // max(sum(_row_bytes(source, a, b) or _row_bytes(name, a, b) for source in (*inputs, name)), 1)
    pairs = _choose(comparison, max(min(fits, _MOST_ROWS), 1))
    differing = int(np.isin(pairs, comparison.differing).sum())
    maker = _Maker(a, b, pairing)
    output = maker.output(comparison, pairs, differing)
    token_S = comparison.token_R[pairs]
    if catalogue[name].rows is RowScope.NEXT:
        token_S = a.tokens.previous_K[token_S]
    token_S = np.unique(token_S[token_S >= 0])
    prefix_S = _prefixes(a, token_S)[: max(fits, 1)] if any(inputs.values()) else token_S
    return DumpPlan(
        format=FORMAT_VERSION,
        weights=weights,
        boundaries=(output, *(maker.tokens(source, prefix_S if mixed else token_S) for source, mixed in inputs.items())),
        max_bytes=max_bytes,
        rows_left_out=len(comparison.differing) - differing,
        a=maker.side(a, maker.sequences_a),
        b=maker.side(b, maker.sequences_b),
    )


def _weight_rows(name: str, a: LogicalTrace, b: LogicalTrace, max_bytes: int) -> tuple[PlanWeight, ...]:
    """Rows of a weight: those that differ and a few equal neighbours where both sides recorded rows, else all of them; evenly
    spread where there are more than fit."""
    x, y = a.weights[name], b.weights.get(name)
    if y is None or x.unknown or y.unknown or (x.rows, x.columns) != (y.rows, y.columns):
        return ()
    size = x.columns * max(DTYPES[dtype].itemsize if dtype in DTYPES else 8 for dtype in (x.dtype, y.dtype))
    most = max(min(max_bytes // max(size, 1), _MOST_ROWS), 1)
    rows_a, rows_b = a.load_weight_rows(name), b.load_weight_rows(name)
    differing = None
    if rows_a is None or rows_b is None or x.dtype != y.dtype:
        chosen = spread(np.arange(x.rows), most)
    else:
        apart = (rows_a.digest_N2 != rows_b.digest_N2).any(axis=1)
        kept = spread(np.flatnonzero(apart), most)
        differing, equal = len(kept), np.flatnonzero(~apart)
        nearest = np.argsort(np.abs(equal - kept[len(kept) // 2]), kind="stable")[:_NEIGHBOURS] if len(kept) else ()
        chosen = np.sort(np.concatenate([kept, equal[nearest] if len(equal) and len(kept) else equal[:0]]))
    return (
        PlanWeight(
            name=name,
            rows=tuple(chosen.tolist()),
            differing=differing,
            digests_a=_hex_rows(rows_a, chosen),
            digests_b=_hex_rows(rows_b, chosen),
            whole_a="".join(x.digest),
            whole_b="".join(y.digest),
        ),
    )


def _hex_rows(rows: Fingerprints | None, chosen: I64) -> tuple[str, ...]:
    return () if rows is None else tuple("".join(f"{lane:016x}" for lane in rows.digest_N2[row].tolist()) for row in chosen.tolist())


def _inputs(info: Boundary, catalogue: dict[str, Boundary], a: LogicalTrace, b: LogicalTrace) -> dict[str, bool]:
    """What a boundary is computed from, back to what was recorded on both sides, and whether tokens are mixed on the way. What a side
    cannot show is passed over, the model's inputs are left out."""
    shown = [{entry.name for entry in trace.catalogue if entry.status in _OBSERVABLE} for trace in (a, b)]
    found: dict[str, bool] = {}
    stack = [(name, info.mixes_tokens) for name in info.inputs]
    while stack:
        name, mixed = stack.pop(0)
        if name.startswith("input.") or name not in catalogue or (found.get(name, False) >= mixed and name in found):
            continue
        if all(name in names for names in shown):
            found[name] = mixed
        if name not in a.boundaries or name not in b.boundaries:
            stack += [(source, mixed or catalogue[name].mixes_tokens) for source in catalogue[name].inputs]
    return found


def _row_bytes(name: str, a: LogicalTrace, b: LogicalTrace) -> int:
    """Bytes of one row on the larger side, 0 where neither recorded it."""
    sides = [trace.boundaries[name] for trace in (a, b) if name in trace.boundaries]
    return max((side.width * (DTYPES[side.dtype].itemsize if side.dtype in DTYPES else 8) for side in sides), default=0)


def _choose(comparison: Comparison, most: int) -> I64:
    """Matched rows to save: differing ones first, then equal neighbours."""
    differing = comparison.differing
    if len(differing) > most:
        distance_D = np.nan_to_num(comparison.distance_D, nan=np.inf)
        largest = np.argsort(-distance_D, kind="stable")[: min(_LARGEST, most // 2)]
        spread = np.linspace(0, len(differing) - 1, most - len(largest)).astype(np.int64)
        differing = differing[np.unique(np.concatenate([largest, spread]))]
    equal = np.setdiff1d(np.arange(len(comparison)), comparison.differing)
    after = np.minimum(np.searchsorted(comparison.differing, equal), len(comparison.differing) - 1)
    apart = np.minimum(*(np.abs(equal - comparison.differing[at]) for at in (after, np.maximum(after - 1, 0))))
    nearest = np.argsort(apart, kind="stable")
    return np.concatenate([differing, np.sort(equal[nearest[:_NEIGHBOURS]])])


def _prefixes(trace: LogicalTrace, token_S: I64) -> I64:
    """The tokens and everything before them in their prefixes, in order of the table."""
    found: set[int] = set()
    previous = trace.tokens.previous_K
    for token in token_S.tolist():
        while token >= 0 and token not in found:
            found.add(token)
            token = int(previous[token])
    return np.array(sorted(found), np.int64)


class _Maker:
    """Rows as a plan names them."""

    def __init__(self, a: LogicalTrace, b: LogicalTrace, pairing: Pairing) -> None:
        self.sequences_a: dict[int, int] = {}
        self.sequences_b: dict[int, int] = {}
        self._a, self._b, self._b_of_a = a, b, pairing.tokens.b_of_a

    def output(self, comparison: Comparison, pairs: I64, differing: int) -> PlanBoundary:
        """The boundary that differs."""
        rows_a, rows_b = comparison.sides(pairs)
        expert_R = comparison.a.expert_R
        experts = () if expert_R is None else tuple(expert_R[rows_a].tolist())
        token_S = comparison.token_R[pairs]
        rows = self._rows(comparison.name, token_S, int(comparison.a.info.rows is RowScope.NEXT))
        return msgspec.structs.replace(
            rows,
            output=True,
            differing=differing,
            experts=experts,
            digests_a=_digests(comparison.a, rows_a),
            digests_b=_digests(comparison.b, rows_b),
        )

    def tokens(self, name: str, token_S: I64) -> PlanBoundary:
        """An input at some tokens of A."""
        digests: list[tuple[str, ...]] = []
        for trace, token in ((self._a, token_S), (self._b, self._b_of_a[token_S])):
            boundary = trace.boundaries.get(name)
            if boundary is None or boundary.expert_R is not None:
                digests.append(())
                continue
            at = np.minimum(np.searchsorted(boundary.token_R, token), max(len(boundary) - 1, 0))
            known = (boundary.token_R[at] == token) & (token >= 0) if len(boundary) else np.zeros(len(token), np.bool_)
            digests.append(_digests(boundary, np.where(known, at, -1)))
        return msgspec.structs.replace(self._rows(name, token_S, 0), digests_a=digests[0], digests_b=digests[1])

    def _rows(self, name: str, token_S: I64, shift: int) -> PlanBoundary:
        return PlanBoundary(
            boundary=name,
            keys=tuple(f"{key:016x}" for key in self._a.tokens.key_K[token_S].tolist()),
            differing=0,
            places_a=_places(self._a, token_S, self.sequences_a, shift),
            places_b=_places(self._b, self._b_of_a[token_S], self.sequences_b, shift),
        )

    def side(self, trace: LogicalTrace, sequences: dict[int, int]) -> PlanSide:
        """One side, with the sequences that the rows named."""
        labels = tuple((trace.sequences[number].scope, trace.sequences[number].label) for number in sequences)
        return PlanSide(run_id=trace.manifest.run_id, host=trace.manifest.host, sequences=labels)


def _digests(boundary: LogicalBoundary, rows_S: I64) -> tuple[str, ...]:
    """Both lanes as hex digits, empty for row -1 and for partial sums, which have none."""
    if boundary.partial_axis:
        return ()
    return tuple("" if row < 0 else "".join(f"{lane:016x}" for lane in boundary.digest_R2[row].tolist()) for row in rows_S.tolist())


def _places(trace: LogicalTrace, token_S: I64, sequences: dict[int, int], shift: int) -> tuple[tuple[int, int], ...]:
    """Where each token was first seen, in a side's own words."""
    places = []
    for token in token_S.tolist():
        if token < 0:
            places.append((-1, -1))
            continue
        number = sequences.setdefault(int(trace.tokens.sequence_K[token]), len(sequences))
        places.append((number, int(trace.tokens.position_K[token]) - shift))
    return tuple(places)
