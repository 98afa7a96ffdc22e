"""What appends refuse: the error names the argument, the request and the value, and no byte of any array changes."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PageTableError, ShapeError
from paged_kv.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from support.kinds import WRITABLE, bytes_of, make

ONES = np.ones((3, 2, 8), np.float16)  # three tokens
CACHE = np.zeros((6, 2, 4, 2, 8), np.float16)  # pages of 4
PAIR = np.zeros((6, 4, 2, 8), np.float16)
TABLE = {
    "kv_indices": np.array([5, 3, 0, 6], np.int32),  # the 6 is past kv_indptr
    "kv_indptr": np.array([0, 2, 2, 3], np.int32),
    "kv_last_page_len": np.array([2, 0, 1], np.int32),
}
TODAY = {
    "append_key": ONES,
    "append_value": ONES,
    "batch_indices": np.array([0, 0, 2], np.int32),
    "positions": np.array([4, 5, 0], np.int32),
    "paged_kv_cache": CACHE,
    **TABLE,
    "kv_layout": "NHD",
}
OLDER = {
    "append_key": ONES,
    "append_value": ONES,
    "append_indptr": np.array([0, 2, 2, 3], np.int32),
    "kv_data": CACHE,
    **TABLE,
    "kv_layout": "NHD",
}
DENSE = {
    "k": ONES,
    "v": ONES,
    "kv_cache": CACHE,
    "page_table": np.array([[5, 3], [1, -1], [0, -1]], np.int32),
    "last_page_len": np.array([2, 0, 3], np.int32),
    "page_size": 4,
    "kv_layout": "NHD",
}
MLA = {
    "append_ckv": np.ones((3, 16), np.float16),
    "append_kpe": np.ones((3, 4), np.float16),
    "batch_indices": TODAY["batch_indices"],
    "positions": TODAY["positions"],
    "ckv_cache": np.zeros((6, 4, 16), np.float16),
    "kpe_cache": np.zeros((6, 4, 4), np.float16),
    **TABLE,
}
DENSE_MLA = {
    "k": ONES,
    "v": ONES,
    "mla_kv_cache": np.zeros((6, 4, 2, 16), np.float16),
    "page_table": DENSE["page_table"],
    "last_page_len": DENSE["last_page_len"],
    "page_size": 4,
}


def ints(*values: int, dtype: str = "int32") -> np.ndarray:
    return np.array(values, dtype)


def copied(argument: Any) -> Any:
    return tuple(map(np.copy, argument)) if isinstance(argument, tuple) else np.copy(argument)


def refused(call: Callable[..., Any], form: dict[str, Any], change: dict[str, Any], error: type, said: str) -> None:
    """Calls with copies of the form's arguments, some of them changed, and looks at all bytes before and after."""
    names = {**form, **change}
    arguments = {
        name: copied(value) if isinstance(value, np.ndarray | tuple) else value for name, value in names.items()
    }
    before = bytes_of([*arguments.values()])
    with pytest.raises(error, match=said) as caught:
        call(**arguments)
    assert isinstance(caught.value, PagedKVError)
    assert isinstance(caught.value, ValueError | TypeError)
    assert "\n" not in str(caught.value)
    assert bytes_of([*arguments.values()]) == before


@pytest.mark.parametrize(
    ("call", "form"),
    [
        (append_paged_kv_cache, TODAY),
        (append_paged_kv_cache, OLDER),
        (append_paged_kv_cache, DENSE),
        (append_paged_mla_kv_cache, MLA),
        (append_paged_mla_kv_cache, DENSE_MLA),
    ],
)
@pytest.mark.parametrize("kind", WRITABLE)
def test_the_forms_themselves_are_right(kind, call, form):
    arguments = {name: make(kind, value) if isinstance(value, np.ndarray) else value for name, value in form.items()}
    before = bytes_of([*arguments.values()])
    call(**arguments)
    assert bytes_of([*arguments.values()]) != before


