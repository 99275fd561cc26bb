"""The pages with both programs, trainer-against-rollout.md and bisect-vllm.md, as a reader runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_readme import run_page
from tests.vllm.engines import ENVIRONMENT
from tests.warm import WarmPython

IMPORTED = (
    "torch._dynamo", "transformers.models.qwen3_moe.modeling_qwen3_moe", "vllm.entrypoints.llm", "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.worker.cpu_worker", "vllm.v1.engine.llm_engine", "tracer.hosts.transformers", "tracer.hosts.vllm",
    "tracer.hosts.vllm_extension",
)  # fmt: skip


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a ``python`` that has imported both programs, and has computed nothing."""
    python = WarmPython(tmp_path_factory.mktemp("warm") / "python", IMPORTED)
    yield python.bin
    python.close()


@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("page", ["docs/tutorial/trainer-against-rollout.md", "docs/how-to/bisect-vllm.md"])
def test_the_page_runs(page: str, commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the page runs in order, in a fresh folder, and prints what the page shows."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run_page(page, tmp_path, commands)
