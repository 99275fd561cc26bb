"""Recording a run (``tracer.trace``, ``tracer.record.capture``)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from tests.small_model import MAP, Recorded, SmallHost, SmallModel, read_back, small_map
from tests.tiny_models import FAMILIES, make_ids, make_model
from tracer.errors import CaptureError, Code, HostError, MapError, UsageError
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import BoundaryStatus, Manifest
from tracer.record.capture import Trace

IDS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def traced(folder: Path, model: nn.Module, host: SmallHost | None = None, text: str = MAP, **options: Any) -> Trace:
    """A trace of a small model into ``folder/trace``."""
    folder.mkdir(exist_ok=True)
    options = {"out": folder / "trace", "level": 2, **options}
    recording = tracer.trace(model, map=small_map(folder, text), host=host or SmallHost(model), **options)
    assert isinstance(recording, Trace)
    return recording


def record(folder: Path, model: nn.Module, *forwards: dict[str, Any], **options: Any) -> Recorded:
    """Trace these forwards and read the shard back."""
    with torch.no_grad(), traced(folder, model, **options):
        for forward in forwards:
            model(**forward)
    return read_back(folder / "trace")


BATCH = {"input_ids": IDS, "mask": MASK}


def manifest_of(folder: Path) -> Manifest:
    return read_back(folder / "trace").manifest


# ------------------------------------------------------------------------------------------- what the model computes


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_model_computes_the_same_bits(family: str, tmp_path: Path) -> None:
    """Traced with every hook there is, logits, gradients and the random state are bitwise those of a plain run."""

    def run(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor | None], torch.Tensor, int]:
        torch.manual_seed(3)
        logits = model(input_ids=make_ids(2, 9)).logits
        logits.float().square().mean().backward()
        return logits, [parameter.grad for parameter in model.parameters()], torch.get_rng_state(), torch.get_num_threads()

    plain = run(make_model(family).train().requires_grad_(True))
    model = make_model(family).train().requires_grad_(True)
    with tracer.trace(model, out=tmp_path / "trace", level=2, strict=True):
        seen = run(model)
    assert torch.equal(plain[0], seen[0])
    for before, after in zip(plain[1], seen[1], strict=True):
        assert (before is None) == (after is None)
        assert before is None or after is None or torch.equal(before, after)
    assert torch.equal(plain[2], seen[2])
    assert plain[3] == seen[3]


def test_autocast_and_inference_mode_are_left_alone(tmp_path: Path) -> None:
    """Under autocast and inference mode the outputs stay bitwise the same and are recorded in their own dtype."""
    model = SmallModel()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        plain = model(IDS)["logits"]
        with traced(tmp_path, model, strict=True):
            seen = model(IDS)["logits"]
    assert torch.equal(plain, seen)
    assert read_back(tmp_path / "trace").boundary("lm_head").dtype == "bfloat16"


def test_generation_is_recorded_step_by_step(tmp_path: Path) -> None:
    """Every decode step of ``generate`` adds rows; the tokens are those of a plain run."""
    model = make_model("qwen3_moe").eval()
    ids = make_ids(1, 5)
    plain = model.generate(ids, max_new_tokens=4, do_sample=False)
    with tracer.trace(model, out=tmp_path / "trace", level=1, strict=True):
        seen = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, seen)
    recorded = read_back(tmp_path / "trace")
    assert recorded.boundary("layers.0.attn.out").executions == 4
    assert recorded.boundary("layers.0.attn.out").row_count == 8


# ------------------------------------------------------------------------------------------- what is recorded


def test_rows_are_fingerprints_of_what_the_module_gave(tmp_path: Path) -> None:
    """Every real row of every boundary is the fingerprint of that row; padding is left out and counted."""
    model = SmallModel()
    given: dict[str, torch.Tensor] = {}
    handle = model.layer(1).mlp.register_forward_hook(lambda module, args, output: given.update(out=output.detach().clone()))
    recorded = record(tmp_path, model, BATCH)
    handle.remove()
    expected = fingerprint_rows(given["out"].reshape(10, 16).numpy(), "float32").digest_N2
    places = [("b1.r0", t) for t in range(5)] + [("b1.r1", t) for t in range(3)]
    rows = recorded.at("layers.1.mlp.out")
    assert rows == {place: tuple(int(lane) for lane in expected[n]) for n, place in enumerate(places)}
    assert recorded.ids["b1.r1"] == {0: 21, 1: 22, 2: 23}
    counts = recorded.manifest.counts
    assert (counts.forwards, counts.rows, [(skip.reason, skip.rows) for skip in counts.skipped]) == (1, 8, [("padding", 2)])
    assert all(boundary.status is BoundaryStatus.RECORDED for boundary in recorded.manifest.boundaries)
    assert recorded.boundary("lm_head").row_count == 8
    assert recorded.manifest.complete


def test_inputs_are_recorded_as_values(tmp_path: Path) -> None:
    """Ids and visibility are kept as raw integers."""
    recorded = record(tmp_path, SmallModel(), BATCH)
    assert recorded.at("input.ids")["b1.r1", 2] == (23,)
    assert recorded.at("input.visible_from")["b1.r0", 4] == (0,)


def test_parts_lie_side_by_side(tmp_path: Path) -> None:
    """Gate and up are one boundary of twice the width, counted once."""
    model = SmallModel()
    given: list[torch.Tensor] = []
    parts = (model.layer(0).mlp.gate, model.layer(0).mlp.up)
    hooks = [part.register_forward_hook(lambda module, args, output: given.append(output.clone())) for part in parts]
    recorded = record(tmp_path, model, BATCH)
    for hook in hooks:
        hook.remove()
    whole = torch.cat([value.reshape(10, -1) for value in given], dim=1)
    expected = fingerprint_rows(whole.detach().numpy(), "float32").digest_N2
    boundary = recorded.boundary("layers.0.mlp.gate_up")
    assert (boundary.width, boundary.executions, boundary.row_count) == (64, 1, 8)
    assert recorded.at("layers.0.mlp.gate_up")["b1.r0", 3] == tuple(int(lane) for lane in expected[3])


def test_a_buffer_reused_after_the_hook_does_not_matter(tmp_path: Path) -> None:
    """The fingerprint is taken in the hook: what happens to the buffer afterwards is not seen."""
    plain = record(tmp_path / "a", SmallModel(), BATCH)
    model = SmallModel()
    for n in range(2):
        model.layer(n).reuses_buffers = True
    assert record(tmp_path / "b", model, BATCH).rows == plain.rows


def test_each_forward_adds_its_rows(tmp_path: Path) -> None:
    """Two forwards are two executions; a continued sequence keeps its label and goes on counting positions."""
    recorded = record(
        tmp_path, SmallModel(), {"input_ids": IDS[:1, :3]}, {"input_ids": IDS[:1, 3:], "start": 3}, {"input_ids": IDS[1:, :3]}
    )
    rows = recorded.rows["layers.0.attn.out"]
    assert [key[:3] for key in rows] == [
        *(("b1.r0", t, 0) for t in range(3)),
        *(("b1.r0", t, 1) for t in (3, 4)),
        *(("b2.r0", t, 2) for t in range(3)),
    ]
    assert recorded.boundary("layers.0.attn.out").executions == 3


def test_an_empty_forward_is_an_execution(tmp_path: Path) -> None:
    """A process whose batch has no tokens counts its executions, has no rows, and is not vacuous."""
    recorded = record(tmp_path, SmallModel(), {"input_ids": torch.zeros((0, 4), dtype=torch.int64)})
    boundary = recorded.boundary("layers.0.residual")
    assert (boundary.status, boundary.executions, boundary.row_count, boundary.width) == (BoundaryStatus.RECORDED, 1, 0, 16)


def test_levels_and_globs_choose(tmp_path: Path) -> None:
    """Level 0 leaves the finer boundaries out, with the reason; globs choose instead of a level."""
    coarse = record(tmp_path / "a", SmallModel(), BATCH, level=0)
    assert coarse.boundary("layers.0.attn.out").status is BoundaryStatus.NOT_SELECTED
    assert set(coarse.rows) == {"input.ids", "input.visible_from", "embedding", "layers.0.residual", "layers.1.residual", "lm_head"}
    chosen = record(tmp_path / "b", SmallModel(), BATCH, boundaries="layers.1.mlp.*")
    assert set(chosen.rows) == {"input.ids", "input.visible_from", "layers.1.mlp.gate_up", "layers.1.mlp.out"}


def test_chosen_positions_only(tmp_path: Path) -> None:
    """``tokens=`` keeps positions of every sequence; the others are declared not computed, and ids stay complete."""
    for number, tokens in enumerate((slice(1, 4, 2), range(1, 4, 2), [3, 1])):
        recorded = record(tmp_path / str(number), SmallModel(), BATCH, tokens=tokens)
        for rows in recorded.rows.values():
            assert {position for _, position, _, _ in rows} <= {1, 3}
        assert recorded.boundary("layers.0.mlp.out").row_count == 3
        declared = {entry.sequence: (entry.positions, entry.reason) for entry in recorded.manifest.not_computed}
        assert declared["b1.r0"] == (((0, 1), (2, 3), (4, 5)), "outside tokens=")
        assert len(recorded.ids["b1.r0"]) == 5
        assert all(boundary.status is BoundaryStatus.RECORDED for boundary in recorded.manifest.boundaries)


def test_requests_name_the_next_forward(tmp_path: Path) -> None:
    """Names go to the sequences of the next forward in batch order; what nobody took is noted."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model) as t:
        t.requests(["step7-p0", "step7-p1"])
        model(**BATCH)
        model(**BATCH)
        t.requests(["late"])
    shard = read_back(tmp_path / "trace")
    assert [note.code for note in shard.manifest.notes] == ["requests-unused"]
    assert "late" in shard.manifest.notes[0].text


