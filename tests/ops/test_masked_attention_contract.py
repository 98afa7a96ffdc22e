"""The refusals of attention with masks, with their words."""

from typing import Any

import numpy as np
import pytest

from support import harness
from support.cases import CacheCase, build
from support.harness import refused

I32, I64, U8 = np.int32, np.int64, np.uint8
DTYPE = "float32"


def call_of() -> tuple[dict[str, Any], dict[str, Any]]:
    """A call of 4 rows over requests of 40 and 9 tokens that is right: its arguments, and its positions and masks."""
    cache = build(CacheCase(lengths=(40, 9), head_dim=16, dtype=DTYPE))
    arguments = {
        "q": np.ones((4, 4, 16), DTYPE),
        "k_blocks": cache.k_blocks,
        "v_blocks": cache.v_blocks,
        "lookup_table": cache.lookup_table,
        "row_batch": np.array([0, 0, 1, -1], I32),
        "row_lengths": np.array([40, 7, 9, 99], I32),
    }
    row_masks = {
        "row_positions": np.array([39, 6, 8, -7], I32),
        "token_offsets": np.array([0, 5], I32),
        "mask": np.full(8, 255, U8),
        "mask_starts": np.array([24, -1, 55, -9], I64),
        "mask_firsts": np.array([0, -3, 0, -3], I32),
    }
    return arguments, row_masks


BAD = [
    ("row_positions", lambda x: x[:3], ["row_positions", "length", 3, 4]),
    ("token_offsets", lambda x: np.append(x, x), ["token_offsets", "length", 4, 2]),
    ("token_offsets", lambda x: x - 1, ["token_offsets", "request 0", -1]),
    ("token_offsets", lambda x: x + I32(2**31 - 10), ["token_offsets", "row 0", "request 0"]),
    ("mask_starts", lambda x: x[:1], ["mask_starts", "length", 1, 4]),
    ("mask_starts", lambda x: x - 2, ["mask_starts", "row 1", "request 0", -3]),
    ("mask_starts", lambda x: x + 1, ["mask", "row 0", "request 0", "40 bits", "bit 25", 64]),
    ("mask_starts", lambda x: np.where(x > 0, 2**63 - 1, x), ["mask", "row 0", 2**63 - 1]),
    ("mask", lambda x: x[:7], ["mask", "row 0", "40 bits", "bit 24", 56]),
    ("mask", lambda x: x[:0], ["mask", "row 0", "40 bits", "bit 24", 0]),
    ("mask_firsts", lambda x: x[:2], ["mask_firsts", "length", 2, 4]),
    ("mask_firsts", lambda x: x - 1, ["mask_firsts", "row 0", "request 0", -1]),
]


def test_the_call_that_is_changed_is_right():
    arguments, row_masks = call_of()
    o, lse = harness.masked_attention(**arguments, **row_masks)
    assert np.isfinite(o).all()
    assert np.isneginf(lse[3]).all()


@pytest.mark.parametrize(("name", "change", "words"), BAD)
def test_positions_and_masks_that_do_not_fit(name, change, words):
    arguments, row_masks = call_of()
    row_masks[name] = change(row_masks[name]).astype(row_masks[name].dtype)
    pages = arguments["k_blocks"], arguments["v_blocks"]
    with refused(*words, unchanged=pages):
        harness.masked_attention(**arguments, **row_masks)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("row_batch", lambda x: x + 1, ["row_batch", "row 2", "request 2"]),
        ("row_lengths", lambda x: x - 8, ["row_lengths", "row 1", "request 0", -1]),
        ("row_lengths", lambda x: x + 60, ["row_lengths", "request 0"]),
        ("lookup_table", lambda x: x + 99, ["lookup_table", "request 0", "page slot 0"]),
    ],
)
def test_what_the_plain_op_refuses(name, change, words):
    arguments, row_masks = call_of()
    row_masks |= {"mask_starts": np.full(4, -1, I64)}
    arguments[name] = change(arguments[name]).astype(arguments[name].dtype)
    with refused(*words):
        harness.masked_attention(**arguments, **row_masks)


def test_pages_before_every_window_are_not_looked_at():
    """The window counts back from positions: with offsets it may begin anywhere."""
    arguments, row_masks = call_of()
    row_masks |= {"row_positions": np.array([39, 39, 8, 0], I32), "mask_starts": np.full(4, -1, I64)}
    arguments["row_lengths"][1] = 40
    expected = harness.masked_attention(**arguments, **row_masks, window_left=5)
    arguments["lookup_table"][0, :2] = 99  # 16 tokens a page, and the window begins at token 34
    again = harness.masked_attention(**arguments, **row_masks, window_left=5)
    np.testing.assert_array_equal(again[0], expected[0])
    row_masks["row_positions"][1] = 36  # begins at token 31
    with refused("lookup_table", "request 0", "page slot 1", 99):
        harness.masked_attention(**arguments, **row_masks, window_left=5)
