"""The refusals of the ops when they run: a ValueError of one line that names argument, request and value.

After each refusal every byte of the cache is as it was, the NaN in unused memory included. Each op is first seen to
accept the call that the refused ones are made from, so a refusal is due to the one thing that was changed.
"""

import math

import numpy as np
import pytest
from max.dtype import DType

from paged_kv import reference
from paged_kv.runtime.variants import Variant
from support import harness
from support.cases import STORAGES, UNUSED_PAGE, CacheCase, build, normal
from support.compare import assert_bits_equal, assert_close
from support.harness import refused

PAGE_SIZE = 8
LENGTHS = (3, 20, 0, 9)  # the table has 4 columns


@pytest.fixture(params=STORAGES, ids=lambda storage: f"{storage[1]}{storage[0]}")
def cache(request):
    rank, layout = request.param
    return build(CacheCase(lengths=LENGTHS, page_size=PAGE_SIZE, head_dim=16, rank=rank, layout=layout))


def attention_arguments(cache):
    row_batch, row_lengths = cache.decode_rows
    q = np.concatenate([cache.q, cache.q[:1]])
    return {"q": q, **pages(cache), "row_batch": np.append(row_batch, [-1]).astype(np.int32),
            "row_lengths": np.append(row_lengths, [0]).astype(np.int32), **cache.storage}  # fmt: skip


def masked_arguments(cache):
    """Positions, offsets and masks beside: rows 1 and 3 have masks, which end where all bits end; row 2 and padding
    have none.
    """
    masks = {
        "row_positions": np.array([2, 24, -1, 11, -7], np.int32),
        "token_offsets": np.array([0, 5, 0, 3], np.int32),
        "mask": np.full(8, 255, np.uint8),
        "mask_starts": np.array([-1, 44, -1, 55, -9], np.int64),
        "mask_firsts": np.array([0, 0, -3, 0, -3], np.int32),
    }
    return attention_arguments(cache) | masks


def append_arguments(cache):
    """The next token of requests 0 and 3, two of request 1, padding, and a first one of request 0."""
    k, v = (normal(np.random.default_rng(side), (6, 2, 16), "float32") for side in range(2))
    return {"k_new": k, "v_new": v, "batch_indices": np.array([0, 3, 1, 1, -1, 0], np.int32),
            "positions": np.array([3, 9, 21, 20, 0, 0], np.int32), **pages(cache), **cache.storage}  # fmt: skip


def gather_arguments(cache):
    indptr = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    return {"indptr": indptr, "num_tokens": int(indptr[-1]), **pages(cache), **cache.storage}


def pages(cache):
    return dict(zip(("k_blocks", "v_blocks", "lookup_table"), cache.pages, strict=True))


OPS = {
    "attention": (harness.attention, attention_arguments),
    "masked_attention": (harness.masked_attention, masked_arguments),
    "append": (harness.append, append_arguments),
    "gather": (harness.gather_rows, gather_arguments),
}


def refuse(op, cache, change, *words):
    """Expects a refusal after `change`: name -> value, (index, value) for an entry, or a function of what is there."""
    call, arguments_of = OPS[op]
    arguments = arguments_of(cache)
    for name, value in change.items():
        if isinstance(value, tuple):
            at, entry = value
            arguments[name] = arguments[name].copy()
            arguments[name][at] = entry
        elif callable(value):
            arguments[name] = value(arguments[name]).astype(arguments[name].dtype)
        else:
            arguments[name] = value
    with refused(*words, unchanged=(cache.k_blocks, cache.v_blocks)):
        call(**arguments)


