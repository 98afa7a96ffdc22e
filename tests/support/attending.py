"""Common parts of the op tests of attention, on any device: settings, rows, options, comparison with the oracle.

`o` may be off by REL of its row (compare.py says how), whatever the options. The lse is float32 for every dtype and
computed from the same rounded inputs, so it has one bound: LSE_TOL, absolute below 1 and relative above, because a
score's own rounding in float32 grows with the score.
"""

import math

import numpy as np

from paged_kv import reference
from support.cases import DTYPES, GROUPS, STORAGES, causal_rows
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import LENGTHS

REL = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
LSE_TOL = 1e-5

AXES = {
    "dtype": DTYPES,
    "storage": STORAGES,
    "page_size": (1, 5, 16, 128),
    "group": GROUPS,
    "num_kv_heads": (1, 2, 3),
    "head_dim": (8, 40, 64, 80, 128, 256, 512),
    "lengths": LENGTHS,
    "rows": ("decode", "mixed"),
    "window_left": (-1, 0, 1, 6, 127, 5000),
    "logits_soft_cap": (0.0, 0.5, 30.0, 50.0),
    "scale": (None, 1.7, -0.4),  # times 1 / sqrt(head_dim)
    "rope_theta": (None, 1e4),
    "v_scale": (1.0, -0.5),
    "alibi": (False, True),
    "sinks": (False, True),
}
OPTIONS = ("window_left", "logits_soft_cap", "rope_theta", "v_scale")


def mixed_rows(cache, seed=0):
    """Rows of a step that decodes some requests and prefills others, in random order among rows of padding.

    A padding row's query is NaN and its length anything; so is the query of a row that sees no token.
    """
    rng = np.random.default_rng(seed)
    new_tokens = [min(length, (1, 5, 2)[b % 3]) for b, length in enumerate(cache.case.lengths)]
    q, row_batch, row_lengths = causal_rows(cache, new_tokens)
    empty = np.flatnonzero(cache.lengths == 0)
    row_batch = np.concatenate([row_batch, [-1, -1, -1], empty]).astype(np.int32)
    row_lengths = np.concatenate([row_lengths, [0, 7, 10**6], 0 * empty]).astype(np.int32)
    q = np.concatenate([q, np.full((3 + len(empty), *q.shape[1:]), np.nan, q.dtype)])
    order = rng.permutation(len(q))
    return q[order], row_batch[order], row_lengths[order]


def options_of(setting, case):
    """The keyword arguments of a setting.

    Scores stay within some 10, past which their own rounding in float32 shows in `o`, and no sink is so far above them
    that `o` becomes a subnormal number of float16.
    """
    options = {name: setting[name] for name in OPTIONS if name in setting}
    if setting["scale"] is not None:
        options["sm_scale"] = setting["scale"] / math.sqrt(case.head_dim)
    if setting["alibi"]:
        options["alibi_slopes"] = np.linspace(-0.02, 0.02, case.num_q_heads)
    if setting["sinks"]:
        options["sinks"] = np.linspace(-8, 0, case.num_q_heads)
    return options


def rows_of(cache, kind):
    return mixed_rows(cache) if kind == "mixed" else (cache.q, *cache.decode_rows)


def compare_with_oracle(attention, cache, rows, *, rel=None, how=None, **options):
    """Runs both, compares, and returns the op's results; the cache must stay as it was.

    `attention` is a harness's; `how` holds what it takes and the oracle does not know.
    """
    q, row_batch, row_lengths = rows
    before = [blocks.copy() for blocks in cache.pages]
    o, lse = attention(q, *cache.pages, row_batch, row_lengths, **cache.storage, **(how or {}), **options)
    expected_o, expected_lse = reference.attention(q, *cache.pages, row_batch, row_lengths, **cache.storage, **options)
    what = f"{cache.case} {options} {how or ''}"
    assert (o.dtype, lse.dtype) == (q.dtype, np.float32)
    assert_close(o, expected_o, rel=rel or REL[q.dtype.name], what=f"o of {what}")
    assert_lse_close(lse, expected_lse, tol=LSE_TOL, what=f"lse of {what}")
    for blocks, copy in zip(cache.pages, before, strict=True):
        assert_bits_equal(blocks, copy, what=f"cache after {what}")
    if not how:
        assert_blocks_change_no_bit(attention, cache, rows, **options)
    return o, lse


def assert_blocks_change_no_bit(attention, cache, rows, sizes=(1,), **options):
    """The same rows have the same results where no more than so many of them, side by side, share a block.

    It is promised on every CPU where it was asked for: on those without AMX that changes nothing.
    """
    how = {**cache.storage, **options, "deterministic": True}
    expected = attention(rows[0], *cache.pages, *rows[1:], **how)
    for size in sizes:
        ends = np.arange(size, len(rows[0]), size)
        padding = zip(rows, (np.nan, -1, 0), strict=True)
        q, row_batch, row_lengths = (np.insert(part, ends, number, axis=0) for part, number in padding)
        results = attention(q, *cache.pages, row_batch, row_lengths, **how)
        own = np.insert(np.ones(len(rows[0]), bool), ends, False)
        for name, result, alike in zip(("o", "lse"), results, expected, strict=True):
            assert_bits_equal(result[own], alike, what=f"{name} of {size} rows of {cache.case} {options}")


def assert_rows_are_alone(attention, cache):
    """A row's results are the same to the bit without the others."""
    q, row_batch, row_lengths = mixed_rows(cache)
    o, lse = attention(q, *cache.pages, row_batch, row_lengths)
    for r in range(len(q)):
        one = slice(r, r + 1)
        o_one, lse_one = attention(q[one], *cache.pages, row_batch[one], row_lengths[one])
        assert_bits_equal(o_one, o[one], what=f"o of row {r} alone")
        assert_bits_equal(lse_one, lse[one], what=f"lse of row {r} alone")
