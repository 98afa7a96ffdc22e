"""Each parameter of each public function, given what belongs nowhere: it works, or raises a typed error of one line.

What is no array, or has no memory, is always refused where an array is needed, and so is what no argument takes.
"""

import re
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU

from hostile.objects import NO_ARRAYS, freed, objects
from paged_kv import mla
from paged_kv.arrays.gpu import TorchArrays
from paged_kv.arrays.host import as_numpy
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError
from support.calls import CALLS, IN_BUFFERS, MLA, OPERATORS, Call, Q

pytestmark = [
    pytest.mark.usefixtures("all_variants"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of sparse and nested tensors
]

MAY_BE_LEGAL = (
    *("kv_layout", "q_data_type", "out", "uses_shared_paged_kv_idx", "seq_lens", "cum_seq_lens_q", "qo_indptr"),
)
"""The places of some values, so that the message names another argument, which no longer fits."""
TAKES_LISTS = r"packbits|fast_"
OPTIONAL = ("custom_mask_buf", "mask_indptr_buf")
SHAPES = ((), (0,), (0, 0), (0, 0, 0), (1, 0, 32), (0, 2, 16, 1, 32), (4, 2, 0, 1, 32))


def arrays_of(call: Call) -> dict[str, np.ndarray]:
    """Arguments that have to be arrays."""
    if re.search(TAKES_LISTS, call.name):
        return {}
    return {name: value for name, value in call.arguments().items() if isinstance(value, np.ndarray)}


def fault(call: Call, parameter: str, thing: Any, *, refused: bool) -> str:
    """Return what is wrong with a call of a bad value; "" where it works, or is refused as it should be."""
    try:
        call(**{parameter: thing})
    except PagedKVError as error:
        named = parameter in str(error) or parameter in MAY_BE_LEGAL
        known = isinstance(error, ContractError | ContractTypeError)
        return "" if known and named and "\n" not in str(error) and len(str(error)) <= 1500 else str(error)[:200]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted" if refused else ""


@pytest.mark.parametrize("call", [*CALLS, *IN_BUFFERS, *OPERATORS], ids=lambda call: call.name)
def test_a_bad_value_works_or_is_refused_by_its_name(call: Call) -> None:
    call()
    arrays = arrays_of(call)
    found = {
        f"{parameter}, object {number}": fault(call, parameter, thing(), refused=False)
        for parameter in call.parameters()
        if parameter not in arrays and call not in IN_BUFFERS  # whose functions are those of CALLS
        for number, thing in enumerate(objects())
    }
    for parameter in arrays:
        for name, thing in NO_ARRAYS.items():
            needed = name != "None" or parameter not in OPTIONAL
            found[f"{parameter}: {name}"] = fault(call, parameter, thing(), refused=needed)
    assert not (wrong := {what: said for what, said in found.items() if said}), wrong


@pytest.mark.parametrize("call", [call for call in CALLS + IN_BUFFERS if arrays_of(call)], ids=lambda call: call.name)
def test_arrays_of_other_ranks_and_no_arrays_at_all_are_refused(call: Call) -> None:
    arrays = arrays_of(call)
    for name, valid in arrays.items():
        for shape in [shape for shape in SHAPES if len(shape) != valid.ndim]:
            with pytest.raises(PagedKVError):
                call(**{name: np.zeros(shape, valid.dtype)})
        with pytest.raises(PagedKVError, match=name):
            call(**{name: valid.astype("complex64")})
    for value in (None, np.ndarray, 0):
        with pytest.raises(PagedKVError):
            call(**dict.fromkeys(arrays, value))


def test_what_counts_for_nothing_is_checked_all_the_same() -> None:
    single = next(call for call in CALLS if call.name == "single_prefill_with_kv_cache")
    with pytest.raises(ContractTypeError, match="q is a masked array"):
        single(q=np.ma.masked_array(Q, mask=True))
    with pytest.raises(ContractError, match="q: expected at most 33554432 tokens, got 2147483648"):
        single(q=np.lib.stride_tricks.as_strided(Q, (2**31, 4, 8), (0, 32, 4)))
    prefix = next(call for call in CALLS if call.name.startswith("BatchDecodeWithShared") and "begin" in call.name)
    with pytest.raises(ContractTypeError, match="data_type"):
        prefix(data_type=None)
    wrapper = mla.BatchMLAPagedAttentionWrapper(None)
    wrapper.plan(*MLA[:6], 0, *MLA[7:], q_data_type="bfloat16", kv_data_type="float8_e4m3fn")
    caches = [np.zeros((4, 4, width), "float8_e4m3fn") for width in (8, 0)]
    queries = [np.zeros((5, 4, width), "bfloat16") for width in (8, 0)]
    with pytest.raises(ContractError, match="kpe_scale: expected a positive number, got 0"):
        wrapper.run(*queries, *caches, ckv_scale=1.0, kpe_scale=0)


def test_numbers_are_called_what_the_caller_calls_them() -> None:
    dense = next(call for call in CALLS if call.name == "trtllm_batch_decode_with_kv_cache")
    for name, value in (("bmm2_scale", 1e39), ("bmm1_scale", np.float32(1e-40)), ("bmm1_scale_log2", 1e39)):
        with pytest.raises(ContractError, match=f"^{name}: expected 0 or from"):
            dense(**{name: value})


OF_A_GPU = TorchArrays(CPU())
"""A GPU's views are torch's. It takes a negated view; a tensor on another device does not come as far."""


@pytest.mark.parametrize("name", [name for name in NO_ARRAYS if name not in ("big endian", "a negated view", "meta")])
def test_a_view_on_a_gpu(name: str) -> None:
    with pytest.raises(ContractTypeError) as raised:
        OF_A_GPU.view(NO_ARRAYS[name](), "paged_kv_cache")
    assert str(raised.value).startswith("paged_kv_cache")
    assert "\n" not in str(raised.value)


def test_storage_that_suffices_is_viewed() -> None:
    tensor = torch.arange(64.0)
    view = tensor.view(8, 8)[1:5, 2:]
    tensor.untyped_storage().resize_(160)  # up to the view's last element
    np.testing.assert_array_equal(as_numpy(view, "q"), np.arange(64.0).reshape(8, 8)[1:5, 2:])
    assert as_numpy(freed()[:0], "q").shape == (0, 4, 32)
