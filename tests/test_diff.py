"""``diff_traces`` on hand-made sides: verdicts, first divergences, roots, and what is said about the rest."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from tests.sides import IDS, Side, catalogue
from tracer.errors import Code, UsageError
from tracer.format.schema import Boundary, BoundaryStatus, RowScope
from tracer.read.diff import diff_traces
from tracer.read.findings import BoundaryOutcome, Class, DiffResult, Finding, FindingCode, Kind, Verdict
from tracer.read.findings import Side as Which
from tracer.read.floor import Tolerance
from tracer.read.logical import PartialPart, Statistics


def outcome(result: DiffResult, name: str) -> BoundaryOutcome:
    """What became of one boundary."""
    return next(boundary.outcome for boundary in result.boundaries if boundary.name == name)


def codes(result: DiffResult, kind: Kind | None = None) -> list[FindingCode]:
    """Codes of the findings of one kind, in order."""
    return [finding.code for finding in result.findings if kind in (None, finding.kind)]


def first(result: DiffResult) -> tuple[str, str, int | None]:
    """Boundary, request and position of the first divergence."""
    assert result.first is not None
    return result.first.boundary, result.first.request, result.first.position


# ---------------------------------------------------------------- values


def test_equal_sides_are_the_same_without_any_finding() -> None:
    """Two sides with equal values are the same, with every boundary identical and no finding."""
    result = diff_traces(Side().trace(), Side().trace())
    assert (result.exit, result.verdict, result.findings, result.roots) == (0, Verdict.SAME, (), ())
    assert {boundary.outcome for boundary in result.boundaries} == {BoundaryOutcome.IDENTICAL}
    assert result.counts.tokens_matched == 12
    assert "12 rows" in result.headline


def test_s44_one_element_is_found_with_its_row() -> None:
    """One element that differs, carried on, is one root at its boundary and row; nothing earlier and no other sequence is named."""
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 1
    assert first(result) == ("layers.2.attn.out", "s0", 5)
    assert [root.place.boundary for root in result.roots] == ["layers.2.attn.out"]
    assert codes(result) == [FindingCode.VALUE_DIFFERS]
    assert outcome(result, "layers.1.residual") is BoundaryOutcome.IDENTICAL
    assert "bitwise: no floor was given" in result.headline
    assert "all earlier boundaries identical, inputs and weights identical" in result.headline


def test_s54_stacked_faults_are_two_roots() -> None:
    """A later fault in a sequence that was clean before is a root of its own."""
    b = Side()
    b.carry_on("layers.1.attn.out", "s1:0")
    b.carry_on("layers.2.mlp.out", "s0:2")
    result = diff_traces(Side().trace(), b.trace())
    assert [(root.place.boundary, root.place.request, root.place.position) for root in result.roots] == [
        ("layers.1.attn.out", "s1", 0),
        ("layers.2.mlp.out", "s0", 2),
    ]


def test_s53_a_difference_that_heals_is_the_cause_of_nothing() -> None:
    """Boundaries that differ while all that depends on them is equal again heal, and are no roots."""
    b = Side()
    b.change("layers.1.attn.q")
    result = diff_traces(Side().trace(), b.trace())
    assert (result.exit, result.roots) == (1, ())
    assert first(result) == ("layers.1.attn.q", "s0", 0)
    assert outcome(result, "layers.1.attn.q") is BoundaryOutcome.HEALS
    assert "equal again at layers.1.attn.core" in result.headline


def test_a_healed_difference_hides_no_later_root() -> None:
    """After a difference healed, a later fault in the same rows is still a root."""
    b = Side()
    b.change("layers.1.attn.q")
    b.carry_on("layers.3.mlp.out", "s0:2")
    result = diff_traces(Side().trace(), b.trace())
    assert [root.place.boundary for root in result.roots] == ["layers.3.mlp.out"]
    assert first(result)[0] == "layers.1.attn.q"


def test_unrecorded_inputs_are_stood_for_by_their_ancestors() -> None:
    """Where the inputs of a root were not recorded, the root lies between it and the nearest recorded boundaries."""
    a, b = Side(level=1), Side(level=1)
    b.carry_on("layers.2.attn.out", "s0:5")
    result = diff_traces(a.trace(), b.trace())
    assert result.roots[0].between == ("layers.1.residual",)
    assert "level=2" in result.next_step


def test_rows_behind_a_mixing_boundary_are_consequences() -> None:
    """A difference at an earlier token explains later tokens of the same sequence only where tokens are mixed."""
    b = Side()
    b.change("embedding", "s0:2")
    for name in ("layers.0.attn.norm", "layers.0.attn.q"):
        b.change(name, "s0:2")
    b.change("layers.0.attn.core", "s0:2", "s0:4", "s1:1")
    for name in list(b.values)[list(b.values).index("layers.0.attn.out") :]:
        if name != "scorer.logprobs":
            b.change(name, "s0:2", "s0:4", "s1:1")
    result = diff_traces(Side().trace(), b.trace())
    assert [(root.place.boundary, root.place.request, root.place.position, root.rows) for root in result.roots] == [
        ("embedding", "s0", 2, 1),
        ("layers.0.attn.core", "s1", 1, 1),
    ]


def test_s49_the_sign_of_zero_is_named() -> None:
    """A zero that changed its sign differs below the sketch's resolution, and is called so."""
    a, b = Side(), Side()
    for side, zero in ((a, 0.0), (b, -0.0)):
        side.values["lm_head"].rows[3, 5] = zero
    result = diff_traces(a.trace(), b.trace())
    found = next(boundary for boundary in result.boundaries if boundary.name == "lm_head")
    assert found.distance is not None
    assert found.distance.below_resolution
    assert "below the sketch's resolution: sign of zero" in found.text


