"""Arguments that are no arrays, or whose memory cannot be had: an error of ours that names the argument, always."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer

from paged_kv import cascade, page
from paged_kv.arrays.gpu import TorchArrays
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.errors import ContractTypeError, PagedKVError


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


ONE = np.ones(1, np.int32)
TABLE = {"indptr": np.array([0, 1], np.int32), "indices": ONE, "last_page_len": ONE}
SIZES = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 32, "page_size": 16, "q_data_type": "float32"}
KV_TABLE = {"kv_indices": ONE, "kv_indptr": TABLE["indptr"], "kv_last_page_len": ONE}
ROWS, CACHE = np.ones((1, 1, 32), np.float32), np.ones((4, 2, 16, 1, 32), np.float32)
AT = {"batch_indices": 0 * ONE, "positions": 0 * ONE}
LATENT_ROWS = {"append_ckv": ROWS[0], "append_kpe": ROWS[0]}
LATENT_CACHES = {"ckv_cache": CACHE[:, 0, :, 0], "kpe_cache": CACHE[:, 1, :, 0]}
STATES = {"v": ROWS.copy(), "s": ROWS[..., 0].copy(), "v_other": ROWS, "s_other": ROWS[..., 0].copy()}


def run(**arguments: Any) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(**TABLE, **SIZES)
    wrapper.run(**arguments)


def fixed(**buffers: Any) -> None:
    BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=True, **buffers)


CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    run: {"q": ROWS, "paged_kv_cache": CACHE},
    BatchDecodeWithPagedKVCacheWrapper(None).plan: TABLE | SIZES,
    single_decode_with_kv_cache: {"q": ROWS[0], "k": ROWS, "v": ROWS},
    page.append_paged_kv_cache: {"append_key": ROWS, "append_value": ROWS, **AT, "paged_kv_cache": CACHE, **KV_TABLE},
    page.append_paged_mla_kv_cache: LATENT_ROWS | AT | LATENT_CACHES | KV_TABLE,
    page.get_seq_lens: {"kv_indptr": TABLE["indptr"], "kv_last_page_len": ONE, "page_size": 16},
    page.get_batch_indices_positions: {"append_indptr": TABLE["indptr"], "seq_lens": ONE, "nnz": 1},
    cascade.merge_state: {"v_a": ROWS, "s_a": ROWS[..., 0], "v_b": ROWS, "s_b": ROWS[..., 0]},
    cascade.merge_state_in_place: STATES | {"mask": ONE.astype(bool)},
    cascade.merge_states: {"v": ROWS[None], "s": ROWS[None, ..., 0]},
    fixed: {f"paged_kv_{name}_buffer": array.copy() for name, array in TABLE.items()},
}
ARGUMENTS = [
    (call, name) for call, arguments in CALLS.items() for name in arguments if hasattr(arguments[name], "shape")
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=[f"{call.__name__}-{name}" for call, name in ARGUMENTS])
def test_every_argument_of_every_call(call: Callable[..., Any], name: str) -> None:
    for what, array in NO_ARRAYS.items():
        if name == "mask" and what == "None":
            continue  # an optional argument
        with pytest.raises(PagedKVError) as raised:
            call(**CALLS[call] | {name: array()})
        assert name in str(raised.value), what
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("value", [None, np.ndarray, 0])
def test_nothing_but_no_arrays(call: Callable[..., Any], value: Any) -> None:
    with pytest.raises(PagedKVError):
        call(**dict.fromkeys(CALLS[call], value))


SHAPES = ((), (0,), (0, 0), (0, 0, 0), (1, 0, 32), (0, 2, 16, 1, 32), (4, 2, 0, 1, 32))
WRONG_RANKS = [
    (call, name, shape) for call, name in ARGUMENTS for shape in SHAPES if len(shape) != CALLS[call][name].ndim
]


@pytest.mark.parametrize(
    ("call", "name", "shape"), WRONG_RANKS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_arrays_without_elements(call: Callable[..., Any], name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(PagedKVError):
        call(**CALLS[call] | {name: np.zeros(shape, CALLS[call][name].dtype)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_left", None),
        ("kv_layout", np.array(["NHD", "HND"])),
        ("pos_encoding_mode", np.array(["NONE", "ALIBI"])),
        ("pos_encoding_mode", ["NONE"]),
        ("head_dim", np.array([32, 64])),
        ("q_data_type", np.ndarray),
        ("q_data_type", torch.Tensor),
    ],
)
def test_options_of_other_types(name: str, value: Any) -> None:
    if name == "kv_layout":
        with pytest.raises(PagedKVError, match=name):
            BatchDecodeWithPagedKVCacheWrapper(None, value)
        return
    with pytest.raises(PagedKVError, match=name):
        BatchDecodeWithPagedKVCacheWrapper(None).plan(**TABLE | SIZES | {name: value})


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(2)])
def test_flags_without_a_truth_value(value: Any) -> None:
    rows, out = np.ones((1, 2, 32), np.float32), np.full((1, 2, 32), np.nan, np.float32)
    with pytest.raises(ContractTypeError, match="return_lse must be true or false"):
        single_decode_with_kv_cache(rows[0], rows, rows, return_lse=value)
    with pytest.raises(ContractTypeError, match="use_cuda_graph must be true or false"):
        BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=value)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    table = [np.array(numbers, np.int32) for numbers in ([0, 1], [0], [1])]
    wrapper.plan(*table, 2, 2, 32, 1, q_data_type="float32")
    with pytest.raises(ContractTypeError, match="return_lse must be true or false"):
        wrapper.run(rows, (rows[:, None], rows[:, None]), return_lse=value, out=out)
    assert np.isnan(out).all()


@pytest.mark.parametrize("name", ["window_left", "sm_scale", "page_size", "num_qo_heads", "q_data_type"])
def test_numbers_that_cannot_be_printed(name: str) -> None:
    with pytest.raises(PagedKVError, match=name):
        BatchDecodeWithPagedKVCacheWrapper(None).plan(**TABLE | SIZES | {name: 10**5000})
