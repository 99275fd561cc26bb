"""Fingerprints of tensors, taken in place on whatever device they are.

On the CPU the numpy form of ``tracer.format.fingerprint`` works on the tensor's own memory. On any other device
the same definition runs as plain torch operations on the current stream, and the few bytes that result are copied
to pinned memory without waiting. Nothing is recorded by autograd, nothing of the input is kept or changed.

Shape suffixes: N rows, C columns held here, W words, G groups of 16 columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch

from tracer.errors import CaptureError, Code
from tracer.format.dtypes import AnyArray, dtype_info
from tracer.format.fingerprint import Fingerprints, check_columns, fingerprint_rows
from tracer.format.fingerprint_plan import GROUP, LANES, Plan, plan_for
from tracer.format.schema import Span

__all__ = ["PendingFingerprints", "copy_to_host", "dense_reals", "fingerprint_on_device", "fingerprint_tensor"]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_THREADS = 8
_THREADED_ITEMS = 1 << 21
"""Smaller tensors stay on this thread. Right after an operation torch's own workers still spin on the other cores for some
milliseconds, so that a helper gets half of one: 512 x 1024 took 4.2 ns an item in a hook alone, 5.0 with a helper."""
_CHUNK_WORDS = 1 << 23
"""Words of one step on a device; its widest temporaries are 64 MiB each."""
_ROW = np.dtype([("digest", "<u8", LANES), ("sketch", "<f4", GROUP), ("sum_squares", "<f8"), ("abs_max", "<f4"), ("nonfinite", "<u4")])


@dataclass(frozen=True, eq=False)
class PendingFingerprints:
    """Fingerprints that may still be on their way from a device."""

    finish: Callable[[], Fingerprints]

    def resolve(self) -> Fingerprints:
        """Wait for this tensor's copy only, and give numpy arrays that the caller owns."""
        return self.finish()


def fingerprint_tensor(rows_NC: torch.Tensor, *, width: int, spans: tuple[Span, ...] = ()) -> PendingFingerprints:
    """Fingerprints of N rows, read before this returns (CPU) or in the order of the current stream (devices).

    ``rows_NC``: two-dimensional, any dtype, strides and device; requires_grad, inference and asynchronous-collective
    tensors too; a DTensor must be given as its local part. ``width`` and ``spans``: as for ``fingerprint_rows``,
    counted in reals for complex dtypes.
    Raises ``CaptureError`` (leaf-not-tensor) for what holds no dense local memory, (capture-failed) during the capture
    of a CUDA graph; ``UsageError`` (bad-argument) where rows, width and spans do not fit.
    """
    if rows_NC.device.type != "cpu":
        return fingerprint_on_device(rows_NC, width=width, spans=spans)
    reals_NC, name = dense_reals(rows_NC)
    storage_NC = reals_NC.view(_SAME_SIZE[reals_NC.element_size()]).numpy()
    threads = _threads() if storage_NC.size >= _THREADED_ITEMS else 1
    fingerprints = fingerprint_rows(storage_NC, name, width=width, spans=spans, threads=threads)
    return PendingFingerprints(lambda: fingerprints)


