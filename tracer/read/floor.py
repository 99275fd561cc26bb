"""How much a difference may be: floors measured on a side against itself, and stated tolerances.

``floor(b)`` is the largest row distance of all floor pairs at boundary ``b``; a row is above it if its distance is
more than twice that (one sketch is good to about 35 % of the square). A floor of zero leaves no room: any other
digest is above it.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.format.schema import Boundary, RowScope
from tracer.read.compare import SKETCH_RESOLUTION, Comparison, Method, compare_boundary
from tracer.read.conditions import differing_conditions, leads
from tracer.read.findings import Kind
from tracer.read.logical import LogicalTrace
from tracer.read.pairing import pair_sides
from tracer.read.settings import differing_numbers
from tracer.read.wording import count, row_text, token_name

__all__ = ["LARGE_FLOOR", "SELF", "Floors", "Tolerance", "large_floors", "measure_floors", "parse_tolerance"]

SELF = "self"
"""``floor="self"``: each side's own siblings and repeats are its floor."""

LARGE_FLOOR = 0.1
"""A floor beyond this share of a row is of the order of what is measured: it hides real errors, and is named."""

_MOST_ULPS = 4
"""A nudge of the embedding by more is no rounding."""
_NUDGE = re.compile(r"perturb_ulps=(\d+)")


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
        name, sign, value = (piece.strip() for piece in part.rpartition("="))
        try:
            number = float(value)
        except ValueError:
            sign = ""
        if not sign or not name:
            raise UsageError(
                Code.BAD_ARGUMENT, "unreadable tolerance", expected="relative=NUMBER, or BOUNDARY=NUMBER, separated by commas",
                found=part or "nothing",
            )  # fmt: skip
        if name in numbers:
            expected, found = "each name once", f"{name} twice, in {text}"
            raise UsageError(Code.BAD_ARGUMENT, "a tolerance is given twice", where=name, expected=expected, found=found)
        numbers[name] = number
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
    row_kinds: Callable[[str], Mapping[tuple[int, int], bool]] = lambda boundary: {}
    """Of a boundary, (token of A, expert or -1) -> whether a dumped row has NaN, +inf and -inf at the same places on both sides."""

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
        another number of non-finite values or of choices, or an undefined distance, or of which dumps show another non-finite
        value at a place; other choices are, unless the floor pairs differ there too."""
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
            ulps = comparison.of_rows(comparison.differing, self.row_ulps(name), math.inf)
            above &= ~(np.array(ulps) <= self.tolerance.ulps)
        held = np.flatnonzero(~above & comparison.holds_nonfinite(comparison.differing))
        if len(held):
            above[held] = ~np.array(comparison.of_rows(comparison.differing[held], self.row_kinds(name), True))
        return above

    def unproven(self, comparison: Comparison, above_D: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Pairs that floor or tolerance would let pass, but for their non-finite values: a fingerprint keeps how many there are,
        not which. Dumps that show the same kinds at the same places prove them. Indices into the matched rows."""
        if not self.given or comparison.method in (Method.NONE, Method.CHOICES) or comparison.values is not None:
            return np.zeros(0, np.int64)
        pairs = comparison.differing[~above_D]
        if comparison.method is Method.SKETCH:  # without digests, rows that do not differ are no more than close either
            pairs = np.setdiff1d(np.arange(len(comparison)), comparison.differing[above_D])
        pairs = pairs[comparison.holds_nonfinite(pairs)]
        if not len(pairs):
            return pairs
        shown = np.array(comparison.of_rows(pairs, self.row_kinds(comparison.name), False), np.bool_)
        left: npt.NDArray[np.int64] = pairs[~shown]
        return left


def large_floors(floors: Floors, catalogue: Iterable[Boundary]) -> list[tuple[str, float]]:
    """Boundaries whose measured floor is beyond ``LARGE_FLOOR``, largest first. Choices, which have no distance, apart."""
    found = [(info.name, floors.by_boundary.get(info.name, 0.0)) for info in catalogue if not info.discrete]
    return sorted((entry for entry in found if entry[1] > LARGE_FLOOR), key=lambda entry: -entry[1])


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
    both, one that is incomplete or shares no token with its side, one in another mode, with other numbers in its modules, other
    non-finite values or an embedding nudged by more than a few ulps; ``own`` where neither side saw any row twice; a limit for a
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
        if math.isinf(noise):
            raise UsageError(
                Code.BAD_ARGUMENT, "siblings or repeats that hold non-finite values are no floor", where=f"{side.path}, {name}",
                expected="finite values, or equal bits", found="rows with NaN or inf that differ between two sightings",
                remedy="tracer siblings lists them; give another trace of a side with --floor-a or --floor-b",
            )  # fmt: skip
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
        unlike = comparison.differing[comparison.nonfinite_differs_D]
        if len(unlike):
            request, position = token_name(side, int(comparison.token_R[unlike[0]]), int(boundary.info.rows is RowScope.NEXT))
            raise UsageError(
                Code.BAD_ARGUMENT, "a floor trace holds other non-finite values than its side", where=f"{trace.path}, {name}",
                expected=f"NaN and inf in the rows where {side.path} has them",
                found=f"another number of them in {count(len(unlike), 'row')}, first {row_text(request, position)}",
                remedy="a distance from NaN or inf measures no noise: find out where they come from, then record the floor again",
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
    modes = {name: values for name, values in differing_conditions(side, trace).items() if "compil" not in name}  # of a compiler: a kernel
    other_mode = [lead.text for lead in leads(modes)]
    if other_mode:
        raise UsageError(
            Code.BAD_ARGUMENT, f"{option} was not run as its side: in these words A is {side.path}, B the floor", where=trace.path,
            expected="the same mode, dropout and quantization on both", found="; ".join(other_mode),
            remedy="put the model of the floor run in the mode of its side (model.eval()), then record it again",
        )  # fmt: skip
    numbers = differing_numbers(side, trace)
    if numbers:
        raise UsageError(
            Code.BAD_ARGUMENT, f"{option} was run with other numbers in its modules: in these words A is {side.path}, B the floor",
            where=trace.path, expected="the same scalar settings (eps, scaling, window) on both",
            found="; ".join(number.text() for number in numbers[:3]) + (", ..." if len(numbers) > 3 else ""),
            remedy="a floor differs from its side in what must not matter: record it again with the settings of its side",
        )  # fmt: skip
    ulps = [int(found[1]) for manifest in trace.manifests for name in manifest.interventions if (found := _NUDGE.fullmatch(name))]
    if max(ulps, default=0) > _MOST_ULPS:
        raise UsageError(
            Code.BAD_ARGUMENT, f"{option} was nudged too far to show what rounding does", where=trace.path,
            expected=f"perturb_ulps of 1 to {_MOST_ULPS}", found=f"perturb_ulps={max(ulps)}", remedy="record it again with perturb_ulps=1",
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
