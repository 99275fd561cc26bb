"""Module names of a vLLM model from its config alone: the engine's own class on the meta device, no weights, no memory.

The names are the engine's, so the engine must be installed: where it is not, the check is not run, and says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tracer.errors import Code, HostError, UsageError

__all__ = ["modules_from_config"]


def modules_from_config(config: Path) -> dict[str, str]:
    """Module path -> class name of the model that vLLM makes of ``config`` (a ``config.json``, or a folder with one).

    Sets up groups of this one process, as a worker does, and takes them down again; call it in a process that runs no engine.
    Raises HostError host-missing-package, UsageError bad-argument (no such file, or no config the engine can build)."""
    if not config.exists():
        raise UsageError(Code.BAD_ARGUMENT, "no such config", expected="a config.json, or a folder with one", found=str(config))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import torch
        import vllm
        from vllm.config import set_current_vllm_config
        from vllm.distributed import cleanup_dist_env_and_memory, ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model
    except ImportError as error:
        raise HostError(
            Code.HOST_MISSING_PACKAGE,
            f"not run: the module names of a vLLM model come from vLLM's own classes, which are not installed here: {error}",
            remedy="run the check in the environment of the engine",
        ) from error
    try:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(config / "config.json" if config.is_dir() else config, f"{folder}/config.json")
            engine = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True, load_format="dummy").create_engine_config()
            with set_current_vllm_config(engine):
                init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                try:
                    ensure_model_parallel_initialized(1, 1)
                    with torch.device("meta"):
                        model = initialize_model(engine)
                finally:
                    cleanup_dist_env_and_memory()
    except (ValueError, KeyError, TypeError, OSError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise UsageError(
            Code.BAD_ARGUMENT,
            f"vLLM {vllm.__version__} cannot build a model from this config: {error}",
            where=str(config),
            expected="a config.json of an architecture that this version of the engine has",
        ) from error
    return {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
