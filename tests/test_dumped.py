"""Tests of ``tracer.read.dumped``: any sharding gives whole rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tracer
from tests.playback import Cut, Full, Rank, Stage, batch, cut, even, padded, tensor_parallel
from tracer.errors import Code, TracerError
from tracer.read.dumped import read_dumps
from tracer.read.inventory import take_inventory
from tracer.read.load import verify_trace

DUMP = ["layers.1.attn.q", "layers.1.attn.out", "layers.1.moe.topk_ids", "layers.1.moe.expert_out", "layers.1.residual"]


@pytest.fixture(scope="module")
def whole(full: Full, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, one right-padded forward."""
    return Stage(tmp_path_factory.mktemp("whole")).plain("a", full, dump=DUMP)


def test_rows_are_those_that_the_model_had(whole: Path, full: Full) -> None:
    """Every dumped row has the bytes of its token's values, integers exactly, expert rows by (token, expert)."""
    dumps = read_dumps(whole)
    assert list(dumps.boundaries) == DUMP
    for name in ("layers.1.attn.q", "layers.1.residual", "layers.1.moe.topk_ids"):
        found = dumps.boundaries[name]
        wanted = [full.values[name][found.label(row)] for row in range(len(found))]
        np.testing.assert_array_equal(found.exact_RC, [value.double().numpy() for value in wanted])
    experts = dumps.boundaries["layers.1.moe.expert_out"]
    assert experts.expert_R is not None
    for row in range(len(experts)):
        place = (*experts.label(row), int(experts.expert_R[row]))
        wanted_row = full.values["layers.1.moe.expert_out"][place]
        np.testing.assert_array_equal(experts.float32_RC[row], wanted_row.float().numpy())


def test_slices_join_to_the_same_rows(whole: Path, full: Full, tmp_path: Path) -> None:
    """Columns cut over two processes, padded and in two forwards, give the rows of one process; replicas change nothing."""
    cuts = [{"attn.q": even(r, 2, 32), "attn.out": cut((0, 10) if r == 0 else (10, 32), width=32)} for r in range(2)]
    sharded = read_dumps(Stage(tmp_path).play("b", full, tensor_parallel(batch(full), 2, lambda r: cuts[r]), dump=DUMP))
    one = read_dumps(whole)
    assert sharded.findings == ()
    for name in DUMP:
        x, y = one.boundaries[name], sharded.boundaries[name]
        order_x, order_y = np.argsort(x.key_R, kind="stable"), np.argsort(y.key_R, kind="stable")
        np.testing.assert_array_equal(x.raw_RB[order_x], y.raw_RB[order_y])
        np.testing.assert_array_equal(x.digest_R2[order_x], y.digest_R2[order_y])


def test_the_first_sighting_is_kept(full: Full, tmp_path: Path) -> None:
    """A prefix that is computed twice is one row per token, with the bytes of the fingerprint that is kept."""
    twice = read_dumps(Stage(tmp_path).play("b", full, Rank([padded(full, ["s0"]), padded(full, ["s0"])]), dump="layers.1.residual"))
    found = twice.boundaries["layers.1.residual"]
    assert len(found) == len(full.ids["s0"])
    np.testing.assert_array_equal(found.digest_R2, twice.trace.boundaries["layers.1.residual"].digest_R2)


def test_what_cannot_be_joined_is_named(full: Full, tmp_path: Path) -> None:
    """Partial sums and columns that nobody dumped give no rows and a finding that says why."""
    halves = tensor_parallel(batch(full), 2, lambda r: {"attn.out": Cut(partial="tp")})
    dumps = read_dumps(Stage(tmp_path).play("b", full, halves, dump=DUMP[:2]))
    assert list(dumps.boundaries) == ["layers.1.attn.q"]
    assert "partial sums over tp" in dumps.findings[0].text
    lone = [Rank(batch(full), cuts={"layers.1.attn.q": cut((0, 16), width=32)})]
    dumps = read_dumps(Stage(tmp_path).play("c", full, lone, dump=DUMP[:1]))
    assert "columns are missing" in dumps.findings[0].text


def test_an_altered_dump_is_never_used(full: Full, tmp_path: Path) -> None:
    """A changed byte fails the checksum, in reading, in a comparison, in verify and in show; a missing file too."""
    out = Stage(tmp_path).plain("b", full, dump="layers.1.residual")
    (file,) = (out / "dumps").iterdir()
    whole = verify_trace(out)
    assert (whole.good, whole.files) == (True, 3)
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    for read in (read_dumps, lambda path: tracer.diff_traces(path, path)):
        with pytest.raises(TracerError) as caught:
            read(out)
        assert caught.value.code is Code.CHECKSUM_MISMATCH
    assert [problem.code for problem in verify_trace(out).problems] == ["checksum-mismatch"]
    shown = take_inventory(str(out))
    assert (shown.complete, [problem.code for problem in shown.problems]) == (False, ["checksum-mismatch"])
    file.unlink()
    assert [problem.code for problem in take_inventory(str(out)).problems] == ["shard-incomplete"]
    with pytest.raises(TracerError) as caught:
        read_dumps(out)
    assert caught.value.code is Code.SHARD_INCOMPLETE