@pytest.mark.parametrize("same_bits", [True, False])
def test_s47_nan_bits(same_bits: bool) -> None:
    """Equal NaN bits are equal and counted; another payload differs by NaN bits only."""
    a, b = Side(), Side()
    for side, bits in ((a, 0x7FC00000), (b, 0x7FC00000 if same_bits else 0x7FC00001)):
        side.values["layers.0.attn.q"].rows.view(np.uint32)[[1, 4], 3] = bits
    result = diff_traces(a.trace(), b.trace())
    found = next(boundary for boundary in result.boundaries if boundary.name == "layers.0.attn.q")
    assert (found.nonfinite_a, found.nonfinite_b) == (2, 2)
    assert result.exit == (0 if same_bits else 1)
    assert ("NaN bits only" in found.text) is not same_bits


def test_s48_other_counts_of_nonfinite_values_are_shown() -> None:
    """Minus infinity against the lowest finite value differs, with both counts in the text."""
    a, b = Side(), Side()
    a.values["final_norm"].rows[2, :4] = -np.inf
    b.values["final_norm"].rows[2, :4] = np.finfo(np.float32).min
    result = diff_traces(a.trace(), b.trace())
    found = next(boundary for boundary in result.boundaries if boundary.name == "final_norm")
    assert (found.nonfinite_a, found.nonfinite_b) == (4, 0)
    assert "4 non-finite values on A, 0 on B" in found.text


def test_s50_integers_are_shown() -> None:
    """Narrow integers that differ are compared as int64 and both values are printed."""
    a, b = Side(), Side()
    for side, value in ((a, 2**24 + 1), (b, 2**24 + 2)):
        side.values["input.positions"].rows[3, 0] = value
    result = diff_traces(a.trace(), b.trace())
    assert result.roots[0].text.startswith("A 16777217, B 16777218")


def test_s52_another_float_dtype_is_a_finding_and_no_value_difference() -> None:
    """The same numbers in another float dtype exit 1 with a dtype finding, and cause nothing."""
    a, b = Side(), Side()
    rows = a.values["final_norm"].rows.view(np.uint32) & np.uint32(0xFFFF0000)
    for side, dtype in ((a, "bfloat16"), (b, "float32")):
        side.values["final_norm"].rows, side.values["final_norm"].dtype = rows.view(np.float32), dtype
    result = diff_traces(a.trace(), b.trace())
    assert (result.exit, result.roots) == (1, ())
    assert codes(result) == [FindingCode.DTYPE_DIFFERS]
    assert "below the sketch's resolution" in result.findings[0].text
    assert first(result) == ("final_norm", "", None)
    within = diff_traces(a.trace(), b.trace(), tolerance=Tolerance(1e-3))
    assert within.exit == 0
    assert outcome(within, "final_norm") is BoundaryOutcome.WITHIN_FLOOR
    assert "other dtype, within floor" in within.findings[0].text


def test_another_dtype_is_not_first_while_an_earlier_value_differs() -> None:
    """A value that differs before a boundary of another dtype is the first divergence; the dtype finding is listed first."""
    a, b = Side(), Side()
    b.values["final_norm"].dtype = "bfloat16"
    b.carry_on("layers.1.attn.out", "s0:3")
    result = diff_traces(a.trace(), b.trace())
    assert first(result)[0] == "layers.1.attn.out"
    assert result.findings[0].code is FindingCode.DTYPE_DIFFERS


def test_s52b_narrow_integers_of_another_dtype_are_equal() -> None:
    """int32 and int64 ids with equal values are the same."""
    a, b = Side(), Side()
    b.values["input.positions"].dtype = "int32"
    assert diff_traces(a.trace(), b.trace()).exit == 0


def test_s10_another_width_is_not_judged() -> None:
    """Another width is incomparable: exit 2, every earlier boundary identical, no value of it judged."""
    a, b = Side(), Side()
    b.values["lm_head"].rows = np.pad(b.values["lm_head"].rows, ((0, 0), (0, 8)))
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 2
    assert outcome(result, "lm_head") is BoundaryOutcome.INCOMPARABLE
    assert "width 40 against 48" in result.headline
    assert codes(result) == [FindingCode.WIDTH_DIFFERS]


# ---------------------------------------------------------------- inputs and tokens


