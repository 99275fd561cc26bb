"""Dumps and interventions in Megatron-core, from one process to tensor, sequence, expert, data and pipeline parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracer import diff_traces, open_trace
from tracer.read.dumped import read_dumps
from tracer.read.findings import DiffResult, FindingCode


def notes(path: Path, code: str) -> list[str]:
    return [note.text for manifest in open_trace(path).manifests for note in manifest.notes if note.code == code]


def roots(result: DiffResult) -> set[str]:
    return {root.place.boundary for root in result.roots}


@pytest.mark.parametrize(("one", "fed"), [("dense1", "fed_tp2_sp"), ("moe1", "fed_moe_tp2_sp_ep2")])
def test_fed_blocks_show_their_own_sums(runs: Path, one: str, fed: str) -> None:
    """Fed with the inputs of one process, cut by tokens here, both layers part at their first sum over processes and not before it."""
    result = diff_traces(runs / one, runs / fed)
    assert {"layers.0.attn.out", "layers.1.attn.out"} <= roots(result)
    assert "layers.1.attn.core" not in roots(result)
    assert "[under INTERVENTION]" in result.headline


def test_pipeline_stages_refuse_to_be_fed(runs: Path) -> None:
    """Later stages know no ids: every process refuses before anything runs, and names the axis."""
    for rank in range(2):
        assert (runs / f"fed_pp2.rank{rank}").read_text() == (
            "intervention-refused: feed= needs the token ids of every row in the process that computes it; pp=2"
        )
    assert not (runs / "fed_pp2").exists()


def test_against_saves_the_first_sum_that_differs(runs: Path) -> None:
    """Rows cut by tokens are whole and judged, columns that are cut are left to a plan; a later stage says that it knows no ids."""
    found = notes(runs / "against_tp2_sp", "against")
    assert all("first differs at layers.0.attn.out, saved" in text for text in found)
    assert "layers.0.attn.out" in read_dumps(open_trace(runs / "against_tp2_sp")).boundaries
    assert any("a part of its columns" in text for text in notes(runs / "against_tp2_sp", "against-left"))
    assert any("token ids are not known in this process" in text for text in notes(runs / "against_pp2", "against-left"))


def test_a_plan_saves_rows_that_were_cut(runs: Path) -> None:
    """Under a plan of the difference the columns of both processes are one row with the digest of the first run; a later stage finds
    its rows by label."""
    dumps = read_dumps(open_trace(runs / "planned_tp2_sp"))
    assert list(dumps.boundaries) == ["layers.0.attn.core", "layers.0.attn.out"]
    result = diff_traces(runs / "dense1", runs / "planned_tp2_sp")
    assert not [finding for finding in result.findings if finding.code is FindingCode.NOT_REPRODUCIBLE]
    late = read_dumps(open_trace(runs / "planned_pp2"))
    assert set(late.boundaries) >= {"layers.1.attn.q_rope"}
    assert len(late.boundaries["layers.1.attn.q_rope"]) > 10


def test_routing_is_pinned(runs: Path) -> None:
    """The router holds to the other side's experts, with weights of its own scores, under sequence and expert parallelism and with
    the softmax before the choice; the choices that were changed are counted."""
    same = diff_traces(runs / "moe1", runs / "pinned_moe_tp2_sp_ep2")
    assert not [entry for entry in same.boundaries if entry.name.endswith("topk_ids") and entry.rows_differing]
    free = diff_traces(runs / "other_experts", runs / "softmax_first")
    assert [entry for entry in free.boundaries if entry.name.endswith("topk_ids") and entry.rows_differing]
    pinned = diff_traces(runs / "other_experts", runs / "pinned_softmax_first")
    assert not [entry for entry in pinned.boundaries if entry.name.endswith("topk_ids") and entry.rows_differing]
    assert "(0 choices" not in open_trace(runs / "pinned_softmax_first").manifest.interventions[0]


def test_a_nudge_is_the_same_in_every_layout(runs: Path) -> None:
    """Rows cut by tokens and requests cut over processes are nudged as in one process."""
    for name, rows in (("nudged_tp2_sp", 24), ("nudged_dp2", 48)):
        result = diff_traces(runs / "nudged1", runs / name)
        embedding = next(entry for entry in result.boundaries if entry.name == "embedding")
        assert (embedding.rows_compared, embedding.rows_differing) == (rows, 0)
