"""The variants of the Hopper kernel, told by their PTX texts."""

import re

DTYPES = [("bf16", ""), ("f16", ""), ("bf16", "e4m3"), ("f16", "e4m3"), ("bf16", "e5m2")]
"""The dtypes of q and of the cache, "" where it is q's: those of compile_hopper_kernel.mojo."""


def tensor_kernels(texts: dict[str, str]) -> list[str]:
    """Those that use the tensor cores."""
    return [text for text in texts.values() if "wgmma" in text]


def products(ptx: str) -> list[tuple[int, str, int, int]]:
    """Columns, type and the majorness of A and B of each wgmma, in the order of the text."""
    pattern = (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(\w+)\.\2 \{.*\}, %rd\d+, %rd\d+, p, 1,  1, (\d),  (\d);"
    )
    return [(int(n), dtype, int(a), int(b)) for n, dtype, a, b in re.findall(pattern, ptx)]


def variant_of(ptx: str) -> tuple[int, int, str, str]:
    """head_dim, columns, the dtype of q, and that of the cache where it is a float8 ("" where it is q's)."""
    float8 = re.search(r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2", ptx)
    found = products(ptx)
    columns = found[0][0]
    dim = 16 * sum(not a for _, _, a, _ in found)
    # With float8 the products are float16, but q and o are what they are: bfloat16 is widened from and rounded to.
    dtype = ("bf16" if "bf16" in ptx else "f16") if float8 else found[0][1]
    return dim, columns, dtype, float8.group(1) if float8 else ""