def test_s64_one_other_id_is_the_difference() -> None:
    """An id that differs parts the pair of sequences there; rows before it and other sequences are equal."""
    a, b = Side(), Side({**IDS, "s0": [11, 12, 13, 99, 15, 16, 17]})
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 1
    assert first(result) == ("input.ids", "s0", 3)
    assert "A has id 14, B has id 99" in result.headline
    assert codes(result) == [FindingCode.INPUT_DIFFERS]
    assert result.classification is not None
    assert result.classification.klass is Class.INPUT
    assert result.counts.tokens_matched == 8


def test_f06_another_length_is_paired_by_prefix() -> None:
    """Two ids replaced by one part the pair there, and the equal tail after the shift is told."""
    ids = list(range(100, 148))
    a, b = Side({"0": ids}), Side({"0": [*ids[:20], 7, *ids[22:]]})
    result = diff_traces(a.trace(), b.trace())
    assert first(result) == ("input.ids", "0", 20)
    assert "lengths 48 and 47, equal again after a shift of 1" in result.headline


def test_f07_the_tail_of_one_sequence() -> None:
    """Other ids in the last decode steps of one sequence part it there."""
    a = Side({"0": list(range(40)), "1": list(range(100, 140))})
    b = Side({"0": list(range(40)), "1": [*range(100, 137), 17, 17, 17]})
    result = diff_traces(a.trace(), b.trace())
    assert first(result) == ("input.ids", "1", 37)
    assert result.counts.tokens_matched == 77


def test_f01_shifted_positions() -> None:
    """Positions that are off by a constant in one sequence are one root there, with the shift told."""
    a, b = Side(), Side()
    tokens = b.token_of["s1"]
    b.values["input.positions"].rows[tokens] += 5
    for name in ("layers.0.attn.core", "layers.2.attn.core"):
        b.change(name, *[f"s1:{at}" for at in range(5)])
    result = diff_traces(a.trace(), b.trace())
    assert first(result) == ("input.positions", "s1", 0)
    assert [root.place.boundary for root in result.roots] == ["input.positions"]
    assert "+5 in all 5 rows" in result.roots[0].text
    assert result.roots[0].tokens == "all of s1"


def test_f05_a_document_that_runs_on() -> None:
    """Equal ids at another offset are a difference of positions at the start of that document, with both positions."""
    first_ids, second = list(range(50, 60)), list(range(70, 80))
    a, b = Side({"0.0": first_ids, "0.1": second}), Side({"0": first_ids + second})
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 1
    assert first(result) == ("input.positions", "0.1", 0)
    assert "A has position 0, B has position 10" in result.headline
    assert codes(result) == [FindingCode.INPUT_DIFFERS]


def test_f05_three_documents_and_either_side() -> None:
    """Every document behind the first is found inside the run-on row, whichever side it is on."""
    documents = {f"0.{n}": list(range(100 * n, 100 * n + 8)) for n in (1, 2, 3)}
    packed = Side({"0": [token for ids in documents.values() for token in ids]})
    for a, b in ((Side(documents), packed), (packed, Side(documents))):
        result = diff_traces(a.trace(), b.trace())
        assert result.exit == 1
        assert codes(result) == [FindingCode.INPUT_DIFFERS] * 2
        assert result.counts.tokens_matched == 8


def test_a_missing_first_token_is_an_input_difference_only_if_anything_matched() -> None:
    """A token in front on one side changes every key: nothing is compared, so nothing can be told, and the reason is named."""
    ids = list(range(50, 60))
    result = diff_traces(Side({"0": ids}).trace(), Side({"0": [1, *ids]}).trace())
    assert result.exit == 2
    assert "0 of 10 (A) and 11 (B) rows matched" in result.headline
    assert "B has 1 more in front" in result.headline


def test_s62_lost_rows_are_unmatched() -> None:
    """Rows that one side lost are listed by sequence and exit 2."""
    b = Side()
    b.drop_rows("s0:3", "s0:4", "s0:5", "s0:6", *(f"s1:{at}" for at in range(5)))
    b.ids = {"s0": b.ids["s0"][:3]}
    b.token_of = {"s0": b.token_of["s0"][:3]}
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 2
    assert codes(result) == [FindingCode.ROWS_UNMATCHED]
    assert result.findings[0].text == "9 rows only in A: s0 4 (3..6), s1 5 (0..4)"


def test_s63_nothing_in_common() -> None:
    """Other prompts under automatic labels are no pair: 0 rows matched, exit 2."""
    b = Side({"s0": [91, 92, 93, 94, 95, 96, 97], "s1": [81, 82, 83, 84, 85]})
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 2
    assert "0 of 12 rows matched" in result.headline
    assert result.first is None


def test_a_request_pairs_whatever_the_ids() -> None:
    """Sequences with one request id are one pair although no id is equal, and other sequences still compare."""
    a, b = Side(), Side({**IDS, "s1": [91, 92, 93, 94, 95]})
    for side in (a, b):
        side.requests = {"s1": "step7-p2-s3"}
    result = diff_traces(a.trace(), b.trace())
    assert first(result) == ("input.ids", "step7-p2-s3", 0)


