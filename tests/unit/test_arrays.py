"""Arrays of every library come in as views of their own memory, and go out as what they came from."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from max.driver import Buffer
from max.dtype import DType
from max.experimental.tensor import Tensor

from paged_kv import reference
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.host import HOST, as_indices, as_numpy, like, to_buffer
from paged_kv.arrays.pages import Pages, check_layout
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PageTableError, ShapeError
from support.cases import STORAGES, CacheCase, build
from support.kinds import KINDS, kind_of, make

DTYPES = (
    "float32",
    "float16",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int32",
    "int64",
    "uint8",
    "bool",
)
VALUES = np.array([[0.0, 1.0, -2.0], [1.0, 0.5, 3.0]])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    # JAX has no 64 bits by default.
    [(kind, dtype) for kind in KINDS for dtype in DTYPES if kind != "jax" or not dtype.endswith("64")],
)
def test_values_and_dtype_survive_the_way_in_and_out(kind, dtype):
    array = VALUES.astype(dtype)
    given = make(kind, array)
    seen = as_numpy(given, "x")
    assert type(seen) is np.ndarray
    assert seen.dtype == array.dtype
    assert seen.tobytes() == array.tobytes()
    returned = like(given, array.copy())
    assert kind_of(returned) == kind
    assert type(returned) is type(given)
    assert as_numpy(returned, "x").dtype == array.dtype
    assert as_numpy(returned, "x").tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "max", "max tensor"])
def test_nothing_is_copied(kind, dtype):
    zeros = np.zeros((2, 3), dtype)
    given = Tensor(storage=to_buffer(zeros)) if kind == "max tensor" else make(kind, zeros)
    as_numpy(given, "x")[1, 2] = 1
    assert as_numpy(given, "x").dtype == np.dtype(dtype)
    assert float(as_numpy(given, "x")[1, 2]) == 1
    result = np.zeros((2, 3), dtype)
    returned = like(given, result)
    assert type(returned) is type(given)
    result[0, 1] = 1
    assert float(as_numpy(returned, "x")[0, 1]) == 1


def test_jax_arrays_come_in_without_a_copy_and_read_only():
    given = jnp.ones((2, 3), jnp.bfloat16)
    view = as_numpy(given, "x")
    assert view.ctypes.data == given.unsafe_buffer_pointer()
    assert not view.flags.writeable


def test_strides_are_kept():
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        tensor = torch.zeros(4, 6, dtype=dtype).T[::2]
        view = as_numpy(tensor, "x")
        assert [stride // view.itemsize for stride in view.strides] == list(tensor.stride())


def test_a_tensor_with_a_gradient_is_detached():
    tensor = torch.ones(3, requires_grad=True)
    assert as_numpy(tensor, "x").tolist() == [1, 1, 1]


def test_any_dlpack_array_comes_in():
    class Wrapped:
        def __init__(self):
            self.array = np.arange(3.0)

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    given = Wrapped()
    as_numpy(given, "x")[0] = 7
    assert given.array[0] == 7
    assert type(like(given, np.zeros(2))) is np.ndarray


class OnDevice:
    """An array in a GPU's memory as it looks to DLPack."""

    def __dlpack__(self, **kwargs):
        raise AssertionError("its memory: expected not requested")

    def __dlpack_device__(self):
        return (2, 0)


def shortened():
    """A tensor whose last element is no longer in its storage."""
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
        (3, "int"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.array([None]), "object"),
        (np.zeros(2, ">f4"), ">f4"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (shortened(), "its elements take 12 bytes of storage, which holds 8"),
        (OnDevice(), r"\(2, 0\)"),
        (Buffer.zeros((2,), DType.float8_e4m3fnuz), "float8_e4m3fnuz"),
    ],
)
def test_what_is_no_cpu_array_is_refused_by_name(given, said):
    with pytest.raises(ContractTypeError, match=f"append_key.*{said}"):
        as_numpy(given, "append_key")


def test_a_buffer_without_elements_has_no_address():
    """MAX gives a number that 64 signed bits do not hold."""
    assert HOST.flat(as_numpy(Buffer.zeros((0, 4), DType.float32), "v"), 0).address == 0


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_indices_of_any_integer_become_int32(dtype):
    extremes = [2**31 - 1, -(2**31)] if dtype == "int64" else []
    indices = as_indices(np.array([3, 0, 127, *extremes], dtype), "positions")
    assert indices.dtype == np.int32
    assert indices.tolist() == [3, 0, 127, *extremes]


def test_int32_indices_are_a_view_and_strided_ones_made_contiguous():
    given = torch.arange(6, dtype=torch.int32)
    assert as_indices(given, "x").ctypes.data == given.data_ptr()
    assert as_indices(given[::2], "x").flags.c_contiguous
    assert as_indices(given[::2], "x").tolist() == [0, 2, 4]
    assert as_indices(given.reshape(2, 3).T, "x", 2).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("given", "ndim", "error", "said"),
    [
        (np.array([0, 2**31]), 1, PageTableError, r"kv_indices\[1\] is 2147483648"),
        (torch.tensor([[0], [-(2**31) - 1]]), 2, PageTableError, r"kv_indices\[1, 0\] is -2147483649"),
        (np.array([2**32 - 1], np.uint32), 1, PageTableError, r"kv_indices\[0\] is 4294967295"),
        (np.array([2**63], np.uint64), 1, PageTableError, r"kv_indices\[0\] is 9223372036854775808"),
        (np.array([1.0]), 1, ContractTypeError, "kv_indices: expected an integer dtype, got float64"),
        (np.array([True]), 1, ContractTypeError, "kv_indices: expected an integer dtype, got bool"),
        ([0, 1], 1, ContractTypeError, "kv_indices: expected an array .*list"),
        (np.zeros((2, 2), np.int32), 1, ShapeError, r"kv_indices: expected 1 dimensions, got shape \[2, 2\]"),
        (np.int32(3), 1, ContractTypeError, "kv_indices"),
        (np.broadcast_to(np.int64(1), 2**28 + 1), 1, ShapeError, r"kv_indices: expected at most 2\^28 entries"),
        (np.broadcast_to(np.int32(1), (3, 2**40)), 2, ShapeError, r"kv_indices: expected at most 2\^28 entries"),
    ],
)
def test_indices_that_are_none_are_refused(given, ndim, error, said):
    with pytest.raises(error, match=said):
        as_indices(given, "kv_indices", ndim)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float16", "float16"),
        ("half", "float16"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float32, "float32"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
        (DType.bfloat16, "bfloat16"),
        (DType.float8_e5m2, "float8_e5m2"),
        (DType.float32, "float32"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("float32"), "float32"),
    ],
)
def test_dtypes_of_every_library(given, name):
    assert dtype_of(given, "dtype") == np.dtype(name)


