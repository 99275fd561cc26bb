"""What the rows of an engine's step are; no engine is needed to say. tests/vllm asks the engine itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.format.token_keys import token_keys
from tracer.hosts.vllm_rows import Batch, RequestTracker, padding_of
from tracer.record.host import Rows
from tracer.record.tokens import SequenceRegistry


def state(prompt: list[int], sampled: list[int] | None = None, **more: Any) -> Any:
    """What the engine keeps of one request."""
    return SimpleNamespace(prompt_token_ids=prompt, output_token_ids=sampled or [], num_prompt_tokens=len(prompt), **more)


def batch(*parts: tuple[str, int, int]) -> Batch:
    """A step of (request, tokens computed before, tokens scheduled) in this order."""
    names, computed, counts = zip(*parts, strict=True)
    return Batch(tuple(names), np.cumsum([0, *counts]), np.array(computed))


def not_computed(tracker: RequestTracker) -> dict[str, list[tuple[int, int]]]:
    """Spans by reason, of boundaries that every row has."""
    return {found.reason: list(found.positions) for found in tracker.not_computed() if not found.boundaries}


def test_a_mixed_step_is_labelled_and_its_padding_left_out() -> None:
    """Prefill, a chunk and a decoded token of one step are rows of their requests; rows beyond them belong to nobody and are
    counted as padding."""
    registry, tracker = SequenceRegistry(), RequestTracker()
    registry.name_requests(["x", "y"])
    states = {"0-0123abcd": state([5, 6, 7], [8]), "1-0123abcd": state([9, 10, 11, 12])}
    rows = tracker.label(batch(("1-0123abcd", 0, 2), ("0-0123abcd", 3, 1)), 5, states, registry)
    assert rows.sequence_N.tolist() == [0, 0, 1, -1, -1]
    assert rows.position_N.tolist() == [0, 1, 3, 0, 0]
    assert padding_of(rows) == 2
    assert [(registry[n].label, registry[n].request) for n in range(2)] == [("1", "x"), ("0", "y")]
    assert registry.look_up(np.array([0, 0, 1]), np.array([1, 3, 3]))[0].tolist() == [10, 12, 8]


def test_rows_never_computed_have_reasons() -> None:
    """What the cache gave, what a running request had before, what was cut off and the last sampled token each have a reason."""
    registry = SequenceRegistry()
    tracker = RequestTracker(running=("old",))
    states = {"hit": state(list(range(6)), [90, 91]), "old": state(list(range(4)), [80, 81, 82])}
    tracker.label(batch(("hit", 4, 2), ("old", 5, 1)), 3, states, registry)
    tracker.label(batch(("hit", 6, 1), ("old", 6, 1)), 2, states, registry)
    assert not_computed(tracker) == {
        "prefix cache hit": [(0, 4)],
        "last sampled token": [(7, 8)],
        "computed before the trace began": [(0, 5)],
    }
    cut = RequestTracker()
    cut.label(batch(("long", 0, 3)), 3, {"long": state(list(range(8)))}, SequenceRegistry())
    assert not_computed(cut) == {"not run before the trace ended": [(3, 8)]}


def test_logits_that_nobody_asked_for_are_declared() -> None:
    """Rows that ran without logits are declared at the boundaries behind the logits alone; a row with logits is not."""
    registry, tracker = SequenceRegistry(), RequestTracker()
    rows = tracker.label(batch(("r", 0, 3)), 3, {"r": state([1, 2, 3])}, registry)
    tracker.note_logits(Rows(rows.sequence_N[2:], rows.position_N[2:]))
    (found,) = tracker.not_computed()
    assert (found.reason, found.positions) == ("logits not requested", ((0, 2),))
    assert found.boundaries == ("lm_head.raw", "lm_head", "scorer.logprobs")


def test_what_conditions_a_request_is_in_its_salt() -> None:
    """An adapter or an image makes other keys of the same tokens; placeholders of sampled tokens are no ids."""
    registry, tracker = SequenceRegistry(), RequestTracker("dp=1")
    adapter = SimpleNamespace(lora_name="a")
    states = {
        "lora": state([1, 2], [-1], lora_request=adapter),
        "image": state([1, 2], mm_features=[SimpleNamespace(identifier="i")]),
        "plain": state([1, 2]),
    }
    tracker.label(batch(("lora", 0, 2), ("image", 0, 2), ("plain", 0, 2)), 6, states, registry)
    assert [(registry[n].salt, registry[n].scope) for n in range(3)] == [("lora:a", "dp=1"), ("mm:i", "dp=1"), ("", "dp=1")]
    assert not registry.look_up(np.array([0]), np.array([2]))[1][0]


STEPS = st.lists(st.tuples(st.permutations(range(3)), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2), st.booleans()), max_size=8)
"""Order of the requests, how many of them run, tokens of each, rows of padding, whether the first is preempted afterwards."""


@given(steps=STEPS)
def test_any_schedule_gives_the_same_keys(steps: list[tuple[list[int], int, int, int, bool]]) -> None:
    """Whatever the chunks, the order and the preemptions of a schedule, every token of every prompt is run under its own key."""
    prompts = {f"r{n}": [10 * n + t for t in range(length)] for n, length in enumerate((7, 3, 5))}
    states = {name: state(ids) for name, ids in prompts.items()}
    registry, tracker = SequenceRegistry(), RequestTracker()
    done = dict.fromkeys(prompts, 0)
    seen: set[int] = set()
    for order, width, most, padding, preempted in [*steps, ([0, 1, 2], 3, 9, 0, False)]:
        left = {f"r{n}": min(most, len(prompts[f"r{n}"]) - done[f"r{n}"]) for n in order[:width]}
        parts = [(name, done[name], count) for name, count in left.items() if count]
        if not parts:
            continue
        scheduled = sum(count for _, _, count in parts)
        rows = tracker.label(batch(*parts), scheduled + padding, states, registry)
        assert padding_of(rows) == padding
        for sequence, position in zip(rows.sequence_N[:scheduled].tolist(), rows.position_N[:scheduled].tolist(), strict=True):
            seen.add(int(token_keys(prompts[registry[sequence].label])[position]))
        for name, _, count in parts:
            done[name] += count
        if preempted:
            done[parts[0][0]] = 0
    assert seen == {int(key) for ids in prompts.values() for key in token_keys(ids)}
    assert not_computed(tracker) == {}


def test_a_label_used_again_is_another_sequence() -> None:
    """Two requests of the engine whose ids differ in the suffix alone are two sequences."""
    registry, tracker = SequenceRegistry(), RequestTracker()
    states = {"0-0123abcd": state([1]), "0-0123abce": state([2])}
    rows = tracker.label(batch(("0-0123abcd", 0, 1), ("0-0123abce", 0, 1)), 2, states, registry)
    assert rows.sequence_N.tolist() == [0, 1]
    assert [registry[n].label for n in range(2)] == ["0", "0-0123abce"]


def test_a_step_of_an_unknown_request_is_an_error() -> None:
    """Rows of a request that the engine does not know are never guessed."""
    with pytest.raises(KeyError):
        RequestTracker().label(batch(("r", 0, 1)), 1, {}, SequenceRegistry())
