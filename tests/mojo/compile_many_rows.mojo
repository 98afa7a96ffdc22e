"""Launches the Hopper kernel for many rows in every variant. gpu_compile/test_many_rows.py compiles it for sm_90a; on such
a GPU, running it compares each result with float64 loops.

The pool is NaN but for the tokens of the requests, and pages are shuffled.
"""

from std.math import exp2, log2, tanh
from std.random import random_float64, random_si64, seed
from std.utils import IndexList
from std.utils.numerics import nan, neg_inf
from max.gpu.host import DeviceBuffer, DeviceContext

from mojo_ops.attention.gpu.many_rows.kernel import attend_many_rows_on_hopper
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
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


comptime PLAIN = Options(-1, 0, False, False)


@fieldwise_init
struct Shape(TrivialRegisterPassable):
    var dim: Int
    var page_size: Int
    var kv_heads: Int
    var group: Int


@fieldwise_init
struct Request(TrivialRegisterPassable):
    var tokens: Int
    var rows: Int
    """The last ones of its tokens."""


struct Batch[dtype: DType]:
    """A batch on the host: K and V `[pages, page_size, kv_heads, dim]`, NHD."""

    var shape: Shape
    var heads: Int
    var max_pages: Int
    var pages: Int
    var row_batch: List[Int32]
    var row_lengths: List[Int32]
    var table: List[UInt32]
    var k: List[Scalar[Self.dtype]]
    var v: List[Scalar[Self.dtype]]
    var q: List[Scalar[Self.dtype]]
    var slopes: List[Float32]
    var sinks: List[Float32]

    def __init__(out self, shape: Shape, requests: List[Request]):
        self.shape = shape
        self.heads = shape.kv_heads * shape.group
        self.max_pages = 1
        for request in requests:
            self.max_pages = max(self.max_pages, (request.tokens + shape.page_size - 1) // shape.page_size)
        self.pages = len(requests) * self.max_pages + 1
        var order = List[Int]()
        for page in range(self.pages):
            order.append(page)
        for i in range(self.pages - 1, 0, -1):
            order.swap_elements(i, Int(random_si64(0, Int64(i))))
        self.table = List[UInt32]()
        for i in range(self.pages - 1):
            self.table.append(UInt32(order[i]))
        var elements = self.pages * shape.page_size * shape.kv_heads * shape.dim
        self.k = List[Scalar[Self.dtype]](length=elements, fill=nan[Self.dtype]())
        self.v = self.k.copy()
        self.q = List[Scalar[Self.dtype]]()
        self.row_batch = List[Int32]()
        self.row_lengths = List[Int32]()
        self.slopes = List[Float32]()
        self.sinks = List[Float32]()
        for _ in range(self.heads):
            self.slopes.append(Float32(random_float64(0, 0.05)))
            self.sinks.append(Float32(random_float64(-1, 2)))
        for b in range(len(requests)):
            for token in range(requests[b].tokens):
                for i in range(shape.kv_heads * shape.dim):
                    self.k[self.element(b, token) + i] = random_float64(-1, 1).cast[Self.dtype]()
                    self.v[self.element(b, token) + i] = random_float64(-1, 1).cast[Self.dtype]()
            for row in range(requests[b].rows):
                self.row_batch.append(Int32(b))
                self.row_lengths.append(Int32(requests[b].tokens - requests[b].rows + 1 + row))
        for _ in range(len(self.row_batch) * self.heads * shape.dim):
            self.q.append(random_float64(-1, 1).cast[Self.dtype]())

    def element(self, request: Int, token: Int) -> Int:
        var page = Int(self.table[request * self.max_pages + token // self.shape.page_size])
        var slot = page * self.shape.page_size + token % self.shape.page_size
        return slot * self.shape.kv_heads * self.shape.dim

    def expected(self, row: Int, head: Int, options: Options, mut o: List[Float64]) -> Float64:
        """The lse of one row and query head, and its output in `o`."""
        var dim = self.shape.dim
        var length = Int(self.row_lengths[row])
        var request = Int(self.row_batch[row])
        var first = max(0, length - 1 - options.window_left) if options.window_left >= 0 else 0
        var at = head // self.shape.group * dim
        var scores = List[Float64]()
        var greatest = self.sinks[head].cast[DType.float64]() if options.sinks else neg_inf[DType.float64]()
        var total = exp2(Float64(0)) if options.sinks else 0
        for token in range(first, length):
            var x = Float64(0)
            for d in range(dim):
                x += (
                    self.q[(row * self.heads + head) * dim + d].cast[DType.float64]()
                    * self.k[self.element(request, token) + at + d].cast[DType.float64]()
                )
            x *= 1 / Float64(dim) ** 0.5
            if options.alibi:
                x += self.slopes[head].cast[DType.float64]() * Float64(token)
            if options.soft_cap > 0:
                x = options.soft_cap * tanh(x / options.soft_cap)
            scores.append(x)
            if x > greatest:
                total *= exp2((greatest - x) * LOG2E)
                greatest = x
            total += exp2((x - greatest) * LOG2E)
        for d in range(dim):
            o[d] = 0
        for i in range(len(scores)):
            var weight = exp2((scores[i] - greatest) * LOG2E) / total
            var values = self.element(request, first + i) + at
            for d in range(dim):
                o[d] += weight * self.v[values + d].cast[DType.float64]()
        return greatest * LOG2E + log2(total)


def on_device[T: DType](ctx: DeviceContext, values: List[Scalar[T]]) raises -> DeviceBuffer[T]:
    var buffer = ctx.enqueue_create_buffer[T](len(values))
    with buffer.map_to_host() as host:
        for i in range(len(values)):
            host[i] = values[i]
    return buffer


def check[dtype: DType, //](ctx: DeviceContext, name: String, batch: Batch[dtype], options: Options) raises:
    var rows = len(batch.row_batch)
    var requests = len(batch.table) // batch.max_pages
    var dim = batch.shape.dim
    var k = on_device(ctx, batch.k)
    var v = on_device(ctx, batch.v)
    var q = on_device(ctx, batch.q)
    var table = on_device(ctx, batch.table)
    var batches = on_device(ctx, batch.row_batch)
    var lengths = on_device(ctx, batch.row_lengths)
    var slopes = on_device(ctx, batch.slopes)
    var sinks = on_device(ctx, batch.sinks)
    var o = on_device(ctx, List[Scalar[dtype]](length=len(batch.q), fill=nan[dtype]()))
    var lse = on_device(ctx, List[Float32](length=rows * batch.heads, fill=nan[DType.float32]()))
    var params = GpuAttentionParams[dtype](
        untracked(q.unsafe_ptr()),
        untracked(o.unsafe_ptr()),
        untracked(lse.unsafe_ptr()),
        untracked_immutable(batches.unsafe_ptr()),
        untracked_immutable(lengths.unsafe_ptr()),
        untracked_immutable(slopes.unsafe_ptr()),
        untracked_immutable(sinks.unsafe_ptr()),
        num_rows=Int32(rows),
        num_heads=Int32(batch.heads),
        head_dim=Int32(dim),
        batch=Int32(requests),
        capacity=Int32(batch.max_pages * batch.shape.page_size),
        window_left=Int32(options.window_left),
        scale=Float32(1 / Float64(dim) ** 0.5),
        soft_cap=Float32(options.soft_cap),
        v_scale=1,
        has_alibi=Int32(1 if options.alibi else 0),
        has_sinks=Int32(1 if options.sinks else 0),
        masks=GpuNoMasks(),
    )
    var shape = IndexList[4](batch.pages, batch.shape.page_size, batch.shape.kv_heads, dim)
    var slot = batch.shape.kv_heads * dim
    var strides = PageStrides(0, batch.shape.page_size * slot, slot, dim)
    var pages = untracked_immutable(table.unsafe_ptr())
    comptime Cache = DynamicKVCache[dtype]
    var keys = Cache(untracked(k.unsafe_ptr()), shape, strides, pages, requests, batch.max_pages)
    var values = Cache(untracked(v.unsafe_ptr()), shape, strides, pages, requests, batch.max_pages)
    attend_many_rows_on_hopper(ctx, params, keys, values)
    ctx.synchronize()

    var wrong = 0
    var worst = Float64(0)
    var expected = List[Float64](length=dim, fill=0)
    with o.map_to_host() as found, lse.map_to_host() as found_lse:
        for row in range(rows):
            for head in range(batch.heads):
                var want = batch.expected(row, head, options, expected)
                # A NaN is an error too.
                if not (abs(found_lse[row * batch.heads + head].cast[DType.float64]() - want) < 2e-3):
                    wrong += 1
                for d in range(dim):
                    var x = found[(row * batch.heads + head) * dim + d].cast[DType.float64]()
                    wrong += 0 if abs(x - expected[d]) < 1e-2 else 1
                    worst = max(worst, abs(x - expected[d]))
    print(name, "ok" if wrong == 0 else "WRONG", "worst error of o", worst)
    if wrong != 0:
        raise Error(name, ": ", wrong, " numbers are wrong")
    _ = (k^, v^, q^, table^, batches^, lengths^, slopes^, sinks^)


def check_dtype[dtype: DType](ctx: DeviceContext) raises:
    print(dtype)
    # The simplest first: one tile, then a few, then every variant.
    check(ctx, "one tile", Batch[dtype](Shape(64, 64, 1, 1), [Request(64, 64)]), PLAIN)
    check(ctx, "two warpgroups", Batch[dtype](Shape(128, 16, 1, 1), [Request(128, 128)]), PLAIN)
    var mixed: List[Request] = [Request(300, 300), Request(65, 4), Request(1, 1), Request(700, 9)]
    for dim in [64, 128]:
        for group in [1, 5, 8, 16]:
            check(ctx, String("dim ", dim, " group ", group), Batch[dtype](Shape(dim, 16, 2, group), mixed), PLAIN)
    for page_size in [8, 24, 64, 128]:
        check(ctx, String("page ", page_size), Batch[dtype](Shape(128, page_size, 3, 4), mixed), PLAIN)
    check(ctx, "split", Batch[dtype](Shape(128, 16, 1, 4), [Request(9000, 5)]), PLAIN)
    check(ctx, "window", Batch[dtype](Shape(128, 16, 2, 4), mixed), Options(70, 0, False, False))
    check(ctx, "all options", Batch[dtype](Shape(128, 16, 2, 4), mixed), Options(200, 5, True, True))


def main() raises:
    seed(0)
    var ctx = DeviceContext()
    check_dtype[DType.bfloat16](ctx)
    check_dtype[DType.float16](ctx)
    print("all results are right")
