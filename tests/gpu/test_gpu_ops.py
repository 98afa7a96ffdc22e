"""The ops on a GPU against the float64 oracle, over caches whose tables are shuffled and whose unused memory is NaN."""

import numpy as np
import pytest

from gpu.harness import Gpu
from support import harness
from support.attending import AXES, REL, compare_with_oracle, options_of, rows_of
from support.cases import DTYPES, STORAGES, CacheCase, build, emptied, permuted
from support.compare import assert_bits_equal
from support.grids import LENGTHS, all_pairs, case_of, setting_id, tokens_of

FLOAT8_REL = 2e-2

GRID = all_pairs(
    {name: values for name, values in AXES.items() if name != "rope_theta"}
    | {"page_size": (1, 5, 8, 16, 24, 128), "batch_invariant": (False, True), "gpu_kernel": ("best", "plain")}
)


def compare(cache, rows, *, rel=None, batch_invariant=False, gpu_kernel="best", **options):
    how = {"on": Gpu(batch_invariant, gpu_kernel)}
    return compare_with_oracle(harness.attention, cache, rows, rel=rel, how=how, **options)


@pytest.mark.parametrize("setting", GRID, ids=setting_id)
def test_attention_grid(setting):
    cache = build(case_of(setting))
    how = {name: setting[name] for name in ("batch_invariant", "gpu_kernel")}
    compare(cache, rows_of(cache, setting["rows"]), **how, **options_of(setting, cache.case))


