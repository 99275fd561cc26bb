"""``tracer diff`` on traces on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import BOUNDARIES, commit, fingerprints, row_set
from tracer.format.dumps import read_plan
from tracer.format.schema import Sequence
from tracer.format.store import ShardWriter
from tracer.read.findings import DiffResult


def write(out: Path, *, changed: str = "", by: float = 0.0) -> Path:
    """A trace of one forward of eight tokens; row 5 of one boundary may be changed."""
    writer = ShardWriter(out, 0)
    writer.open_sequence(Sequence(label="s0"))
    writer.add_ids(0, 0, np.arange(8))
    rows = row_set(range(8))
    for number, name in enumerate(BOUNDARIES):
        found = fingerprints(8, number)
        assert found.sketch_N16 is not None
        assert found.sum_squares_N is not None
        assert found.nonfinite_N is not None
        found.nonfinite_N[:] = 0
        found.sum_squares_N[:] = np.square(found.sketch_N16.astype(np.float64)).sum(axis=1)
        if name == changed:
            found.digest_N2[5] += np.uint64(1e6 * by)
            found.sketch_N16[5] *= np.float32(1 + by)
        writer.add(name, rows, found, dtype="bfloat16", width=64)
    commit(writer, run_id=out.name)
    return out


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two traces that differ by a thousandth at one row."""
    return write(tmp_path / "a"), write(tmp_path / "b", changed="layers.0.residual", by=1e-3)


def test_exit_codes_and_the_line(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Equal traces exit 0, different ones 1, and the first line says which."""
    assert run_tracer("diff", pair[0], pair[0]) == 0
    assert capsys.readouterr().out.startswith("Same: 8 rows at 3 boundaries, all identical; A and B are one run, a: compared with itself")
    assert run_tracer("diff", *pair) == 1
    assert capsys.readouterr().out.startswith("First divergence: layers.0.residual, request s0, token 5")


def test_floor_and_tolerance(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A floor trace or a tolerance that covers the difference exits 0."""
    noisy = write(tmp_path / "noisy", changed="layers.0.residual", by=6e-4)
    assert run_tracer("diff", *pair, "--floor-a", noisy) == 0
    assert "within the given floor" in capsys.readouterr().out
    again = write(tmp_path / "again", changed="layers.0.residual", by=1e-3)
    assert run_tracer("diff", *pair, "--floor-b", again) == 1
    assert run_tracer("diff", *pair, "--tolerance", "relative=2e-3") == 0
    assert run_tracer("diff", *pair, "--tolerance", "layers.*.residual=2e-3") == 0
    assert run_tracer("diff", *pair, "--tolerance", "relative=1e-4") == 1


def test_self_is_no_floor_where_nothing_was_seen_twice(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """``--floor self`` of traces without siblings or repeats is refused with what to do, instead of a floor of zero."""
    assert run_tracer("diff", *pair, "--floor", "self") == 2
    err = capsys.readouterr().err
    assert "neither side saw any row twice" in err
    assert "--floor-a" in err


@pytest.mark.parametrize(("limit", "close"), [("layers.0.residul=1", "layers.0.residual"), ("nothing.*=1", "a name or glob")])
def test_a_tolerance_of_no_boundary_is_refused(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], limit: str, close: str) -> None:
    """A name or glob that no boundary has is a usage error, with the names that are close."""
    assert run_tracer("diff", *pair, "--tolerance", limit) == 2
    err = capsys.readouterr().err
    assert f"where: {limit.partition('=')[0]}" in err
    assert close in err


@pytest.mark.parametrize(("option", "which"), [("--floor-a", 0), ("--floor-a", 1), ("--floor-b", 0), ("--floor-b", 1)])
def test_a_side_is_no_floor(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], option: str, which: int) -> None:
    """Neither side, nor a copy of one, may stand for noise: the other side would excuse every fault of its own."""
    assert run_tracer("diff", *pair, option, pair[which]) == 2
    assert "or a copy of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tolerance", "ulps=2"],
        ["--tolerance", "x"],
        ["--tolerance", ""],
        ["--tolerance", "relative=1,relative=2"],
        ["--floor", "{a}"],
        ["--floor-a", "nowhere"],
    ],
)
def test_unusable_options_are_2(wrong: list[str], pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Options that cannot be carried out are usage errors with a code."""
    assert run_tracer("diff", *pair, *(word.format(a=pair[0]) for word in wrong)) == 2
    assert "tracer: [" in capsys.readouterr().err


def test_json(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json FILE`` writes the whole result beside the report; ``-`` writes it instead."""
    assert run_tracer("diff", *pair, "--json", tmp_path / "out.json") == 1
    assert "layers.0.residual" in capsys.readouterr().out
    result = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=DiffResult)
    assert (result.exit, result.first and result.first.boundary) == (1, "layers.0.residual")
    assert run_tracer("diff", *pair, "--json", "-") == 1
    assert msgspec.json.decode(capsys.readouterr().out, type=DiffResult) == result


def test_all(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """``--all`` leaves nothing out."""
    run_tracer("diff", *pair, "--all")
    assert "not shown" not in capsys.readouterr().out


def test_linked_folders_are_read_as_what_they_link_to(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links to a trace or a shard are followed, and a trace reached by two ways is still one run; a link to itself is no trace."""
    (tmp_path / "link").symlink_to(pair[0], target_is_directory=True)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/shard-00000").symlink_to(pair[0] / "shard-00000", target_is_directory=True)
    for other in ("link", "shards"):
        assert run_tracer("diff", pair[0], tmp_path / other) == 0
        assert "A and B are one run" in capsys.readouterr().out
    assert run_tracer("diff", tmp_path / "link", pair[1]) == 1
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert run_tracer("diff", pair[0], tmp_path / "loop") == 2
    assert "[not-a-trace]" in capsys.readouterr().err


def test_plan_is_written_only_for_a_difference(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--plan writes what a second run should save and says how to run it; without a difference it says why it wrote nothing."""
    file = tmp_path / "plan.json"
    assert run_tracer("diff", pair[0], pair[0], "--plan", file) == 0
    assert "no plan written: no value is proven to differ" in capsys.readouterr().err
    assert not file.exists()
    assert run_tracer("diff", *pair, "--plan", file) == 1
    assert f"TRACER_PLAN={file}" in capsys.readouterr().err
    output = read_plan(file).boundaries[0]
    assert (output.boundary, output.differing) == ("layers.0.residual", 1)