@pytest.mark.parametrize("declared", [True, False])
def test_s71_a_row_that_was_never_computed(declared: bool) -> None:
    """A declared row is counted on the verdict line; an undeclared one is unmatched."""
    b = Side()
    b.drop_rows("s0:6")
    if declared:
        b.declared = {"last sampled token": {"": [("s0", 6)], "scorer.logprobs": [("s0", 6)]}}
    result = diff_traces(Side().trace(), b.trace())
    if declared:
        assert result.exit == 0
        assert "Same on 11 of 12 rows" in result.headline
        assert "1 never computed by B: last sampled token" in result.headline
        assert result.counts.not_computed == {"b: last sampled token": 1}
    else:
        assert result.exit == 2
        assert "1 row only in A: s0:6" in result.headline


def test_s71_with_scores_of_the_last_token() -> None:
    """A token that only a score speaks of was not fed, and is no matched row."""
    b = Side()
    for name in list(b.values):
        if name != "scorer.logprobs":
            b.drop_rows("s0:6", boundary=name)
    assert diff_traces(Side().trace(), b.trace()).exit == 2
    b.declared = {"last sampled token": {"": [("s0", 6)]}}
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 0
    assert "Same on 11 of 12 rows" in result.headline


def test_sampled_logits_are_no_absence() -> None:
    """Rows that a host declares it computed no logits for are counted, not missing."""
    b = Side()
    left_out = {"lm_head": [("s0", at) for at in range(6)], "scorer.logprobs": [("s0", at) for at in range(1, 7)]}
    b.declared = {"logits not requested": left_out}
    b.drop_rows(*(f"s0:{at}" for at in range(6)), boundary="lm_head")
    b.drop_rows(*(f"s0:{at}" for at in range(1, 7)), boundary="scorer.logprobs")
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 0
    assert "6 rows never computed by B: logits not requested" in result.headline


def test_ids_unknown_on_one_side_match_by_name() -> None:
    """A side that does not know the ids of a sequence is matched by request and position."""
    a, b = Side(), Side.__new__(Side)
    b.__init__()  # type: ignore[misc]
    known = {name: dataclasses.replace(values) for name, values in b.values.items()}
    b.label_only("s1")
    b.values = known
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 0
    assert result.counts.tokens_matched == 12
    assert codes(result) == [FindingCode.NOTE]


# ---------------------------------------------------------------- structure


def test_s35a_a_missing_boundary() -> None:
    """A boundary that never executed on one side is missing: exit 2 with its executions."""
    b = Side()
    b.drop("layers.1.mlp.out", reason="its module was never called")
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 2
    assert outcome(result, "layers.1.mlp.out") is BoundaryOutcome.MISSING
    assert codes(result) == [FindingCode.BOUNDARY_MISSING]
    assert "missing on B: 0 executions" in result.headline


def test_s35b_a_missing_boundary_before_a_difference() -> None:
    """With a proven difference the exit is 1, and the missing boundary is said to come earlier."""
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    b.drop("layers.1.mlp.out")
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 1
    assert first(result) == ("layers.2.attn.out", "s0", 5)
    assert "the first divergence may be earlier: layers.1.mlp.out missing" in result.headline
    assert codes(result, Kind.ABSENCE) == [FindingCode.BOUNDARY_MISSING]


def test_a_boundary_named_vacuous_by_its_side_is_not_named_twice() -> None:
    """The side's own finding about a silent boundary is the only one."""
    b = Side()
    b.drop("layers.1.mlp.out")
    b.findings = [Finding(code=FindingCode.VACUOUS, kind=Kind.ABSENCE, boundary="layers.1.mlp.out", text="0 executions: compiled region")]
    result = diff_traces(Side().trace(), b.trace())
    assert codes(result) == [FindingCode.VACUOUS]
    assert result.exit == 2


def test_not_observable_is_no_absence() -> None:
    """A boundary that a host cannot show is on neither side's account."""
    b = Side()
    b.drop("layers.1.attn.core", status=BoundaryStatus.NOT_OBSERVABLE, reason="fused")
    result = diff_traces(Side().trace(), b.trace())
    assert (result.exit, result.findings) == (0, ())
    assert outcome(result, "layers.1.attn.core") is BoundaryOutcome.NOT_OBSERVABLE


def test_other_levels_are_an_absence() -> None:
    """Boundaries that only one side selected are missing, never silently skipped."""
    result = diff_traces(Side().trace(), Side(level=1).trace())
    assert result.exit == 2
    assert set(codes(result)) == {FindingCode.BOUNDARY_MISSING}
    assert "same level" in result.next_step


def test_unreadable_gives_no_value_verdict() -> None:
    """A side that cannot be read as a whole ends the comparison, whatever is left."""
    b = Side()
    b.carry_on("embedding", "s0:0")
    b.findings = [Finding(code=FindingCode.SHARD_MISSING, kind=Kind.UNREADABLE, ranks=(2,), text="rank 2 (tp=0, pp=1) is missing")]
    result = diff_traces(Side().trace(), b.trace())
    assert (result.exit, result.boundaries, result.roots, result.first) == (2, (), (), None)
    assert "side B" in result.headline
    assert "rank 2 (tp=0, pp=1)" in result.headline


