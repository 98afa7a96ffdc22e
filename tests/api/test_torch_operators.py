"""The torch operators: the oracle's results, eagerly and compiled, what torch asks of an operator, and refusals."""

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.library import opcheck

import paged_kv.torch as operators
from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PageTableError, ShapeError
from paged_kv.options import alibi_slopes
from support.cases import Cache, CacheCase, build, causal_rows
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, load_variants

CACHE = build(CacheCase((17, 0, 48, 5), rank=5))
SINKS = np.array([0.5, -np.inf, 3.0, 1.0], np.float32)


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()


def tensors(cache: Cache = CACHE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V as views of one tensor, the page table, and the lengths; a copy each."""
    both = torch.from_numpy(cache.k_blocks.copy())
    table = torch.from_numpy(cache.lookup_table.view(np.int32).copy())
    return both[:, 0], both[:, 1], table, torch.from_numpy(cache.lengths.astype(np.int32))


def rows(new_tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, tuple[np.ndarray, ...]]:
    q, *oracle = causal_rows(CACHE, new_tokens)
    indptr = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
    return torch.from_numpy(q), torch.from_numpy(indptr), (q, *oracle)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale and window": ({"sm_scale": 0.3, "window_left": 6}, {"sm_scale": 0.3, "window_left": 6}),
    "soft cap and sinks": (
        {"logits_soft_cap": 2.0, "sinks": torch.from_numpy(SINKS)},
        {"logits_soft_cap": 2.0, "sinks": SINKS},
    ),
    "ALiBi": ({"alibi": True}, {"alibi_slopes": alibi_slopes(4)}),
}


@pytest.mark.parametrize("new_tokens", [None, [3, 0, 48, 1]], ids=["decode", "prefill"])
@pytest.mark.parametrize("options", OPTIONS)
def test_attention(options: str, new_tokens: list[int] | None) -> None:
    given, of_oracle = OPTIONS[options]
    k, v, table, lengths = tensors()
    q, indptr, oracle = rows(new_tokens or [1] * 4)
    found = operators.paged_attention(q, k, v, table, lengths, None if new_tokens is None else indptr, **given)
    o, lse = reference.attention(oracle[0], *CACHE.pages, *oracle[1:], **CACHE.storage, **of_oracle)
    assert_close(as_numpy(found[0], "o"), o, rel=O_TOLERANCE["float32"], what="o")
    assert_lse_close(as_numpy(found[1], "lse"), lse, tol=LSE_TOLERANCE, what="lse")


def new_rows() -> tuple[torch.Tensor, ...]:
    k, v = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    return k, v, torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([40, 0, 16], dtype=torch.int32)


@pytest.mark.parametrize("apart", [True, False], ids=["slots follow each other", "K and V take turns in a slot"])
def test_append_and_gather(apart: bool) -> None:
    k, v, table, lengths = tensors()
    if not apart:
        k, v = torch.stack([k, v], dim=2).unbind(2)
    new_k, new_v, requests, positions = new_rows()
    pages, slots = zip(*(divmod(token, k.shape[1]) for n in CACHE.lengths for token in range(n)), strict=True)
    owners = np.repeat(np.arange(4), CACHE.lengths)
    expected = [x[table[owners, list(pages)], list(slots)] for x in (k, v)]
    for tokens, appended in zip(expected, (new_k, new_v), strict=True):
        tokens[17 + 40], tokens[16] = appended[0], appended[2]
    operators.append_paged_kv(new_k, new_v, k, v, table, requests, positions)
    for got, tokens in zip(operators.gather_paged_kv(k, v, table, lengths, 70), expected, strict=True):
        assert_bits_equal(got.numpy(), tokens.numpy(), what="tokens")


def linear_operands() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((5, 96), (40, 96)))
    return tuple(torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (x, w))  # type: ignore[return-value]


def test_linear() -> None:
    x, w = linear_operands()
    expected = x.double().numpy() @ w.double().numpy().T
    found = as_numpy(operators.linear(x, w), "y").astype(np.float64)
    assert_close(found, expected, rel=1e-2, what="y")
    assert operators.linear(x[:0], w).shape == (0, 40)


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each operator with valid operands of its schema."""
    k, v, table, lengths = tensors()
    q, indptr, _ = rows([3, 0, 48, 1])
    new_k, new_v, requests, positions = new_rows()
    sinks = torch.from_numpy(SINKS)
    ops = torch.ops.paged_kv
    return {
        "attention": (ops.paged_attention, (q, k, v, table, lengths, indptr, 0.3, 6, 2.0, sinks, False)),
        "append": (ops.append_paged_kv, (new_k, new_v, k, v, table, requests, positions)),
        "gather": (ops.gather_paged_kv, (k, v, table, lengths, 70)),
        "linear": (ops.linear, linear_operands()),
    }


@pytest.mark.parametrize("name", ["attention", "append", "gather", "linear"])
def test_what_torch_asks_of_an_operator(name: str) -> None:
    operator, operands = calls()[name]
    finite = tuple(x.nan_to_num(0.0) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in operands)
    checked = opcheck(operator.default, finite)
    assert set(checked.values()) == {"SUCCESS"}


def step(
    q: torch.Tensor, new: tuple[torch.Tensor, ...], both: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """A layer's use of a cache, and something of torch's before and after."""
    k, v = both[:, 0], both[:, 1]
    new_k, new_v, requests, positions = new
    operators.append_paged_kv(new_k * 2, new_v, k, v, table, requests, positions)
    o, lse = operators.paged_attention(q + 1, k, v, table, lengths, window_left=5)
    gathered_k, _ = operators.gather_paged_kv(k, v, table, lengths, 70)
    return o * 2, lse, gathered_k


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_function_has_no_graph_break_and_the_same_numbers(backend: str) -> None:
    """Inductor, torch's default, needs a C++ compiler."""
    q, _, _ = rows([1] * 4)
    new = new_rows()
    results, caches = [], []
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for function in (step, compiled):
        both = torch.from_numpy(CACHE.k_blocks.copy())
        table, lengths = tensors()[2:]
        results.append(function(q, new, both, table, lengths))
        caches.append(both)
    for one, other in zip(*results, strict=True):
        assert_bits_equal(one.numpy(), other.numpy(), what="result")
    assert_bits_equal(caches[0].numpy(), caches[1].numpy(), what="cache")


def changed(name: str, index: int, value: Any) -> tuple[Any, list[Any]]:
    operator, operands = calls()[name]
    given = list(operands)
    given[index] = value(given[index])
    return operator, given


def put(at: Any, value: int) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    return change


REFUSED: dict[str, tuple[str, int, Any, type[PagedKVError], str]] = {
    "a page past the cache": ("attention", 3, put((0, 1), 99), PageTableError, "request 0, slot 1 holds page id 99"),
    "a negative page": ("attention", 3, put((2, 0), -1), PageTableError, "request 2, slot 0"),
    "a length past the table": ("attention", 4, put(3, 999), PageTableError, "seq_lens: request 3 has 999 tokens"),
    "a negative length": ("attention", 4, put(3, -1), PageTableError, "request 3: expected at least 0 tokens, got -1"),
    "rows that do not fit": ("attention", 5, put(4, 51), ShapeError, "qo_indptr ends at 51, q has"),
    "rows past any memory": ("attention", 5, put(4, 2**31 - 1), ShapeError, "qo_indptr ends at 2147483647, q has"),
    "offsets that decrease": ("attention", 5, put(1, 9), PageTableError, "qo_indptr decreases at request 1"),
    "heads of q": ("attention", 0, lambda q: q[:, :3], ShapeError, "num_qo_heads"),
    "a rank": ("attention", 0, lambda q: q[0], ShapeError, "q: expected 3 dimensions"),
    "dtypes": ("attention", 0, lambda q: q.half(), ContractTypeError, "must equal q's float16"),
    "a window": ("attention", 7, lambda _: -2, ContractError, "window_left"),
    "NaN": ("attention", 6, lambda _: float("nan"), ContractError, "sm_scale"),
    "sinks of another head": ("attention", 9, lambda s: s[:3], ShapeError, "sinks"),
    "two rows for one slot": ("append", 6, put(2, 0), PageTableError, "both write slot 8 of page"),
    "a position past the pages": ("append", 6, put(0, 48), PageTableError, "positions: row 0"),
    "fewer indices than rows": ("append", 5, lambda i: i[:2], ShapeError, "batch_indices has 2"),
    "K and V are one": ("append", 3, lambda _: None, ContractError, "shares memory"),
    "another number of tokens": ("gather", 4, lambda _: 71, ShapeError, "num_tokens is 71"),
    "features": ("linear", 0, lambda x: x[:, :88], ShapeError, "x: expected"),
    "dtypes of linear": ("linear", 0, lambda x: x.float(), ContractTypeError, "x: dtype float32"),
}


def test_a_page_size_past_int32_is_refused() -> None:
    gather, given = changed("gather", 0, lambda k: k[:, :1].expand(-1, 2**33, -1, -1))
    with pytest.raises(ContractError, match="page_size: expected at most 2147483647"):
        gather(*given)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case: str) -> None:
    name, index, change, error, message = REFUSED[case]
    operator, given = changed(name, index, change)
    if case == "K and V are one":
        given[3] = given[2]
    if case == "two rows for one slot":
        given[5], given[6] = put(slice(None), 2)(given[5]), put(slice(None), 40)(given[6])
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    for _ in range(2):
        with pytest.raises(error, match=message):
            operator(*given)
        for now, then in zip(given, before, strict=True):
            if isinstance(now, torch.Tensor):
                assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
        operators.planned.cache_clear()
        operator(*calls()[name][1])  # what it has passed is not checked again


@pytest.mark.parametrize(
    ("name", "index"), [("attention", 0), ("attention", 9), ("append", 0), ("gather", 0), ("linear", 0)]
)
def test_gradients_are_refused(name: str, index: int) -> None:
    operator, given = changed(name, index, lambda tensor: tensor.detach().clone().requires_grad_())
    message = "requires a gradient, and paged_kv's operators compute none"
    with pytest.raises(ContractTypeError, match=message):
        operator(*given)
    with pytest.raises(RuntimeError, match=message):
        torch.compile(lambda: operator(*given), fullgraph=True, backend="aot_eager")()
    with torch.no_grad():
        operator(*given)


def test_a_later_call_of_a_layout_has_the_bits_of_the_first() -> None:
    _, _, table, lengths = tensors()
    both, (q, _, _) = torch.from_numpy(CACHE.k_blocks.copy()), rows([1] * 4)
    by_head = both.transpose(2, 3).contiguous().transpose(2, 3)
    unaligned = torch.frombuffer(bytearray(1 + 4 * q.numel()), dtype=torch.float32, offset=1).view(q.shape)
    caches = {
        "views": both,
        "by head": by_head,
        "one after the other": both.transpose(0, 1).contiguous().transpose(0, 1),
    }
    queries = {
        "contiguous": q,
        "strided": q.transpose(0, 1).contiguous().transpose(0, 1),
        "unaligned": unaligned.copy_(q),
        "a parameter": torch.nn.Parameter(q, requires_grad=False),
    }
    operators.planned.cache_clear()
    expected = operators.paged_attention(q, both[:, 0], both[:, 1], table, lengths)
    for cache_kind, cache in caches.items():
        for kind, of_kind in queries.items():
            for _ in range(2):
                found = operators.paged_attention(of_kind, cache[:, 0], cache[:, 1], table, lengths)
                for one, other in zip(found, expected, strict=True):
                    assert_bits_equal(one.numpy(), other.numpy(), what=f"{kind} q, {cache_kind}")


def test_memory_that_is_refused_in_a_later_call_of_a_layout() -> None:
    k, v, table, lengths = tensors()
    q, _, _ = rows([1] * 4)
    operators.paged_attention(q, k, v, table, lengths)
    freed = torch.empty_strided(k.shape, k.stride())
    freed.untyped_storage().resize_(freed.untyped_storage().nbytes() - 4)
    for given in ((freed, v), (k, freed)):
        with pytest.raises(ContractTypeError, match="was it freed"):
            operators.paged_attention(q, *given, table, lengths)
    nbytes = v.untyped_storage().nbytes()
    unaligned = torch.frombuffer(bytearray(1 + nbytes), dtype=torch.float32, offset=1)
    with pytest.raises(ContractError, match="unaligned"):
        operators.paged_attention(q, k, unaligned.as_strided(v.shape, v.stride()), table, lengths)


def test_indices_that_change_in_place_between_calls() -> None:
    k, v, table, lengths = tensors()
    q, indptr, _ = rows([1] * 4)
    for tensor, at, value in ((lengths, 2, 40), (table, (0, 0), int(table[2, 0])), (indptr, slice(1, 4), 1)):
        before = operators.paged_attention(q, k, v, table, lengths, indptr)[0]
        tensor[at] = value
        now = operators.paged_attention(q, k, v, table, lengths, indptr)[0]
        alone = operators.paged_attention(q, k, v, *(x.clone() for x in (table, lengths, indptr)))[0]
        operators.paged_attention(q[:1], k, v, table[3:], lengths[3:])  # other rows
        again = operators.paged_attention(q, k, v, table, lengths, indptr)[0]
        assert not torch.equal(now, before)
        assert torch.equal(now, again)
        assert torch.equal(now, alone)


def test_indices_of_an_append_that_change_between_calls() -> None:
    k, v, table, lengths = tensors()
    new_k, new_v, requests, positions = new_rows()
    expected = operators.gather_paged_kv(k, v, table, lengths, 70)[0].clone()
    for at, value in ((0, 40), (0, 41), (0, 2), (2, 3)):
        positions[at] = value
        new_k += 1
        operators.append_paged_kv(new_k, new_v, k, v, table, requests, positions)
        expected[17 + positions[0]], expected[positions[2]] = new_k[0], new_k[2]
    assert_bits_equal(operators.gather_paged_kv(k, v, table, lengths, 70)[0].numpy(), expected.numpy(), what="tokens")
    before = k.clone(), v.clone()
    fewest = int(table[2, 0])  # request 2's first page is then past the cache
    with pytest.raises(PageTableError, match=r"request \d, slot \d holds page id"):
        operators.append_paged_kv(new_k, new_v, k[:fewest], v[:fewest], table, requests, positions)
    for now, then in zip((k, v), before, strict=True):
        assert_bits_equal(now.numpy(), then.numpy(), what="pages")


def test_no_call_keeps_a_cache_alive() -> None:
    memory = CACHE.k_blocks.copy()
    both, (_, _, table, lengths) = torch.from_numpy(memory), tensors()
    q, _, _ = rows([1] * 4)
    operators.paged_attention(q, both[:, 0], both[:, 1], table, lengths)
    operators.gather_paged_kv(both[:, 0], both[:, 1], table, lengths, 70)
    held = weakref.ref(memory)
    del memory, both
    gc.collect()
    assert held() is None
