"""Scenarios S32 to S42: completeness."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import tracer
from tests.expectations import expect_could_not_tell, expect_different, expect_disagreement, expect_same, outcome
from tests.playback import Cut, Full, PlaybackModel, Rank, Stage, batch, even, tensor_parallel
from tracer.errors import TraceFormatError
from tracer.read.findings import BoundaryOutcome, DiffResult, FindingCode, Side, Verdict


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    return subprocess.run([sys.executable, "-m", "tracer", *arguments], capture_output=True, text=True, check=False)


def cli_diff(a: Path, b: Path) -> tuple[int, str]:
    done = cli("diff", str(a), str(b))
    return done.returncode, done.stdout + done.stderr


def no_value_verdict(result: DiffResult) -> None:
    assert result.verdict is Verdict.COULD_NOT_TELL
    assert result.first is None
    assert result.roots == ()


def test_s32_shard_missing(full: Full, tmp_path: Path) -> None:
    """A lost shard is named by rank and coordinates, and no value is judged."""
    stage = Stage(tmp_path)
    ranks = [
        Rank(
            batch(full),
            dp * 2 + tp,
            4,
            {"dp": (dp, 2), "tp": (tp, 2)},
            tensor_parallel(batch(full), 2, lambda r: {"attn.q": even(r, 2, 32)})[tp].cuts,
        )
        for dp in range(2)
        for tp in range(2)
    ]
    a, b = stage.play("a", full, ranks), stage.play("b", full.one_element(), ranks)
    shutil.rmtree(b / "shard-00002")
    result = tracer.diff_traces(a, b)
    no_value_verdict(result)
    (finding,) = [finding for finding in result.findings if finding.code is FindingCode.SHARD_MISSING]
    assert finding.ranks == (2,)
    assert finding.side is Side.B
    assert "dp=1" in finding.text
    assert "tp=0" in finding.text


def test_s33_shard_missing_on_both_sides(full: Full, tmp_path: Path) -> None:
    """What is left being equal does not help."""
    stage = Stage(tmp_path)
    ranks = tensor_parallel(batch(full), 2, lambda r: {})
    sides = [stage.play(side, full, ranks) for side in "ab"]
    for side in sides:
        shutil.rmtree(side / "shard-00001")
    result = tracer.diff_traces(*sides)
    no_value_verdict(result)
    assert {finding.side for finding in result.findings if finding.code is FindingCode.SHARD_MISSING} == {Side.A, Side.B}


def test_s34_hole_at_one_boundary(full: Full, plain: Path, tmp_path: Path) -> None:
    """Missing columns of one boundary name the rank and the columns."""
    ranks = tensor_parallel(batch(full), 2, lambda r: {"attn.q": even(r, 2, 32)})
    ranks[1].cuts["layers.0.attn.q"] = Cut(absent=True)
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks))
    assert result.exit == 2
    (hole,) = [finding for finding in result.findings if finding.code is FindingCode.HOLE]
    assert (hole.boundary, hole.ranks) == ("layers.0.attn.q", (1,))
    assert "16:32" in hole.text


@pytest.mark.parametrize("changed", [False, True], ids=["a", "b"])
def test_s35_boundary_never_executed(changed: bool, full: Full, plain: Path, tmp_path: Path) -> None:
    """A boundary that never ran is missing with 0 executions; with a later difference it is listed and said to lie earlier."""
    side = full.one_element() if changed else full
    b = Stage(tmp_path).play("b", side, Rank(batch(full), cuts={"layers.1.mlp.out": Cut(absent=True)}))
    result = tracer.diff_traces(plain, b)
    vacuous = [finding for finding in result.findings if finding.boundary == "layers.1.mlp.out"]
    assert any("0 executions" in finding.text for finding in vacuous)
    if changed:
        expect_different(result, "layers.2.attn.out", "s0", 5)
        assert "earlier" in result.headline + "".join(finding.text for finding in vacuous)
    else:
        expect_could_not_tell(result, FindingCode.VACUOUS)
        assert outcome(result, "layers.1.mlp.out") is BoundaryOutcome.MISSING


def test_s36_compiled_region(full: Full, plain: Path, tmp_path: Path) -> None:
    """A module inside a compiled region whose hook never fires makes its boundary vacuous."""

    def silence(model: PlaybackModel, rank: Rank) -> None:
        leaf = model.leaf("layers.1.attn.norm")
        warm = leaf.prepared[0]
        leaf.compile(backend="eager")
        leaf.prepared, leaf.calls = [warm], 0
        leaf(None)
        leaf.prepared, leaf.calls = [warm], 0

    b = Stage(tmp_path).play("b", full, Rank(batch(full)), prepare=silence)
    result = tracer.diff_traces(plain, b)
    (finding,) = expect_could_not_tell(result, FindingCode.VACUOUS)
    assert finding.boundary == "layers.1.attn.norm"


@pytest.mark.parametrize("off", [False, True], ids=["a", "b"])
def test_s37_same_forward_twice(off: bool, full: Full, tmp_path: Path) -> None:
    """Repeats that agree are one row seen twice; one that does not is named with its executions."""
    stage = Stage(tmp_path)
    twice = Rank(batch(full) * 2)

    def second(model: PlaybackModel, rank: Rank) -> None:
        if off:
            changed = model.leaf("layers.2.attn.out").prepared[1].clone()
            changed[0, 5].view(torch.int16)[17] += 1
            model.leaf("layers.2.attn.out").prepared[1] = changed

    result = tracer.diff_traces(stage.play("a", full, twice), stage.play("b", full, twice, prepare=second))
    if off:
        finding = expect_disagreement(result, FindingCode.REPEATS_DISAGREE, Side.B, "layers.2.attn.out", "s0", 5)
        assert "executions 1 and 2" in finding.text
    else:
        expect_same(result, rows=12)


def test_s38_shard_copied(full: Full, tmp_path: Path) -> None:
    """One rank twice is refused."""
    stage = Stage(tmp_path)
    ranks = tensor_parallel(batch(full), 2, lambda r: {})
    a, b = stage.play("a", full, ranks), stage.play("b", full, ranks)
    shutil.copytree(b / "shard-00001", b / "shard-00002")
    result = tracer.diff_traces(a, b)
    no_value_verdict(result)
    assert FindingCode.SHARD_TWICE in {finding.code for finding in result.findings}
    assert "rank 1" in "".join(finding.text for finding in result.findings)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.playback import Full, Rank, Stage, batch, padded
import tracer.format.store as store

full = Full()
grid = padded(full, ["s0", "s1"])
stage = Stage(Path(sys.argv[2]))
host_finish = tracer = None
import tests.playback as playback
seen = []
def finish(self, forward, output):
    seen.append(1)
    if len(seen) == 40:
        import time; time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
playback.PlaybackHost.finish_forward = finish
original = store.ShardWriter.__init__
def small(self, *args, **kwargs):
    kwargs["flush_bytes"] = 50_000
    original(self, *args, **kwargs)
store.ShardWriter.__init__ = small
stage.play("b", full, Rank([grid] * 60))
"""