def test_the_unchanged_calls_are_accepted(cache):
    arguments = attention_arguments(cache)
    assert_close(harness.attention(**arguments)[0], reference.attention(**arguments)[0], rel=1e-5, what="o")
    arguments = masked_arguments(cache)
    found, expected = (call(**arguments)[0] for call in (harness.masked_attention, reference.masked_attention))
    assert_close(found, expected, rel=1e-5, what="o with masks")
    k, v = harness.gather_rows(**gather_arguments(cache))
    assert_bits_equal(k, np.concatenate(cache.keys), what="k")
    assert_bits_equal(v, np.concatenate(cache.values), what="v")
    arguments = append_arguments(cache)
    harness.append(**arguments)
    after = cache.k_blocks.copy()
    reference.append(**arguments)
    assert_bits_equal(after, cache.k_blocks, what="k_blocks")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("beyond", [0, 1, 2**31 - 9, UNUSED_PAGE - 9])
def test_page_id_outside_the_pool(cache, op, beyond):
    page = len(cache.k_blocks) + beyond
    refuse(op, cache, {"lookup_table": ((1, 2), page)}, "lookup_table", "request 1", "slot 2", page)


@pytest.mark.parametrize("op", OPS)
def test_page_ids_in_unused_slots_do_not_matter(cache, op):
    call, arguments_of = OPS[op]
    for page in (len(cache.k_blocks), 2**31, UNUSED_PAGE):
        cache.lookup_table[0, 1:] = page
        cache.lookup_table[1, 3:] = page
        cache.lookup_table[2] = page
        cache.lookup_table[3, 2:] = page
        call(**arguments_of(cache))


def zeros(*shape):
    return np.zeros(shape, np.float32)


