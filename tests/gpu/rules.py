"""The kernel that a call of attention gets on a GPU, from what the kernels' READMEs say: not from their code."""


def hopper_refusal(q_dtype: str, kv_dtype: str, head_dim: int, group: int, page_size: int) -> str:
    """Return what the Hopper kernel's README says that it requires, in the order in which it is checked; else "-"."""
    if q_dtype == "float32" or (kv_dtype != q_dtype and not kv_dtype.startswith("float8")):
        return f"it takes bfloat16 or float16 with a cache of the same or float8, not {q_dtype} with {kv_dtype}"
    if head_dim not in (64, 128, 256):
        return f"it takes head_dim 64, 128 and 256, not {head_dim}"
    if group > 16:
        return f"it takes up to 16 query heads a KV head, not {group}"
    if page_size % 8:
        return f"it copies 8 slots of a page and more at once; page_size {page_size} is no multiple of 8"
    return "-"


def block_threads(kernel: str, *, float8: bool) -> int:
    """Threads of a block of an attention kernel.

    Args:
        kernel: As `attention_kernel` has it, or "gpu/latent".
        float8: Whether the cache is one of float8.
    """
    if kernel == "gpu/hopper":
        # A producer warp, and a warpgroup of consumers; for float8 one for K and one for V.
        return 32 + 128 * (2 if float8 else 1)
    return 128


def attention_kernel(
    architecture: str,
    q_dtype: str,
    kv_dtype: str,
    head_dim: int,
    group: int,
    page_size: int,
    gpu_kernel: str = "best",
) -> str:
    """The kernel of a call without masks and rotary keys, over storage whose pages begin at multiples of 16 bytes.

    Args:
        architecture: The architecture of the GPU.
        q_dtype: The dtype of q.
        kv_dtype: The dtype of the cache.
        head_dim: D.
        group: Query heads a KV head.
        page_size: Slots of a page.
        gpu_kernel: "best" or "plain".
    """
    refusal = hopper_refusal(q_dtype, kv_dtype, head_dim, group, page_size)
    if architecture != "sm_90a" or gpu_kernel != "best" or refusal != "-":
        return "gpu/generic"
    return "gpu/hopper"
