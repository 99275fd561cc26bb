"""Module names of a transformers model from its config alone: built on the meta device, no weights, no memory."""

from __future__ import annotations

from pathlib import Path

from tracer.errors import Code, HostError, UsageError

__all__ = ["modules_from_config"]


def modules_from_config(config: Path) -> dict[str, str]:
    """Module path -> class name of the model that ``config`` (a ``config.json``, or a folder with one) describes.

    The class is the first of the config's ``architectures`` that the library has, else its causal language model.
    Raises HostError host-missing-package, UsageError bad-argument (no such file, or no config the library can build).
    """
    if not config.exists():
        raise UsageError(Code.BAD_ARGUMENT, "no such config", expected="a config.json, or a folder with one", found=str(config))
    try:
        import torch
        import transformers
    except ImportError as error:
        raise HostError(
            Code.HOST_MISSING_PACKAGE,
            f"building a model from its config needs transformers: {error}",
            remedy="install it: pip install 'boundary-tracer[transformers]'",
        ) from error
    try:
        settings = transformers.AutoConfig.from_pretrained(config)
        known = (getattr(transformers, name, None) for name in settings.architectures or ())
        architecture = next((cls for cls in known if cls is not None), None)
        with torch.device("meta"):
            if architecture is not None:
                model = architecture._from_config(settings)
            else:
                model = transformers.AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        raise UsageError(
            Code.BAD_ARGUMENT,
            f"transformers {transformers.__version__} cannot build a model from this config: {error}",
            where=str(config),
            expected="a config.json with a model_type that this version of the library knows",
        ) from error
    return {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
