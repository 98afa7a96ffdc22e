"""The innermost loops of attention and of the linear op over operands in the first-level cache, beside their bound.

    mojo run -I . benchmarks/loops.mojo [ROUNDS]

One thread, bfloat16, head_dim 128, compiled for the CPU that runs it. The bound of a loop is the time of its products
alone: the rate of the FMA, or of the dot product of pairs, is measured in registers before. What a loop takes beyond it
are loads, conversions, reductions and sums that go to memory. A line is the least time of ROUNDS rounds, 200 unless
told otherwise; figures and what binds each loop: mojo_ops/attention/cpu/README.md, mojo_ops/linear/README.md.
"""

from std.memory import bitcast
from std.sys import argv
from std.time import perf_counter_ns
from std.utils import IndexList

from mojo_ops.attention.cpu.kv_tile import KVTile
from mojo_ops.attention.cpu.plan import Segment
from mojo_ops.attention.cpu.prefetch import KV_TILE_TOKENS, Prefetcher
from mojo_ops.attention.cpu.prefill.queries import QUERY_COLUMNS
from mojo_ops.attention.cpu.prefill.step import STEP_TOKENS
from mojo_ops.attention.cpu.tile_weights import scores_to_weights
from mojo_ops.attention.cpu.vectors.prefill_products import score_tiles, sum_query_tile
from mojo_ops.attention.cpu.vectors.prefill_workspace import KEY_TOKENS, TILES_AT_ONCE, TILE_SCORES, takes_pairs
from mojo_ops.attention.cpu.vectors.products import score_tile, sum_tile
from mojo_ops.attention.cpu.vectors.queries import packed_query_dtype
from mojo_ops.attention.cpu.vectors.segment import UnitPrefetcher
from mojo_ops.attention.cpu.workspace import HeadLayout, SegmentWorkspace, TILE_BUFFERS
from mojo_ops.attention.logits import Logits, ScoreOptions
from mojo_ops.attention.params import AttentionRows
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from mojo_ops.isa.bf16_dot import BF16_DOT_ELEMENTS, USES_BF16_DOT, bf16_dot
from mojo_ops.isa.convert import ChunkConstants, FloatVector, LANES
from mojo_ops.isa.memory import align_to_line
from mojo_ops.isa.registers import HAS_32_REGISTERS, REGISTER_LANES, RegisterVector
from mojo_ops.linear.bf16_dot_section import DotLinear, PANEL_K, PANEL_ROWS, PANEL_W_ROWS

comptime HEAD_DIM = 128
comptime SLOTS = 16
comptime REPEATS = 200
"""Calls of a loop in a round."""
comptime CHAINS = 24 if HAS_32_REGISTERS else 12
"""Sums that do not wait for one another: enough for every latency of an FMA, and few enough for the registers."""


