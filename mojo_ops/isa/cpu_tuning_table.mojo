"""The measured choices of each CPU family. The struct is written by hand, the rows by `benchmarks/tune.py`."""


@fieldwise_init
struct CpuTuning(TrivialRegisterPassable):
    """The choices that are measured for a CPU family."""

    var fast_bf16_dot: Bool
    """True if the dot product of bfloat16 pairs (`isa/bf16_dot.mojo`) has the rate of a float32 FMA, where the target
    has it."""
    var interleaved_slots: Int
    """Slots of the longest pages that decode attention reads as 8 runs of 16 tokens side by side. Longer pages are read
    in the order of memory."""
    var decode_prefetch_level: Int
    """The cache that decode attention in vectors prefetches into: 1, or 2 and then in the order of memory."""
    var decode_prefetch_bytes: Int
    """The bytes by which it does so ahead, rounded up to whole units (`vectors/segment.mojo`)."""
    var decode_unit_bytes: Int
    """Bytes of K or V that it computes before the next head's, or the other of the two, at least."""
    var linear_row_streams: Int
    """Rows of w that the linear layer reads side by side for one row of x, where the memory is the limit."""
    var linear_streams: Int
    """The same for 2 to 4 rows of x."""
    var linear_row_prefetch: Int
    """The cache that each such group of rows prefetches the next into, for one row of x: 1, 2, or 0 for none."""
    var linear_prefetch: Int
    """The same for 2 to 8 rows of x."""
    var blocks_ahead: Int
    """Tiles by which blocks of quantised weights are prefetched into the first-level cache, each row's own; 0: the next
    section's into the second, in the order of memory."""


def tuning_of(family: StringSlice) -> CpuTuning:
    """The row of a family, or of CPUs that are not in the table."""
    # AMD EPYC, 2 CPUs (avx2 avx512f avx512_bf16), 2026-11-24
    if family == "znver5":
        return CpuTuning(
            fast_bf16_dot=True,
            interleaved_slots=16,
            decode_prefetch_level=1,
            decode_prefetch_bytes=0,
            decode_unit_bytes=16384,
            linear_row_streams=1,
            linear_streams=1,
            linear_row_prefetch=1,
            linear_prefetch=1,
            blocks_ahead=0,
        )
    # AMD EPYC, 2 CPUs (avx2 avx512f avx512_bf16), 2026-11-24
    if family == "znver4":
        return CpuTuning(
            fast_bf16_dot=True,
            interleaved_slots=0,
            decode_prefetch_level=2,
            decode_prefetch_bytes=65536,
            decode_unit_bytes=65536,
            linear_row_streams=1,
            linear_streams=8,
            linear_row_prefetch=0,
            linear_prefetch=2,
            blocks_ahead=0,
        )
    # Intel Xeon without AMX (Emerald Rapids), 2 CPUs (avx2 avx512f avx512_bf16), 2026-11-23
    if family == "cooperlake":
        return CpuTuning(
            fast_bf16_dot=False,
            interleaved_slots=65536,
            decode_prefetch_level=1,
            decode_prefetch_bytes=0,
            decode_unit_bytes=16384,
            linear_row_streams=8,
            linear_streams=8,
            linear_row_prefetch=1,
            linear_prefetch=1,
            blocks_ahead=3,
        )
    # AMD EPYC, 2 CPUs (avx2 avx512f avx512_bf16) limited to znver3, 2026-11-28
    if family == "znver3":
        return CpuTuning(
            fast_bf16_dot=False,
            interleaved_slots=65536,
            decode_prefetch_level=1,
            decode_prefetch_bytes=0,
            decode_unit_bytes=16384,
            linear_row_streams=8,
            linear_streams=8,
            linear_row_prefetch=1,
            linear_prefetch=1,
            blocks_ahead=0,
        )
    return CpuTuning(
        fast_bf16_dot=False,
        interleaved_slots=65536,
        decode_prefetch_level=1,
        decode_prefetch_bytes=0,
        decode_unit_bytes=16384,
        linear_row_streams=8,
        linear_streams=8,
        linear_row_prefetch=1,
        linear_prefetch=1,
        blocks_ahead=3,
    )
