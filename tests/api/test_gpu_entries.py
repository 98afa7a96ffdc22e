"""Every other entry of the API on a GPU, without one: torch tensors on the CPU stand in, NumPy is the oracle.

What only a GPU can show (streams, kernels) is in tests/gpu; the kernels run in tests/gpu_sim.
"""

import numpy as np
import pytest
import torch
from max.driver import Buffer

from paged_kv import cascade, page
from paged_kv.arrays import devices
from paged_kv.arrays.host import as_numpy
from paged_kv.arrays.types import ArrayDevice
from paged_kv.cache import PagedKVCache, allocate_blocks, append_kv, gather_kv, init_paged_kv_cache
from paged_kv.errors import ContractError, ContractTypeError, ShapeError, ToolchainError
from paged_kv.page import PagedKVCacheManager
from support import harness
from support.compare import assert_bits_equal
from support.stand_in import STAND_IN, OnGpu, stand_in, tensors

__all__ = ["stand_in"]  # the fixture

TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture(autouse=True)
def one_compile():
    harness.runtime()


def states(dtype: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`[S, n, H, D]` and `[S, n, H]`; some states have seen no key, and hold NaN."""
    rng = np.random.default_rng(count)
    v = rng.standard_normal((4, count, 3, 8), np.float32).astype(dtype)
    s = rng.uniform(-9, 9, (4, count, 3)).astype(np.float32)
    s[1, 0] = s[2] = -np.inf
    v[1, 0] = np.nan
    return v, s


def assert_state(found: tuple[object, object], expected: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    v, s = (as_numpy(array, "found") for array in found)
    assert (v.dtype, s.dtype) == (np.dtype(dtype), np.float32)
    scale = TOLERANCE[dtype]
    np.testing.assert_allclose(v.astype(np.float64), expected[0].astype(np.float64), rtol=scale, atol=scale)
    np.testing.assert_allclose(s, expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("stand_in")
def test_merging_states(dtype):
    v, s = states(dtype, 5)
    assert_state(cascade.merge_states(tensors(v), tensors(s)), cascade.merge_states(v, s), dtype)
    pair = [array[:, i] for i in (0, 1) for array in (v, s)]
    found = cascade.merge_state(*map(tensors, pair))
    assert all(isinstance(array, torch.Tensor) for array in found)
    assert_state(found, cascade.merge_state(*pair), dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("stand_in")
def test_merging_in_place(masked):
    v, s = states("bfloat16", 2)
    mask = np.array([True, False, True, True]) if masked else None
    expected = [v[:, 0].copy(), s[:, 0].copy()]
    found = [tensors(array) for array in expected]
    other = [v[:, 1], s[:, 1]]
    cascade.merge_state_in_place(*found, *map(tensors, other), None if mask is None else tensors(mask))
    cascade.merge_state_in_place(*expected, *other, mask)
    assert_state(tuple(found), tuple(expected), "bfloat16")
    if masked:
        assert_bits_equal(as_numpy(found[0], "v")[1], v[1, 0], what="the row that is not merged")
        assert np.isneginf(found[1].numpy()[1]).all()


@pytest.mark.usefixtures("stand_in")
def test_merging_nothing():
    for shape in ((4, 0, 3, 8), (0, 2, 3, 8), (2, 3, 4, 0)):
        v, s = np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32)
        found, expected = cascade.merge_states(torch.from_numpy(v), torch.from_numpy(s)), cascade.merge_states(v, s)
        assert_state(found, expected, "float32")
        assert [array.shape for array in found] == [array.shape for array in expected]


def test_a_max_buffer_is_merged_to_one(monkeypatch):
    monkeypatch.setattr(devices, "device_of", lambda **_: STAND_IN)
    v, s = states("float32", 2)
    found = cascade.merge_states(Buffer.from_dlpack(v.copy()), Buffer.from_dlpack(s.copy()))
    assert all(isinstance(array, Buffer) for array in found)
    monkeypatch.undo()
    assert_state(found, cascade.merge_states(v, s), "float32")


@pytest.mark.usefixtures("stand_in")
def test_states_are_checked():
    v, s = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="s_b: shape"):
        cascade.merge_state(v, s, v, s[:, :2])
    with pytest.raises(ContractTypeError, match="v_a: dtype float64"):
        cascade.merge_state(v.double(), s, v, s)
    with pytest.raises(ContractTypeError, match="v_b: dtype float16 differs"):
        cascade.merge_state(v, s, v.half(), s)
    with pytest.raises(ContractTypeError, match="mask: dtype int64"):
        cascade.merge_state_in_place(v, s, v, s, torch.ones(2).long())


# Appends: pages of 4, three requests of 8, 0 and 9 tokens.
INDPTR, INDICES, LAST = np.array([0, 2, 2, 5]), np.array([4, 1, 0, 5, 2]), np.array([4, 0, 1])
DENSE = np.array([[4, 1, -1], [3, -1, -1], [0, 5, 2]])


def on(place: str, *arrays: np.ndarray) -> list[object]:
    """Index arrays as they are, or as those of a GPU."""
    return [torch.from_numpy(array.copy()) if place == "gpu" else array for array in arrays]


def rows_of(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("indices", ["host", "gpu"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["at", "last", "dense"])
@pytest.mark.usefixtures("stand_in")
def test_forms_of_append(form, layout, indices):
    shape = (6, 2, 4, 2, 8) if layout == "NHD" else (6, 2, 2, 4, 8)
    expected = np.full(shape, np.nan, np.float32)
    found = torch.from_numpy(expected.copy())
    table = (INDICES, INDPTR, LAST)
    count = 3 if form == "dense" else 5
    k, v = rows_of((count, 2, 8)), rows_of((count, 2, 8)) + 1
    before = {
        "at": [np.array([0, 2, -1, 0, 2]), np.array([7, 8, 0, 0, 5])],
        "last": [np.array([0, 2, 2, 5])],
        "dense": [],
    }[form]
    for cache, rows, where in ((expected, (k, v), "host"), (found, (tensors(k), tensors(v)), indices)):
        after = on(where, DENSE, np.array([3, 2, 0])) if form == "dense" else on(where, *table)
        extra = [4] if form == "dense" else []
        page.append_paged_kv_cache(*rows, *on(where, *before), cache, *after, *extra, kv_layout=layout)
    assert np.isfinite(expected).any()
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.usefixtures("stand_in")
def test_rows_without_a_place_are_skipped():
    """Of index arrays on a GPU: a full last page, a page that the pool has not, more rows than tokens."""
    rows = torch.ones(3, 2, 8)
    cache = torch.zeros(6, 2, 4, 2, 8)
    table = torch.tensor([[4, 1, -1], [6, -1, -1], [-1, -1, -1]])
    page.append_paged_kv_cache(rows, rows, cache, table, torch.tensor([4, 1, 0]), 4)
    assert not cache.any()
    indptr, indices, last = (torch.from_numpy(array) for array in (INDPTR, INDICES, np.array([1, 0, 1])))
    page.append_paged_kv_cache(rows, rows, torch.tensor([0, 0, 2, 3]), cache, indices, indptr, last)
    assert cache.sum() == 2 * 2 * 8  # K and V of request 2's token 8; request 1 has no page for its two
    assert cache[2, :, 0].eq(1).all()


@pytest.mark.usefixtures("stand_in")
def test_offsets_past_the_page_ids_read_nothing_there():
    """Of index arrays on a GPU, whose values stay unread: a row that the table sends past `kv_indices` is skipped."""
    rows = torch.ones(3, 2, 8)
    cache = torch.zeros(6, 2, 4, 2, 8)
    table = [torch.tensor(values) for values in ([4, 1], [0, 9, -3], [4, 4])]  # indices, indptr, last_page_len
    page.append_paged_kv_cache(rows, rows, torch.tensor([0, 0, 1]), torch.tensor([5, 30, 0]), cache, *table)
    assert cache.sum() == 2 * 2 * 8  # token 5 of request 0 alone
    assert cache[1, :, 1].eq(1).all()


@pytest.mark.parametrize("indices", ["host", "gpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.usefixtures("stand_in")
def test_latent_caches(dtype, indices):
    ckv, kpe = np.full((6, 4, 16), np.nan).astype(dtype), np.full((6, 4, 8), np.nan).astype(dtype)
    caches = [(array, tensors(array)) for array in (ckv, kpe)]
    rows = [rows_of((2, width), dtype) for width in (16, 8)]
    batch, positions = np.array([0, 2]), np.array([7, 8])
    for i, where in ((0, "host"), (1, indices)):
        new = rows if i == 0 else [tensors(array) for array in rows]
        index, table = on(where, batch, positions), on(where, INDICES, INDPTR, LAST)
        page.append_paged_mla_kv_cache(*new, *index, *(pair[i] for pair in caches), *table)
    for expected, found in caches:
        assert_bits_equal(as_numpy(found, "found"), expected, what="a latent cache")
    one = np.full((6, 4, 24), np.nan).astype(dtype)
    found = tensors(one)
    rows = [rows_of((3, width), dtype) for width in (16, 8)]
    page.append_paged_mla_kv_cache(*rows, one, DENSE, np.array([3, 2, 0]), 4)
    new = [tensors(array) for array in rows]
    page.append_paged_mla_kv_cache(*new, found, *on(indices, DENSE, np.array([3, 2, 0])), 4)
    assert_bits_equal(as_numpy(found, "found"), one, what="the cache of both")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.usefixtures("stand_in")
def test_index_arithmetic(dtype):
    host = [array.astype(dtype) for array in (INDPTR, LAST, DENSE, np.array([3, 2, 0]), np.array([0, 2, 2, 4]))]
    indptr, last, dense, fill, offsets = host
    device = [torch.from_numpy(array) for array in host]
    pairs = [
        (page.get_seq_lens(device[0], device[1], 4), page.get_seq_lens(indptr, last, 4)),
        (page.get_seq_lens(device[2], device[3], 4), page.get_seq_lens(dense, fill, 4)),
    ]
    lengths = pairs[0][0]
    pairs += zip(
        page.get_batch_indices_positions(device[4], lengths, 6),
        page.get_batch_indices_positions(offsets, lengths.numpy(), 6),
        strict=True,
    )
    for found, expected in pairs:
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(found.numpy(), expected)
        assert found.numpy().dtype == expected.dtype
    with pytest.raises(ContractTypeError, match=r"page_table is on a GPU.*page_table\.cpu\(\)"):
        page.get_batch_indices_positions(device[2], device[3], 4)
    with pytest.raises(ShapeError, match=r"append_indptr must have B \+ 1 = 4 entries"):
        page.get_batch_indices_positions(device[4][:3], lengths, 6)
    assert not page.get_batch_indices_positions(torch.zeros(1).long(), torch.zeros(0).long(), 2)[1].any()


@pytest.mark.usefixtures("stand_in")
def test_storage_that_cannot_be_written_is_refused():
    rows, table = torch.ones(1, 2, 8), (INDICES[:2], np.array([0, 2]), np.array([1]))
    at = (np.array([0]), np.array([1]))
    shared = torch.zeros(6, 4, 4, 8)
    for cache, match in (
        (torch.zeros(6, 2, 4, 1, 8).expand(6, 2, 4, 2, 8), "some of its elements share memory"),
        ((shared[:, :, :2], shared[:, :, 1:3]), "shares memory"),
    ):
        with pytest.raises(ContractError, match=match):
            page.append_paged_kv_cache(rows, rows, *at, cache, *table)
    page.append_paged_kv_cache(rows, rows, *at, (shared[:, :, :2], shared[:, :, 2:]), *table)
    assert shared.sum() == 4 * 8


def on_host(device: object) -> ArrayDevice:
    assert device in ("cuda:1", None)
    return devices.HOST if device is None else STAND_IN


@pytest.mark.usefixtures("stand_in")
def test_the_functional_cache(monkeypatch):
    monkeypatch.setattr(devices, "device_named", on_host)
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    found = init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda:1")
    expected = init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16")
    assert isinstance(found.key_pool, torch.Tensor)
    empty = found
    for sequence, count, free in ((1, 6, [5, 2]), (0, 3, [0]), (1, 4, [6])):
        keys, values = rows_of((count, 2, 8)), rows_of((count, 2, 8)) - 1
        found, consumed = allocate_blocks(
            found, sequence_idx=sequence, num_new_tokens=count, free_block_ids=np.array(free)
        )
        assert consumed == len(free)
        expected, _ = allocate_blocks(
            expected, sequence_idx=sequence, num_new_tokens=count, free_block_ids=np.array(free)
        )
        found = append_kv(found, sequence, torch.from_numpy(keys), torch.from_numpy(values))
        expected = append_kv(expected, sequence, keys, values)
    assert not empty.key_pool.any()
    np.testing.assert_array_equal(found.key_pool.numpy(), expected.key_pool)
    for sequence in (0, 1):
        gathered, wanted = gather_kv(found, sequence), gather_kv(expected, sequence)
        assert gathered[2] == wanted[2]
        for tensor, array in zip(gathered[:2], wanted[:2], strict=True):
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(tensor.numpy(), array)
    assert gather_kv(empty, 0)[0].shape == (0, 2, 8)


def test_books_on_a_gpu_are_refused():
    pool = np.zeros((2, 4, 2, 8), np.float32)
    cache = PagedKVCache(pool, pool, OnGpu(), np.zeros(1, np.int32))
    with pytest.raises(ContractTypeError, match=r"block_table is on a GPU.*block_table\.cpu\(\)"):
        gather_kv(cache, 0)


@pytest.mark.usefixtures("stand_in")
def test_the_manager(monkeypatch):
    monkeypatch.setattr(devices, "device_named", on_host)
    found = PagedKVCacheManager(5, 4, 2, 8, "bfloat16", device="cuda:1")
    expected = PagedKVCacheManager(5, 4, 2, 8, "bfloat16", kind="numpy")
    for request, count in (("a", 3), ("b", 5), ("a", 2)):
        k, v = rows_of((count, 2, 8), "bfloat16"), rows_of((count, 2, 8), "bfloat16")
        found.append(request, tensors(k), tensors(v))
        expected.append(request, k, v)
    assert_bits_equal(as_numpy(found.kv_cache, "found"), expected.kv_cache, what="the manager's cache")
    assert found.get_page_table("b").tolist() == expected.get_page_table("b").tolist()
    with pytest.raises(ContractError, match="kind must be 'torch'"):
        PagedKVCacheManager(5, 4, 2, 8, device="cuda:1", kind="numpy")


def test_a_gpu_that_is_not_there():
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    with pytest.raises(ToolchainError, match="GPU 63: MAX finds no such device"):
        init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda:63")
    with pytest.raises(ContractError, match="not 'metal'"):
        init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="metal")