ROWS = {
    "attention": [
        ({"q": zeros(5, 3, 16)}, ["q", "3 heads", "2 KV heads"]),
        ({"q": zeros(5, 1, 16)}, ["q", "1 heads", "2 KV heads"]),
        ({"q": zeros(5, 4, 24)}, ["q", "head_dim", 24, 16]),
        (
            dict.fromkeys(("k_blocks", "v_blocks"), zeros(9, 8, 0, 16)) | {"layout": "NHD", "layer": 0},
            ["q", "4 heads", "0 KV heads"],
        ),
        *(({"window_left": value}, ["window_left", value]) for value in (-2, -(2**31))),
        *(({"logits_soft_cap": value}, ["logits_soft_cap", value]) for value in (-0.5, math.nan, math.inf)),
        *(({"sm_scale": value}, ["sm_scale", value]) for value in (math.inf, -math.inf, math.nan)),
        ({"row_batch": (3, 4)}, ["row_batch", "row 3", "request 4"]),
        ({"row_batch": (4, 2**31 - 1)}, ["row_batch", "row 4", 2**31 - 1]),
        ({"row_batch": (0, -2)}, ["row_batch", "row 0", "request -2"]),
        ({"row_lengths": (3, -1)}, ["row_lengths", "row 3", "request 3", -1]),
        ({"row_lengths": (1, 33)}, ["row_lengths", "request 1", 33, 4]),
        ({"row_lengths": (2, 2**31 - 1)}, ["row_lengths", "request 2", 2**31 - 1]),
        ({"row_lengths": (2, 1)}, ["lookup_table", "request 2", "slot 0", UNUSED_PAGE]),
    ],
    "append": [
        ({"k_new": zeros(6, 3, 16), "v_new": zeros(6, 3, 16)}, ["k", "KV heads", 3, 2]),
        ({"k_new": zeros(6, 2, 8), "v_new": zeros(6, 2, 8)}, ["k", "head_dim", 8, 16]),
        ({"batch_indices": (5, 4)}, ["batch_indices", "row 5", "request 4"]),
        ({"batch_indices": (5, -2)}, ["batch_indices", "row 5", "request -2"]),
        ({"positions": (1, -1)}, ["positions", "row 1", "request 3", -1]),
        ({"positions": (3, 32)}, ["positions", "row 3", "request 1", 32]),
        ({"positions": (5, 2**31 - 1)}, ["positions", "row 5", "request 0", 2**31 - 1]),
        ({"positions": (5, 8)}, ["lookup_table", "request 0", "slot 1", UNUSED_PAGE]),
        ({"positions": (5, 3)}, ["positions", "row 5", "request 0", "position 3", "slot 3"]),
        ({"positions": (3, 21)}, ["positions", "row 3", "request 1", "position 21", "slot 5"]),
    ],
    "gather": [
        ({"indptr": (0, 1)}, ["indptr", 1]),
        ({"indptr": (0, -1)}, ["indptr", -1]),
        ({"indptr": (3, 22)}, ["indptr", "request 2", -1]),
        ({"indptr": (4, 31), "num_tokens": 32}, ["indptr", 31, 32]),
        ({"num_tokens": 31}, ["indptr", 32, 31]),
        ({"indptr": np.array([0, 3, 36, 36, 36], np.int32), "num_tokens": 36}, ["request 1", 33, 4]),
        ({"indptr": np.array([0, 2**31 - 1, -(2**31), 0, 0], np.int32)}, ["request 0", 2**31 - 1]),
        ({"indptr": np.array([0, 3, 23, 32], np.int32)}, ["indptr", 4, 5]),
        ({"indptr": np.array([0, 3, 23, 23, 32, 32], np.int32)}, ["indptr", 6, 5]),
        ({"indptr": np.zeros(0, np.int32), "num_tokens": 0}, ["indptr", 0, 5]),
    ],
}
ROWS["masked_attention"] = [
    *ROWS["attention"],
    ({"row_positions": lambda x: x[:3]}, ["row_positions", "length", 3, 5]),
    ({"token_offsets": lambda x: np.append(x, x)}, ["token_offsets", "length", 8, 4]),
    ({"token_offsets": lambda x: x - 1}, ["token_offsets", "request 0", -1]),
    ({"token_offsets": lambda x: x + np.int32(2**31 - 10)}, ["token_offsets", "row 1", "request 1"]),
    ({"mask_starts": lambda x: x[:1]}, ["mask_starts", "length", 1, 5]),
    ({"mask_starts": lambda x: x - 2}, ["mask_starts", "row 0", "request 0", -3]),
    ({"mask_starts": lambda x: x + 1}, ["mask", "row 1", "request 1", "20 bits", "bit 45", 64]),
    ({"mask_starts": lambda x: np.where(x > 0, 2**63 - 1, x)}, ["mask", "row 1", 2**63 - 1]),
    ({"mask": lambda x: x[:7]}, ["mask", "row 1", "20 bits", "bit 44", 56]),
    ({"mask": lambda x: x[:0]}, ["mask", "row 1", "20 bits", "bit 44", 0]),
    ({"mask_firsts": lambda x: x[:2]}, ["mask_firsts", "length", 2, 5]),
    ({"mask_firsts": lambda x: x - 1}, ["mask_firsts", "row 1", "request 1", -1]),
]


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [pytest.param(op, *row, id=f"{op}-{'-'.join(row[0])}") for op, rows in ROWS.items() for row in rows],
)
def test_rows(cache, op, change, words):
    refuse(op, cache, change, *words)


def test_two_requests_that_write_one_slot_of_a_shared_page(cache):
    cache.lookup_table[3, 0] = shared = cache.lookup_table[0, 0]
    change = {"batch_indices": (5, 3), "positions": (5, 3)}  # request 0 writes its token 3, too
    refuse("append", cache, change, "positions", "row 5", "request 3", "position 3", "slot 3", f"page {shared}")


def test_two_requests_may_write_different_slots_of_a_shared_page(cache):
    cache.lookup_table[3, 0] = cache.lookup_table[0, 0]
    arguments = append_arguments(cache)
    arguments["batch_indices"][5], arguments["positions"][5] = 3, 4
    harness.append(**arguments)


@pytest.mark.parametrize("rows", [2, 16, 17, 1000])
def test_a_slot_written_twice_is_found_among_many(rows):
    """At every size of the search table: all tokens but one are different."""
    cache = build(CacheCase(lengths=(rows,), num_q_heads=1, num_kv_heads=1, head_dim=8, page_size=PAGE_SIZE))
    k = np.zeros((rows, 1, 8), np.float32)
    positions = np.random.default_rng(0).permutation(rows).astype(np.int32)
    harness.append(k, k, 0 * positions, positions, *cache.pages)
    positions[-1] = positions[0]
    with refused("positions", f"row {rows - 1}", f"position {positions[0]}", unchanged=cache.pages[:2]):
        harness.append(k + 1, k + 1, 0 * positions, positions, *cache.pages)