@pytest.mark.parametrize("gpu_kernel", ["best", "plain"])
@pytest.mark.parametrize("group", [1, 5, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"), [*(pair for pair in harness.PAIRS if pair[0] != pair[1]), ("float16", "float8_e4m3fn")]
)
def test_narrower_caches(q_dtype, kv_dtype, head_dim, group, gpu_kernel):
    case = CacheCase((33, 0, 300, 1), 2 * group, 2, head_dim, page_size=16, dtype=kv_dtype)
    cache = build(case)
    q = np.random.default_rng(5).standard_normal(cache.q.shape, np.float32).astype(q_dtype)
    rel = FLOAT8_REL if kv_dtype.startswith("float8") else REL[q_dtype]
    compare(cache, (q, *cache.decode_rows), rel=rel, k_scale=0.7, v_scale=1.5, gpu_kernel=gpu_kernel)


LONG = [(2500, 0, 1030, 7), (70_001, 3), (131_072,)]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window_left": 1500}, {"sinks": np.linspace(-4, 2, 6), "v_scale": 0.5}], ids=str
)
@pytest.mark.parametrize("lengths", LONG, ids=str)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size"), [("float32", 8, 5), ("bfloat16", 64, 16), ("float16", 128, 64)]
)
def test_requests_long_enough_to_be_split(dtype, head_dim, page_size, lengths, options, batch_invariant):
    storage = {"page_size": page_size, "layout": "HND", "rank": 5, "dtype": dtype}
    cache = build(CacheCase(lengths=lengths, num_q_heads=6, head_dim=head_dim, **storage))
    rows = rows_of(cache, "mixed")
    o, lse = compare(cache, rows, sm_scale=0.6 / head_dim**0.5, batch_invariant=batch_invariant, **options)
    again = compare(cache, rows, sm_scale=0.6 / head_dim**0.5, batch_invariant=batch_invariant, **options)
    assert_bits_equal(again[0], o, what="o of a second run")
    assert_bits_equal(again[1], lse, what="lse of a second run")


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(("rank", "layout"), STORAGES)
def test_nothing_to_attend_to(lengths, rank, layout):
    cache = build(CacheCase(lengths=lengths, dtype="bfloat16", rank=rank, layout=layout))
    o, lse = compare(cache, rows_of(cache, "decode"), window_left=3)
    assert_bits_equal(o, np.zeros_like(o), what="o")
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("page_size", [5, 16, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_permuting_pages_changes_no_bit(dtype, page_size):
    cache = build(CacheCase((700, 3, 0, 129), 8, 2, 128, page_size, dtype=dtype))
    moved = permuted(cache, np.random.default_rng(9))
    rows = rows_of(cache, "decode")
    for first, second in zip(compare(cache, rows), compare(moved, rows), strict=True):
        assert_bits_equal(second, first, what="after a permutation")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_invariant_row_is_the_same_alone(dtype):
    cache = build(CacheCase((5000, 3, 20_000, 1024), 8, 2, 128, 16, dtype=dtype))
    q, row_batch, row_lengths = rows_of(cache, "decode")
    together = compare(cache, (q, row_batch, row_lengths), batch_invariant=True)
    for row in range(len(q)):
        part = slice(row, row + 1)
        alone = compare(cache, (q[part], row_batch[part], row_lengths[part]), batch_invariant=True)
        for whole, single in zip(together, alone, strict=True):
            assert_bits_equal(single, whole[part], what=f"row {row} alone")


def test_batch_invariant_rows_of_several_passes():
    """1500 rows over a table for 131,072 tokens, three times what one pass has: most short, some split."""
    cache = build(CacheCase((131_072, 700), 16, 2, 128, 16, dtype="bfloat16"))
    rng = np.random.default_rng(4)
    row_batch = np.ones(1500, np.int32)
    row_lengths = rng.integers(0, 701, 1500).astype(np.int32)
    row_batch[::100], row_lengths[::100] = 0, rng.integers(1025, 131_072, 15)
    q = rng.standard_normal((1500, 16, 128), np.float32).astype(cache.q.dtype)
    o, lse = compare(cache, (q, row_batch, row_lengths), batch_invariant=True)
    for part in (slice(0, 1), slice(495, 510), slice(1499, 1500)):
        alone = compare(cache, (q[part], row_batch[part], row_lengths[part]), batch_invariant=True)
        assert_bits_equal(alone[0], o[part], what="o of rows alone")
        assert_bits_equal(alone[1], lse[part], what="lse of rows alone")


@pytest.mark.parametrize("gpu_kernel", ["best", "plain"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 32), ("bfloat16", 128)])
def test_what_the_device_finds_wrong_is_nan_in_its_row_alone(dtype, head_dim, gpu_kernel):
    """A request, a length or a page that is not there: o and lse are NaN, every other row is as it was."""
    cache = build(CacheCase((40, 600, 33, 20, 50), 4, 2, head_dim, 16, dtype=dtype))
    q, row_batch, row_lengths = rows_of(cache, "decode")
    good, good_lse = compare(cache, (q, row_batch, row_lengths), gpu_kernel=gpu_kernel)
    row_batch, row_lengths, table = row_batch.copy(), row_lengths.copy(), cache.lookup_table.copy()
    row_batch[0] = 5
    table[1, 7] = len(cache.k_blocks)
    row_lengths[2] = -1
    row_lengths[3] = table.shape[1] * 16 + 1
    pages = (cache.k_blocks, cache.v_blocks, table)
    o, lse = harness.attention(q, *pages, row_batch, row_lengths, on=Gpu(gpu_kernel=gpu_kernel))
    assert np.isnan(o[:4].astype(np.float32)).all()
    assert np.isnan(lse[:4]).all()
    assert_bits_equal(o[4], good[4], what="o of the row that is well")
    assert_bits_equal(lse[4], good_lse[4], what="lse of the row that is well")


COPIES = all_pairs(
    {
        "dtype": (*DTYPES, "float8_e4m3fn"),
        "storage": STORAGES,
        "page_size": (1, 5, 16, 64),
        "num_kv_heads": (1, 3, 8),
        "head_dim": (7, 8, 64, 128),
        "lengths": LENGTHS,
    }
)


@pytest.mark.parametrize("setting", COPIES, ids=setting_id)
def test_append_and_gather_move_bits(setting):
    cache = build(case_of(setting))
    empty = emptied(cache)
    k, v, batch, positions = tokens_of(cache)
    # Rows that no place exists for are skipped, wherever they stand.
    batch = np.concatenate([batch, [-1, len(cache.lengths), 0, 0]]).astype(np.int32)
    capacity = cache.lookup_table.shape[1] * cache.case.page_size
    positions = np.concatenate([positions, [0, 0, -1, capacity]]).astype(np.int32)
    k, v = (np.concatenate([rows, np.ones((4, *rows.shape[1:]), rows.dtype)]) for rows in (k, v))
    harness.append(k, v, batch, positions, *empty.pages, **cache.storage, on=Gpu())
    for found, expected in zip(empty.pages[:2], cache.pages[:2], strict=True):
        assert_bits_equal(found, expected, what="the cache after append")
    found_k, found_v, _ = harness.gather(*cache.pages, cache.lengths, **cache.storage, on=Gpu())
    assert_bits_equal(found_k, k[:-4], what="gathered K")
    assert_bits_equal(found_v, v[:-4], what="gathered V")
