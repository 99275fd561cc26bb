"""The token table of any set of sequences, against a plain walk over them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shard_records import Rank, stitched, values
from tracer.format.token_keys import label_keys, token_keys


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[list[int], int, list[int]]]:
    """Sequences as (ids, how many of them are known, positions with a row); few distinct ids, so that prefixes are shared."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        known = draw(st.sampled_from([len(ids), len(ids), len(ids) // 2, 0]))
        positions = draw(st.permutations(sorted(draw(st.sets(st.integers(0, len(ids) - 1), min_size=1)))))
        found.append((ids, known, list(positions)))
    return found


@given(runs(), st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_table_lists_every_distinct_token_once_behind_its_prefix(sequences: list[tuple[list[int], int, list[int]]], ranks: int) -> None:
    """Keys, order, places and previous tokens equal those of a walk over all sequences, however they are spread over ranks."""
    keys = []
    for number, (ids, known, _) in enumerate(sequences):
        labels = label_keys(f"s{number}", np.arange(len(ids)))
        keys.append([*token_keys(ids[:known]).tolist(), *labels[known:].tolist()])
    with tempfile.TemporaryDirectory() as folder:
        writers = [Rank(Path(folder) / "t", rank, ranks) for rank in range(ranks)]
        for rank in writers:
            for number in range(len(sequences)):
                rank.open(f"s{number}")
        for number, (ids, known, positions) in enumerate(sequences):
            owner = writers[number % ranks]
            writers[-1].open(f"s{number}", ids[:known])
            owner.add("x", values(4, count=len(positions)), [(f"s{number}", position) for position in positions])
        for rank in writers:
            rank.commit()
        trace = stitched(Path(folder) / "t")
    seen = {keys[number][position] for number, (_, _, positions) in enumerate(sequences) for position in positions}
    listed = [key for number, (ids, _, _) in enumerate(sequences) for key in keys[number][: len(ids)] if key in seen]
    distinct = list(dict.fromkeys(listed))
    assert trace.tokens.key_K.tolist() == distinct
    for index, key in enumerate(distinct):
        number, position = next((n, p) for n, of in enumerate(keys) for p, other in enumerate(of) if other == key)
        before = [distinct.index(other) for other in keys[number][:position] if other in seen]
        assert trace.tokens.previous_K[index] == (before[-1] if before else -1)
        shown = next((n, p) for n, (_, _, ps) in enumerate(sequences) for p in sorted(ps) if keys[n][p] == key)
        assert (trace.tokens.sequence_K[index], trace.tokens.position_K[index]) == shown
        assert trace.tokens.labelled_K[index] == (position >= sequences[number][1])
    for number, (ids, known, positions) in enumerate(sequences):
        token = trace.sequences[number].token
        assert [distinct[at] if at >= 0 else None for at in token.tolist()[: len(ids)]] == [
            keys[number][position] if position in positions else None for position in range(len(token))
        ][: len(ids)]
        assert trace.sequences[number].ids.tolist() == ids[:known]


def test_ids_known_to_several_processes_in_pieces_make_one_prefix(tmp_path: Path) -> None:
    """Ids recorded from the middle by one process and from the start by another are one prefix; behind a gap nothing is known."""
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for rank in ranks:
        index = rank.open("s0")
        rank.writer.add_ids(index, 4 * rank.rank, np.arange(4) + 4 * rank.rank)
        rank.writer.add_ids(index, 10, np.array([10]))
        rank.add("x", values(4, count=12), [("s0", position) for position in range(12)])
        rank.commit()
    trace = stitched(tmp_path)
    assert trace.sequences[0].ids.tolist() == list(range(8))
    assert trace.tokens.labelled_K.tolist() == [False] * 8 + [True] * 4


def test_one_name_in_two_scopes_is_told_apart_where_ids_are_unknown(tmp_path: Path) -> None:
    """Rows of equally named sequences of two scopes without ids are different tokens."""
    ranks = [Rank(tmp_path, rank, 2, {"dp": (rank, 2)}) for rank in range(2)]
    for rank in ranks:
        rank.open("0", scope=f"dp={rank.rank}")
        rank.add("x", values(4, count=1), [("0", 0)]).commit()
    assert len(stitched(tmp_path).tokens) == 2
