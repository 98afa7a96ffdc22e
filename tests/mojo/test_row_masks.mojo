"""The tokens that a row sees: bits of masks, windows and lengths, 32 tokens at once against one token at a time."""

from std.testing import TestSuite, assert_equal

from mojo_ops.attention.row_masks import MASK_TOKENS, CustomMasks, bits_between
from support import untracked

comptime BYTES = 13


def masked(
    mask: List[UInt8],
    starts: List[Int64],
    firsts: List[Int32],
    positions: List[Int32] = [],
    offsets: List[Int32] = [],
) -> CustomMasks:
    """Only the first `BYTES` bytes of the mask are its own."""
    return CustomMasks(
        untracked(positions),
        len(positions) > 0,
        untracked(offsets),
        len(offsets) > 0,
        untracked(mask),
        BYTES,
        untracked(starts),
        len(starts) > 0,
        untracked(firsts),
        len(firsts) > 0,
    )


def some_bytes() -> List[UInt8]:
    var mask = List[UInt8](length=BYTES + 9, fill=255)
    for i in range(BYTES):
        mask[i] = UInt8((i * 151 + 77) & 255)
    return mask^


def test_bits_are_those_of_the_mask() raises:
    """From every bit on, with every first token, before, across and after the mask's ends."""
    var mask = some_bytes()
    for start in range(8 * BYTES + 1):
        for first in [0, 1, 31, 32, 40]:
            var starts: List[Int64] = [Int64(start)]
            var firsts: List[Int32] = [Int32(first)]
            var masks = masked(mask, starts, firsts)
            for token in range(0, 80, 3):
                var bits = masks.mask_bits(0, token)
                for i in range(MASK_TOKENS):
                    var bit = start + token + i - first
                    var expected = True
                    if token + i >= first:
                        expected = bit < 8 * BYTES and mask[bit >> 3] >> UInt8(bit & 7) & 1 == 1
                    assert_equal(bits >> UInt32(i) & 1 == 1, expected)
            _ = (starts^, firsts^)
    _ = mask^


def test_a_row_without_a_mask_sees_everything() raises:
    var mask = some_bytes()
    var starts: List[Int64] = [-1]
    var none = List[Int64]()
    var firsts = List[Int32]()
    assert_equal(masked(mask, starts, firsts).mask_bits(0, 5), UInt32.MAX)
    assert_equal(masked(mask, none, firsts).mask_bits(0, 5), UInt32.MAX)
    _ = (mask^, starts^, none^, firsts^)


def test_positions_and_offsets() raises:
    var mask = some_bytes()
    var starts = List[Int64]()
    var firsts = List[Int32]()
    var positions: List[Int32] = [-3, 70]
    var offsets: List[Int32] = [100, 7]
    var none = List[Int32]()
    var both = masked(mask, starts, firsts, positions, offsets)
    assert_equal(both.position(0, 1, 50), -3)
    assert_equal(both.offset(1), 7)
    # A row of padding has no request.
    assert_equal(both.offset(-1), 0)
    assert_equal(masked(mask, starts, firsts, none, offsets).position(1, 0, 50), 149)
    assert_equal(masked(mask, starts, firsts).position(1, 0, 50), 49)
    _ = (mask^, starts^, firsts^, positions^, offsets^, none^)


def test_bits_between() raises:
    for begin in range(-3, 70):
        for end in range(-3, 70):
            var bits = bits_between(20, begin, end)
            for i in range(MASK_TOKENS):
                assert_equal(bits >> UInt32(i) & 1 == 1, begin <= 20 + i < end)
    # What stands for no token.
    assert_equal(bits_between(Int.MAX, 0, 100), 0)
    assert_equal(bits_between(-1, 0, 100) & 1, 0)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
