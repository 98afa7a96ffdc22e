"""The attention op where many rows of a request share a block, which kernels compute in ways of their own."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from support import harness
from support.attending import REL, assert_blocks_change_no_bit, compare_with_oracle, options_of
from support.cases import STORAGES, CacheCase, build, causal_rows, permuted
from support.compare import assert_bits_equal
from support.grids import all_pairs, case_of, setting_id

NAMES = ("o", "lse")
PREFILLS = all_pairs(
    {"pair": harness.PAIRS, "head_dim": (8, 64, 80, 128), "group": (1, 3, 4, 16)}
    | {"num_kv_heads": (1, 2), "page_size": (1, 5, 16, 128), "lengths": ((300, 0, 90), (2500,), (257, 64))}
    | {"new_tokens": (9, 70, 300), "window_left": (-1, 0, 100), "logits_soft_cap": (0.0, 5.0), "scale": (None, -0.4)}
    | {"alibi": (False, True), "sinks": (False, True), "v_scale": (1.0, -0.5), "storage": STORAGES}
)
compare = partial(compare_with_oracle, harness.attention)


def rows_in(cache, new_tokens, q_dtype):
    """Causal rows whose queries have another dtype than the cache."""
    q, *rows = causal_rows(cache, new_tokens)
    return q.astype(np.float32).astype(q_dtype), *rows


def options_among(setting, case):
    """As `options_of`, with sinks that are not far above the scores which ALiBi gives the last tokens."""
    options = options_of(setting, case)
    if setting["alibi"] and setting["sinks"]:
        options["sinks"] = options["sinks"] + options["alibi_slopes"] * max(case.lengths)
    return options


@pytest.mark.parametrize("setting", PREFILLS, ids=setting_id)
def test_many_new_tokens_of_a_request(setting):
    """Long requests are cut as well. No bit changes with repetition, another order of pages, or the rows of a block."""
    q_dtype, kv_dtype = setting["pair"]
    cache = build(replace(case_of(setting | {"dtype": kv_dtype, "lengths": "edges"}), lengths=setting["lengths"]))
    rows = rows_in(cache, [min(length, setting["new_tokens"]) for length in cache.case.lengths], q_dtype)
    options = options_among(setting, cache.case)
    once = compare(cache, rows, **options)
    q, *others = rows
    for again in cache, permuted(cache, np.random.default_rng(1)):
        results = harness.attention(q, *again.pages, *others, **cache.storage, **options)
        for name, result, expected in zip(NAMES, results, once, strict=True):
            assert_bits_equal(result, expected, what=name)
    assert_blocks_change_no_bit(harness.attention, cache, rows, sizes=(7,), **options)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("pair", [("bfloat16", "bfloat16"), ("float32", "float32")], ids="-".join)
def test_every_number_of_new_tokens(pair, group):
    """From decode to whole query tiles, and the remainders between; the second window begins with a tile of tokens."""
    cache = build(CacheCase(lengths=(150,), num_q_heads=2 * group, head_dim=64, dtype=pair[1]))
    for new_tokens in range(1, 50) if group == 1 else range(1, 20):
        for window_left in 90, 86 - new_tokens:
            compare(cache, rows_in(cache, [new_tokens], pair[0]), window_left=window_left)


@pytest.mark.parametrize("pair", [("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float16", "float16")])
def test_the_page_size_changes_no_bit(pair):
    results = []
    for page_size in 1, 5, 16, 128:
        case = CacheCase(lengths=(333, 77), num_q_heads=8, head_dim=64, page_size=page_size, dtype=pair[1])
        cache = build(case)
        fixed = build(replace(case, page_size=16))
        for b, length in enumerate(case.lengths):
            for j in range(length):
                at = cache.lookup_table[b, j // page_size], j % page_size
                cache.k_blocks[at], cache.v_blocks[at] = fixed.keys[b][j], fixed.values[b][j]
        q, *rows = rows_in(fixed, [200, 77], pair[0])
        results.append(harness.attention(q, *cache.pages, *rows))
    for result in results[1:]:
        for name, again, once in zip(NAMES, result, results[0], strict=True):
            assert_bits_equal(again, once, what=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scores_that_rise_all_along(dtype):
    """Every step's greatest score is far above the last one's: the sums so far have to be rescaled.

    Scores reach 870; their own rounding, 8 ulp of the greatest, is all that may show in `o`.
    """
    cache = build(CacheCase(lengths=(400,), num_q_heads=8, head_dim=64, dtype=dtype))
    slopes = np.linspace(0.2, 1.5, 8)
    for slope in slopes, -slopes:
        compare(
            cache, causal_rows(cache, [300]), rel=max(REL[dtype], 8 * 2**-23 * 870), alibi_slopes=slope, sm_scale=0.1
        )
