"""The causal graph: merging catalogues, prefixes, cuts, roots, what heals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sides import catalogue
from tracer.format.schema import Boundary, RowScope
from tracer.read.causes import Causes, Cells, Graph, Prefixes, find_causes, merge_catalogues
from tracer.read.logical import TokenTable

Mask = npt.NDArray[np.bool_]


def table(previous: list[int]) -> TokenTable:
    """A token table with this prefix tree."""
    count = len(previous)
    zeros = np.zeros(count, np.int64)
    return TokenTable(np.arange(count).astype(np.uint64), zeros, np.arange(count), np.array(previous, np.int64), np.zeros(count, np.bool_))


def mask(count: int, *true: int) -> Mask:
    """A mask with these tokens set."""
    found = np.zeros(count, np.bool_)
    found[list(true)] = True
    return found


@settings(deadline=None)
@given(st.data())
def test_at_or_before_follows_the_prefix_tree(data: st.DataObject) -> None:
    """For any prefix tree and mask, a token is reached exactly if it or a token of its prefix is."""
    count = data.draw(st.integers(1, 30))
    previous = [data.draw(st.integers(-1, at - 1)) for at in range(count)]
    chosen = np.array([data.draw(st.booleans()) for _ in range(count)])
    expected = chosen.copy()
    for at in range(count):
        expected[at] |= previous[at] >= 0 and expected[previous[at]]
    prefixes = Prefixes(table(previous))
    np.testing.assert_array_equal(prefixes.at_or_before(chosen), expected)
    np.testing.assert_array_equal(prefixes.before(chosen), [before >= 0 and chosen[before] for before in previous])


def test_merging_keeps_both_orders() -> None:
    """Boundaries of either map stand after what precedes them in their own map, and inputs come from whoever names them."""
    a = [Boundary(name="x", level=0), Boundary(name="z", level=0)]
    b = [Boundary(name="w", level=0), Boundary(name="x", level=0), Boundary(name="y", level=0), Boundary(name="z", level=0, inputs=("y",))]
    merged = merge_catalogues(a, b)
    assert [boundary.name for boundary in merged] == ["w", "x", "y", "z"]
    assert merged[3].inputs == ("y",)


def test_the_cut_after_a_choice_is_where_its_layer_ends() -> None:
    """Everything computed from the chosen ids passes through the combined output of that layer."""
    graph = Graph.of(catalogue(moe=True))
    at = graph.index["layers.1.moe.topk_ids"]
    assert graph.boundaries[graph.cut_after(at)].name == "layers.1.moe.combine"
    lonely = Graph.of([Boundary(name="ids", level=0), Boundary(name="later", level=0)])
    assert lonely.cut_after(0) == 2


def chain(*names: str, mixes: str = "", rows: dict[str, RowScope] | None = None, discrete: str = "") -> Graph:
    """Boundaries that are computed from each other in a row."""
    scopes = rows or {}
    return Graph.of(
        [
            Boundary(
                name=name,
                level=1,
                inputs=names[at - 1 : at] if at else (),
                mixes_tokens=name == mixes,
                discrete=name == discrete,
                rows=scopes.get(name, RowScope.ALL),
            )
            for at, name in enumerate(names)
        ]
    )


def roots(causes: Causes) -> dict[str, list[int]]:
    """Root tokens by boundary, where there are any."""
    return {name: np.flatnonzero(cells.root_K).tolist() for name, cells in causes.cells.items() if cells.root_K.any()}


def test_consequences_are_no_roots_and_other_tokens_are() -> None:
    """A difference is inherited at the same token only, unless the boundary mixes tokens."""
    cells = {"x": Cells(None, mask(4, 1)), "y": Cells(None, mask(4, 1, 2)), "z": Cells(None, mask(4, 1, 2))}
    assert roots(find_causes(chain("x", "y", "z"), cells, table([-1, 0, 1, 2]))) == {"x": [1], "y": [2]}
    assert roots(find_causes(chain("x", "y", "z", mixes="y"), cells, table([-1, 0, 1, 2]))) == {"x": [1]}


def test_an_unrecorded_input_passes_on_what_it_inherits() -> None:
    """A boundary that was not compared hands on the state of its inputs, and the root names who stands for it."""
    graph = chain("x", "gap", "z")
    inherited = find_causes(graph, {"x": Cells(None, mask(3, 1)), "z": Cells(None, mask(3, 1, 2))}, table([-1, 0, 1]))
    assert roots(inherited) == {"x": [1], "z": [2]}
    assert inherited.cells["z"].between == ("x",)
    alone = find_causes(chain("gap", "z"), {"z": Cells(None, mask(3, 1))}, table([-1, 0, 1]))
    assert alone.cells["z"].unobserved


def test_tokens_that_were_not_compared_inherit() -> None:
    """Where an input lacks a token, that token takes the state of what comes before."""
    cells = {"x": Cells(None, mask(3, 2)), "y": Cells(mask(3, 0, 1), None), "z": Cells(None, mask(3, 2))}
    assert roots(find_causes(chain("x", "y", "z"), cells, table([-1, 0, 1]))) == {"x": [2]}


def test_rows_about_the_next_token_line_up_with_their_inputs() -> None:
    """A row keyed by the next token inherits from the token before it."""
    graph = chain("logits", "score", rows={"score": RowScope.NEXT})
    cells = {"logits": Cells(None, mask(4, 1)), "score": Cells(None, mask(4, 2))}
    assert roots(find_causes(graph, cells, table([-1, 0, 1, 2]))) == {"logits": [1]}


def test_a_weight_explains_its_boundary() -> None:
    """A boundary computed with a weight that differs is a consequence at every token."""
    boundaries = [Boundary(name="x", level=0), Boundary(name="y", level=0, inputs=("x",), weights=("y.weight",))]
    causes = find_causes(Graph.of(boundaries), {"x": Cells(None, None), "y": Cells(None, mask(2, 0, 1))}, table([-1, 0]), ["y.weight"])
    assert roots(causes) == {}


def test_after_a_choice_the_search_stops_for_that_token() -> None:
    """Where a choice differs, later boundaries of that token are consequences although no map says that they read it."""
    boundaries = [
        Boundary(name="ids", level=1, discrete=True),
        Boundary(name="stream", level=0),
        Boundary(name="later", level=0, inputs=("stream",)),
    ]
    cells = {"ids": Cells(None, mask(3, 1)), "stream": Cells(None, mask(3, 1, 2)), "later": Cells(None, mask(3, 1, 2))}
    assert roots(find_causes(Graph.of(boundaries), cells, table([-1, 0, -1]))) == {"ids": [1], "stream": [2]}


def test_an_input_that_no_boundary_names_reaches_all() -> None:
    """Positions that differ explain everything where the map does not say who reads them."""
    boundaries = [Boundary(name="input.positions", level=0), Boundary(name="x", level=0)]
    cells = {"input.positions": Cells(None, mask(2, 1)), "x": Cells(None, mask(2, 1))}
    assert roots(find_causes(Graph.of(boundaries, ["input.positions"]), cells, table([-1, 0]))) == {"input.positions": [1]}


@pytest.mark.parametrize(("level", "harmless"), [(2, True), (0, False)])
def test_what_heals_is_harmless_below_the_stream_only(level: int, harmless: bool) -> None:
    """A difference that is equal again where it is read healed; it caused nothing unless a coarse boundary differed on the way."""
    boundaries = [
        Boundary(name="q", level=2),
        Boundary(name="rope", level=level, inputs=("q",)),
        Boundary(name="core", level=2, inputs=("rope",)),
    ]
    cells = {"q": Cells(None, mask(2, 1)), "rope": Cells(None, mask(2, 1)), "core": Cells(None, None)}
    causes = find_causes(Graph.of(boundaries), cells, table([-1, 0]))
    assert causes.healed == {"q": "core", "rope": "core"}
    assert ("q" in causes.harmless) is harmless


def test_a_difference_that_lives_on_in_later_tokens_has_not_healed() -> None:
    """Behind a mixing boundary the later tokens count as reached."""
    graph = chain("x", "core", "y", mixes="core")
    cells = {"x": Cells(None, mask(3, 0)), "core": Cells(None, mask(3, 2)), "y": Cells(None, mask(3, 2))}
    assert find_causes(graph, cells, table([-1, 0, 1])).healed == {}


def test_what_was_not_compared_is_not_healed() -> None:
    """A reader that was not compared at the tokens in question proves nothing."""
    cells = {"x": Cells(None, mask(3, 2)), "y": Cells(mask(3, 0, 1), None), "z": Cells(None, mask(3, 2))}
    assert find_causes(chain("x", "y", "z"), cells, table([-1, 0, 1])).healed == {}


@settings(deadline=None)
@given(st.data())
def test_planted_faults_are_the_roots(data: st.DataObject) -> None:
    """For any graph, prefix tree, faults and choice of what is recorded: with everything recorded the roots are exactly the
    faults that no earlier fault reaches; otherwise every root has a fault at or right above it, and no fault goes unnoticed."""
    size, count = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 5))
    inputs = [data.draw(st.sets(st.integers(0, at - 1), max_size=3)) if at else set() for at in range(size)]
    mixes = [data.draw(st.booleans()) for _ in range(size)]
    previous = [data.draw(st.integers(-1, at - 1)) for at in range(count)]
    faulty = data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, count - 1)), min_size=1, max_size=4))
    recorded = data.draw(st.sets(st.integers(0, size - 1))) | {size - 1}
    boundaries = [
        Boundary(name=str(at), level=0, inputs=tuple(str(source) for source in sorted(inputs[at])), mixes_tokens=mixes[at])
        for at in range(size)
    ]
    prefixes = Prefixes(table(previous))
    differs: list[Mask] = []
    reached: list[Mask] = []
    for at in range(size):
        below = mask(count)
        for source in inputs[at]:
            below = below | differs[source]
        reached.append(prefixes.at_or_before(below) if mixes[at] else below)
        differs.append(reached[at] | mask(count, *(token for fault, token in faulty if fault == at)))

    def search(chosen: set[int]) -> dict[str, list[int]]:
        cells = {str(at): Cells(None, differs[at] if differs[at].any() else None) for at in chosen}
        return roots(find_causes(Graph.of(boundaries), cells, table(previous)))

    everything = search(set(range(size)))
    assert {(int(name), token) for name, tokens in everything.items() for token in tokens} == {
        (at, token) for at, token in faulty if not reached[at][token]
    }

    def hidden(at: int) -> set[int]:
        """The boundary and its unrecorded ancestors, up to recorded ones."""
        found = {at}
        for source in inputs[at] - recorded:
            found |= hidden(source)
        return found

    some = search(recorded)
    for name in some:
        assert any(fault in hidden(int(name)) for fault, _ in faulty)
    if any(differs[at].any() for at in recorded):
        assert some


def test_nothing_is_equal_again_where_no_row_depends_on_it() -> None:
    """The last token's logits have no row about a next token, so that a difference there does not heal in the scores."""
    graph = chain("logits", "scores", rows={"scores": RowScope.NEXT})
    cells = {"logits": Cells(None, mask(4, 3)), "scores": Cells(None, None)}
    assert find_causes(graph, cells, table([-1, 0, 1, 2])).healed == {}
    cells["logits"] = Cells(None, mask(4, 2))
    assert find_causes(graph, cells, table([-1, 0, 1, 2])).healed == {"logits": "scores"}
