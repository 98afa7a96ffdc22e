"""Pointers into working memory, and cache lines."""

from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime FloatPointer = Pointer[Float32, MutUntrackedOrigin]
comptime Bf16Pointer = Pointer[BFloat16, MutUntrackedOrigin]
comptime Bf16BitsPointer = Pointer[UInt16, MutUntrackedOrigin]
"""The bits of bfloat16 numbers, as shuffles and table look-ups give them."""
comptime CACHE_LINE_BYTES = 64


@always_inline
def align_to_line[
    dtype: DType, //
](at: Pointer[Scalar[dtype], MutUntrackedOrigin]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """The next start of a cache line."""
    return at.unsafe_offset((-Int(at) & (CACHE_LINE_BYTES - 1)) // size_of[dtype]())


@always_inline
def prefetch_line[dtype: DType, //, level: Int](at: Pointer[Scalar[dtype], MutUntrackedOrigin]):
    """Requests the cache line at `at`, to be read: into the cache of that level, 1 or 2."""
    comptime cache = PrefetchOptions().for_read().to_data_cache()
    comptime if level == 1:
        prefetch[cache.high_locality()](at)
    else:
        prefetch[cache.medium_locality()](at)
