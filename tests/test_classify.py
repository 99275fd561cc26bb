"""Classes by their evidence: what decides, what does not, and what stays open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracer.format.schema import Boundary
from tracer.read.classify import RootEvidence, classify_root
from tracer.read.conditions import Lead
from tracer.read.findings import (
    BoundaryOutcome,
    Class,
    Confidence,
    Control,
    ControlOutcome,
    Distance,
    DumpLine,
    Explanation,
    Place,
    Root,
    Shape,
)

NAME = "layers.1.mlp.act"
COARSE, WIDE = ("bfloat16", "bfloat16"), ("float32", "float32")
ROOT = Root(place=Place(boundary=NAME), rows=40, rows_compared=96, tokens="40 of 96", distance=Distance(largest=4e-3, median=3e-3))
PLAIN: dict[str, Any] = {
    "root": ROOT, "info": Boundary(name=NAME, level=2), "dtypes": COARSE, "same_input": True, "ancestors": False, "weights_equal": True,
}  # fmt: skip


def shape(kind: Shape, **parameters: Any) -> Explanation:
    """An explanation of that shape."""
    return Explanation(boundary=NAME, shape=kind, text=kind.value, parameters=parameters, rows_tested=20)


def sized(largest: float, median: float | None = None) -> Root:
    """The root with another distance."""
    return msgspec.structs.replace(ROOT, distance=Distance(largest=largest, median=largest if median is None else median))


def control(outcome: ControlOutcome) -> Control:
    """A control with that outcome."""
    return Control(boundary=NAME, outcome=outcome, text=outcome.value)


def dump(ulps: float, above: float = 0.5, rows: int = 40) -> DumpLine:
    """Raw values that differ by so many ulps."""
    return DumpLine(
        boundary=NAME, role="output", rows=96, columns=8, dtype_a="bfloat16", dtype_b="bfloat16", rows_differing=rows, ulps=ulps,
        b_above=above,
    )  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], Class, Confidence]] = {
    "size alone says nothing": ({}, Class.UNLOCALIZED, Confidence.LOW),
    "a shape of its own": ({"explanations": [shape(Shape.ROW_RATIO)]}, Class.CORRECTNESS, Confidence.HIGH),
    "one-sided rounding is an error too": (
        {"explanations": [shape(Shape.ONE_SIDED)], "control": control(ControlOutcome.FALLS)}, Class.CORRECTNESS, Confidence.HIGH,
    ),
    "a place is no shape": ({"explanations": [shape(Shape.FROM_POSITION)]}, Class.UNLOCALIZED, Confidence.LOW),
    "survives in float32": ({"control": control(ControlOutcome.SURVIVES)}, Class.CORRECTNESS, Confidence.HIGH),
    "falls in float32": ({"control": control(ControlOutcome.FALLS)}, Class.FLOATING_POINT, Confidence.HIGH),
    "an unclear control decides nothing": (
        {"control": control(ControlOutcome.UNCLEAR), "dump": dump(1)}, Class.UNLOCALIZED, Confidence.LOW,
    ),
    "too large for float32": ({"dtypes": WIDE, "root": sized(2e-4)}, Class.CORRECTNESS, Confidence.MEDIUM),
    "TF32 explains that": ({"dtypes": WIDE, "root": sized(2e-4), "reduced": "A allows TF32"}, Class.UNLOCALIZED, Confidence.LOW),
    "the size of float32 sums": ({"dtypes": WIDE, "root": sized(2e-7)}, Class.FLOATING_POINT, Confidence.MEDIUM),
    "a setting differs": ({"explanations": [shape(Shape.SETTING, number=True)]}, Class.CORRECTNESS, Confidence.MEDIUM),
    "another name of an implementation does not": (
        {"explanations": [shape(Shape.SETTING, number=False)]}, Class.UNLOCALIZED, Confidence.LOW,
    ),
    "gross in most rows": ({"root": sized(0.4)}, Class.CORRECTNESS, Confidence.MEDIUM),
    "gross in few rows": ({"root": sized(0.4, 3e-3)}, Class.UNLOCALIZED, Confidence.LOW),
    "softmax makes rounding large": (
        {"root": sized(0.4), "info": Boundary(name=NAME, level=2, mixes_tokens=True)}, Class.UNLOCALIZED, Confidence.LOW,
    ),
    "a few ulps, up and down": ({"dump": dump(1)}, Class.FLOATING_POINT, Confidence.MEDIUM),
    "a few ulps, always up": ({"dump": dump(1, 1.0)}, Class.UNLOCALIZED, Confidence.LOW),
    "a few ulps in some of the rows": ({"dump": dump(1, rows=8)}, Class.UNLOCALIZED, Confidence.LOW),
    "one rounding between two dtypes": (
        {"dtypes": ("bfloat16", "float32"), "explanations": [shape(Shape.GRID, scale="none")]}, Class.FLOATING_POINT, Confidence.HIGH,
    ),
    "fades, but who knows": (
        {"root": sized(0.9), "fades": ("q_rope",), "explanations": [shape(Shape.LENGTH_KEPT)]}, Class.UNLOCALIZED, Confidence.LOW,
    ),
    "an equivalent order": (
        {"root": sized(0.9), "fades": ("q_rope",), "faded": True, "control": control(ControlOutcome.SURVIVES),
         "explanations": [shape(Shape.LENGTH_KEPT)]}, Class.FLOATING_POINT, Confidence.HIGH,
    ),
    "unknown weights rule nothing out": (
        {"weights_equal": False, "explanations": [shape(Shape.CONSTANT_RATIO)]}, Class.UNLOCALIZED, Confidence.LOW,
    ),
    "nothing before it was compared": ({"same_input": False, "root": sized(0.9)}, Class.UNLOCALIZED, Confidence.LOW),
    "equal ancestors do": (
        {"same_input": False, "ancestors": True, "control": control(ControlOutcome.SURVIVES)}, Class.CORRECTNESS, Confidence.HIGH,
    ),
    "dropout": ({"leads": [Lead("dropout", "B has active dropout", Class.INPUT)]}, Class.INPUT, Confidence.MEDIUM),
    "declared and on its grid": (
        {"leads": [Lead("quantization", "B declares it")], "explanations": [shape(Shape.GRID, side="b", dtype="float8_e4m3fn")]},
        Class.QUANTIZATION, Confidence.HIGH,
    ),
    "declared, and rounded to bfloat16": (
        {"leads": [Lead("quantization", "B declares it")], "explanations": [shape(Shape.GRID, side="b", dtype="bfloat16")]},
        Class.UNLOCALIZED, Confidence.LOW,
    ),
    "declared by the other side": (
        {"leads": [Lead("quantization", "A declares it")], "explanations": [shape(Shape.GRID, side="b", dtype="float8_e4m3fn")]},
        Class.UNLOCALIZED, Confidence.LOW,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_decides(case: str) -> None:
    """The class and how far its evidence carries; nothing is proven in every respect."""
    fields, klass, confidence = CASES[case]
    found = classify_root(RootEvidence(**{**PLAIN, **fields}))
    assert (found.klass, found.confidence) == (klass, confidence)
    assert found.evidence
    assert found.not_proven


def test_what_is_open_is_listed() -> None:
    """Missing boundaries, unknown weights, the span between ancestors, and what only a control could tell."""
    open_root = msgspec.structs.replace(ROOT, between=("layers.0.residual",))
    found = classify_root(
        RootEvidence(
            **{**PLAIN, "root": open_root, "same_input": False, "ancestors": True, "weights_equal": False},
            earlier=(BoundaryOutcome.MISSING,), fades=("layers.1.mlp.out",),
        )
    )  # fmt: skip
    text = "; ".join(found.not_proven)
    for words in ("between layers.0.residual and", "boundaries before it are missing", "weights are equal", "equivalent order"):
        assert words in text
    found = classify_root(RootEvidence(**{**PLAIN, "root": sized(0.4)}))
    assert "that it survives in float32: no control pair was given" in found.not_proven
