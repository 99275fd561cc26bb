"""Log probabilities of the tokens fed next (``tracer.record.next_token``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tracer
from tests.small_model import Recorded, SmallHost, SmallModel, read_back, small_map
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import Axis, BoundaryStatus
from tracer.record.host import Placement, Rows
from tracer.record.next_token import NextTokenScores, score_rows
from tracer.record.tokens import SequenceRegistry

IDS = torch.tensor([[11, 12, 13, 14, 15]])


def record(folder: Path, *forwards: dict[str, object], host: SmallHost | None = None) -> Recorded:
    """Scores of these forwards of one model."""
    folder.mkdir(exist_ok=True)
    host = host or SmallHost(SmallModel())
    with torch.no_grad(), tracer.trace(host.model, map=small_map(folder), host=host, out=folder / "trace", strict=True):
        for forward in forwards:
            host.model(**forward)
    return read_back(folder / "trace")


def digest(score: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(lane) for lane in fingerprint_rows(score.reshape(1, 1).numpy(), "float32").digest_N2[0])


def test_scores_are_the_log_softmax_at_the_next_token(tmp_path: Path) -> None:
    """Row t is, bitwise, log_softmax of the logits at t taken at token t + 1; the last token has none."""
    model = SmallModel()
    scores = record(tmp_path, {"input_ids": IDS}, host=SmallHost(model)).at("scorer.logprobs")
    with torch.no_grad():
        normal = torch.log_softmax(model(IDS)["logits"].float(), -1)[0]
    assert scores == {("b1.r0", t): digest(normal[t, IDS[0, t + 1]]) for t in range(4)}


def test_chunks_and_decode_steps_score_what_one_forward_scores(tmp_path: Path) -> None:
    """The last row of a call waits for the token of the next one: any chunking gives the rows of a single forward.

    The model computes every token alone, in whole numbers, so that its logits are the same in any chunk."""

    class Exact(SmallModel):
        def forward(self, input_ids: torch.Tensor, **told: object) -> dict[str, torch.Tensor]:
            return {"logits": self.head(self.embed(input_ids))}

    def run(name: str, *forwards: dict[str, object]) -> dict[tuple[str, int], tuple[int, ...]]:
        model = Exact().requires_grad_(False)
        for weight in (model.embed.weight, model.head.weight):
            weight.copy_((weight * 8).round())
        recorded = record(tmp_path / name, *forwards, host=SmallHost(model))
        assert recorded.boundary("scorer.logprobs").row_count == 4
        return recorded.at("scorer.logprobs")

    whole = run("whole", {"input_ids": IDS})
    assert run("chunks", {"input_ids": IDS[:, :3]}, {"input_ids": IDS[:, 3:], "start": 3}) == whole
    assert run("steps", {"input_ids": IDS[:, :2]}, *({"input_ids": IDS[:, n : n + 1], "start": n} for n in range(2, 5))) == whole


def test_padding_and_packing_do_not_leak(tmp_path: Path) -> None:
    """The last token of a sequence is never scored by padding or by the first token of its neighbour."""
    padded = torch.tensor([[11, 12, 13, 0, 0], [0, 0, 21, 22, 23]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    recorded = record(tmp_path, {"input_ids": padded, "mask": mask})
    assert set(recorded.at("scorer.logprobs")) == {("b1.r0", 0), ("b1.r0", 1), ("b1.r1", 0), ("b1.r1", 1)}


def test_sharded_columns_are_not_scored(tmp_path: Path) -> None:
    """A slice of the vocabulary cut over no axis the host names gives no score: the boundary says so and is no absence."""
    model = SmallModel()
    host = SmallHost(model, axes=(Axis(name="tp", index=0, size=2),), world_size=2)
    host.placements = {name: Placement(80, ((0, 40),)) for name in ("lm_head", "scorer.logprobs")}
    boundary = record(tmp_path, {"input_ids": IDS}, host=host).boundary("scorer.logprobs")
    assert boundary.status is BoundaryStatus.NOT_OBSERVABLE
    assert boundary.reason == "columns are sharded in a way that no share of a score can be taken of"


def test_a_process_without_a_column_has_no_part_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one process holds all columns and another only padding, both make the trace of one process that holds all: logits
    bitwise, scores up to the rounding of their shares."""
    monkeypatch.setenv("TRACER_RUN_ID", "run")
    model = SmallModel()
    record(tmp_path / "a", {"input_ids": IDS}, host=SmallHost(model))
    for rank, span in enumerate(((0, 40), (40, 40))):
        host = SmallHost(model, axes=(Axis(name="tp", index=rank, size=2),), rank=rank, world_size=2)
        host.placements = {name: Placement(40, (span,), axis="tp") for name in ("lm_head", "scorer.logprobs")}
        folder = tmp_path / "b"
        folder.mkdir(exist_ok=True)
        with torch.no_grad(), tracer.trace(model, map=small_map(folder), host=host, out=folder / "trace", strict=True):
            model(input_ids=IDS)
    result = tracer.diff_traces(tmp_path / "a/trace", tmp_path / "b/trace")
    found = {boundary.name: boundary for boundary in result.boundaries}
    assert {name for name, boundary in found.items() if boundary.rows_differing} <= {"scorer.logprobs"}
    assert (found["lm_head"].rows_compared, found["lm_head"].copies_b) == (5, 1)
    scores = found["scorer.logprobs"]
    assert (scores.rows_compared, scores.dtype_b) == (4, "float32")
    assert scores.distance is None or (scores.distance.largest or 0) < 1e-6
    assert {finding.code.value for finding in result.findings} <= {"value-differs"}


