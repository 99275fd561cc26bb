"""Run conditions of this process: what could make two runs of the same code differ, as plain JSON.

What cannot be found out is the string ``unknown``. Secrets never get in: environment variables come by an allow-list
and then lose everything whose name looks like a secret, command-line values that look like one are replaced.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tracer.format.redaction import names_secret, redact_arguments, redact_text
from tracer.record.host import Host

__all__ = ["code_revision", "environment_variables", "run_conditions"]

UNKNOWN = "unknown"

_VARIABLES = re.compile(
    r"(OMP_|MKL_|OPENBLAS_|KMP_|CUBLAS|CUDA_|CUDNN_|NVIDIA_|PYTORCH_|TORCH|TRITON_|NCCL_|GLOO_|HIP_|HSA_|ROCM_|MIOPEN_|XLA_"
    r"|PYTHONHASHSEED\Z|FLASH_|ATTENTION|NVTE_|WORLD_SIZE\Z|LOCAL_WORLD_SIZE\Z)"
)
_PLACE = re.compile(r"_(DIR|PATH|HOME|FILE|PREFIX|RUN_ID|IDENT|BUFFER_NAME)\Z")
"""Endings of variables that say where something lies: other on every machine, and without effect on numbers."""
_IMAGE_VARIABLES = ("TRACER_IMAGE_DIGEST", "IMAGE_DIGEST", "CONTAINER_IMAGE_DIGEST", "CONTAINER_IMAGE")
_GIT_SECONDS = 2.0
_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def run_conditions(host: Host) -> dict[str, Any]:
    """Everything of the run but its inputs and weights: command, code, packages, torch's switches, devices, environment, and
    under ``model`` what the host knows. Strict JSON. Takes a few milliseconds, plus what ``git`` needs."""
    return {
        "command": redact_arguments(sys.argv),
        "code": code_revision(_script()),
        "image": next((os.environ[name] for name in _IMAGE_VARIABLES if os.environ.get(name)), UNKNOWN),
        "platform": {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine(), "cpu": _cpu()},
        "packages": _loaded_packages(),
        "torch": _torch_switches(),
        "threads": _threads(),
        "devices": _devices(),
        "environment": environment_variables(os.environ, getattr(host, "environment_prefixes", ())),
        "model": host.conditions(),
    }


# ------------------------------------------------------------------------------------------------ secrets


def environment_variables(environment: Mapping[str, str], prefixes: Sequence[str] = ()) -> dict[str, str]:
    """The variables that can change numbers or layout, without anything that looks like a secret. ``prefixes``: a host's own."""
    return {
        name: redact_text(value)
        for name, value in sorted(environment.items())
        if (_VARIABLES.match(name) or name.startswith(tuple(prefixes))) and not _PLACE.search(name) and not names_secret(name)
    }


# ------------------------------------------------------------------------------------------------ code


def _script() -> Path | None:
    """The program's own file, None in an interactive session."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main) if main else None


def code_revision(script: Path | None) -> dict[str, Any]:
    """Revision of the repository that holds ``script`` (or the working directory), whether it has changes, and a digest of
    them: of the diff of tracked files and of the names of untracked ones. ``unknown`` without git."""
    folder = script.resolve().parent if script is not None and script.exists() else Path.cwd()
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return {"revision": UNKNOWN, "dirty": UNKNOWN, "changes": UNKNOWN}
    status = _git(folder, "status", "--porcelain=v1", "-z", "--untracked-files=normal")
    changes = b"" if not status else _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--binary")
    if changes is None or status is None:
        return {"revision": _text(revision), "dirty": UNKNOWN, "changes": UNKNOWN}
    digest = hashlib.sha256(changes + b"\0" + status).hexdigest()
    return {"revision": _text(revision), "dirty": bool(status), "changes": digest if status else ""}


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of git, None where it is not there, fails, or takes too long. Reads only, asks nothing, takes no lock."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "LC_ALL": "C"}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "--no-pager", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_GIT_SECONDS,
            check=True,
        ).stdout
    return None


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()


# ------------------------------------------------------------------------------------------------ machine and libraries


def _loaded_packages() -> dict[str, str]:
    """Versions of the packages this process has imported, as they say themselves."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name.startswith("_") or name in sys.stdlib_module_names:
            continue
        version = vars(module).get("__version__") if module is not None and hasattr(module, "__dict__") else None
        if isinstance(version, str):
            found[name] = str(version)
    return dict(sorted(found.items()))


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or UNKNOWN


def _torch_switches() -> dict[str, Any]:
    """Switches of torch that change bits."""
    backends = torch.backends
    return {
        "version": str(torch.__version__),
        "git": getattr(torch.version, "git_version", UNKNOWN),
        "cuda": torch.version.cuda or "none",
        "hip": torch.version.hip or "none",
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32_matmul_precision": _ask(torch.get_float32_matmul_precision),
        "cuda_matmul": _flags(backends.cuda.matmul, ("fp32_precision", "allow_tf32", *_REDUCED)),
        "cudnn": _flags(backends.cudnn, ("enabled", "benchmark", "deterministic", "fp32_precision", "allow_tf32")),
        "sdp": {name: _ask(getattr(backends.cuda, f"{name}_sdp_enabled", None)) for name in ("flash", "mem_efficient", "math", "cudnn")},
        "mkldnn": _flags(backends.mkldnn, ("enabled", "deterministic", "fp32_precision", "allow_tf32")),
        "cpu_capability": _ask(lambda: backends.cpu.get_cpu_capability()),
        "autocast": {
            device: str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else False
            for device in ("cpu", "cuda")
        },
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


def _threads() -> dict[str, Any]:
    return {
        "torch": torch.get_num_threads(),
        "torch_interop": torch.get_num_interop_threads(),
        "cpus": os.cpu_count() or UNKNOWN,
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else UNKNOWN,
    }


def _devices() -> dict[str, Any]:
    """Accelerators, as far as this process has initialised them: asking never creates a context."""
    if not torch.cuda.is_available():
        return {"cuda": []}
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"cuda": UNKNOWN}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": properties.name, "capability": f"{properties.major}.{properties.minor}", "memory": properties.total_memory})
    driver = _ask(getattr(torch._C, "_cuda_getDriverVersion", None))
    return {"cuda": devices, "driver": driver, "cudnn": _ask(torch.backends.cudnn.version), "nccl": _ask(_nccl_version)}


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _flags(owner: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: _ask(lambda name=name: getattr(owner, name)) for name in names}


def _ask(question: Any) -> Any:
    """An answer as plain JSON, ``unknown`` where there is none; reading a deprecated switch warns nobody."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = question()
    except Exception:
        return UNKNOWN
    return answer if isinstance(answer, bool | int | float | str) else UNKNOWN if answer is None else str(answer)
