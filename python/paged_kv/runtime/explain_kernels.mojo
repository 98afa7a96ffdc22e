"""Prints which attention kernel answers a call, and why: a line for each pair of dtypes, then one for rotary keys.

    explain_kernels.mojo cpu|gpu HEAD_DIM GROUP PAGE_SIZE

The rules are the kernels' own, for the CPU target and the accelerator that this program is compiled for.
"""

from std.sys import argv

from mojo_ops.attention.cpu.kernel_choice import cpu_kernel
from mojo_ops.attention.gpu.dispatch import generic_reason
from mojo_ops.isa.codes import FORMATS, cache_name


@fieldwise_init
struct Call(TrivialRegisterPassable):
    """The sizes and options of a call that its kernel is chosen by, but for its dtypes."""

    var on_gpu: Bool
    var head_dim: Int
    var group: Int
    """Query heads a KV head."""
    var page_size: Int


def gpu_choice(dtype: DType, kv_dtype: DType, call: Call, rotates: Bool) -> String:
    """The GPU kernel of a call, and the reason."""
    var reason = generic_reason(dtype, kv_dtype, call.head_dim, call.group, call.page_size, rotates)
    if reason:
        return String("gpu/generic: not gpu/hopper: ", reason)
    return "gpu/hopper: all that it requires holds"


def padded[Named: Writable](dtype: Named, length: Int) -> String:
    """The name of a dtype, with spaces up to `length`."""
    var name = String(dtype)
    return name + " " * max(0, length - name.byte_length())


def print_pair[dtype: DType, kv_dtype: DType](call: Call):
    """The line of a pair; `kv_dtype` is that of the cache's memory."""
    var choice = gpu_choice(dtype, kv_dtype, call, False) if call.on_gpu else cpu_kernel[dtype, kv_dtype](call.group)
    print(padded(dtype, 9), "over", padded(cache_name(kv_dtype), 14), choice)


def main() raises:
    var arguments = argv()
    var call = Call(arguments[1] == "gpu", Int(arguments[2]), Int(arguments[3]), Int(arguments[4]))
    comptime for dtype in [DType.float32, DType.float16, DType.bfloat16]:
        print_pair[dtype, dtype](call)
        print_pair[dtype, DType.float8_e4m3fn](call)
        print_pair[dtype, DType.float8_e5m2](call)
        comptime for i in range(FORMATS.length):
            print_pair[dtype, FORMATS[i].MEMORY](call)
    if call.on_gpu:
        print("rotary keys, any dtypes      ", gpu_choice(DType.bfloat16, DType.bfloat16, call, True))
    else:
        print("rotary keys, any dtypes       as above: each KV head of a tile is rotated before its scores")
