"""What became of weights that differ."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tests.sides import Side
from tracer.format.fingerprint import digest_of_rows, fingerprint_rows
from tracer.read.causes import merge_catalogues
from tracer.read.grids import round_to
from tracer.read.logical import LogicalTrace
from tracer.read.weight_diff import compare_weights
from tracer.read.weight_shapes import weight_shapes

F64 = npt.NDArray[np.float64]
Q, K = "layers.1.attn.q.weight", "layers.1.attn.k.weight"


def side(weights: dict[str, F64], *, rows: bool = True, tied: bool = False) -> LogicalTrace:
    """A side with these weights in float32, row by row or by one digest each."""
    made = Side()
    made.weights = {}
    made.conditions = {"model": {"config": {"tie_word_embeddings": tied}}}
    for name, values in weights.items():
        made.set_weight(name, 0, rows=len(values))
        found = fingerprint_rows(values.astype(np.float32), "float32")
        lanes = digest_of_rows(found.digest_N2, np.arange(len(values)))
        digest = (f"{lanes[0]:016x}", f"{lanes[1]:016x}")
        made.weights[name] = msgspec.structs.replace(made.weights[name], dtype="float32", columns=values.shape[1], digest=digest)
        if rows:
            made.weight_rows[name] = found
    return made.trace()


def told(a: LogicalTrace, b: LogicalTrace) -> dict[str, str]:
    """Weight -> what is said of it."""
    weights = compare_weights(a, b, merge_catalogues(a.catalogue, b.catalogue))
    return {name: found.text for name, found in weight_shapes(a, b, weights, weights.differing[0].name)}


def normal(rows: int = 32, columns: int = 64, seed: int = 0) -> F64:
    """Normal values."""
    return round_to(np.random.default_rng(seed).standard_normal((rows, columns)), "float32")


def test_zeroed_and_exchanged_weights_need_only_digests() -> None:
    """A weight of zeros has a digest of zeros, and another weight's bytes have its digest."""
    a = {Q: normal(), K: normal(seed=1)}
    assert told(side(a, rows=False), side({**a, Q: np.zeros_like(a[Q])}, rows=False)) == {Q: "B is all zero"}
    assert told(side(a, rows=False), side({Q: a[K], K: a[Q]}, rows=False)) == {
        Q: f"B holds the bytes of A's {K}",
        K: f"B holds the bytes of A's {Q}",
    }
    assert told(side(a, rows=False), side({**a, Q: a[Q] + 1}, rows=False)) == {}


def test_an_untied_head_is_named_with_the_config() -> None:
    """A head that is the embedding on one side only."""
    table = normal()
    a = side({"embedding.weight": table, "lm_head.weight": table}, rows=False)
    b = {"embedding.weight": table, "lm_head.weight": normal(seed=3)}
    assert "although its config ties them" in told(a, side(b, rows=False, tied=True))["lm_head.weight"]
    assert "config" not in told(a, side(b, rows=False))["lm_head.weight"]


def test_experts_that_carry_another_number() -> None:
    """One permutation for all weights of a layer's experts."""
    name = "layers.0.moe.experts.{}.{}.weight".format
    own = {name(e, leaf): normal(4, 16, seed=10 * e + n) for e in range(4) for n, leaf in enumerate(("up", "down"))}
    order = [2, 0, 3, 1]
    moved = {name(e, leaf): own[name(order[e], leaf)] for e in range(4) for leaf in ("up", "down")}
    found = told(side(own, rows=False), side(moved, rows=False))
    assert found["layers.0.moe.experts.0.up.weight"] == "experts permuted: B holds A's experts [2, 0, 3, 1], byte for byte"


def test_rows_permuted_within_and_across_neighbours() -> None:
    """Rows of q that are rows of k, and rows in another order, in runs."""
    a = {Q: normal(), K: normal(seed=1)}
    packed = np.concatenate([a[Q], a[K]])
    found = told(side(a), side({Q: packed[np.r_[0:16, 32:48]], K: packed[np.r_[16:32, 48:64]]}))
    assert f"rows of its neighbours, byte for byte (0..15 <- {Q} 0..15, 16..31 <- {K} 0..15)" in found[Q]
    found = told(side(a), side({**a, Q: a[Q][::-1]}))
    assert "another order of the same rows" in found[Q]


def test_simple_rules_between_rows() -> None:
    """A ratio, an added number, few directions, and values of small rows rounded to a coarser dtype."""
    a = normal()
    random = np.random.default_rng(7)
    low = a + 0.1 * random.standard_normal((32, 4)) @ random.standard_normal((4, 64))
    for b, words in ((1.5 * a, "B is A times 1.5"), (a + 1, "B is A plus 1 in every element"), (low, "rank 4 (32 rows of 32 differ)")):
        assert words in told(side({Q: a}), side({Q: b}))[Q]
    bias = normal(1, 8) + 7
    assert told(side({Q: bias}), side({Q: round_to(bias, "bfloat16")})) == {Q: "B is A rounded to bfloat16"}
    assert told(side({Q: a}), side({Q: normal(seed=5)})) == {}
