"""Attention over one contiguous prefix that all requests share and pages of their own."""

from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.arrays.host import as_numpy
from paged_kv.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from paged_kv.errors import ContractError
from support.compare import assert_close
from support.decoding import O_TOLERANCE, to_kind
from support.levels import Cascade, build_cascade

pytestmark = pytest.mark.usefixtures("decode_variants")


def case_of(rows: list[int], prefix: int, lengths: list[int], **options: Any) -> Cascade:
    """A cascade of two levels, of which the first is the prefix."""
    bottom = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    return build_cascade([bottom[[0, -1]], bottom], [[prefix], lengths], **options)


def shared(case: Cascade) -> list[np.ndarray]:
    """K and V of the prefix, `[P, Hk, D]` or `[Hk, P, D]`."""
    tokens = case.tokens[0][0]
    return list(tokens if case.layout == "NHD" else (np.ascontiguousarray(part.swapaxes(0, 1)) for part in tokens))


def decode(case: Cascade, kind: str = "numpy", **options: Any) -> Any:
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(None, case.layout)
    table = [arrays[1] for arrays in case.tables[1:]]
    wrapper.begin_forward(*table, *case.sizes, **{"data_type": case.q.dtype.name} | options)
    return wrapper.forward(*(to_kind(array, kind) for array in (case.q, *shared(case), case.cache)))


def prefill(case: Cascade, *arguments: Any, **options: Any) -> Any:
    wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None, case.layout)
    wrapper.begin_forward(*(arrays[1] for arrays in case.tables), *case.sizes)
    return wrapper.forward(case.q, *shared(case), case.cache, *arguments, **options)


def assert_flat(o: Any, case: Cascade, **options: Any) -> None:
    assert_close(as_numpy(o, "o"), case.oracle(**options)[0], rel=O_TOLERANCE[case.q.dtype.name], what="o")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prefix", [0, 1, 130])
def test_decode(layout: str, prefix: int) -> None:
    case = case_of([1, 1, 1, 1], prefix, [17, 0, 3, 48], page_size=5, layout=layout, heads=(6, 2))
    assert_flat(decode(case), case, causal=True)


def test_one_plan_serves_calls_of_other_options() -> None:
    case = case_of([3, 2], 33, [17, 4])
    wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None)
    wrapper.begin_forward(*(arrays[1] for arrays in case.tables), *case.sizes)
    wrapper.prewarm_paged_kv_stride_variant()
    with pytest.raises(ContractError, match="variant: expected 'independent' or"):
        wrapper.prewarm_paged_kv_stride_variant("both")
    wrapper.reset_workspace_buffer(None, None)
    for causal, scale in ((False, None), (True, 0.2), (False, 0.2), (False, None)):
        o = wrapper.forward(case.q, *shared(case), case.cache, causal, sm_scale=scale)
        assert_flat(o, case, causal=causal, sm_scale=scale)
    wrapper.end_forward()


def test_torch_tensors_of_bfloat16() -> None:
    case = case_of([1, 1, 1], 80, [9, 0, 30], dtype="bfloat16")
    o = decode(case, "torch")
    assert isinstance(o, torch.Tensor)
    assert o.dtype == torch.bfloat16
    assert_flat(o, case, causal=True)
