"""Fingerprints of tensors: both paths against the golden file and each other, whatever the tensor is like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fingerprint_cases import DTYPES, assert_equal, assert_matches, held, joined, splits, stored_rows
from tests.fingerprint_reference import GoldenRow, golden_rows, is_narrow, reference
from tracer.errors import CaptureError, Code, TraceFormatError, UsageError
from tracer.format.fingerprint import Fingerprints, fingerprint_rows
from tracer.record.fingerprint_tensors import PendingFingerprints, fingerprint_on_device, fingerprint_tensor

Path_ = Callable[..., PendingFingerprints]
HELD = tuple(name for name in DTYPES if hasattr(torch, name))
"""Dtypes this torch has."""


@pytest.fixture(params=[fingerprint_tensor, fingerprint_on_device], ids=["numpy", "torch"])
def path(request: pytest.FixtureRequest) -> Path_:
    """Each way to take a fingerprint, forced onto CPU tensors."""
    chosen: Path_ = request.param
    return chosen


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch may use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensor(raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], dtype: str) -> torch.Tensor:
    """Stored bytes as a tensor of that dtype, (N, C); complex columns are counted singly in ``raw``."""
    kind: torch.dtype = getattr(torch, dtype)
    flat = torch.zeros(raw.size + kind.itemsize, dtype=torch.uint8)  # one item more, so that views of nothing work
    flat.numpy()[: raw.size] = raw.reshape(-1)
    return flat.view(kind)[:-1].view(len(raw), raw.shape[1] // kind.itemsize)


def taken(path: Path_, rows: torch.Tensor) -> Fingerprints:
    """Fingerprints of whole rows."""
    return path(rows, width=rows.shape[1] * (2 if rows.is_complex() else 1)).resolve()


@pytest.mark.parametrize("row", golden_rows(), ids=lambda row: row.name)
def test_golden(row: GoldenRow, path: Path_) -> None:
    """Both paths equal the golden row."""
    rows = tensor(np.frombuffer(row.raw, np.uint8)[None], row.dtype)
    found = path(rows, width=row.width, spans=((row.start, row.start + row.columns),)).resolve()
    assert_matches(found, [reference(row.raw, row.dtype, row.start, row.width)], row.dtype, row.width)
    assert found.digest_N2.tolist() == [list(row.digest)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_paths_agree_on_any_slices(data: st.DataObject) -> None:
    """Any dtype, bit pattern and column split: torch operations equal numpy, and slices add up to the whole."""
    dtype = data.draw(st.sampled_from(HELD))
    pairs = 2 if dtype.startswith("complex") else 1
    width = data.draw(st.integers(0, 90)) * pairs
    raw = stored_rows(dtype, 3, width, data.draw(st.integers(0, 999)))
    parts = []
    for spans in data.draw(splits(width)):
        if sum(stop - start for start, stop in spans) % pairs:
            return
        rows = tensor(held(raw, dtype, spans), dtype)
        by_numpy = fingerprint_tensor(rows, width=width, spans=spans).resolve()
        assert_equal(by_numpy, fingerprint_on_device(rows, width=width, spans=spans).resolve())
        parts.append(by_numpy)
    whole = fingerprint_rows(raw, dtype)
    np.testing.assert_array_equal(joined(parts).digest_N2, whole.digest_N2)
    if not is_narrow(dtype, width):
        assert_equal(joined(parts), whole)


@pytest.mark.parametrize("dtype", HELD)
def test_every_dtype_of_this_torch(dtype: str, path: Path_) -> None:
    """Every dtype a CPU tensor can have matches the slow reference, wide and narrow."""
    for columns in (34, 130):
        raw = stored_rows(dtype, 4, columns, 11)
        found = taken(path, tensor(raw, dtype))
        assert_matches(found, [reference(row.tobytes(), dtype) for row in raw], dtype, columns)


@pytest.mark.parametrize("dtype", ["int4", "uint2", "bits8", "bits1x8"])
def test_other_packed_dtypes(dtype: str, path: Path_) -> None:
    """torch's other sub-byte and opaque dtypes have a digest of their bytes."""
    if not hasattr(torch, dtype):
        pytest.skip("this torch has no such dtype")
    found = taken(path, torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(getattr(torch, dtype)))
    assert found.digest_N2.tolist() == [list(reference(bytes(row), "float4_e2m1fn_x2").digest) for row in (range(6), range(6, 12))]
    assert found.sketch_N16 is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "int32", "float8_e5m2", "bool"])
