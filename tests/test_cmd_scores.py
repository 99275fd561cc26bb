"""``tracer scores`` on files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.cli_runs import run_tracer
from tests.score_cases import make_batch
from tests.test_update_check import logits, sides
from tracer.format.score_file import read_scores, write_scores
from tracer.format.score_records import ScoreName
from tracer.scores.results import Branch, ScoreResult, UpdateOutcome, UpdateResult


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """Scores that agree."""
    return write_scores(tmp_path / "honest.safetensors", make_batch().records())


@pytest.fixture
def offset(tmp_path: Path) -> Path:
    """A is 0.1 nats too low from the second token on."""
    batch = make_batch()
    batch.scores["A"] = batch.scores["A"] - 0.1 * (np.arange(48) > 0)
    return write_scores(tmp_path / "offset.safetensors", batch.records())


def test_compare(honest: Path, offset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes, the first line, the decision and the JSON of a comparison."""
    assert run_tracer("scores", "compare", honest) == 0
    assert capsys.readouterr().out.startswith("Scores agree: B0-B1 identical, C0-C1 identical")
    assert run_tracer("scores", "compare", offset, "--json", tmp_path / "out.json") == 1
    printed = capsys.readouterr().out
    assert printed.startswith("Look first at: generation side (A): constant offset")
    for text in (
        "Does each side repeat itself?",
        "-0.1",
        "from response token 1 on",
        "logprob_mae",
        "probability_mae",
        "k3",
        "next",
    ):
        assert text in printed
    result = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=ScoreResult)
    assert result.decision.branch is Branch.GENERATION
    assert run_tracer("scores", "compare", offset, "--json", "-") == 1
    assert msgspec.json.decode(capsys.readouterr().out, type=ScoreResult) == result
    assert run_tracer("scores", "compare", offset, "--pass-mark", "0.5") == 0