# ---------------------------------------------------------------- a side against itself


def disagreement(code: FindingCode, boundary: str) -> Finding:
    """What stitching says about a side that disagrees with itself."""
    return Finding(
        code=code,
        kind=Kind.DIFFERENCE,
        boundary=boundary,
        request="s0",
        position=2,
        ranks=(2, 3),
        rows=1,
        text="ranks 2 and 3 differ at s0:2",
    )


def test_s08_replicas_that_disagree_come_first() -> None:
    """The side, boundary, row and ranks are named before anything about the other side, and nothing later is a cause."""
    b = Side()
    b.findings = [disagreement(FindingCode.REPLICAS_DISAGREE, "layers.1.attn.q")]
    b.carry_on("layers.1.attn.q", "s0:2")
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 1
    assert result.headline.startswith("Side B disagrees with itself: replicas at layers.1.attn.q, s0:2")
    assert result.first is not None
    assert (result.first.side, result.first.ranks) == (Which.B, (2, 3))
    assert result.roots == ()
    assert codes(result) == [FindingCode.REPLICAS_DISAGREE]


def test_a_root_before_the_noise_is_still_told() -> None:
    """A difference that lies before the side's own disagreement cannot come from it."""
    b = Side()
    b.findings = [disagreement(FindingCode.REPEATS_DISAGREE, "layers.3.mlp.out")]
    b.carry_on("layers.1.attn.out", "s1:2")
    result = diff_traces(Side().trace(), b.trace())
    assert [root.place.boundary for root in result.roots] == ["layers.1.attn.out"]
    assert result.headline.startswith("Side B disagrees with itself: repeats")


@pytest.mark.parametrize(("code", "expected"), [(FindingCode.SIBLINGS_DISAGREE, 0), (FindingCode.RECOMPUTE_DISAGREES, 1)])
def test_floor_self_covers_siblings_only(code: FindingCode, expected: int) -> None:
    """``floor="self"`` takes siblings and repeats as the floor, never replicas or recompute."""
    b = Side()
    b.findings = [disagreement(code, "layers.1.attn.out")]
    b.noise = {"layers.1.attn.out": 1e-4}
    assert diff_traces(Side().trace(), b.trace()).exit == 1
    assert diff_traces(Side().trace(), b.trace(), floor="self").exit == expected


def test_s30_copies_that_add_up_get_the_hint() -> None:
    """Replicas that disagree while their sum is the other side's value are said to be partial sums."""
    b = Side()
    whole = b.values["layers.0.attn.out"].rows.copy()
    b.values["layers.0.attn.out"].rows = whole * np.float32(0.75)
    trace, whole_trace = b.trace(), Side().trace()
    boundary = trace.boundaries["layers.0.attn.out"]
    summed = dataclasses.replace(boundary, copies=2, load_sum_of_copies=whole_trace.boundaries["layers.0.attn.out"].load_statistics)
    trace = dataclasses.replace(
        trace,
        boundaries={**trace.boundaries, "layers.0.attn.out": summed},
        findings=(disagreement(FindingCode.REPLICAS_DISAGREE, "layers.0.attn.out"),),
    )
    result = diff_traces(whole_trace, trace)
    assert result.exit == 1
    assert "the copies add up to A's value by sketch" in result.headline
    assert "declare it partial" in result.next_step.lower()


def test_an_intervention_is_never_a_fix() -> None:
    """Sides that agree under an intervention are not the same: nobody can tell without it. A difference stays one, marked."""
    b = Side()
    b.interventions = ("pin *.moe.topk_ids=run (3 choices changed)",)
    result = diff_traces(Side().trace(), b.trace())
    assert (result.exit, codes(result)) == (2, [FindingCode.INTERVENTION])
    assert result.headline.startswith("Could not tell: INTERVENTION: B was recorded with pin")
    b.change("layers.1.attn.out")
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 1
    assert result.headline.endswith("[under INTERVENTION]")


def test_a_fed_input_counts_as_equal() -> None:
    """Where one side was fed the other's block inputs, every block that differs is a root of its own, as it started from equal values."""
    a, b = Side(level=0), Side(level=0)
    for layer in (0, 1):
        b.change(f"layers.{layer}.residual")
    assert [root.place.boundary for root in diff_traces(a.trace(), b.trace()).roots] == ["layers.0.residual"]
    b.interventions = ("feed=a",)
    trace_a, trace_b = a.trace(), b.trace()
    replaced = {f"layers.{layer}.residual": trace_a.manifest.run_id for layer in (0, 1)}
    fed = dataclasses.replace(trace_b, manifests=tuple(msgspec.structs.replace(entry, replaced=replaced) for entry in trace_b.manifests))
    assert [root.place.boundary for root in diff_traces(trace_a, fed).roots] == ["layers.0.residual", "layers.1.residual"]


# ---------------------------------------------------------------- partial sums


