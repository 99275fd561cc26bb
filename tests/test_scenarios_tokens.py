"""Scenarios S56 to S64 and S71: tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tracer
from tests.expectations import expect_could_not_tell, expect_different, expect_disagreement, expect_same
from tests.playback import IDS, Full, Grid, PlaybackModel, Rank, Stage, flat, padded
from tracer.format.schema import NotComputed
from tracer.read.findings import FindingCode, Side


def steps(name: str, *sizes: int) -> list[Grid]:
    """One sequence in several forwards over one cache."""
    grids: list[Grid] = []
    at = 0
    for size in sizes:
        grids.append([[(name, t) for t in range(at, at + size)]])
        at += size
    return grids


def test_s56_single_rows_against_left_padding(full: Full, tmp_path: Path) -> None:
    """Two forwards of one sequence each equal one left-padded batch."""
    stage = Stage(tmp_path)
    a = stage.play("a", full, Rank([padded(full, ["s0"]), padded(full, ["s1"])]))
    result = tracer.diff_traces(a, stage.play("b", full, Rank([padded(full, ["s0", "s1"], left=True)])))
    expect_same(result, rows=12)
    assert result.counts.skipped == {"b: padding": 2}


def test_s57_right_padding_against_packed(full: Full, tmp_path: Path) -> None:
    """A right-padded batch in another order equals one packed row."""
    stage = Stage(tmp_path)
    a = stage.play("a", full, Rank([padded(full, ["s1", "s0"])]))
    expect_same(tracer.diff_traces(a, stage.play("b", full, Rank([flat(full, ["s0", "s1"])]))), rows=12)


@pytest.mark.parametrize("sizes", [(4, 3), (4, 1, 1, 1)], ids=["s58_chunks", "s59_decode"])
def test_s58_s59_chunked_prefill_and_decode(sizes: tuple[int, ...], full: Full, tmp_path: Path) -> None:
    """One prefill equals chunks over a cache, and a prefill with decode steps."""
    stage = Stage(tmp_path)
    result = tracer.diff_traces(stage.plain("a", full, ["s0"]), stage.play("b", full, Rank(steps("s0", *sizes))))
    expect_same(result, rows=7)
    assert next(entry for entry in result.boundaries if entry.name == "layers.2.attn.out").executions_b == len(sizes)


def siblings(count: int, shared: int, own: int) -> Full:
    """``count`` sequences whose first ``shared`` tokens, and the values at them, are the same."""
    prompt = list(range(11, 11 + shared))
    full = Full({f"s{n}": prompt + [100 * (n + 1) + t for t in range(own)] for n in range(count)})
    for name, values in full.values.items():
        for row in list(values):
            if row[1] < shared and row[0] != "s0" and not full.points[name].experts:
                values[row] = values[("s0", row[1])].clone()
    for name, point in full.points.items():
        if point.experts:
            ids = full.values[name.replace("expert_out", "topk_ids")]
            for n in range(1, count):
                for t in range(shared):
                    for expert in [row for row in full.values[name] if row[:2] == (f"s{n}", t)]:
                        del full.values[name][expert]
                    for expert_id in ids[("s0", t)].tolist():
                        full.values[name][(f"s{n}", t, expert_id)] = full.values[name][("s0", t, expert_id)].clone()
    return full


def test_s60_prefix_cache(tmp_path: Path) -> None:
    """A prefix found in the cache is the other sequence's rows."""
    full = siblings(2, 4, 3)
    stage = Stage(tmp_path)
    b = stage.play("b", full, Rank([padded(full, ["s0"]), [[("s1", t) for t in range(4, 7)]]]))
    expect_same(tracer.diff_traces(stage.plain("a", full), b), rows=10)


@pytest.mark.parametrize("off", [False, True], ids=["a", "b"])
def test_s61_siblings(off: bool, tmp_path: Path) -> None:
    """A shared prompt computed four times and once is the same; a sibling that is off is the side's own disagreement."""
    full = siblings(4, 4, 3)
    names = list(full.ids)
    stage = Stage(tmp_path)

    def change(model: PlaybackModel, rank: Rank) -> None:
        if off:
            model.leaf("layers.1.attn.out").prepared[0][3, 2].view(torch.int16)[17] += 1

    a = stage.play("a", full, Rank([padded(full, names)]), prepare=change)
    rest: list[Grid] = [[[(name, t) for t in range(4, 7)]] for name in names[1:]]
    b = stage.play("b", full, Rank([padded(full, ["s0"]), *rest]))
    result = tracer.diff_traces(a, b)
    if off:
        finding = expect_disagreement(result, FindingCode.SIBLINGS_DISAGREE, Side.A, "layers.1.attn.out", "s3", 2)
        assert "s0" in finding.text
        assert "s3" in finding.text
    else:
        expect_same(result, rows=16)


@pytest.mark.parametrize("declared", [True, False], ids=["a", "b"])
def test_s71_last_sampled_token(declared: bool, full: Full, plain: Path, tmp_path: Path) -> None:
    """A last sampled token that an engine never forwards is no absence if it says so, and one if not."""
    grid = padded(full, ["s0", "s1"])
    grid[0][6] = None
    reason = [NotComputed(sequence="s0", positions=((6, 7),), reason="last sampled token")] if declared else []
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, Rank([grid], not_computed=reason)))
    if declared:
        assert result.exit == 0, result.findings
        assert "11 of 12" in result.headline
        assert "last sampled token" in result.headline
        assert result.counts.tokens_matched == 11
    else:
        findings = expect_could_not_tell(result, FindingCode.ROWS_UNMATCHED)
        assert "s0:6" in "".join(finding.text for finding in findings)


def test_s62_lost_rows(full: Full, plain: Path, tmp_path: Path) -> None:
    """Rows that one side lost are counted by sequence, and what is left being equal does not help."""
    b = Stage(tmp_path).play("b", full, Rank([[[("s0", t) for t in range(3)]]]))
    result = tracer.diff_traces(plain, b)
    findings = expect_could_not_tell(result, FindingCode.ROWS_UNMATCHED)
    said = "".join(finding.text for finding in findings)
    assert "9 rows only in A" in said
    assert "s0 4" in said
    assert "s1 5" in said


def test_s63_nothing_in_common(plain: Path, tmp_path: Path) -> None:
    """Other ids without labels: nothing was matched, and that is never green."""
    other = Full({"x0": list(range(201, 208)), "x1": list(range(301, 306))})
    result = tracer.diff_traces(plain, Stage(tmp_path).plain("b", other, ["x0", "x1"]))
    assert result.exit == 2
    assert result.first is None
    assert "0 of 12" in result.headline


def test_s64_one_id_differs(full: Full, plain: Path, tmp_path: Path) -> None:
    """One other token id is the difference, with both ids; rows before it are equal and nothing behind it is compared."""
    ids = list(IDS["s0"])
    ids[3] = 99
    other = Full({"s0": ids, "s1": IDS["s1"]})
    for name in ("s0", "s1"):
        assert len(other.ids[name]) == len(full.ids[name])
    b = Stage(tmp_path).play("b", full, Rank([padded(full, ["s0", "s1"])], ids_override={"s0": ids}))
    result = tracer.diff_traces(plain, b)
    expect_different(result, "input.ids", "s0", 3)
    said = result.headline + "".join(finding.text for finding in result.findings)
    assert "14" in said
    assert "99" in said
    assert result.counts.tokens_matched == 8
