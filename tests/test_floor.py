"""Floors and tolerances: what they cover, and which traces may serve as one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.sides import Side
from tracer.errors import Code, UsageError
from tracer.read.diff import diff_traces
from tracer.read.findings import BoundaryOutcome, Class, Finding, FindingCode, Kind
from tracer.read.floor import Floors, Tolerance, measure_floors, parse_tolerance

NAME = "layers.2.attn.out"


def changed(by: float, *, path: str = "side") -> Side:
    """A side with one element changed, carried on."""
    side = Side(path=path)
    side.carry_on(NAME, "s0:5", by=by)
    return side


def test_a_tolerance_is_read_from_text() -> None:
    """``relative=`` and boundary globs are read; the first glob that matches wins over the general limit."""
    tolerance = parse_tolerance("relative=1e-3, layers.*.attn.core=1e-2,lm_head=0")
    assert (tolerance.at("embedding"), tolerance.at("layers.3.attn.core"), tolerance.at("lm_head")) == (1e-3, 1e-2, 0.0)


@pytest.mark.parametrize("text", ["1e-3", "relative=", "relative=x", "=1", "relative=-1", "relative=nan", "ulps=0.5"])
def test_an_unreadable_tolerance_is_refused(text: str) -> None:
    """Anything but finite numbers of 0 or more under a name is a usage error."""
    with pytest.raises(UsageError) as error:
        parse_tolerance(text)
    assert error.value.code is Code.BAD_ARGUMENT


@pytest.mark.parametrize(("by", "expected"), [(1.9e-3, 0), (2.2e-3, 1)])
def test_twice_the_floor_is_the_limit(by: float, expected: int) -> None:
    """A row is above the floor if its distance is more than twice the floor's largest."""
    result = diff_traces(Side().trace(), changed(by).trace(), floor_a=changed(1e-3).trace())
    assert result.exit == expected


def test_a_floor_of_zero_leaves_no_room() -> None:
    """A floor trace without any difference makes every other digest a difference, however small."""
    b = Side()
    b.values["lm_head"].rows[3, 5] = 0.0
    a = Side()
    a.values["lm_head"].rows[3, 5] = -0.0
    assert diff_traces(a.trace(), b.trace(), floor_a=a.trace()).exit == 1
    assert diff_traces(a.trace(), b.trace(), tolerance=Tolerance(1e-6)).exit == 0


def test_the_largest_of_all_floor_pairs_counts() -> None:
    """Floors of both sides and of several traces are joined per boundary by the largest distance."""
    a, b = Side().trace(), Side().trace()
    floors = measure_floors(a, b, floor_a=[changed(1e-4).trace(), changed(3e-4).trace()], floor_b=[changed(2e-4).trace()])
    alone = measure_floors(a, b, floor_a=[changed(3e-4).trace()])
    assert floors.by_boundary == alone.by_boundary
    assert floors.by_boundary["embedding"] == 0.0


def test_a_choice_is_within_the_floor_only_if_the_floor_flips_there_too() -> None:
    """Integers have no distance: a floor pair that chooses otherwise at that boundary covers them, a tolerance does not."""
    a, b, noisy = Side(moe=True), Side(moe=True), Side(moe=True)
    ids = "layers.1.moe.topk_ids"
    for side, row in ((b, "s0:2"), (noisy, "s1:1")):
        rows = side.values[ids].rows.copy()
        rows[side.at(row)] = np.sort((rows[side.at(row)] + 1) % 8)
        side.values[ids].rows = rows
    assert diff_traces(a.trace(), b.trace(), tolerance=Tolerance(10.0)).exit == 1
    within = diff_traces(a.trace(), b.trace(), floor_a=noisy.trace())
    assert next(entry.outcome for entry in within.boundaries if entry.name == ids) is BoundaryOutcome.WITHIN_FLOOR


@pytest.mark.parametrize("name", ["input.positions", "layers.*.moe.topk_ids"])
def test_inputs_and_choices_have_no_tolerance(name: str) -> None:
    """A limit for what is equal or not is refused instead of doing nothing; a glob that reaches other boundaries too is fine."""
    a, b = Side(moe=True).trace(), Side(moe=True).trace()
    with pytest.raises(UsageError, match="inputs and choices have no tolerance"):
        diff_traces(a, b, tolerance=Tolerance(per_boundary={name: 1.0}))
    assert diff_traces(a, b, tolerance=Tolerance(per_boundary={"layers.*": 1.0})).exit == 0