def test_s39_killed_process(full: Full, plain: Path, tmp_path: Path) -> None:
    """A killed recorder leaves finished segments that `show` reads, and a diff without a verdict."""
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent.parent), str(tmp_path)], check=False, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    b = tmp_path / "b"
    assert list(b.glob("shard-*/segment-*.safetensors")), "no segment was flushed before the kill"
    result = tracer.diff_traces(plain, b)
    no_value_verdict(result)
    assert FindingCode.SHARD_UNCOMMITTED in {finding.code for finding in result.findings}
    shown = cli("show", str(b))
    assert "layers.2.attn.out" in shown.stdout


@pytest.mark.parametrize("how", ["a_cut", "b_flipped"])
def test_s40_damaged_segment(how: str, plain: Path, tmp_path: Path) -> None:
    """A torn or altered segment is an error that names the file, exit 2."""
    b = Path(shutil.copytree(plain, tmp_path / "b"))
    segment = next(b.glob("shard-*/segment-*.safetensors"))
    data = bytearray(segment.read_bytes())
    if how == "a_cut":
        data = data[: len(data) // 2]
    else:
        data[-100] ^= 1
    segment.write_bytes(bytes(data))
    with pytest.raises(TraceFormatError, match=segment.name):
        tracer.open_trace(b)
    code, said = cli_diff(plain, b)
    assert code == 2
    assert segment.name in said
    assert "Traceback" not in said


@pytest.mark.parametrize("how", ["a_format_2", "b_no_format", "c_no_json"])
def test_s41_foreign_manifest(how: str, plain: Path, tmp_path: Path) -> None:
    """A manifest of another format, of none, or that is no JSON is refused by file, found and wanted."""
    b = Path(shutil.copytree(plain, tmp_path / "b"))
    manifest = b / "shard-00000" / "manifest.json"
    document = json.loads(manifest.read_text())
    if how == "a_format_2":
        document["format"] = 2
    elif how == "b_no_format":
        del document["format"]
    manifest.write_text("{nonsense" if how == "c_no_json" else json.dumps(document))
    with pytest.raises(TraceFormatError) as caught:
        tracer.open_trace(b)
    assert "manifest.json" in str(caught.value)
    assert caught.value.expected
    assert caught.value.found
    assert cli_diff(plain, b)[0] == 2


def test_s42_unknown_dtype(plain: Path, tmp_path: Path) -> None:
    """An unknown dtype name is refused by file, boundary and found."""
    b = Path(shutil.copytree(plain, tmp_path / "b"))
    manifest = b / "shard-00000" / "manifest.json"
    document = msgspec.json.decode(manifest.read_bytes())
    entry = next(entry for entry in document["boundaries"] if entry["name"] == "layers.1.attn.out")
    entry["dtype"] = "float5"
    manifest.write_bytes(msgspec.json.encode(document))
    with pytest.raises(TraceFormatError) as caught:
        tracer.open_trace(b)
    said = str(caught.value)
    assert "manifest.json" in said
    assert "layers.1.attn.out" in said
    assert "float5" in said
    code, text = cli_diff(plain, b)
    assert code == 2
    assert "KeyError" not in text
    assert os.path.isdir(b)
