"""From what a module was given or gave to rows and columns (``tracer.record.snapshot``)."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tracer.errors import CaptureError, Code, MapError
from tracer.record.snapshot import (
    Layout,
    LeafRoot,
    chosen_columns,
    held_columns,
    leaf_paths,
    local_tensor,
    pick_leaf,
    put_leaf,
    select_columns,
    split_columns,
)

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class ModelOutput:
    """As libraries return: attributes, and None for what is absent."""

    logits: torch.Tensor
    cache: Any = None


def pick(text: str, output: Any = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> torch.Tensor:
    return pick_leaf(leaf_paths(text), args, kwargs or {}, output)


X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("output", X),
        ("output[0]", (X, None)),
        ("output[0]", X),
        ("output[2]", X),
        ("output[1]", [Y, X]),
        ("output.logits", {"logits": X}),
        ("output.logits", ModelOutput(X)),
        ("output.logits", X),
        ("output.second", Pair(Y, X)),
        ("output[1].logits", (Y, {"logits": X})),
        ("output[1]", {"hidden": Y, "logits": X}),
        ("output.cache|output.logits", ModelOutput(X)),
    ],
    ids=str,
)
def test_a_leaf_is_found_in_any_container(text: str, output: Any) -> None:
    """Tuples, lists, named tuples, mappings, model outputs, nested ones, and a bare tensor where a container was named."""
    assert pick(text, output) is X


def test_a_leaf_is_found_among_arguments() -> None:
    """Positional and keyword arguments are leaves too; of several alternatives the first that is a tensor is taken."""
    assert pick("input[1]", args=(Y, X)) is X
    assert pick("kwargs.hidden_states", kwargs={"hidden_states": X}) is X
    assert pick("kwargs.position_ids|input[0]", args=(X,), kwargs={"position_ids": None}) is X
    assert [path.root for path in leaf_paths("kwargs.a|input[0]")] == [LeafRoot.KWARGS, LeafRoot.INPUT]


@pytest.mark.parametrize(
    ("text", "output", "what"),
    [
        ("output[1]", (X, None, Y), "leaf is None"),
        ("output[3]", (X, Y), "no such leaf"),
        ("output.logits", {"hidden": X}, "no such leaf"),
        ("output", (X, Y), "leaf is a tuple, not a tensor"),
        ("output.name", Pair("a", X), "no such leaf"),
        ("output.first", Pair("a", X), "leaf is a str, not a tensor"),
    ],
)
def test_what_is_no_tensor_is_named(text: str, output: Any, what: str) -> None:
    """None, a missing leaf and any other object are refused in words, under one code."""
    with pytest.raises(CaptureError) as caught:
        pick(text, output)
    assert (caught.value.code, caught.value.what, caught.value.where) == (Code.LEAF_NOT_TENSOR, what, text)


def test_of_several_tensors_the_one_that_fits_the_layout_is_taken() -> None:
    """A tuple that begins with a loss gives its logits, to read and to replace; where none fits, the first tensor is taken."""
    loss, logits, other = torch.ones(()), torch.ones(1, 2, 3), torch.zeros(1, 2, 3)
    paths = leaf_paths("output.logits|output[1]|output[0]")
    assert pick_leaf(paths, (), {}, (loss, logits), dimensions=3) is logits
    assert pick_leaf(paths, (), {}, (logits, loss), dimensions=3) is logits
    assert pick_leaf(paths, (), {}, (loss,), dimensions=3) is loss
    assert put_leaf(paths, (), {}, (logits, loss), other, dimensions=3)[2] == (other, loss)


def test_nothing_to_add_is_no_error() -> None:
    """Where the caller allows it, a leaf that is None is None; a missing one is an error all the same."""
    assert pick_leaf(leaf_paths("output[1]"), (), {}, (X, None), none_is_fine=True) is None
    with pytest.raises(CaptureError):
        pick_leaf(leaf_paths("output[5]"), (), {}, (X, None), none_is_fine=True)


@pytest.mark.parametrize("text", ["", "out", "input", "kwargs", "output[-1]", "output[x]", "output..a", "output|"])
def test_selectors_are_strict(text: str) -> None:
    """Anything that is no selector is refused."""
    with pytest.raises(MapError) as caught:
        leaf_paths(text)
    assert caught.value.code is Code.MAP_INVALID


def test_the_local_tensor_is_the_same_memory_without_autograd() -> None:
    """A snapshot's source shares storage with the leaf and records no gradient, for parameters too."""
    weight = nn.Parameter(torch.ones(3))
    for leaf in (weight, weight * 2):
        local = local_tensor(leaf)
        assert (local.data_ptr(), local.requires_grad, type(local)) == (leaf.data_ptr(), False, torch.Tensor)