@pytest.mark.parametrize("head_dim", [4, 12, 15, 520])
def test_head_dim_that_attention_does_not_take(head_dim):
    cache = build(CacheCase(lengths=(5,), head_dim=head_dim))
    with refused("head_dim", head_dim, unchanged=cache.pages[:2]):
        harness.attention(cache.q, *cache.pages, *cache.decode_rows)


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (2, 24)])
def test_gather_into_rows_of_another_shape(cache, monkeypatch, heads, head_dim):
    like = np.zeros((32, heads, head_dim), np.int8)
    monkeypatch.setattr(harness, "like_of", lambda *_: like)
    refuse("gather", cache, {}, "k", *((3, 2) if heads == 3 else (24, 16)))


@pytest.mark.parametrize("op", OPS)
def test_page_size_zero(cache, op):
    blocks = {name: np.zeros((9, 0, 2, 16), np.float32) for name in ("k_blocks", "v_blocks")}
    refuse(op, cache, {**blocks, "layout": "NHD", "layer": 0}, "page_size", 0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (4, 1, ["k_blocks", "past the storage"]),  # K starts one element too late
        (8, 1, ["v_blocks", "past the storage"]),
        (5, 1, ["k_blocks", "past the storage"]),  # its page stride
        (11, 1, ["v_blocks", "past the storage"]),  # the head stride of V
        (0, 1, ["k_blocks", "past the storage"]),  # one page too many
        (0, -10, ["k_blocks", "negative dimension"]),
        (4, -1, ["k_blocks", "negative strides"]),
        (9, -100_000, ["v_blocks", "negative strides"]),
    ],
)
def test_view_that_leaves_the_storage(cache, monkeypatch, op, number, change, words):
    operands = harness.cache_operands

    def changed(k_view, v_view):
        *storage, view = operands(k_view, v_view)
        numbers = view.copy()
        numbers[number] += change
        return *storage, numbers

    monkeypatch.setattr(harness, "cache_operands", changed)
    refuse(op, cache, {}, *words)


@pytest.mark.parametrize("op", OPS)
def test_v_with_fewer_pages_than_k(op):
    cache = build(CacheCase(lengths=LENGTHS, page_size=PAGE_SIZE, head_dim=16))
    refuse(op, cache, {"v_blocks": cache.v_blocks[:-1].copy()}, "v_blocks", "past the storage")


@pytest.mark.parametrize(
    ("op", "name", "word"),
    [
        ("attention", "row_batch", "row_batch"),
        ("attention", "row_lengths", "row_lengths"),
        ("masked_attention", "row_lengths", "row_lengths"),
        ("append", "v_new", "v: its number of tokens"),
        ("append", "batch_indices", "batch_indices"),
        ("append", "positions", "positions"),
    ],
)
def test_number_of_rows(cache, op, name, word):
    """In the op's words: MAX refuses them first where a graph gives two sizes one name, and those of calls do not."""
    call, arguments_of = OPS[op]
    arguments = arguments_of(cache)
    rows = len(arguments[name])
    arguments[name] = arguments[name][:-1]
    with refused(word, rows - 1, rows, unchanged=(cache.k_blocks, cache.v_blocks)):
        call(**arguments)


@pytest.mark.parametrize(("change", "word"), [((slice(1), slice(None)), "rows"), ((slice(None), slice(1)), "states")])
def test_sizes_of_states(change, word):
    v, s = np.zeros((2, 2, 3, 8), np.float32), np.zeros((2, 2, 3), np.float32)
    variant = Variant("merge", DType.float32, DType.float32)
    with refused(f"s: its number of {word}", 1, 2):
        harness.runtime().execute(variant, harness.to_buffer(v), s[change].copy())