TABLE_ERRORS = [
    ({"kv_indices": ints(5, 6, 0)}, PageTableError, r"kv_indices: request 0, slot 1 holds page id 6, .*\[0, 6\)"),
    ({"kv_indices": ints(5, 3, -1)}, PageTableError, "kv_indices: request 2, slot 0 holds page id -1"),
    ({"kv_indices": ints(5, 3)}, PageTableError, "kv_indptr: request 2 ends at 3, kv_indices has 2"),
    ({"kv_indices": ints(5, 3, 2**31, dtype="int64")}, PageTableError, r"kv_indices\[2\] is 2147483648"),
    ({"kv_indices": ints(5, 3, 2**32 - 1, dtype="uint32")}, PageTableError, r"kv_indices\[2\] is 4294967295"),
    ({"kv_indices": ints(5, 3, 0, dtype="float32")}, ContractTypeError, "kv_indices: dtype .* not float32"),
    ({"kv_indices": [5, 3, 0]}, ContractTypeError, "kv_indices must be an array .*list"),
    ({"kv_indptr": ints(1, 2, 2, 3)}, PageTableError, r"kv_indptr\[0\] must be 0, not 1"),
    ({"kv_indptr": ints(0, 2, 1, 3)}, PageTableError, "kv_indptr decreases at request 1: from 2 to 1"),
    ({"kv_indptr": ints()}, ShapeError, "kv_indptr must have"),
    ({"kv_indptr": ints(0, 2, 3)}, ShapeError, "kv_last_page_len must have B = 2 entries.* 3"),
    ({"kv_indptr": ints(0, 2, 2, 3).reshape(2, 2)}, ShapeError, "kv_indptr must have 1 dimensions"),
    ({"kv_last_page_len": ints(0, 0, 1)}, PageTableError, r"kv_last_page_len: request 0 has 0, outside \[1, .* 4\]"),
    ({"kv_last_page_len": ints(2, 0, 5)}, PageTableError, r"kv_last_page_len: request 2 has 5, outside \[1, .* 4\]"),
    ({"kv_last_page_len": ints(2, 0, -1)}, PageTableError, "kv_last_page_len: request 2 has -1"),
    ({"kv_last_page_len": ints(2, 1)}, ShapeError, "kv_last_page_len must have B = 3 entries.* 2"),
]


@pytest.mark.parametrize(("change", "error", "said"), TABLE_ERRORS)
@pytest.mark.parametrize("form", [TODAY, OLDER, MLA])
def test_page_tables(form, change, error, said):
    refused(append_paged_mla_kv_cache if form is MLA else append_paged_kv_cache, form, change, error, said)


ROW_ERRORS = [
    ({"positions": ints(4, 8, 0)}, PageTableError, r"positions: row 1 \(request 0\) has position 8, .* 2 pages of 4"),
    ({"positions": ints(4, 5, -1)}, PageTableError, r"positions: row 2 \(request 2\) has position -1"),
    ({"positions": ints(4, 5, 4)}, PageTableError, r"positions: row 2 \(request 2\) has position 4, .* 1 pages"),
    ({"batch_indices": ints(0, 1, 2)}, PageTableError, r"positions: row 1 \(request 1\) has position 5, .* 0 pages"),
    ({"positions": ints(5, 5, 0)}, PageTableError, r"rows 0 and 1 \(requests 0 and 0\) both write slot 1 of page 3"),
    (
        {"kv_indices": ints(5, 3, 3), "positions": ints(4, 5, 1)},
        PageTableError,
        r"rows 1 and 2 \(requests 0 and 2\) both write slot 1 of page 3",
    ),
    ({"batch_indices": ints(0, 3, 2)}, PageTableError, "batch_indices: row 1 names request 3, .* 3"),
    ({"batch_indices": ints(0, 0, -2)}, PageTableError, "batch_indices: row 2 names request -2"),
    ({"batch_indices": ints(0, 0)}, ShapeError, "batch_indices has 2 entries, .* 3 rows"),
    ({"positions": ints(4, 5)}, ShapeError, "positions has 2 entries, .* 3 rows"),
    ({"positions": ints(4, 2**31, 0, dtype="int64")}, PageTableError, r"positions\[1\] is 2147483648"),
]


