"""The products of a prefill step in vectors: scores with a query in each lane, and weighted sums.

One operand of every product is broadcast from memory, so nothing is transposed.
"""

from std.bit import log2_floor
from std.math import align_down
from std.memory import bitcast

from ....isa.bf16_dot import bf16_dot
from ....isa.convert import FloatVector, LANES
from ....isa.memory import FloatPointer
from ....isa.registers import REGISTER_LANES
from ..prefetch import Prefetcher
from ..prefill.queries import QUERY_COLUMNS
from ..prefill.step import STEP_TOKENS
from .prefill_workspace import (
    KEY_TOKENS,
    LANES_AT_ONCE,
    LINE_WORDS,
    MAX_SUMS,
    SUM_VECTORS,
    TILE_SCORES,
    VALUE_COLUMNS,
    WordPointer,
    score_tokens,
)

comptime WordVector = SIMD[DType.uint32, LANES]


@always_inline
def score_tiles[
    pairs: Bool, tiles: Int, latent: Bool
](
    keys: WordPointer,
    q: WordPointer,
    words: Int,
    latent_words: Int,
    latent_scale: Float32,
    begin: Int,
    end: Int,
    scores: FloatPointer,
    mut prefetcher: Prefetcher,
):
    """Computes the dot products of `tiles` query tiles with tokens `[begin, end)` of the step.

    They are sums of as many partial sums as a register has lanes, the products of every so many-th word, which are
    added in pairs: as `score_block` of `products.mojo` computes them, so that prefill has the bits of decode.

    Parameters:
        pairs: Whether a word is a pair of bfloat16, else a float32.
        tiles: Query tiles.
        latent: Whether the sum over the first words is multiplied by `latent_scale`.

    Args:
        keys: `[words / 16, KEY_TOKENS, 16]`.
        q: `[tiles, words, 16]`.
        words: Words of a head.
        latent_words: Those of them whose sum is scaled.
        latent_scale: What it is multiplied by.
        begin: The first token; some before it, up to a multiple of `score_tokens`, are computed as well.
        end: The token after the last one; some after it are computed as well.
        scores: `[tiles, KEY_TOKENS, 16]`.
        prefetcher: Runs once for every `score_tokens` tokens.
    """
    comptime tokens = score_tokens(tiles)
    comptime count = tokens * tiles
    comptime levels = log2_floor(REGISTER_LANES // LANES_AT_ONCE)
    for token in range(align_down(begin, tokens), end, tokens):
        prefetcher.run()
        # `waiting[level]` is half of a sum of `LANES_AT_ONCE << (level + 1)` partial sums.
        var waiting = Array[Array[FloatVector, count], levels](fill=Array[FloatVector, count](fill=0))
        comptime for group in range(REGISTER_LANES // LANES_AT_ONCE):
            var sums = Array[FloatVector, LANES_AT_ONCE * count](fill=0)
            for line in range(words // LINE_WORDS):
                comptime if latent:
                    if line == latent_words // LINE_WORDS and latent_scale != 1:
                        comptime for i in range(LANES_AT_ONCE * count):
                            sums[i] *= latent_scale
                var k = keys.unsafe_offset((line * KEY_TOKENS + token) * LINE_WORDS)
                var at = q.unsafe_offset(line * LINE_WORDS * LANES)
                comptime for i in range(LANES_AT_ONCE):
                    comptime lane = reversed_bits(group * LANES_AT_ONCE + i, log2_floor(REGISTER_LANES))
                    comptime for word in range(lane, LINE_WORDS, REGISTER_LANES):
                        comptime for t in range(tokens):
                            var x = WordVector(k[unsafe_offset=t * LINE_WORDS + word])
                            comptime for tile in range(tiles):
                                comptime sum = i * count + t * tiles + tile
                                sums[sum] = add_product[pairs](
                                    sums[sum],
                                    at.unsafe_offset(tile * words * LANES).unsafe_load[width=LANES](word * LANES),
                                    x,
                                )
            comptime for level in range(log2_floor(LANES_AT_ONCE)):
                comptime for i in range(0, LANES_AT_ONCE, 2 << level):
                    comptime for sum in range(count):
                        sums[i * count + sum] += sums[(i + (1 << level)) * count + sum]
            comptime full = count_trailing_ones(group)
            comptime for level in range(full):
                comptime for sum in range(count):
                    sums[sum] += waiting[level][sum]
            comptime if full < levels:
                comptime for sum in range(count):
                    waiting[full][sum] = sums[sum]
            else:
                comptime for t in range(tokens):
                    comptime for tile in range(tiles):
                        scores.unsafe_store(tile * TILE_SCORES + (token + t) * QUERY_COLUMNS, sums[t * tiles + tile])


def reversed_bits(i: Int, count: Int) -> Int:
    """Return the lowest `count` bits of `i`, the last one first."""
    var reversed = 0
    for bit in range(count):
        reversed |= (i >> bit & 1) << (count - 1 - bit)
    return reversed


def count_trailing_ones(i: Int) -> Int:
    var count = 0
    while i >> count & 1:
        count += 1
    return count


@always_inline
def add_product[pairs: Bool](sums: FloatVector, a: WordVector, b: WordVector) -> FloatVector:
    """Adds the products of 16 words, each a pair of bfloat16 or a float32."""
    comptime if pairs:
        return bf16_dot(sums, bitcast[DType.bfloat16, 2 * LANES](a), bitcast[DType.bfloat16, 2 * LANES](b))
    else:
        return bitcast[DType.float32, LANES](a).fma(bitcast[DType.float32, LANES](b), sums)


@always_inline
def sum_query_tile(
    values: FloatPointer, weights: FloatPointer, begin: Int, end: Int, padded_value: Int, acc: FloatPointer
):
    """Adds the weighted V of tokens `[begin, end)` of the step to the values of 16 queries.

    Args:
        values: `[padded_value / 32, STEP_TOKENS, 32]`.
        weights: `[STEP_TOKENS, 16]`.
        begin: The first token.
        end: The token after the last one.
        padded_value: Pv.
        acc: `[16, Pv]`.
    """
    var d = 0
    comptime for vectors in [SUM_VECTORS, min(2, SUM_VECTORS)]:
        while d + vectors * LANES <= padded_value:
            comptime blocks = num_query_blocks(vectors)
            comptime for block in range(blocks):
                comptime first = block * QUERY_COLUMNS // blocks
                comptime count = (block + 1) * QUERY_COLUMNS // blocks - first
                sum_block[count, vectors](
                    values.unsafe_offset(d // VALUE_COLUMNS * STEP_TOKENS * VALUE_COLUMNS + d % VALUE_COLUMNS),
                    weights.unsafe_offset(first),
                    begin,
                    end,
                    padded_value,
                    acc.unsafe_offset(first * padded_value + d),
                )
            d += vectors * LANES


def num_query_blocks(vectors: Int) -> Int:
    """Return how many blocks the queries of a tile are divided into, so that the sums stay in registers."""
    var most = max(1, MAX_SUMS // vectors)
    return (QUERY_COLUMNS + most - 1) // most


@always_inline
def sum_block[
    count: Int, vectors: Int
](values: FloatPointer, weights: FloatPointer, begin: Int, end: Int, padded_value: Int, acc: FloatPointer):
    """Adds the weighted V for `count` queries and `vectors` vectors of head_dim."""
    var sums = Array[FloatVector, count * vectors](fill=0)
    comptime for m in range(count):
        comptime for i in range(vectors):
            sums[m * vectors + i] = acc.unsafe_load[width=LANES](m * padded_value + i * LANES)
    for token in range(begin, end):
        var v = Array[FloatVector, vectors](fill=0)
        comptime for i in range(vectors):
            comptime column = i * LANES // VALUE_COLUMNS * STEP_TOKENS * VALUE_COLUMNS + i * LANES % VALUE_COLUMNS
            v[i] = values.unsafe_load[width=LANES](token * VALUE_COLUMNS + column)
        comptime for m in range(count):
            var w = FloatVector(weights[unsafe_offset=token * QUERY_COLUMNS + m])
            comptime for i in range(vectors):
                sums[m * vectors + i] = v[i].fma(w, sums[m * vectors + i])
    comptime for m in range(count):
        comptime for i in range(vectors):
            acc.unsafe_store(m * padded_value + i * LANES, sums[m * vectors + i])