def test_asynchronous_and_distributed_wrappers_give_their_local_part() -> None:
    """A DTensor gives its local tensor, an asynchronous collective its finished result."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    class Local:
        def __init__(self, local: torch.Tensor) -> None:
            self._local_tensor = local

    assert local_tensor(AsyncCollectiveTensor(X)).data_ptr() == X.data_ptr()
    wrapped: Any = Local(AsyncCollectiveTensor(X))
    assert local_tensor(wrapped).data_ptr() == X.data_ptr()


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [(torch.ones(2, device="meta"), "meta"), (torch.eye(2).to_sparse(), "sparse_coo")],
    ids=["meta", "sparse"],
)
def test_tensors_without_plain_data_are_refused(leaf: torch.Tensor, kind: str) -> None:
    """A tensor that has no strided data of its own is no leaf."""
    with pytest.raises(CaptureError, match=f"leaf is a {kind} tensor") as caught:
        local_tensor(leaf)
    assert caught.value.code is Code.LEAF_NOT_TENSOR


def test_fake_tensors_are_refused() -> None:
    """A tensor of an export or a shape propagation has no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(CaptureError, match="no data"):
        local_tensor(fake)


VALUES_BSHD = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
ROWS = VALUES_BSHD.reshape(6, 20)


@pytest.mark.parametrize(
    ("layout", "leaf", "row_shape"),
    [
        ("b s (h d)", VALUES_BSHD.reshape(2, 3, 20), (2, 3)),
        ("b s h d", VALUES_BSHD, (2, 3)),
        ("b h s d", VALUES_BSHD.permute(0, 2, 1, 3), (2, 3)),
        ("t h d", VALUES_BSHD.reshape(6, 4, 5), (6,)),
        ("t 1 c", ROWS.reshape(6, 1, 20), (6,)),
        ("(b s) c", ROWS, (6,)),
        ("(t h) d", ROWS.reshape(24, 5), (6,)),
        ("h b s d", VALUES_BSHD.permute(2, 0, 1, 3), (2, 3)),
    ],
)
def test_every_layout_gives_the_same_rows(layout: str, leaf: torch.Tensor, row_shape: tuple[int, ...]) -> None:
    """Whatever the order and grouping of axes, rows and columns come out the same."""
    rows_NC, shape = Layout(layout).to_rows(leaf, "layers.0.attn.q", 6)
    assert shape == row_shape
    assert torch.equal(rows_NC, ROWS)


def test_rows_follow_the_order_of_the_layout() -> None:
    """Sequence-first leaves give sequence-first rows: the host labels them in that order."""
    rows_NC, shape = Layout("s b (h d)").to_rows(VALUES_BSHD.reshape(2, 3, 20).transpose(0, 1), "residual", 6)
    assert shape == (3, 2)
    assert torch.equal(rows_NC[1], ROWS[3])


def test_contiguous_rows_are_views() -> None:
    """Rows of an ordinary leaf share its memory; nothing is copied."""
    leaf = VALUES_BSHD.reshape(2, 3, 20)
    assert Layout("b s (h d)").to_rows(leaf, "q", 6)[0].data_ptr() == leaf.data_ptr()


def test_known_sizes_unfold_experts() -> None:
    """Expert-major rows are told apart by the number of experts, else by that of the forward's tokens."""
    leaf = torch.arange(24).reshape(6, 4)
    assert Layout("(e t) c", {"e": 3}).to_rows(leaf, "expert_out", 6)[1] == (3, 2)
    assert Layout("(e t) c").to_rows(leaf, "expert_out", 2)[1] == (3, 2)
    with pytest.raises(MapError, match="does not fit"):
        Layout("(e t) c").to_rows(leaf, "expert_out", 4)


def test_choices_are_read_from_dense_scores() -> None:
    """Of a row with a score per choice, 0 where not chosen, the ids come ascending with their values; unequal numbers are refused."""
    scores = torch.tensor([[0.0, 0.5, 0.0, 0.25], [0.75, 0.0, 0.0, 0.125]])
    assert chosen_columns(scores, "ids", "moe.topk_ids").tolist() == [[1, 3], [0, 3]]
    assert chosen_columns(scores, "values", "moe.topk_weights").tolist() == [[0.5, 0.25], [0.75, 0.125]]
    assert chosen_columns(scores[:0], "ids", "moe.topk_ids").shape == (0, 0)
    with pytest.raises(MapError, match="zeros") as caught:
        chosen_columns(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "ids", "moe.topk_ids")
    assert caught.value.code is Code.MAP_LAYOUT


def test_a_broadcast_axis_stands_for_every_index() -> None:
    """Position ids given once for the whole batch become rows of every sequence."""
    rows_NC, shape = Layout("b s", broadcast="b").to_rows(torch.arange(3)[None], "positions", 6)
    assert (shape, rows_NC[:, 0].tolist()) == ((2, 3), [0, 1, 2, 0, 1, 2])
    assert Layout("b s", broadcast="b").to_rows(torch.zeros(2, 3), "positions", 6)[1] == (2, 3)


def test_an_empty_forward_has_no_rows_and_all_columns() -> None:
    """A leaf of shape [0, 0, 32] is no rows of 32 columns."""
    rows_NC, shape = Layout("b s (h d)").to_rows(torch.zeros(0, 0, 32), "q", 0)
    assert (tuple(rows_NC.shape), shape) == ((0, 32), (0, 0))


