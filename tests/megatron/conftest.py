"""Megatron tests run where megatron-core is: elsewhere they are skipped with the reason, under CI they fail instead."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.megatron.runs import record_all

_ABSENT = "megatron-core is not installed; `make test-megatron` makes an environment that has it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands in this folder."""
    for item in items:
        if "megatron" in item.path.parent.name:
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="session", autouse=True)
def megatron_core() -> None:
    """Skip, or fail under CI, where the package is missing."""
    if importlib.util.find_spec("megatron") is None:
        if os.environ.get("CI") == "true":
            pytest.fail(_ABSENT)
        pytest.skip(_ABSENT)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, megatron_core: None) -> Path:
    """Folder of one trace per layout."""
    return record_all(tmp_path_factory.mktemp("megatron"))
