"""Finding a host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import make_model
from tracer.errors import Code, HostError, UsageError
from tracer.hosts import HOST_NAMES, find_host
from tracer.record.host import Mesh


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3")


def test_host_is_found_by_model_and_by_name(model: Any) -> None:
    """A transformers model is claimed by the transformers host, with and without its name."""
    assert find_host(model).name == find_host(model, "transformers").name == "transformers"
    assert HOST_NAMES == ("megatron", "transformers", "vllm")


def test_host_object_is_used_as_it_is(model: Any) -> None:
    """A host of the user's own is taken unchanged."""
    own = find_host(model)
    assert find_host(object(), own) is own


@pytest.mark.parametrize("host", [None, "transformers", "vlm"])
def test_unknown_model_or_host_is_refused_with_a_remedy(host: str | None) -> None:
    """A module of no framework, or a name of no host, is refused with code, finding and remedy."""
    with pytest.raises(HostError) as caught:
        find_host(torch.nn.Linear(2, 2), host)
    assert caught.value.code is Code.HOST_UNKNOWN
    assert caught.value.found
    assert caught.value.remedy


def test_mesh_is_taken_over(model: Any) -> None:
    """A mesh given as a mapping becomes coordinates with a row-major rank; a ``Mesh`` is kept."""
    mesh = find_host(model, mesh={"dp": (1, 2), "fsdp": (2, 3)}).mesh()
    assert (mesh.rank, mesh.world_size) == (5, 6)
    assert [(axis.name, axis.index, axis.size) for axis in mesh.axes] == [("dp", 1, 2), ("fsdp", 2, 3)]
    assert find_host(model, mesh=mesh).mesh() is mesh
    assert find_host(model).mesh() == Mesh()


def test_coordinate_outside_the_mesh_is_refused(model: Any) -> None:
    """An index that the axis does not have is a usage error."""
    with pytest.raises(UsageError) as caught:
        find_host(model, mesh={"dp": (2, 2)})
    assert caught.value.code is Code.BAD_ARGUMENT