def test_policies_mark_what_follows(tmp_path: Path) -> None:
    """A policy version holds from the forward that comes next."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model) as t:
        t.policy("step-7")
        model(IDS)
        t.policy(8)
    marks = [(mark.forward, mark.version) for mark in manifest_of(tmp_path).policies]
    assert marks == [(0, "step-7"), (1, "8")]


@pytest.mark.parametrize(
    "given",
    [[0, 2, 5], torch.tensor([0, 2, 5]), [[2, 3]], lambda args, kwargs: [[2, 3]]],
    ids=["boundaries", "tensor", "lengths", "function"],
)
def test_the_user_says_where_documents_begin(given: Any, tmp_path: Path) -> None:
    """``sequences=`` is cu_seqlens, document lengths per row, or a function of the call."""
    recorded = record(tmp_path, SmallModel(), {"input_ids": IDS[:1]}, sequences=given)
    assert recorded.ids == {"b1.r0": {0: 11, 1: 12}, "b1.r1": {0: 13, 1: 14, 2: 15}}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([0, 2, 5], "expected documents of 2 batch rows; found documents of 1"),
        ([[5], [2, 4]], "batch row 1; expected documents of 5 tokens in all; found 2 + 4 = 6"),
        (lambda args, kwargs: 5, "does not say where documents begin"),
        (lambda args: [[5], [5]], "the function sequences= failed; found TypeError"),
    ],
    ids=["rows", "tokens", "result", "function"],
)
def test_documents_that_do_not_fit_stop_the_recording(given: Any, reason: str, tmp_path: Path) -> None:
    """A ``sequences=`` that a forward shows to be wrong makes the trace incomplete, with both numbers, and the run goes on."""
    recorded = record(tmp_path, SmallModel(), {"input_ids": IDS}, sequences=given)
    assert "[bad-argument]" in recorded.manifest.incomplete_reason
    assert reason in recorded.manifest.incomplete_reason


# ------------------------------------------------------------------------------------------- recorded by hand


def test_a_boundary_computed_outside_is_added(tmp_path: Path) -> None:
    """``t.record`` adds rows of any shape under any name, by request or label, at given positions."""
    model = SmallModel()
    values = torch.randn(3, 2, 4)
    with torch.no_grad(), traced(tmp_path, model) as t:
        t.requests(["p0", "p1"])
        model(**BATCH)
        t.record("value_head", values, sequence="p1")
        t.record("value_head", values[:1].numpy(), sequence="b1.r0", positions=[4])
    recorded = read_back(tmp_path / "trace")
    expected = fingerprint_rows(values.reshape(3, 8).numpy(), "float32").digest_N2
    assert recorded.at("value_head")["b1.r1", 2] == tuple(int(lane) for lane in expected[2])
    assert recorded.at("value_head")["b1.r0", 4] == tuple(int(lane) for lane in expected[0])
    boundary = recorded.boundary("value_head")
    assert (boundary.source, boundary.row_count, boundary.width) == ("recorded by hand", 4, 8)


def test_scores_recorded_by_hand_replace_derived_ones(tmp_path: Path) -> None:
    """The user's own log probabilities, given before the second forward begins, are the only ones recorded."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model) as t:
        for number in range(2):
            model(input_ids=IDS[:1])
            t.record("scorer.logprobs", torch.full((4,), -1.0), sequence=f"b{number + 1}.r0")
    recorded = read_back(tmp_path / "trace")
    assert len(set(recorded.rows["scorer.logprobs"].values())) == 1
    assert recorded.boundary("scorer.logprobs").row_count == 8
    with torch.no_grad(), traced(tmp_path / "late", model) as t:
        model(input_ids=IDS[:1])
        model(input_ids=IDS[:1])
        with pytest.raises(UsageError, match="recorded already"):
            t.record("scorer.logprobs", torch.full((4,), -1.0), sequence="b1.r0")


