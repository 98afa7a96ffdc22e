"""The measured choices of each CPU family. The struct is written by hand, the rows by `benchmarks/tune.py`."""


@fieldwise_init
struct CpuTuning(TrivialRegisterPassable):
    """The choices that are measured for a CPU family."""

    var fast_bf16_dot: Bool
    """Whether the dot product of bfloat16 pairs (`isa/bf16_dot.mojo`) has the rate of a float32 FMA, where the target
    has it."""
    var interleaves_page: Bool
    """Whether decode attention reads 8 runs of one page side by side, where pages are longer than a run of 16 tokens."""
    var linear_row_streams: Int
    """Rows of w that the linear layer reads side by side for one row of x, where the memory is the limit."""
    var linear_streams: Int
    """The same for 2 to 4 rows of x."""
    var linear_prefetch: Bool
    """Whether each such group of rows prefetches the next."""


def tuning_of(family: StringSlice) -> CpuTuning:
    """The row of a family, or of CPUs that are not in the table."""
    # AMD EPYC, 2 CPUs (avx2 avx512f avx512_bf16), 2026-11-22
    if family == "znver5":
        return CpuTuning(
            fast_bf16_dot=True,
            interleaves_page=False,
            linear_row_streams=1,
            linear_streams=1,
            linear_prefetch=True,
        )
    # AMD EPYC, 2 CPUs (avx2 avx512f avx512_bf16), 2026-11-23
    if family == "znver4":
        return CpuTuning(
            fast_bf16_dot=True,
            interleaves_page=True,
            linear_row_streams=1,
            linear_streams=8,
            linear_prefetch=False,
        )
    # Intel Xeon without AMX (Emerald Rapids), 2 CPUs (avx2 avx512f avx512_bf16), 2026-11-23
    if family == "cooperlake":
        return CpuTuning(
            fast_bf16_dot=False,
            interleaves_page=True,
            linear_row_streams=8,
            linear_streams=8,
            linear_prefetch=True,
        )
    return CpuTuning(
        fast_bf16_dot=False,
        interleaves_page=True,
        linear_row_streams=8,
        linear_streams=8,
        linear_prefetch=True,
    )