@pytest.mark.parametrize(("change", "error", "said"), ROW_ERRORS)
@pytest.mark.parametrize("form", [TODAY, MLA])
def test_rows(form, change, error, said):
    refused(append_paged_mla_kv_cache if form is MLA else append_paged_kv_cache, form, change, error, said)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            {"append_key": ONES.astype("float32")},
            ContractTypeError,
            "append_key: dtype float32, the cache's is float16",
        ),
        ({"append_value": ONES.view("int16")}, ContractTypeError, "append_value: dtype int16, the cache's"),
        ({"append_value": ONES[:2]}, ShapeError, "append_value has 2 rows, append_key has 3"),
        ({"append_key": ONES[:, :1]}, ShapeError, r"append_key must be \[N, 2, 8\] .*\(3, 1, 8\)"),
        ({"append_key": ONES[..., :4]}, ShapeError, r"append_key must be \[N, 2, 8\] .*\(3, 2, 4\)"),
        ({"append_value": ONES[0]}, ShapeError, r"append_value must be \[N, 2, 8\] .*\(2, 8\)"),
        ({"append_key": None}, ContractTypeError, "append_key must be an array .*NoneType"),
        ({"paged_kv_cache": PAIR}, ShapeError, "paged_kv_cache must have 5 dimensions"),
        ({"paged_kv_cache": CACHE[:, :1]}, ShapeError, "paged_kv_cache: dimension 1 must be 2"),
        ({"paged_kv_cache": (PAIR, PAIR[1:])}, ShapeError, r"paged_kv_cache\[1\]: shape .*differs"),
        ({"paged_kv_cache": (PAIR, PAIR.astype("float32"))}, ContractTypeError, r"paged_kv_cache\[1\]: dtype float32"),
        ({"paged_kv_cache": np.zeros((6, 2, 0, 2, 8), "f2")}, ContractError, "page_size must be at least 1, not 0"),
        ({"kv_layout": "HND"}, ShapeError, r"append_key must be \[N, 4, 8\] .*\(3, 2, 8\)"),
        ({"kv_layout": "nhd"}, ContractError, "kv_layout must be 'NHD' or 'HND', not 'nhd'"),
    ],
)
def test_rows_and_caches(change, error, said):
    refused(append_paged_kv_cache, TODAY, change, error, said)


def test_caches_that_cannot_be_written():
    frozen = CACHE.copy()
    frozen.flags.writeable = False
    with pytest.raises(ContractError, match="paged_kv_cache is read-only"):
        append_paged_kv_cache(**{**TODAY, "paged_kv_cache": frozen})
    for cache in (np.zeros((6, 2, 4, 2, 16), np.float16)[..., ::2], CACHE.copy()[::-1]):
        with pytest.raises(ContractError, match=r"paged_kv_cache.* stride"):
            append_paged_kv_cache(**{**TODAY, "paged_kv_cache": cache})


def test_jax_caches_are_refused_as_they_are_immutable():
    cache = jnp.zeros(CACHE.shape, jnp.float16)
    with pytest.raises(ContractError, match="paged_kv_cache is read-only"):
        append_paged_kv_cache(**{**TODAY, "paged_kv_cache": cache})


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"append_indptr": ints(0, 2, 2, 4)}, ShapeError, "append_key has 3 rows, append_indptr ends at 4"),
        ({"append_indptr": ints(0, 2, 2, 2)}, ShapeError, "append_key has 3 rows, append_indptr ends at 2"),
        ({"append_indptr": ints(0, 2, 3)}, ShapeError, "append_indptr must have B . 1 = 4 entries, it has 3"),
        ({"append_indptr": ints(1, 2, 2, 3)}, PageTableError, r"append_indptr\[0\] must be 0, not 1"),
        ({"append_indptr": ints(0, 2, 1, 3)}, PageTableError, "append_indptr decreases at request 1"),
        ({"append_indptr": ints(0, 1, 1, 3)}, PageTableError, "append_indptr: request 2 appends 2 tokens, .* says 1"),
        ({"append_indptr": ints(0, 2, 3, 3)}, PageTableError, "append_indptr: request 1 appends 1 tokens, .* says 0"),
        ({"kv_data": PAIR}, ShapeError, "kv_data must have 5 dimensions"),
    ],
)
def test_the_older_form(change, error, said):
    refused(append_paged_kv_cache, OLDER, change, error, said)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"last_page_len": ints(4, 0, 3)}, PageTableError, r"row 0 \(request 0\) has position 8, .* 2 pages of 4"),
        ({"last_page_len": ints(5, 0, 3)}, PageTableError, "last_page_len: request 0 has 5"),
        ({"page_table": ints(5, -1, 0)[:, None]}, PageTableError, r"row 1 \(request 1\) has position 0, .* 0 pages"),
        ({"page_table": ints(5, 6, 0)[:, None]}, PageTableError, "page_table: request 1, slot 0 holds page id 6"),
        ({"page_table": ints(5, 3, 0)}, ShapeError, "page_table must have 2 dimensions"),
        ({"page_table": ints(5, 3)[:, None]}, ShapeError, "last_page_len must have B = 2 entries"),
        (
            {"page_table": ints(5, 5, 0)[:, None], "last_page_len": ints(2, 2, 2)},
            PageTableError,
            r"rows 0 and 1 \(requests 0 and 1\) both write slot 2 of page 5",
        ),
        ({"page_size": 2, "last_page_len": ints(1, 0, 1)}, ShapeError, "page_size is 2, .*cache has pages of 4"),
        ({"page_size": 4.0}, ContractTypeError, "page_size must be an integer, not 4.0"),
        ({"k": ONES[:2], "v": ONES[:2]}, ShapeError, "k has 2 rows, page_table has 3 requests"),
        ({"v": ONES.astype("float32")}, ContractTypeError, "v: dtype float32, the cache's is float16"),
    ],
)
@pytest.mark.parametrize("form", [DENSE, DENSE_MLA])
def test_the_dense_forms(form, change, error, said):
    refused(append_paged_mla_kv_cache if form is DENSE_MLA else append_paged_kv_cache, form, change, error, said)


