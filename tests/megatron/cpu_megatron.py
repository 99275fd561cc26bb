"""Megatron-core 0.16 on CPU and gloo: what of it insists on CUDA is given the CPU, from outside. Import before megatron.

Only tests and tools use this. Every patch names its place; none changes a value that the model computes.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["run_on_cpu"]

_CPU = torch.device("cpu")


class _Stream:
    """Work on the CPU is in order already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def record_event(self, *args: Any) -> _Stream:
        return self

    def synchronize(self) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


def run_on_cpu() -> None:
    """Patch torch.cuda and megatron.core in this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for module in (cuda, cuda.random):  # tensor_parallel.random keeps generator states of the device
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = (torch.default_generator,)
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda stream: stream

    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.torch_norm as torch_norm

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> Any:
        made: Any = torch.nn.RMSNorm(hidden_size, eps=eps)  # the wrapper refuses sequence parallelism, which a norm per token allows
        made.weight.sequence_parallel = config.sequence_parallel
        return made

    torch_norm.WrappedTorchNorm.__new__ = norm
    if not hasattr(moe_utils, "te_general_gemm"):  # named although Transformer Engine is absent
        moe_utils.te_general_gemm = None
    move = dispatcher.maybe_move_tensor_to_cpu

    def split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:  # left as it is upstream, and all_to_all wants numbers
            return tensor.numpy() if as_numpy else tensor
        return move(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = split_sizes