def test_a_boundary_within_tolerance_neither_heals_nor_hides_what_it_carries() -> None:
    """What is within its tolerance is not equal: the fault above does not heal there, and what follows below is no root."""
    b = Side()
    b.carry_on(NAME, "s0:5")
    result = diff_traces(Side().trace(), b.trace(), tolerance=Tolerance(per_boundary={"lm_head": 1.0, "final_norm": 1.0}))
    assert [root.place.boundary for root in result.roots] == [NAME]
    outcomes = {boundary.name: boundary.outcome for boundary in result.boundaries}
    assert outcomes["lm_head"] is outcomes["final_norm"] is BoundaryOutcome.WITHIN_FLOOR
    assert outcomes["scorer.logprobs"] is outcomes["layers.3.residual"] is BoundaryOutcome.DIFFERS
    assert "equal again" not in " ".join(boundary.text for boundary in result.boundaries)
    alone = Side()
    alone.change("lm_head", "s0:5")
    alone.change("scorer.logprobs", "s0:6")
    result = diff_traces(Side().trace(), alone.trace(), tolerance=Tolerance(per_boundary={"lm_head": 1.0}))
    assert [root.place.boundary for root in result.roots] == ["scorer.logprobs"]
    assert "equal or within floor" in result.next_step


def test_a_floor_of_own_noise_is_stated_only_where_rows_were_seen_again() -> None:
    """``floor="self"`` gives no floor to boundaries of which every row was seen once."""
    side = Side()
    side.noise = {NAME: 2e-3}
    result = diff_traces(side.trace(), Side().trace(), floor="self")
    assert {boundary.name: boundary.floor for boundary in result.boundaries if boundary.floor is not None} == {NAME: 2e-3}


def test_inputs_and_counts_of_nonfinite_values_are_never_covered() -> None:
    """No tolerance makes other positions equal, nor a NaN where the other side has a number."""
    a, b = Side(), Side()
    b.values["input.positions"].rows[2, 0] += 1
    assert diff_traces(a.trace(), b.trace(), tolerance=Tolerance(100.0)).exit == 1
    c = Side()
    c.values["lm_head"].rows[3, 5] = np.nan
    assert diff_traces(a.trace(), c.trace(), tolerance=Tolerance(100.0)).exit == 1


def test_a_floor_finds_its_side() -> None:
    """``floor`` serves the side with its host and weights, and is refused where it fits both or neither."""
    a, b, again, other = Side(), Side(), Side(), Side()
    for side in (b, other):
        side.host = "engine"
    other.set_weight("lm_head.weight", 1)
    b.carry_on(NAME, "s0:5")
    again.carry_on(NAME, "s0:5")
    assert diff_traces(a.trace(), b.trace(), floor=again.trace()).exit == 0
    for wrong, text in ((other, "neither"), (again, "both")):
        with pytest.raises(UsageError, match=text) as error:
            diff_traces(a.trace(), (a if text == "both" else b).trace(), floor=wrong.trace())
        assert error.value.code is Code.BAD_ARGUMENT


def test_a_floor_of_other_weights_is_refused() -> None:
    """A floor trace taken with other weights would hide real differences."""
    wrong = Side()
    wrong.set_weight("lm_head.weight", 1)
    with pytest.raises(UsageError, match="with other weights"):
        diff_traces(Side().trace(), Side().trace(), floor_a=wrong.trace())


def test_a_floor_without_a_common_token_is_refused() -> None:
    """A floor must have been fed what its side was fed."""
    with pytest.raises(UsageError, match="no token"):
        diff_traces(Side().trace(), Side().trace(), floor_b=Side({"x": [1, 2, 3]}).trace())


def test_an_incomplete_floor_is_refused() -> None:
    """A floor trace that cannot be read as a whole measures nothing."""
    torn = Side()
    torn.findings = [Finding(code=FindingCode.SHARD_MISSING, kind=Kind.UNREADABLE, text="rank 1 is missing")]
    with pytest.raises(UsageError, match="rank 1 is missing"):
        diff_traces(Side().trace(), Side().trace(), floor_a=torn.trace())


def test_own_noise_as_floor() -> None:
    """Siblings that differ by an undefined distance count as another value where no sketch is kept."""
    side = Side(moe=True)
    side.noise = {NAME: 2e-3, "layers.0.moe.topk_ids": math.nan}
    floors = measure_floors(side.trace(), Side(moe=True).trace(), own=True)
    assert (floors.by_boundary[NAME], floors.by_boundary["layers.0.moe.topk_ids"]) == (2e-3, 1.0)
    assert floors.covers_noise("anything", math.nan)
    assert not Floors().covers_noise(NAME, 1e-9)


