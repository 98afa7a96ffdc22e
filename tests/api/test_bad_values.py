"""Each parameter of each public function, given what belongs nowhere: it works, or raises a typed error of one line.

What is no array, or has no memory, is always refused where an array is needed.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer

from hostile.objects import objects
from paged_kv import mla
from paged_kv.arrays.gpu import TorchArrays
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError
from support.calls import CALLS, IN_BUFFERS, MLA, OPERATORS, Call, Q

pytestmark = pytest.mark.usefixtures("all_variants")


MAY_BE_LEGAL = (
    "kv_layout",
    "q_data_type",
    "out",
    "uses_shared_paged_kv_idx",
    "seq_lens",
    "cum_seq_lens_q",
    "qo_indptr",
)
"""Where some of the values are, so that the message names another argument, which no longer fits."""


@pytest.mark.parametrize("call", [*CALLS, *OPERATORS], ids=lambda call: call.name)
def test_a_bad_value_works_or_is_refused_by_its_name(call: Call) -> None:
    call()
    wrong = []
    for parameter in call.parameters():
        for number, thing in enumerate(objects()):
            try:
                call(**{parameter: thing()})
            except (ContractError, ContractTypeError) as error:
                named = parameter in str(error) or parameter in MAY_BE_LEGAL
                if not named or "\n" in str(error) or len(str(error)) > 1500:
                    wrong.append(f"{parameter}, object {number}: {str(error)[:200]!r}")
            except Exception as error:
                wrong.append(f"{parameter}, object {number}: {type(error).__name__}: {str(error)[:200]}")
    assert not wrong, "\n".join(["", *wrong])


def test_what_counts_for_nothing_is_checked_all_the_same() -> None:
    single = next(call for call in CALLS if call.name == "single_prefill_with_kv_cache")
    with pytest.raises(ContractTypeError, match="q is a masked array"):
        single(q=np.ma.masked_array(Q, mask=True))
    with pytest.raises(ContractError, match="q: its 2147483648 tokens are over"):
        single(q=np.lib.stride_tricks.as_strided(Q, (2**31, 4, 8), (0, 32, 4)))
    prefix = next(call for call in CALLS if call.name.startswith("BatchDecodeWithShared") and "begin" in call.name)
    with pytest.raises(ContractTypeError, match="data_type"):
        prefix(data_type=None)
    wrapper = mla.BatchMLAPagedAttentionWrapper(None)
    wrapper.plan(*MLA[:6], 0, *MLA[7:], q_data_type="bfloat16", kv_data_type="float8_e4m3fn")
    caches = [np.zeros((4, 4, width), "float8_e4m3fn") for width in (8, 0)]
    queries = [np.zeros((5, 4, width), "bfloat16") for width in (8, 0)]
    with pytest.raises(ContractError, match="kpe_scale must be positive, not 0"):
        wrapper.run(*queries, *caches, ckv_scale=1.0, kpe_scale=0)


def test_numbers_are_called_what_the_caller_calls_them() -> None:
    dense = next(call for call in CALLS if call.name == "trtllm_batch_decode_with_kv_cache")
    for name, value in (("bmm2_scale", 1e39), ("bmm1_scale", np.float32(1e-40)), ("bmm1_scale_log2", 1e39)):
        with pytest.raises(ContractError, match=f"^{name} must be 0 or from"):
            dense(**{name: value})


class Broken:
    """A DLPack array whose two methods give what they are told; an exception is raised."""

    def __init__(self, device: Any, capsule: Any = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return given(self.device)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        return given(self.capsule)


def given(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


class NoAttributes:
    def __getattr__(self, name: str) -> Any:
        raise OSError(f"no {name}\non two lines")


def freed(length: int = 0) -> torch.Tensor:
    tensor = torch.ones(4, 4, 32)
    tensor.untyped_storage().resize_(length)
    return tensor


def shrunk_view() -> torch.Tensor:
    tensor = torch.ones(8, 4, 2, 32)
    view = tensor[2:, :, 1]
    tensor.untyped_storage().resize_(tensor.nbytes - 132)
    return view


STRUCTURED = np.dtype([("k", np.float32), ("v", np.float32)])

NO_ARRAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a list": lambda: [[1.0]],
    "a class of arrays": lambda: np.ndarray,
    "torch's class": lambda: torch.Tensor,
    "MAX's class": lambda: Buffer,
    "a float": lambda: 1.0,
    "no attributes": NoAttributes,
    "a device that raises": lambda: Broken(ValueError("no device")),
    "a device that exits": lambda: Broken(StopIteration()),
    "no device": lambda: Broken(None),
    "a device of one number": lambda: Broken((1,)),
    "a device of words": lambda: Broken(("cpu", "0")),
    "a device of its own": lambda: Broken((99, 0)),
    "a capsule that raises": lambda: Broken((1, 0), MemoryError("no memory")),
    "a capsule that raises a key": lambda: Broken((1, 0), KeyError("x")),
    "no capsule": lambda: Broken((1, 0)),
    "a number as capsule": lambda: Broken((1, 0), 42),
    "an array as capsule": lambda: Broken((1, 0), np.ones(3)),
    "objects": lambda: np.array([[None]], object),
    "a structure": lambda: np.zeros((4, 4, 32), STRUCTURED),
    "text": lambda: np.array(["q"]),
    "times": lambda: np.zeros(4, "datetime64[s]"),
    "complex": lambda: np.zeros((4, 4, 32), np.complex64),
    "big endian": lambda: np.zeros((4, 4, 32), ">f4"),
    "freed": freed,
    "shrunk": lambda: freed(16),
    "a shrunk view": shrunk_view,
    "meta": lambda: torch.ones(4, 4, 32, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4, 4, 32), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)], layout=torch.jagged),
    "torch complex": lambda: torch.zeros(4, 4, 32, dtype=torch.complex64),
    "a negated view": lambda: torch.zeros(4, 4, 32, dtype=torch.complex64).conj().imag,
}

OF_TORCH_ALONE = TorchArrays(CPU())
"""A GPU's views are torch's. It takes a negated view; a tensor on another device does not come as far."""
VIEWS = [(HOST, name) for name in NO_ARRAYS]
VIEWS += [(OF_TORCH_ALONE, name) for name in NO_ARRAYS if name not in ("big endian", "a negated view", "meta")]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of sparse and nested tensors
@pytest.mark.parametrize(("device", "name"), VIEWS, ids=[f"{name}-{type(device).__name__}" for device, name in VIEWS])
def test_a_view(device: Any, name: str) -> None:
    with pytest.raises(ContractTypeError) as raised:
        device.view(NO_ARRAYS[name](), "paged_kv_cache")
    assert str(raised.value).startswith("paged_kv_cache")
    assert "\n" not in str(raised.value)


def test_storage_that_suffices_is_viewed() -> None:
    tensor = torch.arange(64.0)
    view = tensor.view(8, 8)[1:5, 2:]
    tensor.untyped_storage().resize_(160)  # up to the view's last element
    np.testing.assert_array_equal(as_numpy(view, "q"), np.arange(64.0).reshape(8, 8)[1:5, 2:])
    assert as_numpy(freed()[:0], "q").shape == (0, 4, 32)


TAKEN = r"tree_|accepted|packbits|fast_|forward$"
"""Calls that take lists, and other names of calls that are here."""
GIVEN = {
    call: [name for name, value in call.arguments().items() if isinstance(value, np.ndarray)]
    for call in CALLS + IN_BUFFERS
    if not re.search(TAKEN, call.name)
}
SHAPES = ((), (0,), (0, 0), (0, 0, 0), (1, 0, 32), (0, 2, 16, 1, 32), (4, 2, 0, 1, 32))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("call", "name"),
    [pytest.param(call, name, id=f"{call.name}-{name}") for call, names in GIVEN.items() for name in names],
)
def test_what_is_no_array_is_refused(call: Call, name: str) -> None:
    for what, array in NO_ARRAYS.items():
        if what == "None" and name in ("custom_mask_buf", "mask_indptr_buf"):
            continue  # optional arguments
        with pytest.raises(PagedKVError) as raised:
            call(**{name: array()})
        assert name in str(raised.value), what
        assert "\n" not in str(raised.value)
    valid = call.arguments()[name]
    for shape in SHAPES:
        if len(shape) != valid.ndim:
            with pytest.raises(PagedKVError):
                call(**{name: np.zeros(shape, valid.dtype)})


@pytest.mark.parametrize("call", [call for call, names in GIVEN.items() if names], ids=lambda call: call.name)
@pytest.mark.parametrize("value", [None, np.ndarray, 0])
def test_nothing_but_no_arrays(call: Call, value: Any) -> None:
    with pytest.raises(PagedKVError):
        call(**dict.fromkeys(GIVEN[call], value))