@pytest.mark.parametrize(
    "given",
    [None, 3, "flat", "complex64", ">f4", np.complex64, np.dtype(">f4"), torch.complex64, DType.float8_e4m3fnuz, "a"],
)
def test_unknown_dtypes_are_refused_by_name(given):
    with pytest.raises(ContractTypeError, match="kv_data_type"):
        dtype_of(given, "kv_data_type")


@pytest.mark.parametrize("call", [lambda thing: dtype_of(thing, "what"), devices.device_named, check_layout])
def test_things_that_cannot_be_shown_are_refused_by_name(call):
    class Raises:
        def __getattr__(self, name: str) -> None:
            raise ZeroDivisionError

    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)  # its repr ends the process
    for thing in (freed, Raises(), 10**5000, [freed], "cuda:" + "9" * 5000):
        with pytest.raises(PagedKVError, match=r"^(what|device|kv_layout)"):
            call(thing)


@pytest.mark.parametrize(("rank", "layout"), STORAGES[:4])
@pytest.mark.parametrize("kind", KINDS)
def test_views_are_those_of_the_oracle(kind, rank, layout):
    cache = build(CacheCase((5, 17), layout=layout, rank=rank))
    given = make(kind, cache.k_blocks) if rank == 5 else tuple(make(kind, a) for a in (cache.k_blocks, cache.v_blocks))
    expected = reference.cache_views(cache.k_blocks, cache.v_blocks, layout)
    found = Pages.of(given, layout)
    for view, wanted in zip((found.k, found.v), expected, strict=True):
        np.testing.assert_array_equal(view, wanted)


def one_layer() -> np.ndarray:
    """The second of three layers of one buffer: not contiguous."""
    return np.zeros((4, 2, 3, 5, 2, 8), np.float16)[:, :, 1]


def test_strided_caches_are_views():
    cache = one_layer()
    pages = Pages.of(cache, "NHD", writable=True)
    pages.v[3, 4, 1] = 1
    pages.k[0] = 2
    assert (cache[3, 1, 4, 1] == 1).all()
    assert (cache[0, 0] == 2).all()


def read_only() -> np.ndarray:
    array = np.zeros((4, 2, 5, 2, 8), np.float16)
    array.flags.writeable = False
    return array


PAIR = np.zeros((4, 5, 2, 8), np.float16)


@pytest.mark.parametrize(
    ("cache", "layout", "error", "said"),
    [
        ((PAIR, one_layer()), "NHD", ShapeError, r"kv_data\[1\]: expected 4 dimensions"),
        ((PAIR, None), "NHD", ContractTypeError, r"kv_data\[1\]: expected an array.*NoneType"),
        (one_layer().swapaxes(-1, -2), "NHD", ContractError, "kv_data: the elements of a head.* stride is 8"),
        (one_layer(), None, ContractError, "kv_layout: expected .* got None"),
        (torch.zeros(1, 2, 5, 2, 8).expand(4, 2, 5, 2, 8), "NHD", ContractError, "some of its elements share memory"),
    ],
)
def test_caches_that_cannot_be_addressed_are_refused(cache, layout, error, said):
    """Beside the rows of `tests/api/test_contract.py`."""
    with pytest.raises(error, match=said):
        Pages.of(cache, layout, "kv_data", writable=True)


def test_what_is_only_read_may_be_read_only_and_shared():
    Pages.of(read_only(), "NHD")
    Pages.of((PAIR, PAIR), "HND")
    Pages.of(torch.zeros(1, 2, 5, 2, 8).expand(4, 2, 5, 2, 8), "NHD")
    Pages.of(one_layer()[:1][::-1], "NHD")  # nothing moves by this stride


def test_halves_of_one_array_are_no_overlap():
    both = one_layer()
    Pages.of((both[:, 0], both[:, 1]), "NHD", writable=True)
    side_by_side = np.zeros((4, 5, 2, 16), np.float16)
    Pages.of((side_by_side[..., :8], side_by_side[..., 8:]), "NHD", writable=True)


def test_a_new_array_takes_no_memory_until_it_is_written():
    """So the threads that write a cache first decide where its memory lies."""

    def resident() -> int:
        with open("/proc/self/smaps_rollup") as file:  # exact; statm may lag behind by megabytes for each CPU
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))

    size = 256 << 20
    before = resident()
    array = HOST.new((size,), np.dtype(np.uint8), "numpy")
    assert resident() - before < size // 8
    array[: size // 2] = 1
    assert resident() - before > size // 4
