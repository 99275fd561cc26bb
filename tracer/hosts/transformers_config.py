"""Module names of a transformers model from its config alone: built on the meta device, no weights, no memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracer.errors import Code, HostError, UsageError

__all__ = ["modules_from_config", "read_config"]


def modules_from_config(config: Path) -> dict[str, str]:
    """Module path -> class name of the model that ``config`` (a ``config.json``, or a folder with one) describes.

    Raises HostError host-missing-package, UsageError bad-argument (no such file, or no config the library can build).
    """
    settings, build = read_config(config)
    import torch

    try:
        with torch.device("meta"):
            model = build(settings)
    except _UNUSABLE as error:
        raise _no_model(config, error) from error
    return {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}


def read_config(config: Path) -> tuple[Any, Callable[[Any], Any]]:
    """The library's config object of a ``config.json`` (or a folder with one), and what builds a model from one like it: the first
    of its ``architectures`` that the library has, else its causal language model. Raises as ``modules_from_config``."""
    if not config.exists():
        raise UsageError(Code.BAD_ARGUMENT, "no such config", expected="a config.json, or a folder with one", found=str(config))
    try:
        import transformers
    except ImportError as error:
        raise HostError(
            Code.HOST_MISSING_PACKAGE,
            f"building a model from its config needs transformers: {error}",
            remedy="install it: pip install 'boundary-tracer[transformers]'",
        ) from error
    try:
        settings = transformers.AutoConfig.from_pretrained(config)
    except _UNUSABLE as error:
        raise _no_model(config, error) from error
    known = (getattr(transformers, name, None) for name in settings.architectures or ())
    architecture: Any = next((cls for cls in known if cls is not None), None)
    return settings, architecture._from_config if architecture is not None else transformers.AutoModelForCausalLM.from_config


_UNUSABLE = (ValueError, KeyError, TypeError, OSError, AttributeError)
"""What the library raises about a config that it cannot use."""


def _no_model(config: Path, error: Exception) -> UsageError:
    import transformers

    return UsageError(
        Code.BAD_ARGUMENT,
        f"transformers {transformers.__version__} cannot build a model from this config: {error}",
        where=str(config),
        expected="a config.json with a model_type that this version of the library knows",
    )