def line_of[dtype: DType, //](mut list: List[Scalar[dtype]]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """Return the address of the first cache line of a list, which has to outlive it."""
    return align_to_line(list.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())


@fieldwise_init
struct Clock(TrivialRegisterPassable):
    """Times loops in nanoseconds."""

    var rounds: Int

    def least[Loop: def() -> None, //](self, loop: Loop) -> Float64:
        """The least time of one call."""
        var least = Float64(1e18)
        for _ in range(self.rounds):
            var start = perf_counter_ns()
            for _ in range(REPEATS):
                loop()
            least = min(least, Float64(perf_counter_ns() - start) / REPEATS)
        return least


@no_inline
def product_time[pairs: Bool](clock: Clock) -> Float64:
    """Nanoseconds that the CPU takes for one product of vectors, of 16 or of 32 elements; in narrower registers as many
    products."""
    comptime lanes = REGISTER_LANES
    var memory = List[Float32](length=(CHAINS + 3) * LANES, fill=0)
    var at = line_of(memory)

    def loop() {var at}:
        var x = at.unsafe_load[width=lanes](0)
        var y = at.unsafe_load[width=lanes](LANES)
        var sums = Array[RegisterVector, CHAINS](fill=0)
        for _ in range(64):
            comptime for i in range(CHAINS):
                comptime if pairs:
                    var dot = bf16_dot(
                        rebind[FloatVector](sums[i]),
                        bitcast[DType.bfloat16, BF16_DOT_ELEMENTS](x),
                        bitcast[DType.bfloat16, BF16_DOT_ELEMENTS](y),
                    )
                    sums[i] = rebind[RegisterVector](dot)
                else:
                    sums[i] = x.fma(y, sums[i])
        comptime for i in range(CHAINS):
            at.unsafe_store((2 + i) * LANES, sums[i])

    var time = clock.least(loop)
    _ = memory^
    return time / Float64(64 * CHAINS) * Float64(LANES // lanes)


def report(name: String, time: Float64, bound: Float64):
    """One line: nanoseconds, those of the products alone, and their share."""
    print(name, "|", round(time, 2), "ns |", round(bound, 2), "ns |", round(bound / time, 2))


@no_inline
def decode_loops(clock: Clock, queries: Int, score_product: Float64, sum_product: Float64):
    """Scores and weighted sums of `vectors/segment.mojo`: a tile of 32 tokens of one KV head."""
    comptime dtype = DType.bfloat16
    comptime query_dtype = packed_query_dtype(dtype, dtype)
    comptime pages = KV_TILE_TOKENS // SLOTS
    var memory = List[BFloat16](length=2 * KV_TILE_TOKENS * HEAD_DIM + 32, fill=0)
    var table = List[UInt32](length=pages, fill=0)
    table[1] = 1
    var storage = line_of(memory)
    var entries = table.unsafe_ptr().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var shape = IndexList[4](pages, SLOTS, 1, HEAD_DIM)
    var strides = PageStrides(0, SLOTS * HEAD_DIM, HEAD_DIM, HEAD_DIM)
    # Zeros: scores, weights and states stay finite however often a loop runs.
    var k = DynamicKVCache[dtype](storage, shape, strides, entries, 1, pages)
    var v = DynamicKVCache[dtype](storage.unsafe_offset(KV_TILE_TOKENS * HEAD_DIM), shape, strides, entries, 1, pages)
    var heads = HeadLayout(1, 1, queries, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM)
    var workspace = SegmentWorkspace(heads, queries, 0)
    var tile = KVTile(k, v, 0, 0, KV_TILE_TOKENS, workspace.offset_buffer(0))
    var constants = ChunkConstants[dtype]()
    var work = Pointer(to=workspace).unsafe_origin_cast[MutUntrackedOrigin]()

    def scores() {var k, var heads, var tile, var constants, var queries, var work}:
        var prefetcher = UnitPrefetcher(work[].offset_buffer(TILE_BUFFERS), HEAD_DIM)
        score_tile[query_dtype](
            k.blocks.ptr, constants, tile.k, heads, 0, 0, 0, KV_TILE_TOKENS, queries, work[], prefetcher
        )

    def sums() {var v, var heads, var tile, var constants, var queries, var work}:
        var prefetcher = UnitPrefetcher(work[].offset_buffer(TILE_BUFFERS), HEAD_DIM)
        sum_tile[False](v, constants, tile, heads, 0, 0, 0, KV_TILE_TOKENS, queries, work[], prefetcher)

    var length = List[Int32](length=1, fill=KV_TILE_TOKENS)
    var none = List[Float32](length=1, fill=0)
    var numbers = none.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var at = length.unsafe_ptr().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var rows = AttentionRows[dtype](
        storage,
        storage,
        numbers,
        at,
        at,
        1,
        queries,
        v_scale=1,
        rope_theta=0,
        rope_scale=1,
        masks=NoMasks(),
        q_latent=storage,
        latent_scale=1,
    )
    var nothing = numbers.unsafe_mut_cast[False]()
    var logits = Logits(ScoreOptions(0.1), -1, nothing, False, nothing, False)

    def softmax() {var rows, var logits, var heads, var tile, var queries, var work}:
        var prefetcher = UnitPrefetcher(work[].offset_buffer(TILE_BUFFERS), HEAD_DIM)
        var segment = Segment(0, 1, 0, KV_TILE_TOKENS)
        scores_to_weights[False](rows, segment, logits, heads, 0, 0, tile, queries, work[], prefetcher)

    comptime elements = BF16_DOT_ELEMENTS if query_dtype == dtype else LANES
    var of_scores = clock.least(scores) / KV_TILE_TOKENS
    var of_sums = clock.least(sums) / KV_TILE_TOKENS
    var what = String(queries, " queries a KV head, a token: ")
    var of_softmax = clock.least(softmax) / KV_TILE_TOKENS
    report(what + "scores", of_scores, score_product * Float64(queries * HEAD_DIM // elements))
    report(what + "weighted sums", of_sums, sum_product * Float64(queries * HEAD_DIM // LANES))
    print(what + "softmax |", round(of_softmax, 2), "ns | |")
    _ = (memory^, table^, workspace^, length^, none^)


@no_inline
def prefill_loops(clock: Clock, score_product: Float64, sum_product: Float64):
    """Scores of two query tiles and weighted sums of one, of `vectors/prefill.mojo`: a step of 64 tokens."""
    comptime pairs = takes_pairs(DType.bfloat16, DType.bfloat16)
    comptime words = HEAD_DIM // 2 if pairs else HEAD_DIM
    comptime tiles = TILES_AT_ONCE
    var key_memory = List[UInt32](length=KEY_TOKENS * words + 16, fill=0)
    var query_memory = List[UInt32](length=tiles * words * LANES + 16, fill=0)
    var number_memory = List[Float32](
        length=STEP_TOKENS * HEAD_DIM + (tiles + 1) * TILE_SCORES + QUERY_COLUMNS * HEAD_DIM + 16, fill=0
    )
    var keys = line_of(key_memory)
    var q = line_of(query_memory)
    var values = line_of(number_memory)
    var scores = values.unsafe_offset(STEP_TOKENS * HEAD_DIM)
    var weights = scores.unsafe_offset(tiles * TILE_SCORES)
    var acc = weights.unsafe_offset(TILE_SCORES)
    var none = List[Int](length=8, fill=0)
    var addresses = none.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

    def score() {var keys, var q, var scores, var addresses}:
        var prefetcher = Prefetcher[to_l1=False](addresses, HEAD_DIM)
        score_tiles[pairs, tiles, False](keys, q, words, 0, 1, 0, STEP_TOKENS, scores, prefetcher)

    def sums() {var values, var weights, var acc}:
        sum_query_tile(values, weights, 0, STEP_TOKENS, HEAD_DIM, acc)

    var products = Float64(STEP_TOKENS * words * tiles)
    report("prefill, 64 tokens x 32 queries: scores", clock.least(score), score_product * products)
    products = Float64(STEP_TOKENS * HEAD_DIM)
    report("prefill, 64 tokens x 16 queries: weighted sums", clock.least(sums), sum_product * products)
    _ = (key_memory^, query_memory^, number_memory^, none^)


@no_inline
def linear_loop(clock: Clock, product: Float64):
    """A group of rows of w by a panel of x, of `linear/bf16_dot_section.mojo`: a block of K."""
    var memory = List[BFloat16](length=(PANEL_ROWS + 2 * PANEL_W_ROWS) * PANEL_K + 32, fill=0)
    var sum_memory = List[FloatVector](length=PANEL_ROWS * PANEL_W_ROWS + 1, fill=0)
    var x = line_of(memory)
    var w = x.unsafe_offset(PANEL_ROWS * PANEL_K)
    var linear = DotLinear[PANEL_ROWS](x, x, w, PANEL_ROWS, PANEL_W_ROWS, PANEL_K, 1)
    var sums = sum_memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

    def loop() {var linear, var w, var sums}:
        linear.add_products[PANEL_W_ROWS](0, 0, 0, w.unsafe_offset(PANEL_W_ROWS * PANEL_K), sums)

    var products = Float64(PANEL_ROWS * PANEL_W_ROWS * PANEL_K // BF16_DOT_ELEMENTS)
    report(String("linear, 8 x 3 rows, K ", PANEL_K), clock.least(loop), product * products)
    _ = (memory^, sum_memory^)


def main() raises:
    var clock = Clock(Int(argv()[1]) if len(argv()) > 1 else 200)
    var fma = product_time[False](clock)
    var score_product = fma
    print("an FMA of 16 float32:", round(fma, 3), "ns")
    comptime if USES_BF16_DOT:
        score_product = product_time[True](clock)
        print("a dot product of 16 pairs of bfloat16:", round(score_product, 3), "ns")
    print("loop | it takes | its products alone | share")
    for queries in [1, 2, 4, 8, 16]:
        decode_loops(clock, queries, score_product, fma)
    prefill_loops(clock, score_product, fma)
    comptime if USES_BF16_DOT:
        linear_loop(clock, score_product)
