"""One vLLM process for the whole session: engines are built once per setting and kept, as vLLM wants it.

Nothing here skips: without vLLM the tests fail, and `make test-vllm` decides whether they run at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests.vllm.engines import ENVIRONMENT, SETTINGS, SETTINGS_OF, Trainer, generate, whole, write_checkpoint

os.environ.update(ENVIRONMENT)

Build = Callable[..., Any]
Checkpoint = Callable[[str, str], Path]
Pair = Callable[..., tuple[Path, Path]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is marked; warnings are the engine's own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """``checkpoint(family, dtype)``: folder of a tiny one."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str = "Qwen3Moe", dtype: str = "float32") -> Path:
        if (family, dtype) not in made:
            made[family, dtype] = write_checkpoint(tmp_path_factory.mktemp(f"{family}-{dtype}"), family, dtype)
        return made[family, dtype]

    return make


@pytest.fixture(scope="session")
def engine(checkpoint: Checkpoint) -> Build:
    """``engine(family, dtype, **settings)``: an ``LLM`` built with ``tracer.vllm_options()``."""
    from vllm import LLM

    built: dict[Any, Any] = {}

    def build(family: str = "Qwen3Moe", dtype: str = "float32", **settings: Any) -> Any:
        key = (family, dtype, repr(sorted(settings.items())))
        if key not in built:
            given = {**tracer.vllm_options(), **SETTINGS, **settings}
            built[key] = LLM(model=str(checkpoint(family, dtype)), dtype=dtype, **given)
        return built[key]

    return build


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """transformers, in a process of its own."""
    made = Trainer(tmp_path_factory.mktemp("trainer") / "log")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def pair(trainer: Trainer, engine: Build, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """``pair(family, dtype, *faults)``: traces of trainer and rollout on the same tokens, everything recorded."""
    rollouts: dict[tuple[str, str], tuple[Path, list[list[int]]]] = {}

    def record(family: str, dtype: str, *faults: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("pair")
        if (family, dtype) not in rollouts:
            llm = engine(family, dtype, **SETTINGS_OF.get(family, {}))
            with tracer.trace(llm, out=folder / "rollout", level=2, weights="rows", strict=True):
                outputs = generate(llm, prompt_logprobs=1)
            rollouts[family, dtype] = folder / "rollout", whole(outputs)
        rollout, tokens = rollouts[family, dtype]
        return trainer.trace(checkpoint(family, dtype), dtype, tokens, folder / "trainer", *faults), rollout

    return record