def test_pages(offset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--html`` and ``report`` on the saved JSON give one page, for a comparison and for an update; a refusal leaves its reason."""
    saved, direct, later = tmp_path / "out.json", tmp_path / "direct.html", tmp_path / "later.html"
    assert run_tracer("scores", "compare", offset, "--json", saved, "--html", direct) == 1
    assert run_tracer("report", saved, "--html", later) == 0
    assert direct.read_bytes() == later.read_bytes()
    batch, old, new = logits()
    before = write_scores(tmp_path / "before.safetensors", sides(batch, old, old, "6"))
    after = write_scores(tmp_path / "after.safetensors", sides(batch, old, new, "7"))
    assert run_tracer("scores", "update", before, after, "--json", saved, "--html", direct) == 1
    assert run_tracer("report", saved, "--html", later) == 0
    assert direct.read_bytes() == later.read_bytes()
    assert run_tracer("scores", "compare", offset, offset, "--html", direct) == 2
    assert "scores-twice" in direct.read_text()
    capsys.readouterr()


def test_all_and_log_lines(offset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--all leaves nothing out; --log prints lines for a log."""
    assert run_tracer("scores", "compare", offset, "--all", "--log", "run=nightly", "--log", "step=7") == 1
    printed = capsys.readouterr().out
    assert "(--all)" not in printed
    assert "[mismatch] run=nightly step=7" in printed
    assert run_tracer("scores", "compare", offset, "--log", "nightly") == 2


def test_refusals_are_2(honest: Path, offset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What may not be compared ends with 2 and its code."""
    assert run_tracer("scores", "compare", honest, offset) == 2
    assert "[scores-twice]" in capsys.readouterr().err
    assert run_tracer("scores", "compare", tmp_path / "nowhere") == 2
    (tmp_path / "torn.safetensors").write_bytes(honest.read_bytes()[:-1])
    assert run_tracer("scores", "compare", tmp_path / "torn.safetensors") == 2
    assert "[scores-invalid]" in capsys.readouterr().err


def test_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of torch tensors, pairs on top of it, and an engine's JSON become records that compare."""
    batch = make_batch(4, 12, 32)
    plain = {name: torch.from_numpy(values.astype(np.float32)) for name, values in batch.scores.items()}
    tokens = {"tokens": batch.ids.tolist(), "response_lengths": [12] * 4, "sample_indices": [f"r{q}" for q in range(4)]}
    torch.save({**tokens, "rollout_log_probs": plain["A"], "log_probs": plain["C0"]}, tmp_path / "rollout.pt")
    out = tmp_path / "base.safetensors"
    more = ("--definition", "A=raw", "--definition", "C0=temperature:1", "--policy", "A=7", "--model", "C0=d1")
    assert run_tracer("scores", "import", tmp_path / "rollout.pt", "--from", "slime", "--out", out, *more) == 0
    assert "4 requests, 48 response tokens" in capsys.readouterr().out
    info = {name: score.info for name, score in read_scores(out)[0].scores.items()}
    assert (info[ScoreName.A].policies[0].version, info[ScoreName.C0].model) == ("7", "d1")
    torch.save({f"r{q}": (plain["B0"][q], torch.ones(12)) for q in range(4)}, tmp_path / "b0.pt")
    pairs = ("--from", "pairs", "--as", "B0", "--base", out, "--out", tmp_path / "b0.safetensors")
    assert run_tracer("scores", "import", tmp_path / "b0.pt", *pairs) == 0
    lines = [
        {"meta_info": {"input_token_logprobs": [[v, 0, None] for v in [None, *[-1.0] * 7, *plain["B1"][q].tolist()]]}} for q in range(4)
    ]
    for q, line in enumerate(lines):
        for entry, token in zip(line["meta_info"]["input_token_logprobs"], batch.ids[q].tolist(), strict=True):
            entry[1] = token
    (tmp_path / "b1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    answers = ("--from", "json", "--as", "B1", "--base", out, "--out", tmp_path / "b1.safetensors")
    assert run_tracer("scores", "import", tmp_path / "b1.jsonl", *answers) == 0
    capsys.readouterr()
    assert run_tracer("scores", "compare", out, tmp_path / "b0.safetensors", tmp_path / "b1.safetensors", "--pass-mark", "0.02") == 0
    assert "A-B" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ("--from", "nobody"),
        ("--from", "pairs"),
        ("--from", "verl"),
        ("--from", "slime", "--definition", "raw"),
        ("--from", "slime", "--definition", "A=hot"),
        ("--from", "slime", "--definition", "A=temperature:warm"),
        ("--from", "slime", "--policy", "7"),
    ],
    ids=" ".join,
)
def test_unusable_imports_are_2(wrong: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options and batches that cannot be used end with 2 and a code; nothing is written."""
    (tmp_path / "batch.json").write_text(json.dumps({"tokens": [[1, 2]], "response_lengths": [1], "rollout_log_probs": [[-1.0]]}))
    assert run_tracer("scores", "import", tmp_path / "batch.json", *wrong, "--out", tmp_path / "out.safetensors") == 2
    assert "tracer: [" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()
    (tmp_path / "bad.json").write_text("{]")
    assert run_tracer("scores", "import", tmp_path / "bad.json", "--from", "slime", "--out", tmp_path / "out.safetensors") == 2
    assert run_tracer("scores", "import", tmp_path / "nowhere", "--from", "slime", "--out", tmp_path / "out.safetensors") == 2


def test_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An update that never reached the engine is 1 and named, one that did is 0."""
    batch, old, new = logits()
    before = write_scores(tmp_path / "before.safetensors", sides(batch, old, old, "6"))
    after = write_scores(tmp_path / "after.safetensors", sides(batch, new, new, "7"))
    skipped = write_scores(tmp_path / "skipped.safetensors", sides(batch, old, new, "7"))
    assert run_tracer("scores", "update", before, after) == 0
    assert capsys.readouterr().out.startswith("Update applied")
    assert run_tracer("scores", "update", before, skipped, "--json", tmp_path / "out.json") == 1
    assert "Update skipped" in capsys.readouterr().out
    result = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=UpdateResult)
    assert result.outcome is UpdateOutcome.SKIPPED
    assert run_tracer("scores", "update", before, tmp_path / "nowhere") == 2


def test_update_with_fingerprints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weight fingerprints come from traces of both sides, before and after; a weight that did not arrive is named."""
    from tests.tiny_models import make_ids, make_model
    from tracer import trace

    for name, change in (("old", ""), ("new", "all"), ("partial", "head")):
        state = make_model("qwen3", num_hidden_layers=1)
        with torch.no_grad():
            for parameter, tensor in state.named_parameters():
                if change == "all" or (change == "head" and "lm_head" not in parameter):
                    tensor.mul_(1.01)
        with trace(state, out=tmp_path / name, level=0), torch.no_grad():
            state(make_ids(1, 6))
    batch, old, new = logits()
    before = write_scores(tmp_path / "before.safetensors", sides(batch, old, old, "6"))
    after = write_scores(tmp_path / "after.safetensors", sides(batch, new, new, "7"))
    traces = (
        "--b-before",
        tmp_path / "old",
        "--b-after",
        tmp_path / "partial",
        "--c-before",
        tmp_path / "old",
        "--c-after",
        tmp_path / "new",
    )
    assert run_tracer("scores", "update", before, after, *traces) == 1
    assert "changed in the trainer and not in the engine: lm_head.weight" in capsys.readouterr().out


def test_masked_requests_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request without a valid token is named in the report."""
    records = make_batch().records()
    records[3] = replace(records[3], mask=np.zeros(48, np.bool_))
    assert run_tracer("scores", "compare", write_scores(tmp_path / "a.safetensors", records)) == 0
    assert "no valid token in r3" in capsys.readouterr().out
