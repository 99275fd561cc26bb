"""How much a difference may be: floors measured on a side against itself, and stated tolerances.

``floor(b)`` is the largest row distance of all floor pairs at boundary ``b``; a row is above it if its distance is
more than twice that (one sketch is good to about 35 % of the square). A floor of zero leaves no room: any other
digest is above it.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.format.schema import Boundary
from tracer.read.compare import SKETCH_RESOLUTION, Comparison, Method, compare_boundary
from tracer.read.findings import Kind
from tracer.read.logical import LogicalTrace
from tracer.read.pairing import pair_sides

__all__ = ["SELF", "Floors", "Tolerance", "measure_floors", "parse_tolerance"]

SELF = "self"
"""``floor="self"``: each side's own siblings and repeats are its floor."""


class Tolerance(msgspec.Struct, frozen=True):
    """A stated limit, in place of a measured floor.

    ``relative``: largest row distance that passes, as in ``Distance``. ``ulps``: a row passes too if no element of it is
    off by more, in the coarser of both dtypes; needs dumps, and holds for dumped rows only. ``per_boundary``:
    relative limits by boundary name or glob (``layers.*.attn.core``), the first match wins over ``relative``.
    Raises ``UsageError`` (bad-argument) on numbers that are negative or not finite.
    """

    relative: float = 0.0
    ulps: int = 0
    per_boundary: dict[str, float] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.per_boundary, Mapping):
            expected, found = "limits by boundary: {'layers.*.attn.core': 1e-2}", repr(self.per_boundary)
            raise UsageError(Code.BAD_ARGUMENT, "a tolerance cannot be read", where="per_boundary", expected=expected, found=found)
        for name, value in (("relative", self.relative), ("ulps", self.ulps), *self.per_boundary.items()):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
            if not number or (name == "ulps" and value != int(value)):
                expected = "a whole number, 0 or more" if name == "ulps" else "a finite number, 0 or more"
                raise UsageError(Code.BAD_ARGUMENT, f"a tolerance must be {expected}", where=name, expected=expected, found=repr(value))

    def at(self, boundary: str) -> float:
        """Relative limit at one boundary."""
        if boundary in self.per_boundary:
            return self.per_boundary[boundary]
        return next((limit for glob, limit in self.per_boundary.items() if fnmatch.fnmatchcase(boundary, glob)), self.relative)


def parse_tolerance(text: str) -> Tolerance:
    """A tolerance as the command line writes it: ``relative=1e-3``, ``relative=1e-3,layers.*.attn.core=1e-2``.

    Raises ``UsageError`` (bad-argument).
    """
    numbers: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().rpartition("=")
        try:
            numbers[name.strip()] = float(value)
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise UsageError(
                Code.BAD_ARGUMENT, "unreadable tolerance", expected="relative=NUMBER, or BOUNDARY=NUMBER, separated by commas", found=part
            )
    relative, ulps = numbers.pop("relative", 0.0), numbers.pop("ulps", 0.0)
    if ulps != int(ulps):
        raise UsageError(Code.BAD_ARGUMENT, "a tolerance in ulps must be a whole number", found=str(ulps))
    return Tolerance(relative, int(ulps), numbers)


@dataclass(frozen=True)
class Floors:
    """What rows are held against. ``by_boundary``: measured floors; a boundary that is not in it has none.
    ``own``: siblings and repeats of each side are part of the floor. ``row_ulps``: of a boundary, (token of A, expert or -1) ->
    largest difference in ulps, for dumped rows."""

    by_boundary: Mapping[str, float] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    row_ulps: Callable[[str], Mapping[tuple[int, int], float]] = lambda boundary: {}
    measured: bool = False
    own: bool = False

    @property
    def given(self) -> bool:
        """Whether any floor or tolerance was given."""
        return self.measured or self.tolerance is not None

    def stated(self, boundary: str) -> float | None:
        """The floor to print, None where none was given."""
        return self.by_boundary.get(boundary) if self.measured else None

    def limit(self, boundary: str) -> float:
        """Largest distance that passes at a boundary; 0 where any difference is above."""
        tolerated = self.tolerance.at(boundary) if self.tolerance is not None else 0.0
        return max(2 * self.by_boundary.get(boundary, 0.0), tolerated)

    def covers_noise(self, boundary: str, noise: float | None) -> bool:
        """Whether siblings or repeats that disagree at a boundary are within what was given."""
        return self.own or (self.given and noise is not None and 0 < self.limit(boundary) >= noise)

    def above(self, comparison: Comparison) -> npt.NDArray[np.bool_]:
        """Which differing pairs are above floor and tolerance, bool (D,). Inputs always are, and so are rows with
        another number of non-finite values or of choices, or an undefined distance; other choices are, unless the floor pairs
        differ there too."""
        name, count = comparison.name, len(comparison.differing)
        if not count or not self.given or name.startswith("input.") or comparison.method is Method.CHOICES:
            return np.ones(count, np.bool_)
        limit = self.limit(name) if comparison.values is None else 2 * self.by_boundary.get(name, 0.0)
        if comparison.method is Method.SKETCH:
            limit = max(limit, SKETCH_RESOLUTION)
        above = np.ones(count, np.bool_)
        if limit > 0:
            above = ~(comparison.distance_D <= limit) | comparison.nonfinite_differs_D
        if self.tolerance is not None and self.tolerance.ulps and comparison.values is None and above.any():
            above &= ~self._within_ulps(comparison, self.tolerance.ulps)
        return above

    def _within_ulps(self, comparison: Comparison, most: int) -> npt.NDArray[np.bool_]:
        """Which differing pairs were dumped and are off by no more ulps than that."""
        known = self.row_ulps(comparison.name)
        token_D = comparison.token_R[comparison.differing].tolist()
        expert_R = comparison.a.expert_R
        expert_D = [-1] * len(token_D) if expert_R is None else expert_R[comparison.sides(comparison.differing)[0]].tolist()
        return np.array([known.get(row, math.inf) <= most for row in zip(token_D, expert_D, strict=True)], np.bool_)