def partial(side: Side, boundary: str, shares: tuple[float, ...]) -> None:
    """Make a boundary partial sums: ``shares`` of the value per coordinate."""
    from tracer.format.fingerprint import fingerprint_rows

    rows = side.values[boundary].rows
    parts = [fingerprint_rows((rows * np.float32(share)).astype(np.float32), "float32") for share in shares]
    sketch = sum(part.sketch_N16 for part in parts if part.sketch_N16 is not None)
    squares = np.square(np.asarray(sketch, np.float64)).sum(axis=1)
    statistics = Statistics(np.asarray(sketch), squares, np.full(len(rows), np.nan, np.float32), np.zeros(len(rows), np.uint32))
    side.values[boundary].extra = {
        "partial_axis": "tp",
        "parts": tuple(PartialPart(at, len(shares), part.digest_N2) for at, part in enumerate(parts)),
        "load_statistics": lambda: statistics,
    }


NAME = "layers.2.attn.out"


def test_s27_the_same_split_is_compared_rank_by_rank() -> None:
    """Equal partial sums of the same split are the same, and marked as partial sums."""
    a, b = Side(), Side()
    for side in (a, b):
        partial(side, NAME, (0.75, 0.25))
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 0
    assert "partial sums" in next(boundary.text for boundary in result.boundaries if boundary.name == NAME)


def test_the_same_parts_on_other_coordinates_are_equal() -> None:
    """Parts of one sum that lie on other coordinates of the axis are the same sum; another part is still found."""
    a, b, c = Side(), Side(), Side()
    for side, shares in ((a, (0.75, 0.25)), (b, (0.25, 0.75)), (c, (0.25, 0.5))):
        partial(side, NAME, shares)
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 0
    assert "in 12 rows the same parts on other coordinates" in next(line.text for line in result.boundaries if line.name == NAME)
    assert first(diff_traces(a.trace(), c.trace()))[0] == NAME


def test_s28a_partial_sums_against_the_whole_are_left_open() -> None:
    """Partial sums whose sketches add up to the other side's value are never identical: exit 2 without a floor."""
    b = Side()
    partial(b, NAME, (0.75, 0.25))
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 2
    assert outcome(result, NAME) is BoundaryOutcome.BY_SKETCH
    assert codes(result) == [FindingCode.ONLY_BY_SKETCH]
    assert "resolution" in result.headline


def test_s28b_a_tolerance_settles_partial_sums() -> None:
    """With a tolerance the same comparison is the same, marked by sketch."""
    b = Side()
    partial(b, NAME, (0.75, 0.25))
    result = diff_traces(Side().trace(), b.trace(), tolerance=Tolerance(1e-3))
    assert (result.exit, result.findings) == (0, ())
    assert outcome(result, NAME) is BoundaryOutcome.BY_SKETCH
    assert "by sketch" in result.headline


def test_s28c_a_part_that_is_doubled_differs() -> None:
    """A sum that rounding cannot explain is different at that boundary."""
    b = Side()
    partial(b, NAME, (0.75, 0.5))
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 1
    assert first(result)[0] == NAME


def test_s29_copies_declared_partial_are_not_judged() -> None:
    """Identical copies declared partial are a wrong declaration, and no difference between the sides."""
    b = Side()
    partial(b, NAME, (1.0, 1.0))
    result = diff_traces(Side().trace(), b.trace())
    assert result.exit == 2
    assert "all 2 copies are identical" in result.headline
    assert codes(result) == [FindingCode.PARTIAL_COPIES_IDENTICAL]


# ---------------------------------------------------------------- choices and experts


def moe_sides() -> tuple[Side, Side]:
    """Two equal MoE sides in which two experts of one token tie."""
    sides = Side(moe=True), Side(moe=True)
    for side in sides:
        logits = side.values["layers.1.moe.router_logits"].rows
        row = side.at("s1:1")
        logits[row] = [0, 0, 9, 0, 0, 4, 4, 0]
        side.values["layers.1.moe.topk_ids"].rows[row] = [2, 5]
        side.values["layers.1.moe.expert_out"].experts = side.values["layers.1.moe.topk_ids"].rows.reshape(-1).astype(np.int64)
    return sides


def test_s25_a_tie_that_flips_is_a_choice() -> None:
    """A choice that flips on a tie is the only cause; later boundaries and the expert rows of that token are consequences."""
    a, b = moe_sides()
    b.values["layers.1.moe.topk_ids"].rows[b.at("s1:1")] = [2, 6]
    b.values["layers.1.moe.expert_out"].experts = b.values["layers.1.moe.topk_ids"].rows.reshape(-1).astype(np.int64)
    b.carry_on("layers.1.moe.combine", "s1:1")
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 1
    assert first(result) == ("layers.1.moe.topk_ids", "s1", 1)
    assert [root.klass for root in result.roots] == [Class.DISCRETE]
    assert "1 token flipped, a tie (score gap 0 ulps)" in result.headline
    assert codes(result) == [FindingCode.CHOICE_DIFFERS]
    assert "Pin the routing" in result.next_step


