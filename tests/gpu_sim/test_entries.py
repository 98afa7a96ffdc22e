"""The PTX that the model runs is that of the kernel which the dispatch takes: its entry is named after that file."""

import re
from collections import Counter

import pytest

from paged_kv.runtime.launches import kernel_of
from support import gpu_programs
from support.gpu_rules import attention_kernel
from support.hopper_variants import tensor_kernels, variant_of

generic = gpu_programs.generic["sm_90a"]

pytestmark = pytest.mark.waits_for(gpu_programs.hopper, generic)

NAMES = {"bf16": "bfloat16", "f16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
"""PTX's names of the dtypes, and ours."""


def kernel_in(ptx: str) -> str:
    (entry,) = re.findall(r"\.visible \.entry (\w+)", ptx)
    return kernel_of(entry)


def test_the_hopper_kernels_are_those_of_their_calls():
    kernels = tensor_kernels(gpu_programs.hopper())
    for ptx in kernels:
        dim, columns, dtype, float8 = variant_of(ptx)
        q_dtype, kv_dtype = NAMES[dtype], NAMES[float8 or dtype]
        assert kernel_in(ptx) == attention_kernel("sm_90a", q_dtype, kv_dtype, dim, columns, 16) == "gpu/hopper"
    assert len({variant_of(ptx) for ptx in kernels}) == len(kernels)


def test_the_kernels_for_any_gpu_are_named_after_what_they_do():
    """A name that a trace of launches shows is not another kernel's."""
    expected = {"attention": "gpu/generic", "merge": "merge_states"}
    expected |= {kind: f"gpu/{kind}" for kind in ("latent", "schedule", "combine")}
    found = Counter()
    for name, ptx in generic().items():
        kind = gpu_programs.kind_of(name)
        found[kind] += 1
        assert kernel_in(ptx).startswith(expected.get(kind, "mojo_ops_transfer_gpu"))
    assert set(expected) <= set(found)
