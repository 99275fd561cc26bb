"""Bytes, the same input and the same experts, between the engine and transformers, both ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests.cli_runs import run_tracer
from tests.vllm.conftest import Build, Checkpoint
from tests.vllm.engines import Trainer, generate, whole
from tracer.errors import Code, UsageError
from tracer.read.dumped import read_dumps
from tracer.read.findings import DiffResult

pytestmark = pytest.mark.xdist_group("engine")

CHOICES = "*.moe.topk_ids"
BLOCK_INPUTS = ["embedding", "layers.*.residual"]


@dataclass(frozen=True)
class Sides:
    """The trainer with a planted scale in layer 1, and the engine; both with the inputs of their blocks."""

    folder: Path
    llm: Any
    tokens: list[list[int]]
    trainer: Trainer
    checkpoint: Path

    @property
    def a(self) -> Path:
        return self.folder / "a"

    @property
    def b(self) -> Path:
        return self.folder / "b"

    def train(self, name: str, *faults: str, **options: Any) -> Path:
        """Another trace of the trainer."""
        given = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
        return self.trainer.trace(self.checkpoint, "bfloat16", self.tokens, self.folder / name, *(faults or ("scale",)), **given)

    def roll(self, name: str, llm: Any = None, **options: Any) -> Path:
        """Another trace of the engine, on the trainer's tokens as prompts: what it samples under an intervention is another run's."""
        engine = llm or self.llm
        with tracer.trace(engine, out=self.folder / name, level=2, strict=True, **options):
            generate(engine, self.tokens, 1, prompt_logprobs=1)
        return self.folder / name


@pytest.fixture(scope="module")
def sides(engine: Build, trainer: Trainer, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """Both sides, traced once."""
    folder, llm = tmp_path_factory.mktemp("evidence"), engine("Qwen3Moe", "bfloat16")
    with tracer.trace(llm, out=folder / "b", level=2, strict=True, dump=BLOCK_INPUTS):
        tokens = whole(generate(llm, prompt_logprobs=1))
    made = Sides(folder, llm, tokens, trainer, checkpoint("Qwen3Moe", "bfloat16"))
    made.train("a", dump=BLOCK_INPUTS)
    return made


def roots(result: DiffResult) -> set[str]:
    return {root.place.boundary for root in result.roots}


def test_a_plan_saves_the_same_rows_on_both_sides(sides: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of the pair makes trainer and engine save the first divergence and its input; the digests are those of the first run,
    and the table shows equal inputs and a small error at the output."""
    plan = sides.folder / "plan.json"
    assert run_tracer("diff", sides.a, sides.b, "--plan", plan) == 1
    a, b = sides.train("a-planned", plan=plan), sides.folder / "b-planned"
    with tracer.trace(sides.llm, out=b, level=2, strict=True, plan=plan):
        generate(sides.llm, prompt_logprobs=1)
    result = tracer.diff_traces(a, b)
    assert not [finding for finding in result.findings if finding.code == "not-reproducible"]
    assert [(line.boundary, line.role, line.rows_differing) for line in result.dumps] == [
        ("layers.0.attn.q_norm", "input", 0),
        ("layers.0.attn.q_rope", "output", 30),
    ]
    assert 0 < (result.dumps[1].relative_l2 or 0) < 0.01
    assert run_tracer("diff", a, b) == 1
    assert "layers.0.attn.q_rope  output  30 of 33 differ" in capsys.readouterr().out


def test_each_side_is_held_against_the_other_while_it_runs(sides: Sides) -> None:
    """``against`` finds the first divergence in one run of either side, and saves it with its input."""
    for path in (sides.train("a-against", against=sides.b), sides.roll("b-against", against=sides.a)):
        saved = read_dumps(tracer.open_trace(path))
        assert list(saved.boundaries) == ["layers.0.attn.q_norm", "layers.0.attn.q_rope"]
        assert len(saved.boundaries["layers.0.attn.q_rope"]) >= 30


def test_the_trainer_is_fed_with_the_engines_inputs(sides: Sides) -> None:
    """Every block of the trainer starts from what the engine's had: both layers show the engine's own rounding, and only the layer
    with the wrong scale an error behind attention; last sampled tokens, which the engine never computed, keep their own."""
    fed = sides.train("a-fed", feed=sides.b)
    result = tracer.diff_traces(fed, sides.b)
    assert {"layers.0.attn.q_rope", "layers.1.attn.norm"} <= roots(result)
    size = {entry.name: entry.distance.largest or 0.0 for entry in result.boundaries if entry.distance}
    assert size["layers.0.attn.out"] < 0.03 < 0.08 < size["layers.1.attn.out"]
    told = tracer.open_trace(fed).manifest.interventions[0]
    assert told.endswith("(3 rows that the other side never computed keep their own)")
    assert "INTERVENTION" in result.headline


