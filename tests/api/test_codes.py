"""Caches of int8 and int4 codes through the public calls: append, decode, prefill, the functional cache."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

import paged_kv
import paged_kv.cascade
import paged_kv.torch as operators
from paged_kv import reference
from paged_kv.arrays import devices
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.calls import kv_copy
from paged_kv.errors import ContractTypeError, ShapeError
from paged_kv.page import PagedKVCacheManager
from support import harness
from support.cases import CacheCase
from support.codes import quantised_cache, widened_pages
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.levels import build_cascade
from support.stand_in import STAND_IN, tensors

DTYPES = {"int8": "float32", "int4": "bfloat16"}
REL = {"float32": 1e-5, "bfloat16": 1e-2}
HEADS = (6, 2, 40)


@pytest.fixture(autouse=True)
def compiled():
    harness.code_libraries()


def case_of(kv_format):
    """A cache, and its table in CSR."""
    case = CacheCase(lengths=(23, 41), num_q_heads=6, head_dim=40, page_size=5, rank=5, dtype=DTYPES[kv_format])
    cache = quantised_cache(case, kv_format)
    counts = [-(-length // 5) for length in case.lengths]
    indptr = np.cumsum([0, *counts], dtype=np.int32)
    indices = np.concatenate([row[:n] for row, n in zip(cache.lookup_table, counts, strict=True)]).astype(np.int32)
    return cache, (indptr, indices, np.array([3, 1], np.int32))


@pytest.mark.parametrize("kv_format", DTYPES)
def test_decode(kv_format):
    cache, table = case_of(kv_format)
    wrapper = paged_kv.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(*table, *HEADS, 5, q_data_type=DTYPES[kv_format], kv_data_type=kv_format)
    o = wrapper.run(cache.q, cache.k_blocks)
    expected, _ = reference.attention(cache.q, *widened_pages(cache), *cache.decode_rows)
    assert_close(o, expected, rel=REL[DTYPES[kv_format]], what="o")
    size = cache.k_blocks.shape[-1]
    with pytest.raises(ShapeError, match=f"heads of k of {size} bytes .{kv_format} codes .*, got {size - 4}"):
        wrapper.run(cache.q, np.ascontiguousarray(cache.k_blocks[..., :-4]))
    with pytest.raises(ContractTypeError, match=f"planned dtype {kv_format}"):
        wrapper.run(cache.q, cache.k_blocks.view({"int8": np.uint8, "int4": np.int8}[kv_format]))


@pytest.mark.parametrize("kv_format", DTYPES)
def test_append(kv_format):
    cache, table = case_of(kv_format)
    before, dtype = cache.k_blocks.copy(), DTYPES[kv_format]
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 2, 40), np.float32).astype(dtype) for _ in range(2))
    where = np.array([0, 1], np.int32), np.array([22, 7], np.int32)
    paged_kv.append_paged_kv_cache(k, v, *where, cache.k_blocks, table[1], table[0], table[2])
    reference.append(k, v, *where, before, before, cache.lookup_table)
    assert_bits_equal(cache.k_blocks, before, what="the cache")
    with pytest.raises(ShapeError, match=r"append_key: expected \[N, 2, 40\]"):
        paged_kv.append_paged_kv_cache(k[..., :32], v[..., :32], *where, cache.k_blocks, table[1], table[0], table[2])
    other = v.astype("float16")
    with pytest.raises(ContractTypeError, match=f"append_value: expected append_key's dtype {dtype}, got float16"):
        paged_kv.append_paged_kv_cache(k, other, *where, cache.k_blocks, table[1], table[0], table[2])
    stored = np.zeros((2, 2, cache.k_blocks.shape[-1]), cache.k_blocks.dtype)
    with pytest.raises(
        ContractTypeError, match=f"append_value: expected append_key's dtype {dtype}, got {stored.dtype}"
    ):
        paged_kv.append_paged_kv_cache(k, stored, *where, cache.k_blocks, table[1], table[0], table[2])
    assert_bits_equal(cache.k_blocks, before, what="the cache after refusals")


@pytest.mark.parametrize("stored", ["int8", "uint8"])
@pytest.mark.parametrize("size", [8, 64])
def test_floats_do_not_become_integers_of_the_same_number(stored, size):
    """Heads of 8 bytes could be int4 codes of 8 elements, which there are not."""
    pages, rows = np.zeros((2, 2, 4, 1, size), stored), np.ones((1, 1, size), np.float32)
    where = np.zeros(1, np.int32), np.zeros(1, np.int32)
    table = np.zeros(1, np.int32), np.array([0, 1], np.int32), np.ones(1, np.int32)
    with pytest.raises(ContractTypeError, match=f"append_key: expected the cache's dtype {stored}, got float32"):
        paged_kv.append_paged_kv_cache(rows, rows, *where, pages, *table)
    assert not pages.any()


def test_latents_do_not_become_codes():
    ckv, kpe = np.zeros((2, 4, 68), np.int8), np.zeros((2, 4, 12), np.int8)
    where = np.zeros(1, np.int32), np.zeros(1, np.int32)
    table = np.zeros(1, np.int32), np.array([0, 1], np.int32), np.ones(1, np.int32)
    rows = np.ones((1, 64), np.float32), np.ones((1, 8), np.float32)
    with pytest.raises(ContractTypeError, match="append_ckv: expected the cache's dtype int8, got float32"):
        paged_kv.append_paged_mla_kv_cache(*rows, *where, ckv, kpe, *table)
    assert not ckv.any()


def test_a_cascade():
    """A prefix of both requests, and the tokens of each."""
    harness.libraries()  # which merges
    case = build_cascade([np.array([0, 2], np.int32), np.array([0, 1, 2], np.int32)], [[13], [5, 9]], page_size=5)
    cache = reference.quantised(case.cache, "int8")
    wrapper = paged_kv.cascade.MultiLevelCascadeAttentionWrapper(2, None, case.layout)
    wrapper.plan(*case.tables, *case.sizes, q_data_type="float32", kv_data_type="int8")
    o, lse = wrapper.run(case.q, cache, return_lse=True)
    of_codes = [
        [tuple(reference.widened(reference.quantised(side, "int8")) for side in group) for group in level]
        for level in case.tokens
    ]
    expected = replace(case, tokens=of_codes).oracle()
    assert_close(o, expected[0], rel=1e-5, what="o")
    assert_lse_close(lse, expected[1], tol=1e-5, what="lse")


@pytest.mark.parametrize("kv_format", DTYPES)
def test_the_manager(kv_format, monkeypatch):
    """It takes head_dim in elements, quantises, and compiles before it takes a page."""
    manager = PagedKVCacheManager(6, 4, 2, 40, kv_format, kind="numpy")
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((7, 2, 40), np.float32).astype(DTYPES[kv_format]) for _ in range(2))
    manager.append("a", k, v)
    pages = manager.kv_cache[manager.get_page_table("a")].swapaxes(0, 1).reshape(2, 8, 2, -1)[:, :7]
    for side, tokens, name in zip(pages, (k, v), "kv", strict=True):
        assert_bits_equal(side, reference.quantised(tokens, kv_format), what=name)
    loaded = []
    monkeypatch.setattr(kv_copy, "runtime_on", lambda _: SimpleNamespace(load=loaded.extend))
    monkeypatch.setattr(manager.pool, "extend", lambda *_: None)
    manager.append("b", k, v)
    assert [(one.op, one.dtype.name) for one in loaded] == [("append", DTYPES[kv_format])]


@pytest.mark.parametrize("kv_format", DTYPES)
def test_torch_operators(kv_format):
    """Append quantises, gather gives the numbers in float32, attention reads the codes; eagerly and compiled."""
    cache, _ = case_of(kv_format)
    dtype = DTYPES[kv_format]
    both = torch.from_numpy(cache.k_blocks.copy())
    k_cache, v_cache = both[:, 0], both[:, 1]
    table = torch.from_numpy(cache.lookup_table.view(np.int32).copy())
    lengths = torch.from_numpy(cache.lengths.astype(np.int32))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 2, 40), np.float32) for _ in range(2))
    where = np.array([0, 1], np.int32), np.array([22, 7], np.int32)
    as_torch = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in (k, v, cache.q.astype(np.float32))]
    reference.append(*(x.astype(dtype) for x in (k, v)), *where, cache.k_blocks, cache.v_blocks, cache.lookup_table)

    def step(k_cache, v_cache):
        operators.append_paged_kv(*as_torch[:2], k_cache, v_cache, table, *map(torch.from_numpy, where))
        gathered = operators.gather_paged_kv(k_cache, v_cache, table, lengths, 64)
        return operators.paged_attention(as_torch[2], k_cache, v_cache, table, lengths), gathered

    pages = widened_pages(cache)
    expected, _ = reference.attention(cache.q, *pages, *cache.decode_rows)
    tokens = reference.gather(*pages, cache.lengths)
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        (o, _), gathered = run(k_cache, v_cache)
        assert_bits_equal(both.numpy(), cache.k_blocks, what="the cache")
        assert_close(as_numpy(o, "o"), expected, rel=REL[dtype], what="o")
        for found, wanted in zip(gathered, tokens, strict=False):
            assert_bits_equal(found.numpy(), wanted.astype(np.float32), what="gathered")
    with pytest.raises(ShapeError, match=r"cache: heads of \d+ bytes are no"):
        operators.gather_paged_kv(k_cache[..., 1:], v_cache[..., 1:], table, lengths, 64)


def test_functional_cache():
    cache = paged_kv.init_paged_kv_cache(
        num_blocks=4, block_size=4, num_kv_heads=2, head_dim=24, batch_size=1, max_blocks_per_seq=3, dtype="int8"
    )
    cache, _ = paged_kv.allocate_blocks(cache, sequence_idx=0, num_new_tokens=9, free_block_ids=np.array([2, 0, 3]))
    k = np.random.default_rng(0).standard_normal((9, 2, 24)).astype(ml_dtypes.bfloat16)
    cache = paged_kv.append_kv(cache, 0, k, -k)
    keys, values, length = paged_kv.gather_kv(cache, 0)
    assert (length, keys.dtype) == (9, np.float32)
    for name, rows, tokens in (("keys", keys, k), ("values", values, -k)):
        expected = reference.widened(reference.quantised(tokens, "int8"))
        assert_bits_equal(rows, expected.astype(np.float32), what=name)
    for other in ("int4", "int2"):
        with pytest.raises(ContractTypeError, match=f"kv_format: '{other}' codes do not lie in arrays of int8"):
            paged_kv.gather_kv(replace(cache, kv_format=other), 0)
    with pytest.raises(ShapeError, match="key_pool: heads of 22 bytes are no int8 codes"):
        paged_kv.gather_kv(replace(cache, key_pool=cache.key_pool[..., 6:], value_pool=cache.value_pool[..., 6:]), 0)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kv_format", DTYPES)
def test_tensors_on_a_gpu(kv_format, monkeypatch):
    """The CPU stands in for it: decode, then pools that are made there, appended to and gathered from."""
    monkeypatch.setattr(devices, "device_named", lambda name: HOST if name is None else STAND_IN)
    cache, table = case_of(kv_format)
    wrapper = paged_kv.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(*table, *HEADS, 5, q_data_type=DTYPES[kv_format], kv_data_type=kv_format)
    o = wrapper.run(tensors(cache.q), tensors(cache.k_blocks))
    expected, _ = reference.attention(cache.q, *widened_pages(cache), *cache.decode_rows)
    assert_close(as_numpy(o, "o"), expected, rel=REL[DTYPES[kv_format]], what="o")
    sizes = {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 24, "batch_size": 1}
    pools = paged_kv.init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype=kv_format, device="cuda")
    assert isinstance(pools.key_pool, torch.Tensor)
    pools, _ = paged_kv.allocate_blocks(pools, sequence_idx=0, num_new_tokens=9, free_block_ids=np.array([2, 0, 3]))
    k = np.random.default_rng(0).standard_normal((9, 2, 24), np.float32).astype(DTYPES[kv_format])
    pools = paged_kv.append_kv(pools, 0, tensors(k), tensors(-k))
    for name, rows, tokens in zip(("keys", "values"), paged_kv.gather_kv(pools, 0), (k, -k), strict=False):
        wanted = reference.widened(reference.quantised(tokens, kv_format))
        assert_bits_equal(rows.numpy(), wanted.astype(np.float32), what=name)