def check_names(tolerance: Tolerance, catalogue: Iterable[Boundary]) -> None:
    """Refuse limits for boundaries that there are not, or that have none: inputs and choices are equal or they are not.

    Raises ``UsageError`` (bad-argument) with close matches."""
    limited = {boundary.name: not (boundary.discrete or boundary.name.startswith("input.")) for boundary in catalogue}
    for name in tolerance.per_boundary:
        matches = [name] if name in limited else fnmatch.filter(limited, name)
        if not matches:
            close = difflib.get_close_matches(name, limited, n=3, cutoff=0.5)
            raise UsageError(
                Code.BAD_ARGUMENT, "a tolerance is given for a boundary that neither side has", where=name,
                expected=" or ".join(close) or "a name or glob that tracer show --all lists", found=name,
                remedy="tracer show --all TRACE lists every name",
            )  # fmt: skip
        if not any(limited[match] for match in matches):
            raise UsageError(
                Code.BAD_ARGUMENT, "inputs and choices have no tolerance: they are equal or they are not", where=name, found=name,
                remedy="leave it out; a floor trace that chooses otherwise at that boundary covers choices",
            )  # fmt: skip


def measure_floors(
    a: LogicalTrace,
    b: LogicalTrace,
    *,
    floor_a: Iterable[LogicalTrace] = (),
    floor_b: Iterable[LogicalTrace] = (),
    floor: Iterable[LogicalTrace] = (),
    own: bool = False,
    tolerance: Tolerance | None = None,
    dumped: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Floors:
    """Measure what was given as floor. Floor traces are of one side: the same host and weights. ``dumped``: both sides hold raw
    values of some rows.

    Raises ``UsageError`` (bad-argument): a tolerance in ulps without dumps, a floor trace of another side or for
    both, one that is incomplete or shares no token with its side; ``own`` where neither side saw any row twice; a limit for a
    boundary that there is not.
    """
    if tolerance is not None:
        check_names(tolerance, [*a.catalogue, *b.catalogue])
    if tolerance is not None and tolerance.ulps and not dumped:
        raise UsageError(
            Code.BAD_ARGUMENT, "a tolerance in ulps needs the raw values of the rows", expected="dumps on both sides",
            found="fingerprints only", remedy="make a plan (tracer diff A B --plan FILE) and run both sides with it",
        )  # fmt: skip
    pairs = [(a, trace, "--floor-a") for trace in floor_a] + [(b, trace, "--floor-b") for trace in floor_b]
    pairs += [(_side_of(trace, a, b), trace, "--floor") for trace in floor]
    by_boundary: dict[str, float] = {}
    for side, trace, option in pairs:
        _check_side(side, b if side is a else a, trace, option)
        if progress is not None:
            progress(f"floor {trace.path}")
        for name, distance in _pair_distances(side, trace):
            by_boundary[name] = max(by_boundary.get(name, 0.0), distance)
    if own:
        noise = [*_own_noise(a), *_own_noise(b)]
        if not noise:
            raise UsageError(
                Code.BAD_ARGUMENT, f"{SELF} is no floor here: neither side saw any row twice", where="--floor",
                expected="siblings of one prompt, or the same forward twice, in at least one trace", found="every row once",
                remedy="record them, or give another trace of a side with --floor-a or --floor-b",
            )  # fmt: skip
        for name, distance in noise:
            by_boundary[name] = max(by_boundary.get(name, 0.0), distance)
    return Floors(by_boundary, tolerance, measured=bool(pairs) or own, own=own)


def _own_noise(side: LogicalTrace) -> Iterable[tuple[str, float]]:
    """Largest distance between siblings or repeats per boundary, of those that saw any row again."""
    for name, boundary in side.boundaries.items():
        if name not in side.noise and not (boundary.seen_R > 1).any():
            continue
        noise = side.noise.get(name, 0.0)
        if math.isnan(noise):  # rows that keep no sketch: "another value" counts as 1, see Comparison.distance_D
            noise = 1.0 if boundary.load_statistics() is None else 0.0
        yield name, noise


def _pair_distances(side: LogicalTrace, trace: LogicalTrace) -> Iterable[tuple[str, float]]:
    """Largest distance per boundary of one floor pair."""
    pairing = pair_sides(side, trace)
    if not pairing.matched:
        raise UsageError(
            Code.BAD_ARGUMENT, "a floor trace shares no token with its side", where=trace.path, expected=f"the requests of {side.path}",
            found="0 tokens in common", remedy="record the floor with the same token ids",
        )  # fmt: skip
    for name, boundary in side.boundaries.items():
        other = trace.boundaries.get(name)
        if other is None:
            continue
        comparison = compare_boundary(boundary, other, pairing.tokens)
        if comparison.method is Method.NONE or not len(comparison):
            continue
        if comparison.method is Method.CHOICES or (name.startswith("input.") and len(comparison.differing)):
            raise UsageError(
                Code.BAD_ARGUMENT, "a floor trace was not fed or routed as its side", where=f"{trace.path}, {name}",
                expected=f"{name} as in {side.path}", found=comparison.reason or f"{len(comparison.differing)} other rows",
                remedy="a floor differs from its side in what must not matter: record it again with the same inputs and top_k",
            )  # fmt: skip
        distance = comparison.distance_D
        distance = distance[np.isfinite(distance)]
        yield name, float(distance.max()) if len(distance) else 0.0


def _identity(trace: LogicalTrace) -> tuple[object, ...]:
    mesh = sorted({(axis.name, axis.size) for manifest in trace.manifests for axis in manifest.mesh})
    return trace.manifest.host, trace.manifest.world_size, tuple(mesh)


def _same_weights(x: LogicalTrace, y: LogicalTrace) -> bool:
    """No weight that both know differs."""
    return all(
        x.weights[name].unknown or y.weights[name].unknown or x.weights[name].digest == y.weights[name].digest
        for name in x.weights.keys() & y.weights.keys()
    )


def _side_of(trace: LogicalTrace, a: LogicalTrace, b: LogicalTrace) -> LogicalTrace:
    """The side with the same host, mesh and weights."""
    fits = [side for side in (a, b) if _identity(side) == _identity(trace) and _same_weights(side, trace)]
    if len(fits) == 1:
        return fits[0]
    raise UsageError(
        Code.BAD_ARGUMENT,
        "a floor trace fits both sides" if fits else "a floor trace fits neither side",
        where=trace.path,
        expected="the host, mesh and weights of exactly one side",
        found=f"host {trace.manifest.host}, {trace.manifest.world_size} process(es)",
        remedy="say which: --floor-a or --floor-b" if fits else "record the floor with the program of one side",
    )


def _check_side(side: LogicalTrace, other: LogicalTrace, trace: LogicalTrace, option: str) -> None:
    if trace.manifest.run_id in (side.manifest.run_id, other.manifest.run_id):
        same = "the side itself" if trace.manifest.run_id == side.manifest.run_id else "the other side"
        raise UsageError(
            Code.BAD_ARGUMENT, f"{option} is {same}, or a copy of it", where=trace.path, expected="another run of the same program",
            found=f"run {trace.manifest.run_id}", remedy="record that side once more; a floor is how much it differs from itself",
        )  # fmt: skip
    unreadable = [finding.text for finding in trace.findings if finding.kind is Kind.UNREADABLE]
    if unreadable:
        raise UsageError(Code.BAD_ARGUMENT, "a floor trace cannot be read as a whole", where=trace.path, found=unreadable[0])
    if _same_program(side, other) and _equal(other, trace) and not _equal(side, trace):
        raise UsageError(
            Code.BAD_ARGUMENT, f"{option} is a run of the other side: it equals that bit for bit, and this side does not", where=trace.path,
            expected=f"another run of {side.path}", found=f"the values of {other.path}",
            remedy="record the side that the floor is for once more, with the program of that side",
        )  # fmt: skip
    if not _same_program(side, trace):
        raise UsageError(
            Code.BAD_ARGUMENT, f"{option} is no trace of that side", where=trace.path,
            expected=f"{_program(side)} with the weights of {side.path}",
            found=_program(trace) + ("" if _same_weights(side, trace) else " with other weights"),
            remedy="a floor is the same program with the same map and weights, run again or in another layout",
        )  # fmt: skip


def _same_program(x: LogicalTrace, y: LogicalTrace) -> bool:
    """One program as far as traces tell."""
    return _program(x) == _program(y) and _same_weights(x, y)


def _program(trace: LogicalTrace) -> str:
    manifest = trace.manifest
    return f"host {manifest.host}, map {manifest.map.family}, model {manifest.map.root_class}"


def _equal(x: LogicalTrace, y: LogicalTrace) -> bool:
    """Whether all that both recorded of common tokens is bitwise equal."""
    tokens = pair_sides(x, y).tokens
    pairs = [compare_boundary(x.boundaries[name], y.boundaries[name], tokens) for name in x.boundaries.keys() & y.boundaries.keys()]
    return any(len(pair) for pair in pairs) and not any(pair.method is Method.NONE or len(pair.differing) for pair in pairs)