def _threads() -> int:
    """As many threads as torch may use for one operation here."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(torch.get_num_threads(), usable, _MAX_THREADS)


def dense_reals(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The tensor's own memory as reals, without autograd or subclass behaviour, and its dtype's name."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: only clone() and waiting finish the collective
            with torch.no_grad():
                tensor = tensor.clone()
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise _no_memory(tensor, type(tensor).__name__)
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise _no_memory(tensor, f"{tensor.layout}, {tensor.dtype} on {tensor.device}")
    tensor = tensor.detach()
    name = _name(tensor.dtype)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()).flatten(-2)
    return tensor.resolve_neg(), name


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_memory(tensor: torch.Tensor, found: str) -> CaptureError:
    return CaptureError(
        Code.LEAF_NOT_TENSOR,
        "a tensor without dense memory of its own has no fingerprint",
        expected="a strided tensor, or the local part of a distributed one",
        found=f"{found}, shape {tuple(tensor.shape)}",
    )


# The same definition in plain torch operations, for any device.


def fingerprint_on_device(rows_NC: torch.Tensor, *, width: int, spans: tuple[Span, ...] = ()) -> PendingFingerprints:
    """As ``fingerprint_tensor``, in torch operations on the tensor's device (the CPU too) and current stream.

    Integer sums wrap around as int64, so digests are exact. Sketches are elementwise products and sums, never a matrix
    product, so that neither autocast nor TF32 rounds them.
    """
    if rows_NC.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            Code.CAPTURE_FAILED,
            "no fingerprint can be taken while a CUDA graph is being captured",
            expected="an eager forward",
            remedy="switch graphs off for the traced run",
        )
    with torch.no_grad():
        reals_NC, name = dense_reals(rows_NC)
        info = dtype_info(name, "fingerprint_on_device")
        narrow = info.is_narrow(width)
        plan = _device_plan("int64" if narrow else name, width, spans, reals_NC.device)
        check_columns(reals_NC.shape[1:], plan.host, info)
        reals_NC = reals_NC[:, : plan.host.columns]
        if narrow:
            values_NC = reals_NC.to(torch.int64, memory_format=torch.contiguous_format)
            whole = torch.cat([_digest(values_NC, plan), values_NC], dim=1)
            return _on_its_way(whole, _narrow_fingerprints)
        digest_N2 = _digest(reals_NC.view(_SAME_SIZE[reals_NC.element_size()]), plan)
        if info.kind == "packed":
            return _on_its_way(digest_N2, lambda array: Fingerprints(array.view(np.uint64)))
        return _on_its_way(torch.cat([digest_N2.view(torch.uint8), _statistics(reals_NC, plan)], dim=1), _float_fingerprints)


@dataclass(frozen=True, eq=False)
class _DevicePlan:
    """A plan's numbers on one device: ``keys_2W`` int64, ``signs_C`` float32, ``gather_L`` int64 (L = 16 per line:
    per bucket one signed column, or column C, which is zero)."""

    host: Plan
    keys_2W: torch.Tensor
    signs_C: torch.Tensor
    gather_L: torch.Tensor


@lru_cache(maxsize=128)
def _device_plan(dtype: str, width: int, spans: tuple[Span, ...], device: torch.device) -> _DevicePlan:
    plan = plan_for(dtype, width, spans)
    order = np.argsort(plan.buckets_C, kind="stable")
    counts = np.bincount(plan.buckets_C, minlength=GROUP)
    lines = np.full((GROUP, counts.max(initial=0)), plan.columns, np.int64)
    lines[np.arange(lines.shape[1]) < counts[:, None]] = order
    on_device = (torch.from_numpy(array).to(device) for array in (plan.keys_2W.view(np.int64), plan.signs_C, lines.T.reshape(-1)))
    return _DevicePlan(plan, *on_device)


def _digest(storage_NC: torch.Tensor, plan: _DevicePlan) -> torch.Tensor:
    """Both lanes, int64 (N, 2)."""
    digest_N2 = torch.zeros((len(storage_NC), LANES), dtype=torch.int64, device=storage_NC.device)
    for start, stop in _chunks(storage_NC):
        words_RW = _words(storage_NC[start:stop], plan.host).to(torch.int64) & 0xFFFFFFFF
        for lane in range(LANES):
            digest_N2[start:stop, lane] = (words_RW * plan.keys_2W[lane]).sum(dim=1)
    return digest_N2


def _words(storage_RC: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Whole words of every row, int32 (R, W)."""
    if storage_RC.numel() == 0:
        return storage_RC.new_zeros((len(storage_RC), plan.words), dtype=torch.int32)
    if plan.direct:
        flat = storage_RC.contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 4:
            flat = flat.clone()
        return flat.view(torch.int32).view(len(storage_RC), plan.words)
    packed = torch.zeros((len(storage_RC), plan.words * 4), dtype=torch.uint8, device=storage_RC.device)
    source = storage_RC.contiguous().view(torch.uint8)
    for piece in plan.pieces:
        packed[:, piece.offset : piece.offset + piece.stop - piece.start] = source[:, piece.start : piece.stop]
    return packed.view(torch.int32)


def _statistics(reals_NC: torch.Tensor, plan: _DevicePlan) -> torch.Tensor:
    """Sketch, squares, maximum and non-finite count as bytes, uint8 (N, 80)."""
    rows, columns = reals_NC.shape
    device = reals_NC.device
    whole = torch.zeros((rows, _ROW.itemsize - 8 * LANES), dtype=torch.uint8, device=device)
    if reals_NC.numel() == 0:
        return whole
    for start, stop in _chunks(reals_NC):
        values_RC = reals_NC[start:stop].to(torch.float32)
        finite_RC = values_RC.isfinite()
        values_RC = torch.where(finite_RC, values_RC, values_RC.new_zeros(()))
        signed_RC = values_RC.new_zeros((stop - start, columns + 1))
        torch.mul(values_RC, plan.signs_C, out=signed_RC[:, :columns])
        sketch_R16 = signed_RC.index_select(1, plan.gather_L).view(stop - start, -1, GROUP).sum(dim=1)
        squares_R1 = values_RC.double().square_().sum(dim=1, keepdim=True)
        abs_max_R1 = values_RC.abs().amax(dim=1, keepdim=True)
        nonfinite_R1 = (columns - finite_RC.sum(dim=1, keepdim=True)).to(torch.int32)
        parts = (sketch_R16, squares_R1, abs_max_R1, nonfinite_R1)
        whole[start:stop] = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    return whole


def _chunks(rows_NC: torch.Tensor) -> list[tuple[int, int]]:
    rows, columns = rows_NC.shape
    step = max(1, _CHUNK_WORDS // max(1, columns))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _on_its_way(whole: torch.Tensor, unpack: Callable[[AnyArray], Fingerprints]) -> PendingFingerprints:
    """Start the only copy to the host; ``unpack`` is called once it has arrived."""
    arrive = copy_to_host(whole)
    return PendingFingerprints(lambda: unpack(arrive()))


def copy_to_host(whole: torch.Tensor) -> Callable[[], AnyArray]:
    """Start copying a tensor of numbers that nobody else writes to; what is returned waits for this copy only and gives an array
    that the caller owns."""
    if whole.device.type != "cuda":
        array = whole.cpu().numpy()
        return lambda: array
    pinned = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=True)
    pinned.copy_(whole, non_blocking=True)
    arrived = torch.cuda.current_stream(whole.device).record_event()

    def finish() -> AnyArray:
        arrived.synchronize()
        copied: AnyArray = pinned.numpy().copy()
        return copied

    return finish


def _narrow_fingerprints(array: AnyArray) -> Fingerprints:
    return Fingerprints(np.ascontiguousarray(array[:, :LANES]).view(np.uint64), values_NC=np.ascontiguousarray(array[:, LANES:], np.int64))


def _float_fingerprints(array: AnyArray) -> Fingerprints:
    rows = np.ascontiguousarray(array).view(_ROW)[:, 0]
    return Fingerprints(*(np.ascontiguousarray(rows[name]) for name in ("digest", "sketch", "sum_squares", "abs_max", "nonfinite")))
