"""The choice of the CPU kernel of a call of attention: rules that the dispatch follows and `paged-kv doctor` prints."""

from std.bit import prev_power_of_two
from std.math import ceildiv

from ...isa.amx import HAS_AMX, amx_permitted
from ...isa.convert import chunk_of, is_float8
from .amx.layout import AmxBuffers
from .amx.prefill_workspace import AMX_PREFILL_SPLIT_TOKENS, PREFILL_MIN_QUERIES
from .bf16_chunk import Bf16Chunk
from .plan import BlockSizes, MAX_BLOCK_ROWS, SPLIT_TOKENS
from .prefill.queries import LATENT_MAX_QUERIES, PREFILL_MAX_QUERIES
from .vectors.code_sums import rounds_weights
from .vectors.prefill_workspace import VECTOR_PREFILL_MIN_QUERIES
from .workspace import HeadLayout


def rotates_keys(rope_theta: Float32) -> Bool:
    """Return whether keys lie un-rotated in the cache: kernels rotate them as they read them (`rotary_keys.mojo`)."""
    return rope_theta != 0


def max_vector_queries(kv_dtype: DType) -> Int:
    """The queries a KV head up to which vectors are used though there is AMX: they overlap better with the memory."""
    return 2 if is_float8(kv_dtype) else 4


def amx_serves(dtype: DType, kv_dtype: DType) -> Bool:
    """Return whether the CPU target has AMX, and it computes attention of these dtypes as exactly as vectors do."""
    return HAS_AMX and dtype == DType.bfloat16 and (kv_dtype == DType.bfloat16 or is_float8(kv_dtype))


@fieldwise_init
struct CpuKernelChoice[dtype: DType, kv_dtype: DType](ImplicitlyCopyable):
    """The instructions that compute a block of rows. The choice depends on the block alone."""

    comptime may_use_amx = amx_serves(Self.dtype, Self.kv_dtype)
    comptime chunk = max(chunk_of(Self.kv_dtype), Bf16Chunk[Self.kv_dtype].length if Self.may_use_amx else 0)
    """The elements that head_dim is rounded up to a multiple of."""
    var permitted: Bool
    """True if this process may use AMX."""

    def __init__(out self):
        self.permitted = False
        comptime if Self.may_use_amx:
            self.permitted = amx_permitted()

    @always_inline
    def uses_amx(self, queries: Int) -> Bool:
        """Return whether AMX computes a block of that many queries a KV head."""
        return self.permitted and queries > max_vector_queries(Self.kv_dtype)

    @always_inline
    def query_stride(self, queries: Int) -> Int:
        """The queries of a KV head that the workspace has memory for, for such a block."""
        return AmxBuffers.query_stride(queries) if self.uses_amx(queries) else queries

    def sizes[*, latent: Bool = False](self, heads: HeadLayout, *, prefill_only: Bool) -> BlockSizes:
        """The rows of a block, and those of a prefill block (`amx/prefill.mojo`, `vectors/prefill.mojo`)."""
        comptime if rounds_weights(Self.dtype, Self.kv_dtype):
            # Prefill multiplies float32 weights: its rows would not have the bits of decode.
            if not prefill_only:
                return BlockSizes(MAX_BLOCK_ROWS, Int.MAX, heads.kv_heads, SPLIT_TOKENS)
        var least = PREFILL_MIN_QUERIES if self.permitted else VECTOR_PREFILL_MIN_QUERIES
        # A power of two: a block ends with a span at the latest, and the last one of a span should not be short.
        var rows = prev_power_of_two(max(1, (LATENT_MAX_QUERIES if latent else PREFILL_MAX_QUERIES) // heads.group))
        return BlockSizes(
            rows if latent else max(MAX_BLOCK_ROWS, rows),
            1 if prefill_only else ceildiv(least, heads.group),
            heads.kv_heads,
            AMX_PREFILL_SPLIT_TOKENS if self.permitted else SPLIT_TOKENS,
        )


def cpu_kernel[dtype: DType, kv_dtype: DType](group: Int) -> String:
    """The folder of the kernel that decodes, and the reason.

    Parameters:
        dtype: The dtype of q.
        kv_dtype: The dtype of the cache.

    Args:
        group: Query heads a KV head: the queries of one row; rows of the same request add theirs.
    """
    var choice = CpuKernelChoice[dtype, kv_dtype]()
    comptime prefill = String("; ", VECTOR_PREFILL_MIN_QUERIES, " queries a KV head and more as in prefill")
    comptime if not HAS_AMX:
        return "cpu/vectors: the CPU target has no AMX" + prefill
    comptime if not choice.may_use_amx:
        return "cpu/vectors: AMX takes bfloat16 with a cache of the same or float8" + prefill
    if not choice.permitted:
        return "cpu/vectors: the operating system does not grant AMX" + prefill
    comptime limit = max_vector_queries(kv_dtype)
    if not choice.uses_amx(group):
        return String("cpu/vectors: ", group, " queries a KV head; cpu/amx takes more than ", limit)
    if group < PREFILL_MIN_QUERIES:
        return String("cpu/amx: more than ", limit, " queries a KV head")
    return String("cpu/amx: ", PREFILL_MIN_QUERIES, " queries a KV head and more, as in prefill")
