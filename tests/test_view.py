"""What a report shows."""

from __future__ import annotations

from pathlib import Path

from tests.sides import Side
from tests.trace_files import edit_manifest, write_shard
from tracer.read.diff import diff_traces
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.inventory import take_inventory
from tracer.read.load import verify_trace
from tracer.read.siblings import check_siblings
from tracer.read.weight_report import diff_weights
from tracer.reports.terminal import render_plain
from tracer.reports.view import Table, view_diff, view_inventory, view_siblings, view_verify, view_weights


def shown(a: Side, b: Side, *, everything: bool = False) -> str:
    """The report on two sides, plain."""
    return render_plain(view_diff(diff_traces(a.trace(), b.trace()), everything=everything))


def one_element() -> Side:
    """A side with a fault in the middle."""
    side = Side()
    side.carry_on("layers.2.attn.out", "s0:5")
    return side


def test_a_difference_is_a_screenful() -> None:
    """The report leads with the line, shows the boundaries around it, and ends with one next step."""
    text = shown(Side(), one_element())
    lines = text.splitlines()
    assert lines[0].startswith("First divergence: layers.2.attn.out, request s0, token 5")
    assert len(lines) < 40
    assert lines[-1].startswith("next  ")
    assert any(line.startswith("first  layers.2.attn.out") for line in lines)
    assert "19 identical" in text
    assert "--all shows every boundary" in text


def test_everything_is_everything() -> None:
    """With ``everything`` each boundary has its line."""
    result = diff_traces(Side().trace(), one_element().trace())
    table = next(block for block in view_diff(result, everything=True) if isinstance(block, Table))
    assert [row[1] for row in table.rows] == [boundary.name for boundary in result.boundaries]
    assert table.rest == ""


def test_same_is_short() -> None:
    """Two equal sides need no table."""
    text = shown(Side(), Side())
    assert text.startswith("Same: 12 rows at 35 boundaries, all identical\n")
    assert "boundary  " not in text


def test_what_is_missing_is_in_the_table() -> None:
    """A missing boundary is shown with the side that lacks it, and in the findings."""
    b = Side()
    b.drop("layers.1.mlp.out")
    text = shown(Side(), b)
    assert "missing on B" in text
    assert "[boundary-missing]" in text


def test_many_findings_of_one_code_are_counted() -> None:
    """Of each code a few are shown and the rest are counted."""
    b = Side()
    b.findings = [Finding(code=FindingCode.NOTE, kind=Kind.INFORMATION, text=f"note {number}") for number in range(9)]
    assert "and 6 more [note] (--all)" in shown(Side(), b)
    assert "note 8" in shown(Side(), b, everything=True)


def test_other_roots_floors_and_declared_rows_have_their_place() -> None:
    """Further roots, the floor column and rows never computed are shown where they exist."""
    b = one_element()
    b.carry_on("layers.3.mlp.out", "s1:0")
    b.drop_rows("s0:6")
    b.declared = {"last sampled token": {"": [("s0", 6)], "scorer.logprobs": [("s0", 6)]}}
    text = render_plain(view_diff(diff_traces(Side().trace(), b.trace(), floor_a=Side().trace())))
    assert "other roots   layers.3.mlp.out, s1:0" in text
    assert "not computed  b: last sampled token 1" in text
    assert "0.00e+00" in text


def test_weights() -> None:
    """Differing weights are listed, identical ones counted, and rows offered."""
    b = Side()
    b.set_weight("lm_head.weight", 1)
    text = render_plain(view_weights(diff_weights(Side().trace(), b.trace())))
    assert "lm_head.weight" in text
    assert "identical (--all)" in text
    assert 'weights="rows"' in text
    assert "embedding.weight" in render_plain(view_weights(diff_weights(Side().trace(), b.trace()), everything=True))


def test_siblings() -> None:
    """Boundaries that disagree with themselves are listed with their size."""
    side = Side()
    side.noise = {"final_norm": 2e-3}
    side.findings = [
        Finding(code=FindingCode.REPEATS_DISAGREE, kind=Kind.DIFFERENCE, boundary="final_norm", text="executions 1 and 2 differ")
    ]
    text = render_plain(view_siblings(check_siblings(side.trace())))
    assert "2.00e-03" in text
    assert "--floor self" in text


def test_a_trace_on_disk(tmp_path: Path) -> None:
    """``show`` and ``verify`` print boundaries, conditions and problems of real files."""
    shard = write_shard(tmp_path / "t", conditions={"model": {"mode": "eval"}})
    text = render_plain(view_inventory(take_inventory(str(tmp_path / "t"))))
    assert "layers.0.residual" in text
    assert "model.mode: eval" in text
    assert "whole and unaltered" in render_plain(view_verify(verify_trace(tmp_path / "t")))
    edit_manifest(shard, lambda content: content["segments"][0].update(xxh3_128="0" * 32))
    assert "[checksum-mismatch]" in render_plain(view_verify(verify_trace(tmp_path / "t")))
