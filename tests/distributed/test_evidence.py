"""Dumps and interventions in sharded runs of real models, held to one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.conftest import Runs
from tracer import diff_traces, open_trace
from tracer.read.dump_checks import check_dumps
from tracer.read.dumped import read_dumps
from tracer.read.findings import DiffResult, FindingCode, Side

pytestmark = pytest.mark.distributed

REDUCED = ["qwen3_moe:evidence_tp", "qwen3_moe:evidence_tp_ep", "llama:evidence_torch_sp_dtensor"]
"""Tensor and expert parallelism of the library, and sequence parallelism of torch, whose block inputs are cut by tokens."""


def trace_of(runs: Runs, case: str, name: str) -> Path:
    path = runs.path(case, 2)
    return path.with_name(f"{path.name}-{name}")


def against_one(runs: Runs, case: str, name: str) -> DiffResult:
    return diff_traces(runs.path(f"{case.partition(':')[0]}:whole", 1), trace_of(runs, case, name))


def notes(path: Path, code: str) -> list[str]:
    return [note.text for manifest in open_trace(path).manifests for note in manifest.notes if note.code == code]


@pytest.mark.parametrize("case", REDUCED)
def test_fed_blocks_show_their_own_sums(runs: Runs, case: str) -> None:
    """Fed with the inputs that one process had, both layers begin equal and part at their own first sum over processes."""
    result = against_one(runs, case, "fed")
    roots = {root.place.boundary for root in result.roots}
    assert {"layers.0.attn.out", "layers.1.attn.out"} <= roots
    assert "layers.1.attn.core" not in roots
    assert "[under INTERVENTION]" in result.headline
    assert all(manifest.interventions[0].startswith("feed=") for manifest in open_trace(trace_of(runs, case, "fed")).manifests)


@pytest.mark.parametrize("case", REDUCED)
def test_a_plan_saves_whole_rows_of_cut_boundaries(runs: Runs, case: str) -> None:
    """The columns that two processes saved are one row again, with the digest of the first run, and stand in the table."""
    one, planned = runs.path(f"{case.partition(':')[0]}:whole", 1), trace_of(runs, case, "planned")
    dumps = read_dumps(open_trace(planned))
    assert list(dumps.boundaries) == ["layers.0.attn.core", "layers.0.attn.out"]
    assert dumps.boundaries["layers.0.attn.core"].width == 64
    result = diff_traces(one, planned)
    assert not [finding for finding in result.findings if finding.code is FindingCode.NOT_REPRODUCIBLE]


@pytest.mark.parametrize("case", REDUCED)
def test_a_plan_saves_whole_rows_of_cut_weights(runs: Runs, case: str) -> None:
    """Weights that processes hold by rows or by columns are saved as whole rows, which together have the digest of the whole weight."""
    planned = trace_of(runs, case, "planned")
    held = read_dumps(open_trace(planned)).weights
    assert {(name, len(rows), rows.width) for name, rows in held.items()} == {
        ("layers.0.attn.q.weight", 64, 64),
        ("layers.0.attn.out.weight", 64, 64),
    }
    told = [finding.text for finding in check_dumps(read_dumps(open_trace(planned)), Side.A) if finding.code is FindingCode.NOTE]
    assert len(told) == 2
    assert all("together they have the digest recorded of the whole weight, and the whole weight that of run" in text for text in told)


@pytest.mark.parametrize("case", REDUCED)
def test_against_judges_whole_rows_and_names_the_others(runs: Runs, case: str) -> None:
    """The first boundary with whole rows that differs is saved by the processes that have them; cut ones are left to a plan by name."""
    path = trace_of(runs, case, "against")
    assert all("first differs at layers.0.attn.out, saved" in text for text in notes(path, "against"))
    assert all("layers.0.attn.q" in text and "a part of its columns" in text for text in notes(path, "against-left"))
    assert "layers.0.attn.out" in read_dumps(open_trace(path)).boundaries


def test_routing_is_pinned_under_tensor_and_expert_parallelism(runs: Runs) -> None:
    """Every process holds to the choices of one process."""
    for case in REDUCED[:2]:
        path = trace_of(runs, case, "pinned")
        assert all("(0 choices changed)" in manifest.interventions[0] for manifest in open_trace(path).manifests)
        assert not [entry for entry in against_one(runs, case, "pinned").boundaries if entry.name.endswith("ids") and entry.rows_differing]


def test_a_nudge_is_the_same_on_every_process(runs: Runs) -> None:
    """Copies agree, rows cut by tokens and requests cut over processes are nudged as in any other layout."""
    paths = [trace_of(runs, case, "nudged") for case in ("llama:evidence_fsdp", "llama:evidence_torch_sp_dtensor")]
    result = diff_traces(*paths)
    embedding = next(entry for entry in result.boundaries if entry.name == "embedding")
    assert (embedding.rows_compared, embedding.rows_differing) == (64, 0)
    assert not [finding for finding in result.findings if finding.code is FindingCode.REPLICAS_DISAGREE]
    plain = next(entry for entry in against_one(runs, "llama:evidence_fsdp", "nudged").boundaries if entry.name == "embedding")
    assert plain.rows_differing == 64


def test_fully_sharded_parameters_are_no_obstacle(runs: Runs) -> None:
    """Under FSDP2 with other requests on every process, feeding equal inputs gives equal bits, a plan saves the rows of both
    processes, and ``against`` finds nothing."""
    case = "llama:evidence_fsdp"
    fed = against_one(runs, case, "fed")
    assert (fed.exit, fed.counts.rows_differing) == (2, 0)
    assert len(read_dumps(open_trace(trace_of(runs, case, "planned"))).boundaries["layers.1.attn.out"]) == 64
    assert all("nothing that could be judged differs" in text for text in notes(trace_of(runs, case, "against"), "against"))


def test_a_refusal_in_one_process_hangs_no_other(runs: Runs) -> None:
    """Process 1 is fed tokens that the other side lacks: it computes on with its own values, so that process 0 is not left waiting in
    a collective, and its part of the trace is incomplete."""
    found = open_trace(trace_of(runs, "llama:evidence_fsdp", "refused"))
    assert [manifest.complete for manifest in found.manifests] == [True, False]
    assert "does not have all of its tokens" in found.manifests[1].incomplete_reason


def test_split_sequences_are_refused_in_every_process(runs: Runs) -> None:
    """Pipeline stages and context parallelism do not know the ids of their rows: every process refuses before anything runs, with
    the axis and what to do; a plan still reaches the last stage."""
    for case, axis in (("llama:evidence_pp", "pp=2"), ("llama:evidence_cp", "cp=2")):
        for rank in range(2):
            told = json.loads(Path(f"{trace_of(runs, case, 'fed')}.rank{rank}.json").read_text())
            assert (told[0], told[2]) == ("intervention-refused", axis)
            assert told[3] == "run this side on fewer processes for the diagnosis"
        assert not trace_of(runs, case, "fed").exists()
    planned = trace_of(runs, "llama:evidence_pp", "planned")
    assert len(read_dumps(open_trace(planned)).boundaries["layers.1.attn.out"]) == 64