def test_unknown_ids_are_not_scored(tmp_path: Path) -> None:
    """A process that is not given the token ids cannot score them, nor show them."""
    recorded = record(tmp_path, {"input_ids": IDS}, host=SmallHost(SmallModel(), ids_known=False))
    assert recorded.boundary("scorer.logprobs").reason == "token ids are not known in this process"
    assert recorded.boundary("input.ids").status is BoundaryStatus.NOT_OBSERVABLE


@given(st.integers(1, 9), st.integers(1, 70), st.data())
def test_a_row_scores_the_same_in_any_company(rows: int, columns: int, data: st.DataObject) -> None:
    """Whatever rows lie beside it, in whatever order, a row's score keeps its bits, and equals torch's own."""
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns)).to(torch.bfloat16)
    ids = np.array(data.draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows)))
    order = np.array(data.draw(st.permutations(range(rows))))
    whole = score_rows(logits, np.arange(rows), ids)
    assert torch.equal(whole, torch.log_softmax(logits.float(), -1)[torch.arange(rows), torch.from_numpy(ids)])
    assert torch.equal(score_rows(logits, order, ids[order]), whole[torch.from_numpy(order)])
    alone = [score_rows(logits, np.array([n]), ids[n : n + 1]) for n in range(rows)]
    assert torch.equal(torch.cat(alone), whole)


def test_many_rows_are_scored_in_blocks() -> None:
    """More rows than a block of the cache holds keep their bits, chosen rows too."""
    logits = torch.randn(70, 32768, generator=torch.Generator().manual_seed(1))
    ids = np.arange(70) * 7
    expected = torch.log_softmax(logits, -1)[torch.arange(70), torch.from_numpy(ids)]
    assert torch.equal(score_rows(logits, np.arange(70), ids), expected)
    assert torch.equal(score_rows(logits, np.arange(0, 70, 2), ids[::2]), expected[::2])


def test_an_id_outside_the_vocabulary_scores_nan() -> None:
    """A token the logits have no column for has no score."""
    assert score_rows(torch.zeros(2, 4), np.arange(2), np.array([9, 1])).isnan().tolist() == [True, False]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Last rows of sequences that never go on give way, oldest first, and are counted."""
    monkeypatch.setattr("tracer.record.next_token._WAITING_BYTES", 3 * 40 * 4)
    registry = SequenceRegistry()
    scores = NextTokenScores(registry)
    for n in range(5):
        registry.record_ids(registry.open(str(n)), 0, [1])
        scored = scores.score(torch.zeros(1, 40), Rows(np.array([n]), np.array([0])), forward=n)
        assert scored is not None
        assert len(scored.score_N) == 0
    assert scores.dropped == 2
    for n in range(5):
        registry.record_ids(n, 1, [2])
    assert [(rows.forward, rows.sequence_N.tolist()) for rows in scores.score_waiting()] == [(2, [2]), (3, [3]), (4, [4])]
    assert scores.score_waiting() == []
