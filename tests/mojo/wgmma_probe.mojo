"""Both products of the Hopper kernel by themselves, on numbers that ordinary stores have put into shared memory.

Where the kernel's results are wrong on a GPU, this tells whether its operands are to blame: every product is exact,
and it is repeated with the two strides of a descriptor exchanged. Compiled for sm_90a by
tests/gpu/model/test_hopper.py.
"""

from std.random import random_si64, seed
from max.gpu import thread_idx
from max.gpu.compute.mma import WGMMADescriptor, wgmma_async, wgmma_commit_group_sync, wgmma_fence_aligned
from max.gpu.host import DeviceBuffer, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory, fence_async_view_proxy
from max.gpu.sync import barrier

from mojo_ops.attention.gpu.hopper.shared_memory import SharedMemoryMap
from mojo_ops.attention.gpu.hopper.tiles import WGMMA_TILE_TOKENS
from mojo_ops.attention.gpu.hopper.wgmma import (
    ATOM_ELEMENTS,
    CONSUMER_THREADS,
    MatrixOperand,
    WGMMA_K,
    fragment_column,
    fragment_row,
    wait_for_products,
)

comptime DIM = 128


def exchanged(operand: MatrixOperand, really: Bool) -> MatrixOperand:
    if really:
        return MatrixOperand(operand.start, operand.stride, operand.leading, operand.swizzled)
    return operand


