"""Finding a host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import make_config, make_model
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


def test_a_wrapper_is_refused_with_what_to_pass(model: Any) -> None:
    """A module of the user's own around models names the parts that can be traced, outermost only."""

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value_head, self.reference = model, torch.nn.Linear(2, 1), torch.nn.Sequential(make_model("gpt2"))

    with pytest.raises(HostError) as caught:
        find_host(Pair())
    assert ".policy (a Qwen3ForCausalLM), or .reference.0 (a GPT2LMHeadModel);" in caught.value.remedy


def test_what_is_no_host_is_refused(model: Any) -> None:
    """An object without the protocol's methods is refused by their names."""
    with pytest.raises(HostError) as caught:
        find_host(model, 5)  # type: ignore[arg-type]
    assert caught.value.code is Code.HOST_UNKNOWN
    assert caught.value.found.startswith("int without begin_forward, ")


@pytest.mark.parametrize("mesh", [5, {"tp": 3}, {"tp": ("a", 2)}, {"tp": (0, 2, 3)}])
def test_what_is_no_mesh_is_refused(model: Any, mesh: Any) -> None:
    """Anything but axis -> (index, size) is a typed error."""
    with pytest.raises(UsageError) as caught:
        find_host(model, mesh=mesh)
    assert (caught.value.code, caught.value.found) == (Code.BAD_ARGUMENT, repr(mesh))


def test_a_model_without_values_is_refused() -> None:
    """A model on the meta device computes nothing: refused before a run."""
    with torch.device("meta"), pytest.raises(HostError) as caught:
        find_host(type(make_model("llama"))(make_config("llama")))
    assert caught.value.code is Code.HOST_UNSUPPORTED


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