def test_a_boundary_the_floor_lacks_has_no_floor() -> None:
    """Where the floor trace did not record a boundary, its differences are above and no floor is stated."""
    noisy = Side(level=1)
    noisy.carry_on(NAME, "s0:5")
    b = Side()
    b.change("layers.3.attn.q", "s0:2", by=1e-6)
    result = diff_traces(Side().trace(), b.trace(), floor_a=noisy.trace())
    found = next(entry for entry in result.boundaries if entry.name == "layers.3.attn.q")
    assert (result.exit, found.floor, found.rows_above_floor) == (1, None, 1)


def test_a_run_of_the_other_side_is_no_floor() -> None:
    """A floor trace that equals the other side bit for bit, and not its own, would excuse every fault of the other side."""
    faulty = changed(1e-3, path="b")
    for floor_a, floor_b in ((changed(1e-3), None), (None, Side())):
        floors = [() if side is None else side.trace() for side in (floor_a, floor_b)]
        with pytest.raises(UsageError, match="a run of the other side"):
            diff_traces(Side().trace(), faulty.trace(), floor_a=floors[0], floor_b=floors[1])
    assert diff_traces(Side().trace(), faulty.trace(), floor_a=Side().trace(), floor_b=changed(1e-3).trace()).exit == 1


def test_a_floor_with_other_inputs_or_top_k_is_refused() -> None:
    """A floor trace that was given other positions, or chose another number of experts, would excuse more than noise."""
    shifted = Side()
    shifted.values["input.positions"].rows[2:] += 1
    with pytest.raises(UsageError, match=r"not fed or routed") as error:
        diff_traces(Side().trace(), changed(1e-3).trace(), floor_a=shifted.trace())
    assert "input.positions" in error.value.where
    wider = Side(moe=True)
    ids = wider.values["layers.1.moe.topk_ids"]
    ids.rows = np.concatenate([ids.rows, ids.rows + 1], axis=1)
    with pytest.raises(UsageError, match=r"not fed or routed"):
        diff_traces(Side(moe=True).trace(), Side(moe=True).trace(), floor_b=wider.trace())


def test_a_floor_of_another_map_is_refused() -> None:
    """Boundaries of another map or model class are other places, whatever their names."""
    trace = Side().trace()
    other = msgspec.structs.replace(trace.manifest, map=msgspec.structs.replace(trace.manifest.map, family="llama"))
    with pytest.raises(UsageError, match="map llama"):
        diff_traces(Side().trace(), Side().trace(), floor_a=dataclasses.replace(trace, manifests=(other,)))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"relative": "1e-3"}, "relative"),
        ({"relative": None}, "relative"),
        ({"relative": True}, "relative"),
        ({"relative": -1.0}, "relative"),
        ({"relative": float("nan")}, "relative"),
        ({"relative": float("inf")}, "relative"),
        ({"ulps": 1.5}, "ulps"),
        ({"ulps": "2"}, "ulps"),
        ({"per_boundary": 5}, "per_boundary"),
        ({"per_boundary": {"layers.*": "x"}}, "layers.*"),
    ],
)
def test_what_is_no_tolerance_is_refused(given: Any, where: str) -> None:
    """A limit that is no finite number from 0 on is a typed error that names it, what works and what was given."""
    with pytest.raises(UsageError) as caught:
        Tolerance(**given)
    assert (caught.value.code, caught.value.where) == (Code.BAD_ARGUMENT, where)
    assert caught.value.expected
    assert caught.value.found


LIMITS = [{"tolerance": Tolerance(relative=1e-2)}, {"tolerance": Tolerance(relative=1e-2, per_boundary={"lm_head": 5.0})}]


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize(("x", "y"), [(np.inf, -np.inf), (np.nan, np.inf), (-np.inf, -np.inf)])
def test_no_limit_covers_nonfinite_values_whose_kinds_are_not_known(x: float, y: float, options: dict[str, Any]) -> None:
    """A row with as many non-finite values on both sides and another digest is neither within a tolerance nor proven to differ,
    and without a tolerance it differs. Rows of finite values beside it are judged as ever."""
    a, b = Side(), Side()
    for side, value in ((a, x), (b, y)):
        side.values["lm_head"].rows[4, 7] = value
    b.change("lm_head", "s1:1", *(["s0:4"] if x == y else []), by=1e-3, column=3)
    result = diff_traces(a.trace(), b.trace(), **options)
    assert (result.exit, result.classification) == (2, None)
    found = [finding for finding in result.findings if finding.code is FindingCode.NONFINITE_UNPROVEN]
    assert [(finding.boundary, finding.rows, finding.kind) for finding in found] == [("lm_head", 1, Kind.ABSENCE)]
    assert 'dump=["lm_head"]' in result.next_step
    entry = next(entry for entry in result.boundaries if entry.name == "lm_head")
    assert entry.outcome is BoundaryOutcome.INCOMPARABLE
    bitwise = diff_traces(a.trace(), b.trace())
    assert bitwise.exit == 1
    assert bitwise.classification is not None
    assert bitwise.classification.klass is Class.UNLOCALIZED


