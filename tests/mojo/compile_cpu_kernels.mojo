"""The CPU kernels, all dtypes: compiled for CPUs that are not here by tests/isa/test_arm.py, never run."""

from std.sys import is_defined
from std.utils import IndexList

from mojo_ops.attention.cpu.dispatch import attend_on_cpu
from mojo_ops.attention.logits import Logits, ScoreOptions
from mojo_ops.attention.params import AttentionRows
from mojo_ops.attention.row_masks import CustomMasks, NoMasks
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from mojo_ops.linear.dispatch import linear
from mojo_ops.linear.member import LinearMember
from mojo_ops.transfer.append import AppendRows, append_rows
from mojo_ops.transfer.gather import gather_rows
from support import untracked, untracked_mutable


def cache_of[dtype: DType](mut memory: List[Float32]) -> DynamicKVCache[dtype]:
    var floats = untracked_mutable(memory)
    return DynamicKVCache[dtype](
        floats.unsafe_bitcast[Scalar[dtype]](),
        IndexList[4](1, 16, 2, 64),
        PageStrides(0, 2048, 128, 64),
        floats.unsafe_bitcast[UInt32]().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin](),
        1,
        1,
    )


def attention[dtype: DType, kv_dtype: DType](mut memory: List[Float32]):
    var floats = untracked_mutable(memory)
    var numbers = floats.unsafe_bitcast[Int32]().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var heads = floats.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var q = floats.unsafe_bitcast[Scalar[dtype]]()
    var rows = AttentionRows[dtype](q, q, floats, numbers, numbers, 1, 8, 1, 0, 1, NoMasks(), q, 1)
    var cache = cache_of[kv_dtype](memory)
    attend_on_cpu(rows, cache, cache, Logits(ScoreOptions(1), -1, heads, False, heads, False), 2)
    attend_on_cpu[rotates=True](rows, cache, cache, Logits(ScoreOptions(1), -1, heads, False, heads, False), 2)
    comptime if dtype == kv_dtype:
        var bytes = numbers.unsafe_bitcast[UInt8]()
        var starts = numbers.unsafe_bitcast[Int64]()
        var masks = CustomMasks(numbers, False, numbers, False, bytes, 0, starts, False, numbers, False)
        var masked = AttentionRows[dtype, DType.float32, CustomMasks](
            q, floats, floats, numbers, numbers, 1, 8, 1, 0, 1, masks, q, 1
        )
        attend_on_cpu(masked, cache, cache, Logits(ScoreOptions(1), -1, heads, False, heads, False), 2)
    comptime if dtype != DType.float16:
        attend_on_cpu[latent=True](rows, cache, cache, Logits(ScoreOptions(1), -1, heads, False, heads, False), 2)


def copies[dtype: DType](mut memory: List[Float32]):
    var rows = untracked_mutable(memory).unsafe_bitcast[Scalar[dtype]]()
    var numbers = rows.unsafe_bitcast[Int32]().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var cache = cache_of[dtype](memory)
    append_rows(cache, cache, rows, rows, AppendRows(numbers, numbers, 1), 1)
    gather_rows(cache, cache, rows, rows, numbers, 1, 1)


def layer[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
):
    var member = LinearMember(y, w, 64)
    var members = List[type_of(member)](length=1, fill=member)
    linear(untracked_mutable(members), 1, x, 1, 64, 2)
    _ = members^


def main():
    var memory = List[Float32](length=1 << 16, fill=0)
    attention[DType.float16, DType.float16](memory)
    attention[DType.bfloat16, DType.float8_e4m3fn](memory)
    copies[DType.uint16](memory)
    comptime if not is_defined["FEW"]():
        attention[DType.bfloat16, DType.bfloat16](memory)
        attention[DType.float32, DType.float32](memory)
        attention[DType.bfloat16, DType.float8_e5m2](memory)
        copies[DType.uint8](memory)
        copies[DType.uint32](memory)
    var floats = untracked_mutable(memory)
    var words = floats.unsafe_bitcast[BFloat16]()
    layer(words, words, words)
    layer(floats, floats, floats)
    layer(floats, floats, words)
    _ = memory^