def multiply[
    heads: Int, exchange_a: Bool, exchange_b: Bool
](
    tile: MutPointer[BFloat16, MutAnyOrigin],
    query: MutPointer[BFloat16, MutAnyOrigin],
    weights: MutPointer[BFloat16, MutAnyOrigin],
    scores: MutPointer[Float32, MutAnyOrigin],
    sums: MutPointer[Float32, MutAnyOrigin],
):
    """From `tile` `[64, DIM]`: scores `[64, heads]` with `query` `[heads, DIM]`, sums `[DIM, heads]` with `weights`
    `[64, heads]`.
    """
    comptime Map = SharedMemoryMap[DType.bfloat16, DIM, heads]
    comptime Fragment = SIMD[DType.float32, heads // 2]
    var memory = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    var base = UInt32(Int(memory))
    var thread = Int(thread_idx.x)
    # Stage 1 of the ring, so that a forgotten stage offset shows.
    comptime at = Map.STAGE_BYTES
    for i in range(thread, WGMMA_TILE_TOKENS * DIM, CONSUMER_THREADS):
        var token, dim = divmod(i, DIM)
        var offset = at + Map.widened_offset(token, dim // 8) + (dim % 8) * 2
        memory.unsafe_offset(offset).unsafe_bitcast[BFloat16]()[] = tile[unsafe_offset=i]
    for i in range(thread, heads * DIM, CONSUMER_THREADS):
        var head, dim = divmod(i, DIM)
        var offset = Map.query_offset(head, dim // 8) + (dim % 8) * 2
        memory.unsafe_offset(offset).unsafe_bitcast[BFloat16]()[] = query[unsafe_offset=i]
    for i in range(thread, WGMMA_TILE_TOKENS * heads, CONSUMER_THREADS):
        var token, head = divmod(i, heads)
        memory.unsafe_offset(Map.weight_offset(token, head)).unsafe_bitcast[BFloat16]()[] = weights[unsafe_offset=i]
    fence_async_view_proxy()
    barrier()

    comptime Descriptor = WGMMADescriptor[DType.bfloat16]
    var s = Fragment(0)
    wgmma_fence_aligned()
    comptime for step in range(DIM // WGMMA_K):
        var a = Descriptor(exchanged(Map.key_operand(at, step), exchange_a).descriptor(base))
        var b = Descriptor(exchanged(Map.query_operand(step), exchange_b).descriptor(base))
        s = wgmma_async[WGMMA_TILE_TOKENS, heads, WGMMA_K, a_type=DType.bfloat16, b_type=DType.bfloat16](a, b, s)
    wgmma_commit_group_sync()
    wait_for_products(s)
    comptime for i in range(heads // 2):
        scores.unsafe_store(fragment_row(thread, i) * heads + fragment_column(thread, i), s[i])
    comptime for atom in range(Map.ATOMS):
        var o = Fragment(0)
        wgmma_fence_aligned()
        comptime for step in range(WGMMA_TILE_TOKENS // WGMMA_K):
            var a = Descriptor(exchanged(Map.value_operand(at, atom, step), exchange_a).descriptor(base))
            var b = Descriptor(exchanged(Map.weight_operand(step), exchange_b).descriptor(base))
            o = wgmma_async[
                64, heads, WGMMA_K, a_type=DType.bfloat16, b_type=DType.bfloat16, layout_a="col", layout_b="row"
            ](a, b, o)
        wgmma_commit_group_sync()
        wait_for_products(o)
        comptime for i in range(heads // 2):
            sums.unsafe_store(
                (atom * ATOM_ELEMENTS + fragment_row(thread, i)) * heads + fragment_column(thread, i), o[i]
            )


def integers(ctx: DeviceContext, count: Int) raises -> DeviceBuffer[DType.bfloat16]:
    var buffer = ctx.enqueue_create_buffer[DType.bfloat16](count)
    with buffer.map_to_host() as host:
        for i in range(count):
            host[i] = BFloat16(Int(random_si64(-3, 3)))
    return buffer


def check[heads: Int, exchange_a: Bool = False, exchange_b: Bool = False](ctx: DeviceContext) raises -> Bool:
    """Return whether both products are right, bit for bit."""
    comptime Map = SharedMemoryMap[DType.bfloat16, DIM, heads]
    var tile = integers(ctx, WGMMA_TILE_TOKENS * DIM)
    var query = integers(ctx, heads * DIM)
    var weights = integers(ctx, WGMMA_TILE_TOKENS * heads)
    var scores = ctx.enqueue_create_buffer[DType.float32](WGMMA_TILE_TOKENS * heads)
    var sums = ctx.enqueue_create_buffer[DType.float32](DIM * heads)
    comptime kernel = multiply[heads, exchange_a, exchange_b]
    ctx.enqueue_function[kernel](
        tile,
        query,
        weights,
        scores,
        sums,
        grid_dim=1,
        block_dim=CONSUMER_THREADS,
        shared_mem_bytes=Map.BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(Map.BYTES)),
    )
    ctx.synchronize()
    var wrong_scores = 0
    var wrong_sums = 0
    with tile.map_to_host() as x, query.map_to_host() as q, weights.map_to_host() as p:
        with scores.map_to_host() as s, sums.map_to_host() as o:
            for head in range(heads):
                for token in range(WGMMA_TILE_TOKENS):
                    var dot = Float32(0)
                    for dim in range(DIM):
                        dot += x[token * DIM + dim].cast[DType.float32]() * q[head * DIM + dim].cast[DType.float32]()
                    wrong_scores += 1 if s[token * heads + head] != dot else 0
                for dim in range(DIM):
                    var sum = Float32(0)
                    for token in range(WGMMA_TILE_TOKENS):
                        sum += (
                            x[token * DIM + dim].cast[DType.float32]() * p[token * heads + head].cast[DType.float32]()
                        )
                    wrong_sums += 1 if o[dim * heads + head] != sum else 0
    print(
        heads,
        "heads; strides exchanged in A:",
        exchange_a,
        "B:",
        exchange_b,
        "; wrong scores:",
        wrong_scores,
        "of",
        WGMMA_TILE_TOKENS * heads,
        "; wrong sums:",
        wrong_sums,
        "of",
        DIM * heads,
    )
    return wrong_scores == 0 and wrong_sums == 0


def main() raises:
    seed(0)
    var ctx = DeviceContext()
    var right = check[8](ctx) and check[16](ctx)
    if right:
        print("all products are right")
        return
    # What would have been right?
    _ = check[8, True, False](ctx)
    _ = check[8, False, True](ctx)
    _ = check[16](ctx)
    _ = check[16, True, False](ctx)
    _ = check[16, False, True](ctx)
    _ = check[16, True, True](ctx)
    raise Error("products are wrong")