def test_a_choice_is_a_consequence_where_its_scores_differ() -> None:
    """Ids that flip because the scores differ are listed as a consequence, and the scores are the root."""
    a, b = moe_sides()
    row = b.at("s1:1")
    b.values["layers.1.moe.router_logits"].rows[row, 6] = 4.5
    b.values["layers.1.moe.topk_ids"].rows[row] = [2, 6]
    b.values["layers.1.moe.expert_out"].experts = b.values["layers.1.moe.topk_ids"].rows.reshape(-1).astype(np.int64)
    b.carry_on("layers.1.moe.combine", "s1:1")
    result = diff_traces(a.trace(), b.trace())
    assert [root.place.boundary for root in result.roots] == ["layers.1.moe.router_logits"]
    choice = next(finding for finding in result.findings if finding.code is FindingCode.CHOICE_DIFFERS)
    assert choice.kind is Kind.INFORMATION
    assert "a consequence" in choice.text


def test_f40_ids_that_are_not_the_highest_are_told() -> None:
    """A side whose ids are not the highest of its own scores is named."""
    a, b = moe_sides()
    b.values["layers.1.moe.topk_ids"].rows[b.at("s1:1")] = [0, 1]
    b.values["layers.1.moe.expert_out"].experts = b.values["layers.1.moe.topk_ids"].rows.reshape(-1).astype(np.int64)
    result = diff_traces(a.trace(), b.trace())
    assert "on B 1 token did not choose the highest of B's own scores" in result.headline


@pytest.mark.parametrize("swapped", [False, True])
def test_another_top_k_is_a_discrete_path_mismatch(swapped: bool) -> None:
    """Another number of choices per row is the first divergence, with both numbers; what has their width follows from it."""
    a, b = moe_sides()
    for layer in (0, 1, 2, 3):
        at = f"layers.{layer}.moe"
        ids, weights, out = (b.values[f"{at}.{name}"] for name in ("topk_ids", "topk_weights", "expert_out"))
        logits = b.values[f"{at}.router_logits"].rows
        chosen = a.values[f"{at}.topk_ids"].rows
        further = [[e for e in np.argsort(-row) if e not in own][:2] for own, row in zip(chosen, logits, strict=True)]
        ids.rows = np.sort(np.concatenate([chosen, np.array(further)], axis=1), axis=1)
        weights.rows = np.repeat(weights.rows, 2, axis=1)
        out.rows, out.tokens = np.repeat(out.rows, 2, axis=0), np.repeat(out.tokens, 2)
        out.experts = ids.rows.reshape(-1).astype(np.int64)
    b.change("layers.0.moe.combine")
    sides = (b.trace(), a.trace()) if swapped else (a.trace(), b.trace())
    for floor in ((), Side(moe=True).trace()):
        result = diff_traces(*sides, floor_a=() if swapped else floor)
        assert (result.exit, first(result)) == (1, ("layers.0.moe.topk_ids", "s0", 0))
        assert {root.klass for root in result.roots} == {Class.DISCRETE}
        assert ("top_k: 4 against 2" if swapped else "top_k: 2 against 4") in result.headline
        assert "the fewer ids among the more in every token" in result.headline
        assert "same top_k" in result.next_step
        assert codes(result, Kind.ABSENCE) == []
    assert outcome(result, "layers.0.moe.topk_weights") is BoundaryOutcome.INCOMPARABLE


def test_s23_a_lost_expert_row_is_unmatched() -> None:
    """An expert row that one side lost is named with its token and expert, and the others are equal."""
    a, b = moe_sides()
    values = b.values["layers.0.moe.expert_out"]
    line = 2 * b.at("s1:4")
    expert = int(values.experts[line]) if values.experts is not None else -1
    keep = np.arange(len(values.tokens)) != line
    values.rows, values.tokens, values.experts = (
        values.rows[keep],
        values.tokens[keep],
        None if values.experts is None else values.experts[keep],
    )
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 2
    assert result.findings[0].text == f"1 row only in A: s1:4/e{expert}"
    assert next(boundary.rows_compared for boundary in result.boundaries if boundary.name == "layers.0.moe.expert_out") == 23


# ---------------------------------------------------------------- weights


def test_f11_a_weight_comes_before_its_boundary() -> None:
    """A weight that differs is first where its boundary is the earliest root, which is then its consequence."""
    b = Side()
    b.set_weight("layers.2.mlp.up.weight", 1)
    b.carry_on("layers.2.mlp.out", "s0:0", "s1:0")
    result = diff_traces(Side().trace(), b.trace())
    assert first(result) == ("layers.2.mlp.up.weight", "", None)
    assert [root.klass for root in result.roots] == [Class.WEIGHT]
    assert result.headline.startswith("First divergence: weight layers.2.mlp.up.weight")
    assert "tracer weights" in result.next_step


def test_a_root_before_a_weight_stays_first() -> None:
    """A weight that differs behind the first divergence is listed, not first."""
    b = Side()
    b.set_weight("layers.3.mlp.up.weight", 1)
    b.carry_on("layers.1.attn.out", "s0:2")
    result = diff_traces(Side().trace(), b.trace())
    assert first(result)[0] == "layers.1.attn.out"
    assert [root.place.boundary for root in result.roots] == ["layers.1.attn.out", "layers.3.mlp.up.weight"]