def test_the_engine_is_fed_with_the_trainers_inputs(sides: Sides, engine: Build) -> None:
    """The same the other way, in one prefill and in chunks of eight rows, which give the same bits."""
    fed = sides.roll("b-fed", feed=sides.a)
    size = {entry.name: entry.distance.largest or 0.0 for entry in tracer.diff_traces(sides.a, fed).boundaries if entry.distance}
    assert size["layers.0.attn.out"] < 0.03 < 0.08 < size["layers.1.attn.out"]
    chunked = sides.roll("b-fed-chunked", engine("Qwen3Moe", "bfloat16", max_num_batched_tokens=8), feed=sides.a)
    result = tracer.diff_traces(fed, chunked)
    assert result.counts.rows_differing == 0
    assert result.counts.rows_compared > 1000


def test_a_refusal_in_a_step_leaves_the_engine_working(sides: Sides) -> None:
    """An engine that samples another token under an intervention has no values for it: the step goes on with its own, the trace is
    incomplete, leaving raises the refusal with what to do, and the engine generates what it did before."""
    with (
        pytest.raises(UsageError, match="does not have all of its tokens") as caught,
        tracer.trace(sides.llm, out=sides.folder / "refused", level=2, feed=sides.a),
    ):
        generate(sides.llm, [[*ids[:-1], 7] for ids in sides.tokens], 2)
    assert caught.value.code is Code.INTERVENTION_REFUSED
    assert "max_tokens=1" in caught.value.remedy
    assert tracer.open_trace(sides.folder / "refused").findings[0].code.value == "trace-incomplete"
    assert whole(generate(sides.llm)) == sides.tokens


def test_an_engine_with_a_prefix_cache_is_not_changed(sides: Sides, engine: Build) -> None:
    """What an intervention computes would stay in the cache: refused before anything runs."""
    llm = engine(enable_prefix_caching=True, block_size=32)
    for options in ({"feed": sides.a}, {"pin": {CHOICES: sides.a}}, {"perturb_ulps": 1}):
        with pytest.raises(UsageError, match="remembers") as caught, tracer.trace(llm, out=sides.folder / "cached", **options):
            raise AssertionError("entered")
        assert caught.value.found == "enable_prefix_caching=True"
    assert not (sides.folder / "cached").exists()


def test_experts_are_pinned_both_ways(sides: Sides) -> None:
    """The trainer holds to the engine's experts, and the engine to the trainer's, as in rollout routing replay: no choice differs
    any more where many did."""
    a = sides.train("a-router", "router")

    def flipped(one: Path, other: Path) -> int:
        result = tracer.diff_traces(one, other)
        return sum(entry.rows_differing for entry in result.boundaries if entry.name.endswith("topk_ids"))

    assert flipped(a, sides.b) > 5
    pinned = sides.train("a-pinned", "router", pin={CHOICES: str(sides.b)}), sides.roll("b-pinned", pin={CHOICES: a})
    assert flipped(pinned[0], sides.b) == 0
    assert flipped(a, pinned[1]) == 0
    for path in pinned:
        told = tracer.open_trace(path).manifest.interventions[0]
        assert told.startswith(f"pin {CHOICES}=")
        assert "(0 choices" not in told


def test_a_nudged_engine_is_a_floor_for_the_pair(sides: Sides) -> None:
    """With how far one unit in the last place of its embedding carries in the engine, the first divergence above rounding is the
    layer with the wrong scale, although the first bitwise one is in layer 0."""
    nudged = sides.folder / "b-nudged"
    with tracer.trace(sides.llm, out=nudged, level=2, strict=True, perturb_ulps=1):
        generate(sides.llm, prompt_logprobs=1)
    result = tracer.diff_traces(sides.a, sides.b, floor_b=[nudged])
    assert result.first is not None
    assert result.first.boundary == "layers.1.attn.core"
    assert "first bitwise at layers.0.attn.q_rope" in result.headline


def test_rows_of_a_stale_weight_are_saved_where_they_can_be(sides: Sides) -> None:
    """The first divergence beyond rounding is an expert's weight: the trainer saves its rows; the engine has repacked it, and says so."""
    stale, plan = sides.train("a-stale", "stale-expert"), sides.folder / "weights.json"
    assert run_tracer("diff", stale, sides.b, "--tolerance", "relative=0.1", "--plan", plan) == 1
    a, b = sides.train("a-rows", "stale-expert", plan=plan), sides.roll("b-rows", plan=plan)
    name = "layers.1.moe.experts.5.down.weight"
    assert len(read_dumps(tracer.open_trace(a)).weights[name]) == 128
    assert name not in read_dumps(tracer.open_trace(b)).weights
    notes = [note.text for note in tracer.open_trace(b).manifest.notes if note.code == "dump-left"]
    assert notes, "the engine says what it could not save"
    assert name in notes[0]


def test_one_module_of_the_engine_is_replayed(sides: Sides) -> None:
    """The engine's output projection, on the trainer's inputs, gives the trainer's bits."""
    dumped = sides.train("a-dumped", dump=["layers.1.attn.core", "layers.1.attn.out"])
    (module,) = sides.llm.apply_model(lambda model: model.model.layers[1].self_attn.o_proj)
    replayed = tracer.replay_operator(module, dumped, "layers.1.attn.out", batched=False)
    assert (replayed.rows, replayed.rows_equal) == (36, 36), str(replayed)
