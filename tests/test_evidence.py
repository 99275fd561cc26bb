"""Evidence about roots, gathered: what fades behind them, which weights and settings they hang on, what the control says."""

from __future__ import annotations

import msgspec
import numpy as np

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.read.findings import Class, DiffResult

NAME = "layers.1.attn.core"


def turned(by: float) -> tuple[Side, Side]:
    """B's attention is turned within pairs of columns; what reads it differs by noise of relative size ``by``."""
    a, b = Side(), Side()
    rows = b.values[NAME].rows.reshape(-1, 16, 2)
    b.values[NAME].rows = np.stack([-rows[..., 1], rows[..., 0]], axis=-1).reshape(-1, 32)
    random = np.random.default_rng(0)
    for info in b.boundaries[[info.name for info in b.boundaries].index(NAME) + 1 :]:
        values = b.values[info.name]
        if values.dtype == "float32" and by:
            values.rows = (values.rows * (1 + by * random.uniform(-1, 1, values.rows.shape))).astype(np.float32)
    return a, b


def klass(result: DiffResult) -> Class:
    """The class."""
    assert result.classification is not None
    return result.classification.klass


def test_an_equivalent_order_fades_behind_the_boundary() -> None:
    """A boundary that is turned while what reads it is at rounding size: open without a control, equivalent with one whose
    reader falls, an error where the reader moves as well."""
    a, b = turned(1e-7)
    result = diff_traces(a.trace(), b.trace())
    assert klass(result) is Class.UNLOCALIZED
    assert any("what reads it differs by rounding only (layers.1.attn.out)" in text for text in result.classification.evidence)  # type: ignore[union-attr]
    wide = turned(1e-7)
    result = diff_traces(a.trace(), b.trace(), control=(wide[0].trace(), wide[1].trace()))
    assert klass(result) is Class.FLOATING_POINT
    a, b = turned(0.1)
    assert klass(diff_traces(a.trace(), b.trace())) is Class.CORRECTNESS


def test_weights_that_nobody_knows_rule_nothing_out() -> None:
    """The projection's own weight has no fingerprint on one side: whatever the shape, it may be the weight."""
    a, b = Side(), Side()
    for info in b.boundaries[[info.name for info in b.boundaries].index("layers.1.attn.out") :]:
        if b.values[info.name].dtype == "float32":
            b.values[info.name].rows = (b.values[info.name].rows * 1.5).astype(np.float32)
    assert klass(diff_traces(a.trace(), b.trace())) is Class.CORRECTNESS
    weight = b.weights["layers.1.attn.out.weight"]
    b.weights["layers.1.attn.out.weight"] = msgspec.structs.replace(weight, digest=("", ""), unknown="repacked")
    result = diff_traces(a.trace(), b.trace())
    assert klass(result) is Class.UNLOCALIZED
    assert any("weights are equal" in text for text in result.classification.not_proven)  # type: ignore[union-attr]


def test_products_in_less_than_float32_explain_small_differences() -> None:
    """A side that allows TF32 on a device that has it: a projection that is 3e-4 off is no proven error."""
    a, b = Side(), Side()
    rows = b.values["layers.1.attn.out"].rows
    noise = np.random.default_rng(0).uniform(-1, 1, rows.shape) * 5e-4
    b.values["layers.1.attn.out"].rows = (rows + noise).astype(np.float32)
    b.carry_on("layers.1.attn.residual", "s0:2")
    assert klass(diff_traces(a.trace(), b.trace())) is Class.CORRECTNESS
    device = {"mode": "eval", "devices": {"cuda": [{"name": "x"}]}, "torch": {"float32_matmul_precision": "high"}}
    a.conditions = b.conditions = device
    assert klass(diff_traces(a.trace(), b.trace())) is Class.UNLOCALIZED


def test_the_first_roots_are_classed_and_further_ones_listed() -> None:
    """Each of the earliest roots gets a class of its own."""
    b = Side()
    b.set_weight("layers.2.attn.q.weight", 1)
    for layer in (0, 1):
        b.carry_on(f"layers.{layer}.mlp.out", f"s{layer}:1")
    roots = diff_traces(Side().trace(), b.trace()).roots
    assert [(root.place.boundary, root.klass) for root in roots] == [
        ("layers.0.mlp.out", Class.CORRECTNESS),
        ("layers.1.mlp.out", Class.CORRECTNESS),
        ("layers.2.attn.q.weight", Class.WEIGHT),
    ]
