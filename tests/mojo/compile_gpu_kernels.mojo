"""The GPU kernels for any GPU, a few of each kind: compiled by tests/gpu/model/test_compiled_kernels.py, never run."""

from std.sys import is_defined
from std.utils import IndexList
from max.gpu.host import DeviceBuffer, DeviceContext

from mojo_ops.attention.gpu.generic import launch_generic
from mojo_ops.attention.gpu.latent import RotaryQuery, launch_latent
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.rope import RotaryFrequencies
from mojo_ops.attention.gpu.row_masks import GpuCustomMasks, GpuNoMasks, GpuRowMasks
from mojo_ops.attention.logits import ScoreOptions
from mojo_ops.attention.merge_states import States, merge_on_gpu
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.pointers import untracked, untracked_immutable
from mojo_ops.cache.strides import PageStrides
from mojo_ops.isa.codes import head_units
from mojo_ops.transfer.gpu.append import append_on_gpu
from mojo_ops.transfer.gpu.copy_pages import copy_pages_on_gpu
from mojo_ops.transfer.gpu.gather import gather_on_gpu
from mojo_ops.transfer.gpu.ragged_rows import ragged_rows_on_gpu


def cache_of[dtype: DType, DIM: Int](memory: DeviceBuffer[DType.float32]) -> DynamicKVCache[dtype]:
    """One page of one slot and head."""
    comptime head = head_units(dtype, DIM)
    var at = untracked(memory.unsafe_ptr()).unsafe_bitcast[Scalar[dtype]]()
    var table = untracked_immutable(memory.unsafe_ptr()).unsafe_bitcast[UInt32]()
    return DynamicKVCache[dtype](at, IndexList[4](1, 1, 1, DIM), PageStrides(0, head, head, head), table, 1, 1)


def attention[dtype: DType, kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool = False](ctx: DeviceContext) raises:
    launch[dtype, dtype, kv_dtype, DIM, HEADS, ROTARY](ctx, GpuNoMasks())


def masked[
    dtype: DType, o_dtype: DType, kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool = False
](ctx: DeviceContext) raises:
    var memory = ctx.enqueue_create_buffer[DType.int32](1024)
    var numbers = untracked_immutable(memory.unsafe_ptr())
    var starts = numbers.unsafe_bitcast[Int64]()
    var bits = numbers.unsafe_bitcast[UInt8]()
    var masks = GpuCustomMasks(numbers, numbers, bits, starts, numbers, 8, Int32(DIM), 1, 1, 1, 1)
    launch[dtype, o_dtype, kv_dtype, DIM, HEADS, ROTARY](ctx, masks)
    _ = memory^


def launch[
    Masks: GpuRowMasks, //, dtype: DType, o_dtype: DType, kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool
](ctx: DeviceContext, masks: Masks) raises:
    var memory = ctx.enqueue_create_buffer[DType.float32](1024)
    var floats = untracked(memory.unsafe_ptr())
    var numbers = floats.unsafe_bitcast[Int32]().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var heads = floats.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var q = floats.unsafe_bitcast[Scalar[dtype]]()
    var o = floats.unsafe_bitcast[Scalar[o_dtype]]()
    var scores = ScoreOptions(1)
    var params = GpuAttentionParams[dtype, o_dtype, Masks](
        q, o, floats, numbers, numbers, heads, heads, 1, Int32(HEADS), Int32(DIM), 1, 1, -1, scores, 1, 0, 0, masks
    )
    var cache = cache_of[kv_dtype, DIM](memory)
    launch_generic[DIM, HEADS, ROTARY](ctx, params, cache, cache, RotaryFrequencies(0, 1), HEADS, False)
    _ = memory^


def latent[dtype: DType, o_dtype: DType, kv_dtype: DType, ROTARY_DIM: Int, HEADS: Int](ctx: DeviceContext) raises:
    var memory = ctx.enqueue_create_buffer[DType.float32](1024)
    var floats = untracked(memory.unsafe_ptr())
    var numbers = untracked_immutable(memory.unsafe_ptr()).unsafe_bitcast[Int32]()
    var heads = untracked_immutable(memory.unsafe_ptr())
    var q = floats.unsafe_bitcast[Scalar[dtype]]()
    var o = floats.unsafe_bitcast[Scalar[o_dtype]]()
    var params = GpuAttentionParams[dtype, o_dtype](
        q, o, floats, numbers, numbers, heads, heads, 1, 4, 512, 1, 1, -1, ScoreOptions(1), 1, 0, 0, GpuNoMasks()
    )
    var cache = cache_of[kv_dtype, 512](memory)
    launch_latent[ROTARY_DIM, HEADS](ctx, params, RotaryQuery[dtype](q, Int32(ROTARY_DIM), 1), cache, cache, False)
    _ = memory^