def test_a_floor_covers_no_nonfinite_values_either() -> None:
    """A measured floor above zero lets no row pass whose non-finite values may be others."""
    a, b, noisy = Side(), Side(), Side()
    for side, value in ((a, np.inf), (b, -np.inf), (noisy, np.inf)):
        side.values["lm_head"].rows[4, 7] = value
    noisy.change("lm_head", "s1:1", by=1e-2)
    assert diff_traces(a.trace(), b.trace(), floor_a=noisy.trace()).exit == 2
    assert diff_traces(a.trace(), a.trace(), floor_a=noisy.trace()).exit == 0


def test_a_floor_with_other_nonfinite_values_is_refused() -> None:
    """A NaN in the floor run alone would be a floor of 1 and excuse everything."""
    noisy = Side()
    noisy.values[NAME].rows[5, 3] = np.nan
    with pytest.raises(UsageError, match="other non-finite values than its side") as error:
        diff_traces(Side().trace(), Side().trace(), floor_a=noisy.trace())
    assert "1 row, first s0:5" in error.value.found


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"model": {"mode": "train"}}, "was not run as its side"),
        ({"model": {"mode": "eval", "dropout": {"model.layers.*.attention_dropout": 0.9}}}, "was not run as its side"),
        ({"model": {"mode": "eval", "attributes": {"model.layers.*.self_attn.scaling": 0.4}}}, "other numbers in its modules"),
    ],
)
def test_a_floor_run_in_another_way_than_its_side_is_refused(conditions: dict[str, Any], message: str) -> None:
    """Mode, dropout and scalar settings are the side's; threads, kernels and backends may be others."""
    a, noisy = Side(), Side()
    a.conditions = {"model": {"mode": "eval", "attributes": {"model.layers.*.self_attn.scaling": 0.25}}, "threads": 1}
    noisy.conditions = {"attention": "sdpa", "threads": 8, **conditions}
    with pytest.raises(UsageError, match=message):
        diff_traces(a.trace(), Side().trace(), floor_a=noisy.trace())
    noisy.conditions = {**a.conditions, "attention": "sdpa", "threads": 8, "compile": {"mode": "max-autotune"}}
    assert diff_traces(a.trace(), Side().trace(), floor_a=noisy.trace()).exit == 0


@pytest.mark.parametrize(("ulps", "refused"), [(2, False), (5, True), (10**9, True)])
def test_a_floor_nudged_by_more_than_rounding_is_refused(ulps: int, refused: bool) -> None:
    """A few units in the last place show what rounding does, thousands excuse faults."""
    noisy = changed(1e-3)
    noisy.interventions = (f"perturb_ulps={ulps}",)
    if refused:
        with pytest.raises(UsageError, match="nudged too far"):
            diff_traces(Side().trace(), Side().trace(), floor_a=noisy.trace())
    else:
        assert diff_traces(Side().trace(), Side().trace(), floor_a=noisy.trace()).exit == 0


def test_a_floor_of_the_order_of_the_values_is_named() -> None:
    """A floor above 0.1 is in a finding and on the headline, whatever the verdict."""
    result = diff_traces(Side().trace(), changed(1e-3).trace(), floor_a=changed(30.0).trace())
    assert result.exit == 0
    assert "of the order of the values themselves" in result.headline
    assert FindingCode.FLOOR_LARGE in [finding.code for finding in result.findings]


def test_noise_with_nonfinite_values_is_no_floor() -> None:
    """Siblings that differ in rows with NaN or inf have no size that could be a floor, and no tolerance covers them."""
    side = Side()
    side.noise = {NAME: math.inf}
    with pytest.raises(UsageError, match="non-finite values are no floor"):
        diff_traces(side.trace(), Side().trace(), floor="self")
    assert not Floors({NAME: 10.0}, measured=True).covers_noise(NAME, math.inf)


@pytest.mark.parametrize(
    ("text", "message"), [("relative=1,relative=2", "given twice"), ("", "unreadable"), ("lm_head=1, lm_head =2", "given twice")]
)
def test_a_tolerance_that_contradicts_itself_or_says_nothing_is_refused(text: str, message: str) -> None:
    """The last of two limits does not win, and an empty text is no tolerance."""
    with pytest.raises(UsageError, match=message):
        parse_tolerance(text)