def test_wrong_rows_by_hand_are_refused(tmp_path: Path) -> None:
    """Unknown sequence, wrong positions, no rows, a boundary that hooks record, a trace that is over: typed errors."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model) as t:
        with pytest.raises(UsageError, match="needs to know the sequence"):
            t.record("value_head", torch.zeros(3))
        model(**BATCH)
        for arguments in (
            {"tensor": torch.zeros(3), "sequence": "p9"},
            {"tensor": torch.zeros(3)},
            {"tensor": torch.zeros(3), "sequence": "b1.r0", "positions": [0, 1]},
            {"tensor": torch.tensor(1.0), "sequence": "b1.r0"},
        ):
            with pytest.raises(UsageError):
                t.record("value_head", **arguments)
        with pytest.raises(UsageError, match="recorded already"):
            t.record("embedding", torch.zeros(5, 16), sequence="b1.r0")
    with pytest.raises(UsageError, match="not recording"):
        t.record("value_head", torch.zeros(3), sequence="b1.r0")
    assert manifest_of(tmp_path).complete


# ------------------------------------------------------------------------------------------- hooks


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_gone_after_any_exit(tmp_path: Path) -> None:
    """Whatever ends the block, no hook is left: normal exit, an exception, an interrupt."""
    model = SmallModel()
    for number, error in enumerate((None, ValueError("x"), KeyboardInterrupt())):
        with pytest.raises(type(error)) if error else _nothing(), traced(tmp_path / str(number), model):
            assert hooks_of(model) > 0
            model(IDS)
            if error:
                raise error
        assert hooks_of(model) == 0


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_a_failing_setup_leaves_nothing(tmp_path: Path) -> None:
    """When installing taps fails after hooks went on, the hooks come off, the writer stops and no shard folder stays."""

    class NoTaps(SmallHost):
        def taps(self, sources: Any, sink: Any) -> Any:
            raise MapError(Code.MAP_UNFIT, "no such tap")

    model = SmallModel()
    with pytest.raises(MapError), traced(tmp_path, model, NoTaps(model)):
        pass
    assert hooks_of(model) == 0
    assert not (tmp_path / "trace").exists()


def test_two_traces_watch_one_model(tmp_path: Path) -> None:
    """Nested traces both record the same rows; leaving the inner one leaves the outer one's hooks alone."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path / "outer", model):
        with traced(tmp_path / "inner", model):
            model(**BATCH)
        model(**BATCH)
    outer, inner = read_back(tmp_path / "outer" / "trace"), read_back(tmp_path / "inner" / "trace")
    assert outer.boundary("embedding").executions == 2
    assert inner.boundary("embedding").executions == 1
    assert inner.at("lm_head").items() <= outer.at("lm_head").items()
    assert hooks_of(model) == 0