def test_any_memory_layout(dtype: str, path: Path_) -> None:
    """Transposed, strided, offset and expanded tensors give what a contiguous copy gives."""
    base = torch.randn(90, 300).to(getattr(torch, dtype))
    sliced = (base[:, 1:], base[3:, 7:290], base[3:4, 1:], base[:, ::3], base[::2])
    for rows in (*sliced, base.t(), base[4:5].expand(6, -1), base[:, :1].expand(-1, 80)):
        assert_equal(taken(path, rows), taken(path, rows.contiguous()))


def test_conjugate_and_negative_views(path: Path_) -> None:
    """Lazily conjugated or negated tensors are read as the values they stand for."""
    base = torch.randn(3, 40, dtype=torch.complex64)
    assert_equal(taken(path, base.conj()), taken(path, base.conj().resolve_conj().clone()))
    negative = base.conj().imag
    assert negative.is_neg()
    assert_equal(taken(path, negative), taken(path, negative.resolve_neg()))


def test_autograd_is_not_involved(path: Path_) -> None:
    """Parameters and tensors inside a graph are read without joining it, and grad mode stays as it was."""
    leaf = torch.randn(4, 32, requires_grad=True)
    inner = leaf * 2
    node = inner.grad_fn
    saved: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        saved.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        for rows in (leaf, inner, torch.nn.Parameter(leaf)):
            assert_equal(taken(path, rows), taken(path, rows.detach().clone()))
    assert saved == []
    assert inner.grad_fn is node
    assert torch.is_grad_enabled()
    inner.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None


