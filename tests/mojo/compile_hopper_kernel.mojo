"""Launches the Hopper kernel in every variant. tests/gpu/model/test_hopper.py compiles it for sm_90a; on such a GPU,
running it compares each result with float64 loops.

The pool is NaN but for the tokens that rows may see, pages are shuffled, lengths lie at the edges of tiles and pages.
"""

from std.math import exp2, log2, tanh
from std.random import random_float64, random_si64, seed
from std.utils import IndexList
from std.utils.numerics import nan, neg_inf
from max.gpu.host import DeviceBuffer, DeviceContext

from mojo_ops.attention.gpu.hopper.kernel import attend_hopper
from mojo_ops.attention.gpu.hopper.requirements import hopper_refusal
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
from mojo_ops.attention.logits import ScoreOptions
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.pointers import untracked, untracked_immutable
from mojo_ops.cache.strides import PageStrides

comptime LOG2E = 1.4426950408889634


@fieldwise_init
struct Options(TrivialRegisterPassable):
    var window_left: Int
    var soft_cap: Float64
    var alibi: Bool
    var sinks: Bool
    var batch_invariant: Bool


comptime PLAIN = Options(-1, 0, False, False, False)


struct Case[dtype: DType, kv_dtype: DType]:
    """A batch on the host: K and V `[pages, page_size, kv_heads, dim]`, rows of all requests, one of padding."""

    var dim: Int
    var page_size: Int
    var kv_heads: Int
    var heads: Int
    var hnd: Bool
    var lengths: List[Int]
    var max_pages: Int
    var pages: Int
    var table: List[UInt32]
    var k: List[Scalar[Self.kv_dtype]]
    var v: List[Scalar[Self.kv_dtype]]
    var q: List[Scalar[Self.dtype]]
    var slopes: List[Float32]
    var sinks: List[Float32]

    def __init__(out self, dim: Int, page_size: Int, kv_heads: Int, group: Int, hnd: Bool, var lengths: List[Int]):
        self.dim = dim
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.heads = kv_heads * group
        self.hnd = hnd
        self.max_pages = 1
        for length in lengths:
            self.max_pages = max(self.max_pages, (length + page_size - 1) // page_size)
        self.pages = len(lengths) * self.max_pages + 1
        self.lengths = lengths^
        var order = List[Int]()
        for page in range(self.pages):
            order.append(page)
        for i in range(self.pages - 1, 0, -1):
            order.swap_elements(i, Int(random_si64(0, Int64(i))))
        self.table = List[UInt32]()
        for i in range(self.pages - 1):
            self.table.append(UInt32(order[i]))
        self.k = List[Scalar[Self.kv_dtype]](length=self.pages * page_size * kv_heads * dim, fill=nan[Self.kv_dtype]())
        self.v = self.k.copy()
        self.q = List[Scalar[Self.dtype]]()
        for _ in range((len(self.lengths) + 1) * self.heads * dim):
            self.q.append(random_float64(-1, 1).cast[Self.dtype]())
        self.slopes = List[Float32]()
        self.sinks = List[Float32]()
        for _ in range(self.heads):
            self.slopes.append(Float32(random_float64(0, 0.05)))
            self.sinks.append(Float32(random_float64(-1, 2)))
        for r in range(len(self.lengths)):
            for token in range(self.lengths[r]):
                for head in range(kv_heads):
                    for d in range(dim):
                        var at = self.element(r, token, head, d)
                        self.k[at] = random_float64(-1, 1).cast[Self.kv_dtype]()
                        self.v[at] = random_float64(-1, 1).cast[Self.kv_dtype]()

    def strides(self) -> PageStrides:
        var page = self.page_size * self.kv_heads * self.dim
        if self.hnd:
            return PageStrides(0, page, self.dim, self.page_size * self.dim)
        return PageStrides(0, page, self.kv_heads * self.dim, self.dim)

    def element(self, request: Int, token: Int, head: Int, d: Int) -> Int:
        var page = Int(self.table[request * self.max_pages + token // self.page_size])
        var at = self.strides()
        return page * at.page + (token % self.page_size) * at.slot + head * at.head + d

    def expected(self, row: Int, head: Int, options: Options, mut o: List[Float64]) -> Float64:
        """The lse of one row and query head, and its output in `o`."""
        var scale = 1 / Float64(self.dim) ** 0.5
        var length = self.lengths[row] if row < len(self.lengths) else 0
        var first = max(0, length - 1 - options.window_left) if options.window_left >= 0 else 0
        var kv_head = head // (self.heads // self.kv_heads)
        var scores = List[Float64]()
        var greatest = neg_inf[DType.float64]()
        for token in range(first, length):
            var x = Float64(0)
            for d in range(self.dim):
                x += (
                    self.q[(row * self.heads + head) * self.dim + d].cast[DType.float64]()
                    * self.k[self.element(row, token, kv_head, d)].cast[DType.float64]()
                )
            x *= scale
            if options.alibi:
                x += self.slopes[head].cast[DType.float64]() * Float64(token)
            if options.soft_cap > 0:
                x = options.soft_cap * tanh(x / options.soft_cap)
            scores.append(x)
            greatest = max(greatest, x)
        for d in range(self.dim):
            o[d] = 0
        if length == 0:
            return neg_inf[DType.float64]()
        var total = Float64(0)
        if options.sinks:
            var sink = self.sinks[head].cast[DType.float64]()
            greatest = max(greatest, sink)
            total = exp2((sink - greatest) * LOG2E)
        for i in range(len(scores)):
            var weight = exp2((scores[i] - greatest) * LOG2E)
            total += weight
            for d in range(self.dim):
                o[d] += weight * self.v[self.element(row, first + i, kv_head, d)].cast[DType.float64]()
        for d in range(self.dim):
            o[d] /= total
        return greatest * LOG2E + log2(total)


def on_device[T: DType](ctx: DeviceContext, values: List[Scalar[T]]) raises -> DeviceBuffer[T]:
    var buffer = ctx.enqueue_create_buffer[T](len(values))
    with buffer.map_to_host() as host:
        for i in range(len(values)):
            host[i] = values[i]
    return buffer


def check[
    dtype: DType, kv_dtype: DType, //
](ctx: DeviceContext, name: String, batch: Case[dtype, kv_dtype], options: Options) raises:
    var num_rows = len(batch.lengths) + 1
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    for r in range(num_rows):
        row_batch.append(Int32(r) if r < num_rows - 1 else -1)
        row_lengths.append(Int32(batch.lengths[r]) if r < num_rows - 1 else 0)
    var k = on_device(ctx, batch.k)
    var v = on_device(ctx, batch.v)
    var q = on_device(ctx, batch.q)
    var table = on_device(ctx, batch.table)
    var batches = on_device(ctx, row_batch)
    var lengths = on_device(ctx, row_lengths)
    var slopes = on_device(ctx, batch.slopes)
    var sinks = on_device(ctx, batch.sinks)
    var o = on_device(ctx, List[Scalar[dtype]](length=len(batch.q), fill=nan[dtype]()))
    var lse = on_device(ctx, List[Float32](length=num_rows * batch.heads, fill=nan[DType.float32]()))
    var params = GpuAttentionParams[dtype](
        untracked(q.unsafe_ptr()),
        untracked(o.unsafe_ptr()),
        untracked(lse.unsafe_ptr()),
        untracked_immutable(batches.unsafe_ptr()),
        untracked_immutable(lengths.unsafe_ptr()),
        untracked_immutable(slopes.unsafe_ptr()),
        untracked_immutable(sinks.unsafe_ptr()),
        num_rows=Int32(num_rows),
        num_heads=Int32(batch.heads),
        head_dim=Int32(batch.dim),
        batch=Int32(len(batch.lengths)),
        capacity=Int32(batch.max_pages * batch.page_size),
        window_left=Int32(options.window_left),
        scores=ScoreOptions(Float32(1 / Float64(batch.dim) ** 0.5), soft_cap=Float32(options.soft_cap)),
        v_scale=1,
        has_alibi=Int32(1 if options.alibi else 0),
        has_sinks=Int32(1 if options.sinks else 0),
        masks=GpuNoMasks(),
    )
    var shape = IndexList[4](batch.pages, batch.page_size, batch.kv_heads, batch.dim)
    comptime Cache = DynamicKVCache[kv_dtype]
    var pages = untracked_immutable(table.unsafe_ptr())
    var keys = Cache(untracked(k.unsafe_ptr()), shape, batch.strides(), pages, len(batch.lengths), batch.max_pages)
    var values = Cache(untracked(v.unsafe_ptr()), shape, batch.strides(), pages, len(batch.lengths), batch.max_pages)
    var refusal = hopper_refusal(params, keys, values)
    if refusal:
        raise Error(name, ": refused: ", refusal)
    attend_hopper(ctx, params, keys, values, options.batch_invariant)
    ctx.synchronize()

    var worst = Float64(0)
    var wrong = 0
    var expected = List[Float64](length=batch.dim, fill=0)
    with o.map_to_host() as found, lse.map_to_host() as found_lse:
        for row in range(num_rows):
            for head in range(batch.heads):
                var want = batch.expected(row, head, options, expected)
                var got = found_lse[row * batch.heads + head].cast[DType.float64]()
                if not (got == want or abs(got - want) < 2e-3):
                    wrong += 1
                    if wrong < 4:
                        print("  lse of row", row, "head", head, "is", got, "not", want)
                for d in range(batch.dim):
                    var x = found[(row * batch.heads + head) * batch.dim + d].cast[DType.float64]()
                    var error = abs(x - expected[d])
                    # A NaN is an error too.
                    if not (error < 1e-2):
                        wrong += 1
                        if wrong < 4:
                            print("  o of row", row, "head", head, "dim", d, "is", x, "not", expected[d])
                    else:
                        worst = max(worst, error)
    print(name, "ok" if wrong == 0 else "WRONG", "worst error of o", worst)
    if wrong != 0:
        raise Error(name, ": ", wrong, " numbers are wrong")
    _ = (k^, v^, q^, table^, batches^, lengths^, slopes^, sinks^)


def edges(page_size: Int) -> List[Int]:
    return [1, 0, page_size, page_size + 1, 63, 64, 65, 129, 300]


def check_dtypes[dtype: DType, kv_dtype: DType](ctx: DeviceContext) raises:
    print(dtype, "with a cache of", kv_dtype)
    comptime Batch = Case[dtype, kv_dtype]
    # The simplest first: one tile, then a few, then every variant.
    check(ctx, "one token", Batch(64, 64, 1, 8, False, [1]), PLAIN)
    check(ctx, "one tile", Batch(64, 64, 1, 8, False, [64]), PLAIN)
    check(ctx, "one tile, pages of 16", Batch(128, 16, 1, 8, False, [64]), PLAIN)
    check(ctx, "two tiles", Batch(128, 16, 1, 8, False, [128]), PLAIN)
    check(ctx, "a tail", Batch(128, 16, 1, 8, False, [70]), PLAIN)
    for dim in [64, 128, 256]:
        for group in [1, 4, 5, 8, 9, 16]:
            check(ctx, String("dim ", dim, " group ", group), Batch(dim, 16, 2, group, False, edges(16)), PLAIN)
    for page_size in [8, 16, 24, 32, 48, 64, 96, 128, 256]:
        for hnd in [False, True]:
            var name = String("page ", page_size, " HND" if hnd else " NHD")
            check(ctx, name, Batch(128, page_size, 3, 4, hnd, edges(page_size)), PLAIN)
    var options = [
        Options(0, 0, False, False, False),
        Options(70, 0, False, False, False),
        Options(-1, 5, False, False, False),
        Options(-1, 0, True, False, False),
        Options(-1, 0, False, True, False),
        Options(33, 20, True, True, False),
        Options(-1, 0, False, True, True),
    ]
    for i in range(len(options)):
        check(ctx, String("options ", i), Batch(128, 16, 2, 8, False, edges(16)), options[i])
        check(ctx, String("options ", i, ", long"), Batch(128, 16, 1, 8, False, [5000, 3, 1700]), options[i])


def main() raises:
    seed(0)
    var ctx = DeviceContext()
    check_dtypes[DType.bfloat16, DType.bfloat16](ctx)
    check_dtypes[DType.float16, DType.float16](ctx)
    check_dtypes[DType.bfloat16, DType.float8_e4m3fn](ctx)
    check_dtypes[DType.float16, DType.float8_e4m3fn](ctx)
    check_dtypes[DType.bfloat16, DType.float8_e5m2](ctx)
    print("all results are right")
