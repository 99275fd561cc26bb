"""One vLLM process for the whole session: engines are built once per setting and kept, as vLLM wants it.

Nothing here skips: without vLLM the tests fail, and `make test-vllm` decides whether they run at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENVIRONMENT, SETTINGS, write_checkpoint

os.environ.update(ENVIRONMENT)

Build = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is marked; warnings are the engine's own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``checkpoint(family, dtype)``: folder of a tiny one."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str = "Qwen3Moe", dtype: str = "float32") -> Path:
        if (family, dtype) not in made:
            made[family, dtype] = write_checkpoint(tmp_path_factory.mktemp(f"{family}-{dtype}"), family, dtype)
        return made[family, dtype]

    return make


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str, str], Path]) -> Build:
    """``engine(family, dtype, **settings)``: an ``LLM`` built with ``tracer.vllm_options()``."""
    from vllm import LLM

    import tracer

    built: dict[Any, Any] = {}

    def build(family: str = "Qwen3Moe", dtype: str = "float32", **settings: Any) -> Any:
        key = (family, dtype, tuple(sorted(settings.items())))
        if key not in built:
            given = {"max_num_batched_tokens": 256, "enable_prefix_caching": False, **SETTINGS, **settings}
            built[key] = LLM(**tracer.vllm_options(), model=str(checkpoint(family, dtype)), dtype=dtype, **given)
        return built[key]

    return build
