"""Explanations of a boundary, from dumps where there are any, else from what was recorded."""

from __future__ import annotations

import numpy as np

from tests.material import dumps_of
from tests.sides import Side
from tracer.format.schema import RowScope
from tracer.read.causes import merge_catalogues
from tracer.read.conditions import differing_conditions
from tracer.read.diff import diff_traces
from tracer.read.explain import Material, explain_boundary
from tracer.read.findings import Explanation, Shape
from tracer.read.floor import Floors
from tracer.read.outcomes import compare_all, judge
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.out"
IDS = {"s0": list(range(100, 132)), "s1": list(range(200, 232))}


def explained(a: Side, b: Side, name: str = NAME, *, dumps: bool = False) -> list[Explanation]:
    """Explanations of one boundary."""
    x, y = a.trace(), b.trace()
    pairing = pair_sides(x, y)
    judged = {known: judge(comparison, Floors()) for known, comparison in compare_all(x, y, pairing, list(x.boundaries)).items()}
    held = (dumps_of(a, x, name), dumps_of(b, y, name)) if dumps else None
    catalogue = {info.name: info for info in merge_catalogues(x.catalogue, y.catalogue)}
    return explain_boundary(Material(x, y, judged, differing_conditions(x, y), held, catalogue), name)


def changed(factor: object, name: str = NAME, *, moe: bool = False) -> tuple[Side, Side]:
    """Two sides, the second with one boundary multiplied."""
    a, b = Side(IDS, moe=moe), Side(IDS, moe=moe)
    b.values[name].rows = (b.values[name].rows * factor).astype(np.float32)
    return a, b


def test_ratios_are_found_without_dumps() -> None:
    """A constant ratio shows in sketches; the rows it was tested on are counted."""
    found = explained(*changed(1.25))
    assert [(entry.shape, entry.source) for entry in found] == [(Shape.CONSTANT_RATIO, "sketches")]
    assert found[0].text == "constant ratio: B is A times 1.25"
    assert (found[0].rows_fitted, found[0].rows_tested) == (32, 32)


def test_a_ratio_per_column_needs_dumps() -> None:
    """Sketches mix columns, raw values do not."""
    sides = changed(np.linspace(0.5, 2, 32, dtype=np.float32))
    assert explained(*sides) == []
    found = explained(*sides, dumps=True)
    assert [(entry.shape, entry.source) for entry in found] == [(Shape.COLUMN_RATIO, "dumps")]


def test_shape_and_place_are_told_together() -> None:
    """Half the sign from position 16 on: one shape of the values, one of the places."""
    a, b = Side(IDS), Side(IDS)
    late = np.array(b.position) >= 16
    b.values[NAME].rows = np.where(late[:, None], -b.values[NAME].rows, b.values[NAME].rows).astype(np.float32)
    assert [entry.shape for entry in explained(a, b)] == [Shape.SIGN, Shape.FROM_POSITION]


def test_rows_of_another_layer_and_of_another_token() -> None:
    """Bit for bit the rows of layer 0, or the row before: told by digests, of choices too."""
    a, b = Side(IDS, moe=True), Side(IDS, moe=True)
    ids = "layers.{}.moe.topk_ids"
    b.values[ids.format(1)].rows = a.values[ids.format(0)].rows
    found = explained(a, b, ids.format(1))
    assert [(entry.shape, entry.source) for entry in found] == [(Shape.OTHER_LAYER, "digests")]
    assert "A's of layer 0" in found[0].text
    b = Side(IDS)
    rows = b.values[NAME].rows
    b.values[NAME].rows = np.where(np.array(b.position)[:, None] > 0, np.roll(rows, 1, axis=0), rows)
    assert [entry.shape for entry in explained(Side(IDS), b)] == [Shape.TOKEN_SHIFT, Shape.FROM_POSITION]


def test_experts_are_blamed_by_their_rows_and_by_the_choices_of_their_tokens() -> None:
    """Rows of expert 5, or of the combined tokens that went there, and no others."""
    a, b = Side(IDS, moe=True), Side(IDS, moe=True)
    out, combine = "layers.1.moe.expert_out", "layers.1.moe.combine"
    chosen = a.values["layers.1.moe.topk_ids"].rows
    experts = b.values[out].experts
    assert experts is not None
    b.values[out].rows = np.where((experts == 5)[:, None], b.values[out].rows + 1, b.values[out].rows).astype(np.float32)
    b.values[combine].rows = np.where((chosen == 5).any(axis=1)[:, None], b.values[combine].rows * 2, b.values[combine].rows)
    for name in (out, combine):
        assert any(entry.text.startswith("expert 5 only") for entry in explained(a, b, name)), name


def test_noise_and_inputs_are_not_explained() -> None:
    """Rounding has no shape, a single element none either, and inputs are told elsewhere."""
    a, b = changed(1)
    rows = b.values[NAME].rows
    b.values[NAME].rows = rows + np.random.default_rng(0).uniform(-1e-3, 1e-3, rows.shape).astype(np.float32)
    assert explained(a, b, dumps=True) == []
    b = Side(IDS)
    b.values["input.positions"].rows = b.values["input.positions"].rows + 5
    assert explained(a, b, "input.positions") == []


def test_the_result_carries_explanations_of_the_earliest_roots() -> None:
    """In causal order, with source and counts, also as JSON; rows that speak of the next token give the position of their own."""
    a, b = changed(3, "lm_head")
    late = np.array([b.position[token] - 1 for token in b.values["scorer.logprobs"].tokens]) >= 16
    b.values["scorer.logprobs"].rows[late] += 1
    result = diff_traces(a.trace(), b.trace())
    assert result.explanations[0].text == "constant ratio: B is A times 3"
    assert result.explanations[0].boundary == "lm_head"
    found = explained(a, b, "scorer.logprobs")
    assert [entry.parameters.get("position") for entry in found if entry.shape is Shape.FROM_POSITION] == [16]
    assert a.boundaries[-1].rows is RowScope.NEXT