def test_a_trace_is_entered_once(tmp_path: Path) -> None:
    """Entering a trace again, inside or after, is an error; what was recorded stays."""
    model = SmallModel()
    recording = traced(tmp_path, model)
    with torch.no_grad(), recording:
        with pytest.raises(UsageError, match="entered once"):
            recording.__enter__()
        model(IDS)
    with pytest.raises(UsageError, match="entered once"):
        recording.__enter__()
    assert manifest_of(tmp_path).complete


def test_a_call_inside_a_call_is_one_forward(tmp_path: Path) -> None:
    """A root module that calls itself is one forward, with further uses of its modules."""

    class Twice(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return self(input_ids, again=True) if not kwargs else super().forward(input_ids)

    recorded = record(tmp_path, Twice(), {"input_ids": IDS})
    assert (recorded.manifest.counts.forwards, recorded.boundary("embedding").executions) == (1, 1)


def test_modules_used_again_are_told_apart(tmp_path: Path) -> None:
    """A module called twice in one forward gives two occurrences."""

    class Loop(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            self.embed(input_ids)
            return super().forward(input_ids)

    recorded = record(tmp_path, Loop(), {"input_ids": IDS})
    assert sorted(block.occurrence for block in recorded.blocks if block.boundary == "embedding") == [0, 1]


def test_shared_modules_are_told_apart_by_call(tmp_path: Path) -> None:
    """One module object at two paths gives its first call to the first path and its second to the second."""
    model = SmallModel()
    model.layer(1).mlp = model.layer(0).mlp
    shared = record(tmp_path / "a", model, BATCH)
    copied = SmallModel()
    copied.layer(1).mlp.load_state_dict(copied.layer(0).mlp.state_dict())
    assert shared.rows == record(tmp_path / "b", copied, BATCH).rows
    assert {block.occurrence for block in shared.blocks} == {0}


def test_calls_outside_a_forward_are_counted(tmp_path: Path) -> None:
    """A watched module that the user calls by hand is no part of a forward: noted, not recorded."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model):
        model(IDS)
        model.head(torch.zeros(1, 2, 16))
    recorded = read_back(tmp_path / "trace")
    assert recorded.boundary("lm_head").executions == 1
    assert [(note.code, note.text.split()[0]) for note in recorded.manifest.notes] == [("outside-forward", "1")]


def test_skipped_forwards_are_counted(tmp_path: Path) -> None:
    """A forward that the host calls no part of the run is counted under its reason; with no other one all is vacuous."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model, SmallHost(model, skip="warm-up")):
        model(IDS)
    manifest = manifest_of(tmp_path)
    assert [(skip.reason, skip.forwards) for skip in manifest.counts.skipped] == [("warm-up", 1)]
    verdicts = {(boundary.status, boundary.reason) for boundary in manifest.boundaries}
    assert verdicts == {(BoundaryStatus.VACUOUS, "no forward ran: 1 skipped: warm-up")}


# ------------------------------------------------------------------------------------------- vacuous boundaries


def test_a_trace_without_a_forward_is_vacuous(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the model never ran, no boundary passes, and the end says so."""
    with traced(tmp_path, SmallModel()):
        pass
    (reason,) = {boundary.reason for boundary in manifest_of(tmp_path).boundaries}
    assert reason.startswith("no forward ran: nothing called model(...); torch.compile(model)(...) is no such call")
    count = len(manifest_of(tmp_path).boundaries)
    said = f"proves nothing at input.ids (and {count - 1} more): {reason}\n"
    assert capsys.readouterr().err == f"tracer: {tmp_path / 'trace'} {said}"


def test_a_model_whose_call_is_gone_around_is_vacuous(tmp_path: Path) -> None:
    """``model.forward(...)`` or a part of the model runs modules but no forward: the reason counts them and says what to call."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model):
        model.forward(**BATCH)
    (reason,) = {boundary.reason for boundary in manifest_of(tmp_path).boundaries if boundary.name == "embedding"}
    assert "call model(...), not model.forward(...) or a part like model.model(...)" in reason


def test_a_module_that_never_ran_is_vacuous(tmp_path: Path) -> None:
    """A selected boundary whose module is not called has 0 executions, with the cause where the host knows it."""

    class Skipping(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return {"logits": self.head(self.layers[0](self.embed(input_ids)))}

    model = Skipping()
    with torch.no_grad(), traced(tmp_path, model, SmallHost(model, compiled="layers.1 is compiled")):
        model(IDS)
    boundary = read_back(tmp_path / "trace").boundary("layers.1.mlp.out")
    assert (boundary.status, boundary.reason) == (BoundaryStatus.VACUOUS, "0 executions: layers.1 is compiled")


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo's own
@pytest.mark.parametrize("warm", [True, False], ids=["before", "inside"])
def test_a_compiled_region_is_vacuous_and_computes_the_same(warm: bool, tmp_path: Path) -> None:
    """A block that was compiled before runs no late hooks; one that is compiled inside sees hooks that do nothing."""
    torch._dynamo.reset()
    model = SmallModel()
    with torch.no_grad():
        plain = model(IDS)["logits"]
        model.layer(1).compile(backend="eager", fullgraph=True)
        if warm:
            model(IDS)
        with traced(tmp_path, model):
            assert torch.equal(model(IDS)["logits"], plain)
            assert torch.equal(model(IDS)["logits"], plain)
    recorded = read_back(tmp_path / "trace")
    assert recorded.boundary("layers.0.mlp.out").executions == 2
    assert recorded.boundary("layers.1.mlp.out").reason == "0 executions"


def test_missing_rows_are_vacuous_unless_declared(tmp_path: Path) -> None:
    """A boundary that shows fewer rows than the forward is vacuous, by number and first row, unless the host declared them."""
    from tracer.format.schema import NotComputed
    from tracer.record.host import Rows

    class Shorter(SmallHost):
        def leaf_rows(self, forward: Any, source: Any, row_shape: tuple[int, ...]) -> Any:
            rows = super().leaf_rows(forward, source, row_shape)
            if source.boundary != "layers.0.mlp.out" or rows is None:
                return rows
            return Rows(np.where(rows.position_N == 4, -1, rows.sequence_N), rows.position_N)

    for number, declared in enumerate(([], [NotComputed(sequence="b1.r0", positions=((4, 5),), reason="pruned")])):
        model = SmallModel()
        with torch.no_grad(), traced(tmp_path / str(number), model, Shorter(model, declared=declared)):
            model(**BATCH)
    boundary = read_back(tmp_path / "0" / "trace").boundary("layers.0.mlp.out")
    assert (boundary.status, boundary.reason) == (BoundaryStatus.VACUOUS, "1 rows fewer than the forwards had, first b1.r0:4")
    assert read_back(tmp_path / "1" / "trace").boundary("layers.0.mlp.out").status is BoundaryStatus.RECORDED


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        ('{module: "layers.{layer}.attn", leaf: "output[1]", layout: b s c}', "leaf is None"),
        ('{module: "layers.{layer}.attn", leaf: "output[7]", layout: b s c}', "no such leaf"),
        ('{module: "layers.{layer}.attn", leaf: output, layout: b s c}', "leaf is a tuple, not a tensor"),
        ('{module: "layers.{layer}.attn", leaf: "output[0]", layout: t c}', "layout `t c` does not fit layers.0.attn.out"),
        ('{module: "layers.{layer}.attn", leaf: "output[0]", layout: b s (h d), sizes: {h: 5}}', "found shape [2, 5, 16]"),
        (
            '{module: "layers.{layer}.attn", leaf: "output[0]", layout: b s c, select: "0:3", split: ["layers.{layer}.attn.out", lm_head]}',
            "packed leaf of layers.0.attn.out does not split",
        ),
    ],
)
def test_what_cannot_be_read_is_vacuous_and_the_run_goes_on(binding: str, reason: str, tmp_path: Path) -> None:
    """A leaf or layout that does not fit spoils its boundary only, with the reason; every other boundary is recorded."""
    text = MAP.replace('{module: "layers.{layer}.attn", leaf: "output[0]", layout: b s c}', binding)
    with torch.no_grad(), traced(tmp_path, model := SmallModel(), text=text):
        model(**BATCH)
    recorded = read_back(tmp_path / "trace")
    boundary = recorded.boundary("layers.0.attn.out")
    assert boundary.status is BoundaryStatus.VACUOUS
    assert reason in boundary.reason
    assert "(1 of 1 executions)" in boundary.reason
    assert recorded.boundary("layers.0.mlp.out").status is BoundaryStatus.RECORDED
    assert recorded.manifest.complete
    assert "boundary-unreadable" in {note.code for note in recorded.manifest.notes}


def test_an_axis_nobody_explains_is_vacuous(tmp_path: Path) -> None:
    """A MapError of the host's placement spoils its boundary, by axis and size."""

    class Silent(SmallHost):
        def placement(self, source: Any, columns: int, leaf: torch.Tensor) -> Any:
            if source.boundary == "lm_head":
                raise MapError(Code.MAP_AXIS, "lm_head is cut over tp (size 2) and the map does not say how")
            return super().placement(source, columns, leaf)

    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model, Silent(model)):
        model(IDS)
    boundary = read_back(tmp_path / "trace").boundary("lm_head")
    assert boundary.reason.startswith("[map-axis] lm_head is cut over tp (size 2)")


# ------------------------------------------------------------------------------------------- failures


def test_a_map_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """An unresolved selected boundary says how many resolved; no folder is made and no hook installed."""
    model = SmallModel()
    text = MAP.replace('{module: "layers.{layer}.mlp", layout: b s c}', '{module: "layers.{layer}.feed", layout: b s c}')
    with pytest.raises(MapError, match="boundaries resolved") as caught, traced(tmp_path, model, text=text):
        pass
    assert caught.value.code is Code.MAP_UNFIT
    assert not (tmp_path / "trace").exists()
    assert hooks_of(model) == 0


def test_nothing_existing_is_overwritten(tmp_path: Path) -> None:
    """A folder that holds a trace is refused before anything runs, and stays as it is."""
    record(tmp_path, SmallModel(), BATCH)
    before = (tmp_path / "trace" / "shard-00000" / "manifest.json").read_bytes()
    model = SmallModel()
    with pytest.raises(UsageError) as caught, traced(tmp_path, model):
        pass
    assert caught.value.code is Code.OUT_IN_USE
    assert (tmp_path / "trace" / "shard-00000" / "manifest.json").read_bytes() == before
    assert hooks_of(model) == 0


def test_an_unknown_model_is_refused() -> None:
    """What no host claims is a typed error."""
    with pytest.raises(HostError):
        tracer.trace(nn.Linear(2, 2))


def test_a_failure_of_ours_never_breaks_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception inside the tracer stops the recording; outputs are the same, the trace is incomplete and says why."""

    class Broken(SmallHost):
        def finish_forward(self, forward: Any, output: Any) -> None:
            raise RuntimeError("a bug of ours")

    model = SmallModel()
    with torch.no_grad():
        plain = model(IDS)["logits"]
        with traced(tmp_path, model, Broken(model)):
            assert torch.equal(model(IDS)["logits"], plain)
            assert torch.equal(model(IDS)["logits"], plain)
    manifest = manifest_of(tmp_path)
    assert not manifest.complete
    assert manifest.incomplete_reason == "recording failed: RuntimeError: a bug of ours"
    assert manifest.counts.forwards == 1
    assert "is incomplete: recording failed: RuntimeError: a bug of ours" in capsys.readouterr().err


def test_strict_raises(tmp_path: Path) -> None:
    """With ``strict`` a failure of the tracer comes out of the traced program as CaptureError."""

    class Broken(SmallHost):
        def begin_forward(self, *arguments: Any) -> Any:
            raise RuntimeError("a bug of ours")

    model = SmallModel()
    with pytest.raises(CaptureError, match="a bug of ours"), traced(tmp_path, model, Broken(model), strict=True):
        model(IDS)
    assert not manifest_of(tmp_path).complete


def test_an_exception_in_the_model_makes_the_trace_incomplete(tmp_path: Path) -> None:
    """The model's own exception passes through; what was recorded is committed as incomplete."""

    class Failing(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            self.embed(input_ids)
            raise ZeroDivisionError("the model's")

    model = Failing()
    with pytest.raises(ZeroDivisionError), traced(tmp_path, model):
        model(IDS)
    recorded = read_back(tmp_path / "trace")
    assert recorded.manifest.incomplete_reason == "forward 0 raised ZeroDivisionError: the model's"
    assert recorded.boundary("embedding").row_count == 10


def test_a_caught_exception_ends_only_its_forward(tmp_path: Path) -> None:
    """A forward that failed and was retried leaves the trace incomplete; the retry is recorded as the next forward."""

    class Sometimes(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if "fail" in kwargs:
                raise kwargs["fail"]
            return super().forward(input_ids)

    model = Sometimes()
    with torch.no_grad(), traced(tmp_path, model):
        for error in (ValueError("out of memory"), KeyboardInterrupt()):
            try:
                model(IDS, fail=error)
            except (ValueError, KeyboardInterrupt):
                model(IDS)
    recorded = read_back(tmp_path / "trace")
    assert recorded.manifest.incomplete_reason.startswith("forward 0 raised ValueError")
    assert {key[2] for key in recorded.rows["lm_head"]} == {1, 3}


def test_an_interrupted_forward_makes_the_trace_incomplete(tmp_path: Path) -> None:
    """A KeyboardInterrupt that the program catches leaves half a forward, whether another one follows or not."""

    class Interrupted(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            output = super().forward(input_ids)
            if "stop" in kwargs:
                raise KeyboardInterrupt
            return output

    for more in (0, 1):
        model = Interrupted()
        with torch.no_grad(), traced(tmp_path / str(more), model):
            model(IDS)
            with suppress(KeyboardInterrupt):
                model(IDS, stop=True)
            for _ in range(more):
                model(IDS)
        manifest = manifest_of(tmp_path / str(more))
        assert (manifest.complete, manifest.incomplete_reason) == (False, "forward 1 was interrupted")


def test_any_thread_may_run_the_model_but_one_at_a_time(tmp_path: Path) -> None:
    """Forwards of other threads are recorded; two at once stop the recording before a row is taken for another's."""

    class Meeting(SmallModel):
        barrier: threading.Barrier | None = None

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if self.barrier is not None:
                self.barrier.wait(10)
            return super().forward(input_ids)

    def in_threads(model: nn.Module, count: int) -> None:
        threads = [threading.Thread(target=model, kwargs={"input_ids": IDS + n}) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    model = Meeting()
    with traced(tmp_path / "one", model):
        in_threads(model, 1)
        in_threads(model, 1)
    manifest = manifest_of(tmp_path / "one")
    assert (manifest.complete, manifest.counts.forwards) == (True, 2)
    with traced(tmp_path / "two", model):
        model.barrier = threading.Barrier(2)
        in_threads(model, 2)
    manifest = manifest_of(tmp_path / "two")
    assert manifest.incomplete_reason.startswith("two threads ran the model at once")
    assert manifest.counts.forwards == 1


def test_a_module_that_another_thread_calls_is_no_part_of_a_forward(tmp_path: Path) -> None:
    """A watched module called beside the forward from another thread is counted, and its rows are nobody's."""

    class Helped(SmallModel):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            helper = threading.Thread(target=self.layer(0).mlp, args=(torch.zeros(2, 5, 16),))
            helper.start()
            helper.join()
            return super().forward(input_ids)

    recorded = record(tmp_path, Helped(), BATCH)
    assert [note.code for note in recorded.manifest.notes] == ["other-thread"]
    assert recorded.rows == record(tmp_path / "plain", SmallModel(), BATCH).rows


def test_an_exception_beside_the_model_makes_the_trace_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ends the block early is named in the manifest; stderr, where its own text follows, has its kind only."""

    def run() -> None:
        with traced(tmp_path, model := SmallModel()):
            model(IDS)
            raise KeyError("lost")

    with pytest.raises(KeyError):
        run()
    assert manifest_of(tmp_path).incomplete_reason == "the traced program raised KeyError: 'lost'"
    assert capsys.readouterr().err == f"tracer: {tmp_path / 'trace'} is incomplete: the traced program raised KeyError\n"


def test_a_folder_that_vanishes_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When nothing can be written the run goes on, and the end says that the trace is lost."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model):
        model(IDS)
        shutil.rmtree(tmp_path / "trace")
    assert "could not be committed" in capsys.readouterr().err


KILLED = """
import os, signal, sys
import torch
from pathlib import Path
from tests.small_model import SmallHost, SmallModel, small_map
import tracer
folder = Path(sys.argv[1])
model = SmallModel()
with tracer.trace(model, map=small_map(folder), host=SmallHost(model), out=folder / "trace", level=2) as t:
    model(torch.tensor([[11, 12, 13]]))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_an_uncommitted_shard(tmp_path: Path) -> None:
    """A process that dies while recording leaves a shard folder without a manifest."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, env=environment, check=False)
    assert child.returncode == -signal.SIGKILL
    shard = tmp_path / "trace" / "shard-00000"
    assert shard.is_dir()
    assert not (shard / "manifest.json").exists()


def test_a_forked_copy_is_not_recorded(tmp_path: Path) -> None:
    """A child forked while recording has no writer: it runs the model untouched, ends its copy of the block, writes nothing."""
    model = SmallModel()
    with torch.no_grad(), traced(tmp_path, model) as t:
        child = os.fork()
        if child == 0:
            for _ in range(2):
                model(IDS[:1, :1])
            t.stop()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model(IDS)
    manifest = manifest_of(tmp_path)
    assert manifest.complete
    assert manifest.counts.forwards == 1


# ------------------------------------------------------------------------------------------- the manifest


def test_the_manifest_describes_the_run(tmp_path: Path) -> None:
    """Host, map, level, weights, conditions: a reader needs neither the model nor the machine."""
    recorded = record(tmp_path, SmallModel(), BATCH, level=1)
    manifest = recorded.manifest
    assert (manifest.host, manifest.map.family, manifest.map.root_class, manifest.level) == ("small", "small", "SmallModel", 1)
    assert (manifest.tracer, manifest.rank, manifest.world_size) == (tracer.__version__, 0, 1)
    assert (manifest.weights_mode, manifest.weights_after) == ("digest", "equal")
    assert "other.embed.weight" in {weight.name for weight in manifest.weights}
    assert manifest.conditions["optimizer_steps"] == 0


def test_weights_that_move_are_noticed(tmp_path: Path) -> None:
    """An optimizer step while recording is counted, and the weights are compared with those at entry."""
    model = SmallModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traced(tmp_path, model):
        model(IDS)["logits"].sum().backward()
        optimizer.step()
    manifest = manifest_of(tmp_path)
    assert (manifest.conditions["optimizer_steps"], manifest.weights_after) == (1, "changed")


def test_weights_may_be_left_out_or_kept_by_row(tmp_path: Path) -> None:
    """``weights=False`` takes none; ``"rows"`` keeps a fingerprint of every row; anything else is refused."""
    assert record(tmp_path / "a", SmallModel(), BATCH, weights=False).manifest.weights == ()
    rows = record(tmp_path / "b", SmallModel(), BATCH, weights="rows").manifest
    assert rows.weights_file is not None
    assert rows.weights_file.rows == sum(weight.rows for weight in rows.weights)
    with pytest.raises(UsageError):
        traced(tmp_path / "c", SmallModel(), weights="all")


def test_the_environment_names_run_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``TRACER_OUT`` and ``TRACER_RUN_ID`` override; a folder nobody named is printed at exit, a named one is not."""
    monkeypatch.chdir(tmp_path)
    model = SmallModel()
    monkeypatch.setenv("TRACER_RUN_ID", "run-7")
    with traced(tmp_path, model, out=None) as t:
        pass
    assert t.path.parent == Path("traces")
    assert t.path.name.endswith("-small-run-7")
    assert f"tracer: wrote {t.path}" in capsys.readouterr().err
    monkeypatch.setenv("TRACER_OUT", str(tmp_path / "elsewhere"))
    with traced(tmp_path, model) as t:
        model(IDS)
    assert t.path == tmp_path / "elsewhere"
    assert read_back(t.path).manifest.run_id == "run-7"
    assert capsys.readouterr().err == ""
