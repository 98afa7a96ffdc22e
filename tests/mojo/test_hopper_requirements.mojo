"""The calls that the Hopper kernel leaves to the generic one, and that each gets its reason."""

from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList

from mojo_ops.attention.gpu.hopper.requirements import hopper_refusal
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
from mojo_ops.attention.logits import ScoreOptions
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from support import untracked_mutable


def reason[
    dtype: DType = DType.bfloat16, kv_dtype: DType = dtype
](
    head_dim: Int = 128,
    heads: Int = 8,
    kv_heads: Int = 2,
    page_size: Int = 16,
    pages: Int = 4,
    pad: Int = 0,
    shift: Int = 0,
    head_pad: Int = 0,
) raises -> String:
    """Return the reason for a call over an NHD cache, `shift` bytes into aligned memory: `pad` elements after each
    slot, `head_pad` after each head."""
    var memory = List[UInt8](length=256, fill=0)
    var aligned = untracked_mutable(memory).unsafe_offset(-Int(memory.unsafe_ptr()) % 16)
    var numbers = aligned.unsafe_bitcast[Float32]()
    var ints = numbers.unsafe_bitcast[Int32]().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var floats = numbers.unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var params = GpuAttentionParams[dtype](
        numbers.unsafe_bitcast[Scalar[dtype]](),
        numbers.unsafe_bitcast[Scalar[dtype]](),
        numbers,
        ints,
        ints,
        floats,
        floats,
        num_rows=1,
        num_heads=Int32(heads),
        head_dim=Int32(head_dim),
        batch=1,
        capacity=1,
        window_left=-1,
        scores=ScoreOptions(1),
        v_scale=1,
        has_alibi=0,
        has_sinks=0,
        masks=GpuNoMasks(),
    )
    var slot = kv_heads * (head_dim + head_pad) + pad
    var cache = DynamicKVCache[kv_dtype](
        aligned.unsafe_offset(shift).unsafe_bitcast[Scalar[kv_dtype]](),
        IndexList[4](pages, page_size, kv_heads, head_dim),
        PageStrides(0, page_size * slot, slot, head_dim + head_pad),
        ints.unsafe_bitcast[UInt32](),
        1,
        1,
    )
    var found = hopper_refusal(params, cache, cache)
    _ = memory^
    return found


def test_what_it_serves() raises:
    for head_dim in [64, 128, 256]:
        for group in range(1, 17):
            assert_equal(reason(head_dim=head_dim, heads=2 * group), "")
    for page_size in range(8, 257, 8):
        assert_equal(reason(page_size=page_size), "")
    assert_equal(reason[DType.float16](), "")
    assert_equal(reason[DType.bfloat16, DType.float8_e4m3fn](), "")
    assert_equal(reason[DType.float16, DType.float8_e5m2](), "")
    assert_equal(reason(pad=8), "")
    assert_equal(reason(head_pad=64), "")
    assert_equal(reason(head_pad=8, kv_heads=1), "")
    assert_equal(reason[DType.bfloat16, DType.float8_e4m3fn](head_pad=16), "")


def test_what_it_refuses() raises:
    assert_true("head_dim 64, 128 and 256, not 80" in reason(head_dim=80))
    assert_true("not 512" in reason(head_dim=512))
    assert_true("16 query heads a KV head, not 17" in reason(heads=34))
    for page_size in [1, 2, 4, 5, 12, 20, 30]:
        assert_true(String("page_size ", page_size, " is no multiple of 8") in reason(page_size=page_size))
    assert_true("not float32 with float32" in reason[DType.float32]())
    assert_true("not bfloat16 with float16" in reason[DType.bfloat16, DType.float16]())
    assert_true("no page" in reason(pages=0))
    assert_true("address" in reason(shift=2))
    assert_true("a stride of" in reason(pad=1))
    assert_true("has heads 272 bytes apart, no multiple of 128" in reason(head_pad=8))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