def copies(ctx: DeviceContext) raises:
    var memory = ctx.enqueue_create_buffer[DType.uint16](1024)
    var words = untracked(memory.unsafe_ptr())
    var positions = words.unsafe_bitcast[Int32]()
    var numbers = positions.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var table = numbers.unsafe_bitcast[UInt32]()
    var cache = DynamicKVCache[DType.uint16](words, IndexList[4](1, 1, 1, 8), PageStrides(0, 8, 8, 8), table, 1, 1)
    append_on_gpu(ctx, cache, cache, words, words, numbers, numbers, 1)
    gather_on_gpu(ctx, cache, cache, words, words, numbers, 1)
    ragged_rows_on_gpu(ctx, positions, positions, 1, table, table, 1)
    copy_pages_on_gpu(ctx, cache, cache, 2, numbers, numbers, 1)
    _ = memory^


def moves_of_codes[row_dtype: DType, dtype: DType](ctx: DeviceContext) raises:
    var memory = ctx.enqueue_create_buffer[DType.float32](1024)
    var floats = untracked(memory.unsafe_ptr())
    var numbers = untracked_immutable(memory.unsafe_ptr()).unsafe_bitcast[Int32]()
    var rows = floats.unsafe_bitcast[Scalar[row_dtype]]()
    var cache = cache_of[dtype, 8](memory)
    append_on_gpu(ctx, cache, cache, rows, rows, numbers, numbers, 1)
    gather_on_gpu(ctx, cache, cache, rows, rows, numbers, 1)
    _ = memory^


def merge[dtype: DType](ctx: DeviceContext) raises:
    var memory = ctx.enqueue_create_buffer[DType.float32](1024)
    var floats = untracked(memory.unsafe_ptr())
    var s = floats.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var v = floats.unsafe_bitcast[Scalar[dtype]]()
    var states = States[dtype](s.unsafe_bitcast[Scalar[dtype]](), s, v, floats, 2, 1, 8)
    merge_on_gpu(ctx, states, 1)
    _ = memory^


def main() raises:
    var ctx = DeviceContext()
    attention[DType.bfloat16, DType.bfloat16, 128, 8](ctx)
    attention[DType.float16, DType.float8_e5m2, 64, 4](ctx)
    attention[DType.float32, DType.float32, 512, 2, True](ctx)
    masked[DType.float16, DType.bfloat16, DType.float8_e4m3fn, 512, 4](ctx)
    attention[DType.float32, DType.int8, 64, 8](ctx)
    attention[DType.bfloat16, DType.uint8, 256, 4](ctx)
    latent[DType.bfloat16, DType.float32, DType.bfloat16, 512, 2](ctx)
    latent[DType.float32, DType.float32, DType.float32, 128, 4](ctx)
    copies(ctx)
    moves_of_codes[DType.bfloat16, DType.int8](ctx)
    moves_of_codes[DType.float32, DType.uint8](ctx)
    merge[DType.bfloat16](ctx)
    merge[DType.float32](ctx)
    comptime if not is_defined["FEW"]():
        more(ctx)


def more(ctx: DeviceContext) raises:
    """Other sizes and pairs of dtypes, which `-D FEW` leaves out."""
    attention[DType.bfloat16, DType.float8_e4m3fn, 256, 8](ctx)
    attention[DType.float32, DType.float32, 512, 4](ctx)
    attention[DType.bfloat16, DType.bfloat16, 128, 4, True](ctx)
    masked[DType.bfloat16, DType.float32, DType.bfloat16, 128, 8](ctx)
    masked[DType.float32, DType.float32, DType.float32, 128, 1](ctx)
    masked[DType.bfloat16, DType.bfloat16, DType.bfloat16, 128, 4, True](ctx)
    masked[DType.float32, DType.float16, DType.float32, 512, 2, True](ctx)
    attention[DType.bfloat16, DType.int8, 128, 1](ctx)
    attention[DType.float16, DType.int8, 256, 1](ctx)
    attention[DType.float32, DType.uint8, 64, 1](ctx)
    attention[DType.float16, DType.uint8, 512, 1](ctx)
    masked[DType.bfloat16, DType.float32, DType.int8, 128, 1](ctx)
    masked[DType.float16, DType.bfloat16, DType.uint8, 512, 4](ctx)
    latent[DType.bfloat16, DType.bfloat16, DType.bfloat16, 128, 4](ctx)
    latent[DType.float16, DType.float16, DType.float8_e4m3fn, 128, 4](ctx)
    latent[DType.float32, DType.float32, DType.float32, 512, 2](ctx)