@pytest.mark.parametrize(
    ("layout", "sizes", "shape", "expected"),
    [
        ("b s (h d)", {"h": 4}, (2, 7, 33), "h=4 in dimension 2"),
        ("b s c", {}, (14, 32), "3 dimensions"),
        ("t 1 c", {}, (7, 2, 3), "size 1 in dimension 1"),
        ("t h d", {"h": 4}, (7, 3, 8), "h=4 in dimension 1"),
        ("(t h) d", {}, (13, 8), "a multiple of 6 in dimension 0"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named(layout: str, sizes: dict[str, int], shape: tuple[int, ...], expected: str) -> None:
    """The error names boundary, layout, what was expected, and the shape."""
    with pytest.raises(MapError) as caught:
        Layout(layout, sizes).to_rows(torch.zeros(shape), "layers.0.attn.q", 6)
    assert caught.value.code is Code.MAP_LAYOUT
    assert caught.value.what == f"layout `{layout}` does not fit layers.0.attn.q"
    assert (caught.value.expected, caught.value.found) == (expected, f"shape {list(shape)}")


@pytest.mark.parametrize("layout", ["", "h d", "b b c", "(b s c", "(b h s d)"])
def test_layouts_that_say_nothing_are_refused(layout: str) -> None:
    """No row axis, an axis twice, or a dimension whose parts cannot be told."""
    with pytest.raises(MapError) as caught:
        Layout(layout)
    assert caught.value.code is Code.MAP_LAYOUT


def test_packed_columns_split_by_what_is_known() -> None:
    """The host's sizes, proportions of the rest, or equal parts; slices are views."""
    rows_NC = torch.arange(16).reshape(1, 16)
    assert split_columns(rows_NC, 1, [8, 4, 4], (), "k").tolist() == [[8, 9, 10, 11]]
    assert split_columns(rows_NC, 0, [None] * 3, (2, 1, 1), "q").shape == (1, 8)
    assert split_columns(rows_NC, 1, [None, None], (), "up").tolist() == [list(range(8, 16))]
    assert split_columns(rows_NC, 2, [8, None, None], (), "v").tolist() == [[12, 13, 14, 15]]
    for sizes in ([8, 4, 5], [None, None, None], [20, None]):
        with pytest.raises(MapError, match="packed leaf of q does not split"):
            split_columns(rows_NC, 0, sizes, (), "q")


def test_columns_behind_the_spans_are_padding() -> None:
    """Vocabulary padding is dropped; too few columns is an error."""
    rows_NC = torch.arange(12).reshape(1, 12)
    assert held_columns(rows_NC, 40, ((36, 40),), "lm_head").tolist() == [[0, 1, 2, 3]]
    assert held_columns(rows_NC, 12, (), "lm_head") is rows_NC
    with pytest.raises(MapError, match="lm_head has fewer columns than declared"):
        held_columns(rows_NC, 40, (), "lm_head")


def test_selected_columns_are_a_view() -> None:
    """``start:stop`` with either end open."""
    rows_NC = torch.arange(6).reshape(1, 6)
    assert [select_columns(rows_NC, text).tolist()[0] for text in ("0:2", "4:", ":1")] == [[0, 1], [4, 5], [0]]


@pytest.mark.parametrize(
    ("leaf", "output"),
    [
        ("output", torch.ones(2)),
        ("output[1]", (None, torch.ones(2))),
        ("output[0]", torch.ones(2)),
        ("output[0]", [torch.ones(2), 3]),
        ("output[0]", Pair(torch.ones(2), None)),
        ("output.second", Pair(None, torch.ones(2))),
        ("output.logits", ModelOutput(torch.ones(2))),
        ("output.logits", {"logits": torch.ones(2), "loss": None}),
        ("output.a|output[0].x[1]", ({"x": (1, torch.ones(2))}, 5)),
    ],
)
def test_a_leaf_is_put_where_it_was_picked(leaf: str, output: Any) -> None:
    """The new value is what the selector picks afterwards; containers keep their kind, and what was passed in is not changed."""
    paths, value = leaf_paths(leaf), torch.zeros(2)
    args, kwargs, changed = put_leaf(paths, (1,), {"k": 2}, output, value)
    assert pick_leaf(paths, args, kwargs, changed) is value
    assert pick_leaf(paths, args, kwargs, output) is not value
    assert (args, kwargs, type(changed)) == ((1,), {"k": 2}, type(output))


def test_a_leaf_is_put_into_arguments() -> None:
    """Positional and keyword arguments are replaced without touching the caller's; a leaf that is not there is refused."""
    value, kwargs = torch.zeros(2), {"hidden_states": torch.ones(2)}
    paths = leaf_paths("input[0]|kwargs.hidden_states")
    assert put_leaf(paths, (torch.ones(2), 5), {}, None, value)[0] == (value, 5)
    assert put_leaf(paths, (), kwargs, None, value)[1]["hidden_states"] is value
    assert kwargs["hidden_states"] is not value
    with pytest.raises(CaptureError):
        put_leaf(paths, (), {}, None, value)