@pytest.mark.parametrize(
    ("form", "change", "error", "said"),
    [
        (MLA, {"append_ckv": np.ones((3, 8), "f2")}, ShapeError, r"append_ckv must be \[N, 16\] .*\(3, 8\)"),
        (MLA, {"append_kpe": np.ones((3, 1, 4), "f2")}, ShapeError, r"append_kpe must be \[N, 4\] .*\(3, 1, 4\)"),
        (MLA, {"append_kpe": np.ones((3, 4), "f4")}, ContractTypeError, "append_kpe: dtype float32"),
        (MLA, {"append_kpe": np.ones((2, 4), "f2")}, ShapeError, "append_kpe has 2 rows, append_ckv has 3"),
        (MLA, {"kpe_cache": np.zeros((6, 2, 4), "f2")}, ShapeError, r"kpe_cache: .*\(6, 2\), ckv_cache's is \(6, 4\)"),
        (MLA, {"kpe_cache": np.zeros((6, 4, 4), "f4")}, ContractTypeError, "kpe_cache: dtype float32 differs"),
        (MLA, {"ckv_cache": CACHE}, ShapeError, "ckv_cache must have 3 dimensions"),
        (DENSE_MLA, {"mla_kv_cache": CACHE}, ShapeError, "mla_kv_cache must have 3 or 4 dimensions"),
        (DENSE_MLA, {"mla_kv_cache": np.zeros((6, 4, 2, 15), "f2")}, ShapeError, r"v must be \[N, 2, 7\]"),
        (DENSE_MLA, {"mla_kv_cache": np.zeros((6, 4, 16), "f2")}, ShapeError, r"k must be \[N, 8\]"),
    ],
)
def test_mla_caches(form, change, error, said):
    refused(append_paged_mla_kv_cache, form, change, error, said)


def test_mla_caches_that_overlap():
    both = np.zeros((6, 4, 18), np.float16)
    with pytest.raises(ContractError, match="kpe_cache shares memory with ckv_cache"):
        append_paged_mla_kv_cache(**{**MLA, "ckv_cache": both[..., :16], "kpe_cache": both[..., 14:]})
    assert not both.any()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (append_paged_kv_cache, TODAY.keys() - {"positions"}),
        (append_paged_kv_cache, (TODAY.keys() - {"positions"}) | {"append_indptr"}),
        (append_paged_kv_cache, OLDER.keys() | {"page_size"}),
        (append_paged_kv_cache, (DENSE.keys() - {"k"}) | {"append_key"}),
        (append_paged_kv_cache, ()),
        (append_paged_mla_kv_cache, MLA.keys() | {"kv_layout"}),
        (get_seq_lens, ("kv_indptr", "last_page_len", "page_size")),
        (get_batch_indices_positions, ("append_indptr", "seq_lens")),
    ],
)
def test_arguments_of_no_signature_are_refused(call, names):
    with pytest.raises(ContractTypeError, match=f"{call.__name__}: its arguments .* fit none of its signatures"):
        call(**dict.fromkeys(names, 1))