def test_f09_all_weights_blame_no_boundary() -> None:
    """Where every weight differs, that is said once and no boundary is blamed."""
    b = Side()
    for name in b.weights:
        b.set_weight(name, 1)
    for name in b.values:
        if not name.startswith("input."):
            b.change(name)
    result = diff_traces(Side().trace(), b.trace())
    count = len(b.weights)
    assert result.exit == 1
    assert f"{count} of {count} trainable tensors differ" in result.headline
    assert [root.klass for root in result.roots][:1] == [Class.WEIGHT]
    assert not [root for root in result.roots if root.place.boundary in ("embedding", "layers.0.attn.norm", "layers.0.attn.q")]


def test_unknown_and_missing_weights_are_named() -> None:
    """A weight without a fingerprint is never equal; a missing parameter is an absence, a missing buffer is not."""
    a, b = Side(), Side()
    b.set_weight("lm_head.weight", 0, unknown="repacked by the engine")
    a.set_weight("rope.inv_freq", 0, buffer=True)
    result = diff_traces(a.trace(), b.trace())
    assert result.exit == 0
    assert set(codes(result)) == {FindingCode.WEIGHT_UNKNOWN, FindingCode.WEIGHT_MISSING}
    del b.weights["embedding.weight"]
    assert diff_traces(a.trace(), b.trace()).exit == 2


def test_weights_that_were_not_recorded_are_said_to_be() -> None:
    """Without weights nothing is claimed about them."""
    a, b = Side(), Side()
    b.weights = {}
    b.carry_on("layers.2.attn.out", "s0:5")
    assert "weights not recorded" in diff_traces(a.trace(), b.trace()).headline


# ---------------------------------------------------------------- conditions


def test_f08_active_dropout_makes_it_an_input_mismatch() -> None:
    """A value difference under dropout that only one side has is classed as input mismatch, with the mode named."""
    a, b = Side(), Side()
    b.conditions = {"mode": "train", "dropout": {"model.layers.*.self_attn.attention_dropout": 0.1}, "command": "python b.py"}
    b.carry_on("layers.0.attn.core", "s0:0", "s1:0")
    result = diff_traces(a.trace(), b.trace())
    assert result.classification is not None
    assert result.classification.klass is Class.INPUT
    assert any("active dropout" in text for text in result.classification.evidence)
    assert "command" not in result.conditions
    assert result.conditions["mode"] == {"a": "eval", "b": "train"}
    assert "eval" in result.next_step


def test_conditions_alone_change_no_verdict() -> None:
    """Other conditions with equal values are listed and are no finding."""
    b = Side()
    b.conditions = {"mode": "eval", "attention": "sdpa"}
    result = diff_traces(Side().trace(), b.trace())
    assert (result.exit, result.findings) == (0, ())
    assert result.conditions == {"attention": {"a": None, "b": "sdpa"}}


# ---------------------------------------------------------------- floors and the result itself


def test_s55_floor() -> None:
    """A difference within the floor is the same, with the first bitwise difference kept; a zero floor leaves no room."""
    a, same, noisy, b = Side(), Side(), Side(), Side()
    noisy.carry_on("layers.2.attn.out", "s0:5")
    b.carry_on("layers.2.attn.out", "s0:5", by=1.5e-3)
    within = diff_traces(a.trace(), b.trace(), floor_a=noisy.trace())
    assert within.exit == 0
    assert within.first is None
    assert within.first_bitwise is not None
    assert within.first_bitwise.boundary == "layers.2.attn.out"
    assert outcome(within, "layers.2.attn.out") is BoundaryOutcome.WITHIN_FLOOR
    assert "within the given floor from layers.2.attn.out on" in within.headline
    above = diff_traces(a.trace(), b.trace(), floor_a=[same.trace()])
    assert above.exit == 1
    assert above.headline.startswith("First divergence: layers.2.attn.out")


def test_ulps_need_dumps() -> None:
    """A tolerance in ulps is refused while only fingerprints are kept."""
    with pytest.raises(UsageError, match="ulps") as error:
        diff_traces(Side().trace(), Side().trace(), tolerance=Tolerance(ulps=2))
    assert error.value.code is Code.BAD_ARGUMENT


def test_the_result_survives_json() -> None:
    """The result decodes strictly from its own JSON to an equal value."""
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    b.values["final_norm"].rows[:, 0] = np.nan
    result = diff_traces(Side().trace(), b.trace())
    assert msgspec.json.decode(msgspec.json.encode(result), type=DiffResult) == result


def test_catalogues_of_two_maps_are_merged() -> None:
    """A boundary that only one map has stands where it belongs and is missing on the other side."""
    extra = catalogue()
    extra.insert(8, Boundary(name="layers.0.attn.extra", level=2, inputs=("layers.0.attn.residual",), rows=RowScope.ALL))
    result = diff_traces(Side().trace(), Side(boundaries=extra).trace())
    names = [boundary.name for boundary in result.boundaries]
    assert names.index("layers.0.attn.extra") == 8
    assert result.exit == 2
    assert "its map has no such boundary" in result.headline
