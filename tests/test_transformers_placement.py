"""Where the columns of a boundary lie when one process of a tensor-parallel group shows a plain slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.test_torch_sharding import placed, process
from tests.tiny_models import make_config
from tracer.errors import Code, MapError
from tracer.format.schema import Axis
from tracer.hosts.transformers_placement import Placer, attention_columns
from tracer.record.boundaries import Source
from tracer.record.host import Mesh, Placement

LEAF = torch.zeros(1)
SECOND = Mesh(rank=1, world_size=2, axes=(Axis(name="tp", index=1, size=2),))


def placer(mesh: Mesh = SECOND, modules: dict[str, torch.nn.Module] | None = None, **changes: Any) -> Placer:
    return Placer(make_config("qwen3", **changes), mesh, modules or {})


def test_without_an_axis_that_cuts_everything_is_whole() -> None:
    """In one process, and where processes only run other sequences, a leaf has all its columns."""
    for axes in ((), (Axis(name="fsdp", index=1, size=2),), (Axis(name="cp", index=1, size=2), Axis(name="pp", index=0, size=2))):
        mesh = Mesh(rank=1, world_size=2, axes=axes)
        assert placer(mesh).place(Source("layers.0.attn.q", "q"), 7, LEAF) == Placement(7)


def test_heads_are_placed_by_the_config() -> None:
    """What no weight tells, heads after their norm or rope, is cut of the width that the config gives."""
    source = Source("layers.0.attn.q_rope", "attn", tap="attention", leaf="q", layout="b h s d", shard=(("tp", "h"),))
    assert placer().place(source, 32, LEAF) == Placement(64, ((32, 64),), axis="tp")
    assert placer().place(source, 64, LEAF) == Placement(64)


def test_linear_modules_know_their_width() -> None:
    """A linear module's weight gives the width, of its output and of its input, uneven parts as torch cuts them."""
    modules: dict[str, torch.nn.Module] = {"up": torch.nn.Linear(8, 127), "down": torch.nn.Linear(127, 8)}
    up = Source("layers.0.mlp.gate_up", "up", layout="b s i", shard=(("tp", "i"),))
    act = Source("layers.0.mlp.act", "down", leaf="input[0]", layout="b s i", shard=(("tp", "i"),))
    for source in (up, act):
        assert placer(modules=modules).place(source, 63, LEAF) == Placement(127, ((64, 127),), axis="tp")


def test_a_cut_that_nobody_explains_is_refused() -> None:
    """S31: an axis cuts a boundary and the map is silent, or says it does not; the error names boundary, axis and remedy."""
    modules: dict[str, torch.nn.Module] = {"up": torch.nn.Linear(8, 128)}
    silent = Source("layers.0.mlp.gate_up", "up", layout="b s i")
    wrong = Source("layers.0.attn.out", "attn", layout="b s c", replicated=("tp",))
    unknown = Source("layers.0.linear_attn.core", "core", layout="b s c")
    for source, columns in ((silent, 64), (wrong, 32), (unknown, 32)):
        with pytest.raises(MapError, match="tp=1 of 2") as caught:
            placer(modules=modules).place(source, columns, LEAF)
        assert caught.value.code is Code.MAP_AXIS
        assert source.boundary in caught.value.what
        assert caught.value.remedy


def test_a_whole_boundary_needs_no_word_of_the_map() -> None:
    """A boundary that has all its columns is whole although the map is silent about the axis, and one without columns always is."""
    modules: dict[str, torch.nn.Module] = {"up": torch.nn.Linear(8, 128)}
    assert placer(modules=modules).place(Source("layers.0.mlp.gate_up", "up", layout="b s i"), 128, LEAF) == Placement(128)
    other = Mesh(rank=1, world_size=2, axes=(Axis(name="model", index=1, size=2),))
    assert placer(other).place(Source("input.positions", "rotary", layout="b s"), 1, LEAF) == Placement(1)


def test_expert_parallelism_concerns_experts_only() -> None:
    """An ``ep`` axis leaves boundaries outside the experts' module whole, whatever the map says of it."""
    mesh = Mesh(rank=1, world_size=2, axes=(Axis(name="ep", index=1, size=2),))
    assert placer(mesh).place(Source("input.positions", "rotary", layout="b s"), 1, LEAF) == Placement(1)


def test_declared_partial_sums_keep_their_axis() -> None:
    """Partial sums over an active axis have all columns, and say over which axis they add up."""
    source = Source("layers.0.attn.out", "attn", layout="b s c", partial="tp")
    assert placer().place(source, 64, LEAF) == Placement(64, partial="tp")


def test_dtensors_speak_for_themselves() -> None:
    """A DTensor's placements decide, not the map: columns, rows and pending sums."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard

    source = Source("lm_head", "lm_head", layout="b s c", replicated=("tp",))
    with process(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        cut = placed((1, 2, 9), mesh, [Shard(2)], (1, 2, 4))
        assert placer().place(source, 4, cut) == Placement(9, ((5, 9),), axis="tp")
        assert placer().place(source, 9, placed((1, 4, 9), mesh, [Shard(1)], (1, 2, 9))) == Placement(9)
        assert placer().place(source, 9, placed((1, 2, 9), mesh, [Partial()], (1, 2, 9))) == Placement(9, partial="tp")


def test_columns_of_all_heads() -> None:
    """q, k and v have heads times head size; other boundaries have no heads."""
    config = make_config("qwen3")
    assert [attention_columns(config, name) for name in ("attn.q", "attn.k_norm", "attn.v", "mlp.out")] == [64, 32, 32, None]
