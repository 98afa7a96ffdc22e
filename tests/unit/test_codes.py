"""Caches of int8 and int4 codes as far as no kernel is needed: the oracle's own bounds, sizes, what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

from paged_kv import init_paged_kv_cache, reference
from paged_kv.arrays.dtypes import cache_dtype_of
from paged_kv.calls.plan import AttentionPlan
from paged_kv.engine import load
from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.engine.model import DecoderModel
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs import ops
from paged_kv.kv_formats import CODE_DTYPES, TABLE
from paged_kv.options import AttentionOptions, stored_dtype, stored_elements, stored_head
from paged_kv.page import PagedKVCacheManager
from support.fake_model import FakeModel

CPU = DeviceRef.CPU()


@pytest.mark.parametrize("kv_format", CODE_DTYPES)
def test_codes_are_within_half_a_step(kv_format):
    x = np.random.default_rng(0).standard_normal((50, 3, 40), np.float32) * np.logspace(-30, 30, 50)[:, None, None]
    x = np.concatenate([x, x[-1:]]).astype(np.float32)
    x[-1, :, 5] = np.finfo(np.float32).max
    stored = reference.quantised(x, kv_format)
    assert stored.shape == (51, 3, stored_head(kv_format, 40))
    assert stored.dtype == stored_dtype(kv_format)
    greatest = np.abs(x).max(-1, keepdims=True)
    scale = greatest / TABLE[kv_format].greatest
    assert np.isfinite(reference.widened(stored).astype(np.float32)).all()
    error = np.abs(reference.widened(stored) - x)
    # Of int4, what is as large as the greatest but of the other sign has no code of its own.
    is_cut = (kv_format == "int4") & (np.abs(x) > 7.49 * scale)
    assert (error <= np.where(is_cut, 1.0001, 0.5001) * scale).all()
    assert (error[np.abs(x) == greatest] <= 1e-6 * np.broadcast_to(greatest, x.shape)[np.abs(x) == greatest]).all()


def test_bytes_of_a_head_by_hand():
    x = np.array([-8, 7, 3.4, -2.5, 0, 1.5, 0.4, -0.6], np.float32)
    codes = [-8, 7, 3, -2, 0, 2, 0, -1]
    halves = [(codes[i] & 15) | (codes[i + 1] & 15) << 4 for i in (0, 2, 4, 6)]
    for sign in (1, -1):
        stored = reference.quantised(sign * x, "int4")
        assert stored[:4].tolist() == halves
        assert stored[4:].tobytes() == np.float32(sign).tobytes()
    of_both_signs = np.array([8, -8, 1, 0, 0, 0, 0, 0], np.float32)
    assert reference.widened(reference.quantised(of_both_signs, "int4"))[:3].tolist() == [7, -8, 1]
    stored = reference.quantised(x * np.float32(127 / 8), "int8")
    assert stored[:3].tolist() == [-127, 111, 54]
    assert reference.widened(stored)[0] == -127


def plan(kv, **changes):
    fields = {"q_dtype": np.dtype("float32"), "pos_encoding_mode": "NONE", "page_size": 16, "head_dim": 64} | changes
    q, mode, size, dim = (fields.pop(name) for name in ("q_dtype", "pos_encoding_mode", "page_size", "head_dim"))
    return AttentionPlan(8, 2, dim, size, q, cache_dtype_of(kv, "kv_data_type"), mode, AttentionOptions(), **fields)


def test_a_plan_of_codes():
    assert plan("int4").variant().kv_dtype == DType.uint8
    assert plan("int8").variant().kv_dtype == DType.int8
    assert cache_dtype_of(np.dtype("int4"), "kv_data_type") == np.dtype("int4")
    for kv in ("int8", "int4"):
        with pytest.raises(ContractError, match=f"a cache of {kv} codes has no rotary keys"):
            plan(kv, pos_encoding_mode="ROPE_LLAMA")
        with pytest.raises(ContractTypeError, match=f"a cache of {kv} codes is paged"):
            plan(kv, page_size=None)
        with pytest.raises(ShapeError, match=f"^head_dim_vo: expected 64, as K has, for {kv} codes, got 32"):
            plan(kv, head_dim_vo=32)
    with pytest.raises(ShapeError, match="head_dim: expected a multiple of 8 from 16 on for int4 codes, got 8"):
        plan("int4", head_dim=8)
    with pytest.raises(ContractTypeError, match="q_data_type: int8 is none of"):
        plan("int8", q_dtype=np.dtype("int8"))


SIZES = {"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "batch_size": 1, "max_blocks_per_seq": 2}


@pytest.mark.parametrize(
    ("dtype", "kind", "kv_format"),
    [
        (np.int8, np.ndarray, "int8"),
        (torch.int8, torch.Tensor, "int8"),
        (jnp.int8, jax.Array, "int8"),
        (DType.int8, np.ndarray, "int8"),
        ("torch.int4", np.ndarray, "int4"),
        (ml_dtypes.int4, np.ndarray, "int4"),
        (torch.int4, torch.Tensor, "int4"),
        (jnp.int4, jax.Array, "int4"),
        (torch.uint8, torch.Tensor, None),
    ],
)
def test_a_dtype_means_codes_however_it_is_named(dtype, kind, kv_format):
    cache = init_paged_kv_cache(**SIZES, head_dim=24, dtype=dtype)
    assert isinstance(cache.key_pool, kind)
    assert (cache.kv_format, cache.head_dim) == (kv_format, 24)
    assert cache_dtype_of(dtype, "kv_data_type").name == (kv_format or "uint8")
    manager = PagedKVCacheManager(3, 4, 2, 24, dtype, kind="numpy")
    assert manager.kv_cache.shape[-1] == cache.key_pool.shape[-1]


@pytest.mark.parametrize("kv_format", CODE_DTYPES)
def test_sizes_that_codes_have(kv_format):
    for head_dim in range(TABLE[kv_format].least_head, 520, 8):
        assert stored_elements(kv_format, stored_head(kv_format, head_dim)) == head_dim
    for size in (0, 4, 8, 66):
        stored = size * np.dtype(stored_dtype(kv_format)).itemsize
        with pytest.raises(ShapeError, match=f"cache: heads of {stored} bytes are no {kv_format} codes"):
            stored_elements(kv_format, size)
    for head_dim in (0, 4, 20, TABLE[kv_format].least_head - 8):
        with pytest.raises(ShapeError, match=f"head_dim: expected .* for {kv_format} codes, got {head_dim}"):
            stored_head(kv_format, head_dim)


def test_an_engine_is_loaded_with_the_format_of_its_cache(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(DecoderModel, "from_folder", lambda _, **options: given.update(options) or FakeModel(9, 4))
    load(write_demo_checkpoint(tmp_path / "demo"), num_pages=9, kv_format="int4", cache_rotation="hadamard")
    assert (given["kv_format"], given["cache_rotation"]) == ("int4", "hadamard")


def test_a_cache_inside_a_graph():
    def blocks(dtype, stored):
        return BufferType(dtype, ["pages", 2, 16, 2, stored], CPU)

    types = [blocks(DType.int8, 68), blocks(DType.uint8, 36), TensorType(DType.uint32, ["B", "n"], CPU)]
    types.append(blocks(DType.int8, 64))
    rows = [TensorType(dtype, ["N", 2, dim], CPU) for dtype, dim in ((DType.float16, 64), (DType.float32, 68))]
    with Graph("codes", input_types=[*types, *rows, TensorType(DType.int32, ["N"], CPU)]) as graph:
        int8, int4, table, plain, k, other, batch = graph.inputs
        cache = ops.PagedCache.of(int8.buffer, table.tensor)
        assert (cache.kv_format, int(cache.head_dim)) == ("int8", 64)
        assert cache.takes(k.tensor.dtype)
        assert not cache.takes(DType.int8)
        with pytest.raises(ShapeError, match="k: expected dimension 2 to be 64, got 68"):
            ops.append(cache, other.tensor, other.tensor, batch.tensor, batch.tensor)
        cache = ops.PagedCache.of(int4.buffer, table.tensor, kv_format="int4")
        assert int(cache.head_dim) == 64
        with pytest.raises(ContractTypeError, match=r"dtype: expected dtype float32 or .*, got uint8"):
            ops.gather(cache, batch.tensor, "T", dtype=DType.uint8)
        assert ops.PagedCache.of(int4.buffer, table.tensor).kv_format is None  # the bits of some cache
        with pytest.raises(ContractTypeError, match="kv_format: expected one of buffers of int8, got 'int4'"):
            ops.PagedCache.of(int8.buffer, table.tensor, kv_format="int4")
        with pytest.raises(ShapeError, match="k_blocks: heads of 64 bytes are no int8 codes"):
            ops.PagedCache.of(plain.buffer, table.tensor)
        graph.output()