def test_inference_and_autocast(path: Path_) -> None:
    """Inference tensors, inside and outside inference mode, and a surrounding autocast change nothing."""
    rows = torch.randn(64, 257)  # a width of its own, so that its plan is made in inference mode
    with torch.inference_mode():
        inference = rows.clone()
        inside = taken(path, inference)
    plain = taken(path, rows)
    assert_equal(inside, plain, scale=0)
    assert_equal(taken(path, inference), plain, scale=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(taken(path, rows), plain, scale=0)


def test_other_defaults_change_nothing(path: Path_) -> None:
    """Another default dtype or default device has no influence."""
    rows = torch.randn(5, 101)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = taken(path, rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(found, taken(path, rows), scale=0)


def test_nothing_global_and_nothing_given_changes(path: Path_) -> None:
    """The input's bytes and version, the random state, thread count and modes are the same afterwards."""
    rows = torch.randn(300, 700)
    rows[3, 4] = torch.nan
    copy, version, state, threads = rows.clone(), rows._version, torch.get_rng_state(), torch.get_num_threads()
    taken(path, rows)
    assert torch.equal(rows.view(torch.int32), copy.view(torch.int32))
    assert rows._version == version
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) == (True, False, False)


def test_buffer_reused_after_the_call(path: Path_) -> None:
    """Overwriting the tensor before the result is asked for changes nothing."""
    for rows in (torch.randn(6, 64), torch.randn(6, 64).bfloat16(), torch.arange(60).reshape(6, 10)):
        expected = taken(path, rows.clone())
        pending = path(rows, width=rows.shape[1])
        rows.fill_(7)
        assert_equal(pending.resolve(), expected, scale=0)


def test_threads_change_no_bit_of_a_digest(two_threads: None) -> None:
    """A large tensor has the same fingerprint with helper threads as without."""
    rows = torch.randn(512, 4096)
    assert_equal(fingerprint_tensor(rows, width=4096).resolve(), fingerprint_rows(rows.numpy(), "float32"))


def test_unfinished_collectives_are_awaited(tmp_path: Path, path: Path_) -> None:
    """An asynchronous collective's tensor is read after the collective has finished, and stays usable."""
    from torch.distributed._functional_collectives import all_reduce

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rows = torch.randn(4, 40)
        unfinished = all_reduce(rows, "sum", dist.distributed_c10d._get_default_group())
        assert type(unfinished) is not torch.Tensor
        assert_equal(taken(path, unfinished), taken(path, rows))
        assert torch.equal(unfinished + 0, rows)
    finally:
        dist.destroy_process_group()


def test_subclasses_without_behaviour_of_their_own_are_read(path: Path_) -> None:
    """Parameter subclasses, as inference engines have them, are ordinary memory."""

    class EngineParameter(torch.nn.Parameter):
        """Adds a loader, say."""

    rows = torch.randn(3, 20)
    assert_equal(taken(path, EngineParameter(rows)), taken(path, rows))
    assert_equal(taken(path, torch.nn.Buffer(rows)), taken(path, rows))


def test_what_has_no_memory_is_refused(tmp_path: Path, path: Path_) -> None:
    """Meta, sparse, quantized and distributed tensors are refused with what was found."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dense = torch.randn(3, 4)
    refused = [dense.to("meta"), dense.to_sparse()]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        refused.append(distribute_tensor(dense, init_device_mesh("cpu", (1,)), [Replicate()]))
        for rows in refused:
            with pytest.raises(CaptureError, match="dense memory") as raised:
                path(rows, width=4)
            assert raised.value.code is Code.LEAF_NOT_TENSOR
            assert "(3, 4)" in raised.value.found
    finally:
        dist.destroy_process_group()


def test_wrong_shapes_are_refused(path: Path_) -> None:
    """Rows that do not hold what they should, and dimensions other than two, are refused."""
    for rows in (torch.zeros(2, 7), torch.zeros(8), torch.zeros(2, 2, 8), torch.zeros(2, 8, dtype=torch.complex64)):
        with pytest.raises(UsageError, match="do not hold") as raised:
            path(rows, width=8)
        assert raised.value.code is Code.BAD_ARGUMENT


def test_unknown_dtype_is_refused(path: Path_, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype this format does not name is refused, not guessed."""
    monkeypatch.setattr("tracer.format.dtypes.DTYPES", {})
    with pytest.raises(TraceFormatError):
        path(torch.zeros(2, 8), width=8)


@pytest.mark.parametrize("shape", [(0, 80), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64", "float4_e2m1fn_x2"])
def test_empty_tensors(dtype: str, shape: tuple[int, int], path: Path_) -> None:
    """No rows or no columns are fine on both paths."""
    if not hasattr(torch, dtype):
        pytest.skip("this torch has no such dtype")
    rows = torch.empty(shape, dtype=getattr(torch, dtype))
    columns = shape[1] * (2 if rows.is_complex() else 1)
    found = path(rows, width=200, spans=((10, 10 + columns),)).resolve()
    assert found.digest_N2.shape == (shape[0], 2)
    assert not found.digest_N2.any()


def test_device_path_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors beyond one chunk of temporaries give the same rows."""
    rows = torch.randn(50, 300)
    rows[40, 2] = -torch.inf
    whole = fingerprint_on_device(rows, width=300).resolve()
    monkeypatch.setattr("tracer.record.fingerprint_tensors._CHUNK_WORDS", 1000)
    assert_equal(fingerprint_on_device(rows, width=300).resolve(), whole)
    assert_equal(fingerprint_tensor(rows, width=300).resolve(), whole)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", HELD)
def test_cuda_equals_numpy(dtype: str) -> None:
    """On a CUDA device every dtype gives the digests of the numpy path, on the current stream, TF32 allowed or not."""
    raw = stored_rows(dtype, 40, 130, 11)
    rows = tensor(raw, dtype).cuda()
    with torch.cuda.stream(torch.cuda.Stream()), torch.autocast("cuda", dtype=torch.bfloat16):  # type: ignore[no-untyped-call]
        pending = fingerprint_tensor(rows, width=130)
        rows.view(torch.uint8).fill_(0)
    assert_equal(pending.resolve(), fingerprint_rows(raw, dtype))
