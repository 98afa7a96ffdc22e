"""The torch operators under Inductor over caches of several layers: what is written, and which views are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.torch import append_paged_kv, gather_paged_kv, paged_attention
from support.compare import assert_bits_equal

LAYERS, PAGE, HEADS, DIM = 3, 4, 2, 8
POSITIONS = (3, 5)
LENGTHS = [position + 1 for position in POSITIONS]

Made = tuple[Tensor, ...]
Operands = Callable[[Any, int], tuple[Tensor, Tensor | None, int | None]]


def shape(pages: int, *before: int) -> tuple[int, ...]:
    return (*before, pages, PAGE, HEADS, DIM)


LAYOUTS: dict[str, tuple[Callable[[int], list[tuple[int, ...]]], Callable[[Made], Any], Operands]] = {
    "all layers": (lambda n: [shape(n, LAYERS)] * 2, tuple, lambda kv, layer: (*kv, layer)),
    "K and V of all layers": (lambda n: [shape(n, LAYERS, 2)], tuple, lambda kv, layer: (kv[0], None, layer)),
    "pages first": (
        lambda n: [(n, LAYERS, 2, *shape(n)[1:])],
        tuple,
        lambda kv, layer: (kv[0].permute(1, 2, 0, 3, 4, 5), None, layer),
    ),
    "K and V": (
        lambda n: [shape(n, 2)] * LAYERS,
        tuple,
        lambda kv, layer: (kv[layer], None, None),
    ),
    "views made outside": (
        lambda n: [shape(n, LAYERS)] * 2,
        lambda made: list(zip(*made, strict=True)),
        lambda kv, layer: (*kv[layer], None),
    ),
}
"""By name: the shapes of a cache's tensors for a number of pages, what a step gets of them, and an operator's
operands."""


def operands(pages: int) -> tuple[Tensor, ...]:
    """Q, new K and V, the page table and the rows of a step."""
    generator = torch.Generator().manual_seed(pages)
    q, k, v = (torch.randn(2, heads, DIM, generator=generator) for heads in (4, HEADS, HEADS))
    table = torch.randperm(pages, generator=generator)[:4].view(2, 2).int()
    return q, k, v, table, torch.tensor([0, 1], dtype=torch.int32), torch.tensor(POSITIONS, dtype=torch.int32)


def caches(layout: str, pages: int) -> Made:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(one, generator=generator) for one in LAYOUTS[layout][0](pages))


def step_of(layout: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Appends to each layer, attends to it, and copies its tokens out."""

    def step(kv: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, requests: Tensor, at: Tensor) -> Any:
        o, tokens = [], []
        for index in range(LAYERS):
            k_cache, v_cache, layer = LAYOUTS[layout][2](kv, index)
            append_paged_kv(k + index, v - index, k_cache, v_cache, table, requests, at, layer=layer)
            o.append(paged_attention(q, k_cache, v_cache, table, at + 1, layer=layer)[0])
            tokens.append(torch.cat(gather_paged_kv(k_cache, v_cache, table, at + 1, sum(LENGTHS), layer=layer)))
        return torch.stack(o), torch.stack(tokens)

    return step


def expected(layout: str, made: Made, given: tuple[Tensor, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """NumPy's copies of the cache's tensors with the new tokens, and the tokens `[layers, 2, N, ...]` in order."""
    copies = [tensor.numpy().copy() for tensor in made]
    _, k, v, table, _, _ = (tensor.numpy() for tensor in given)
    tokens = []
    for layer in range(LAYERS):
        views = {
            "all layers": lambda layer=layer: (copies[0][layer], copies[1][layer]),
            "views made outside": lambda layer=layer: (copies[0][layer], copies[1][layer]),
            "K and V of all layers": lambda layer=layer: (copies[0][layer, 0], copies[0][layer, 1]),
            "pages first": lambda layer=layer: (copies[0][:, layer, 0], copies[0][:, layer, 1]),
            "K and V": lambda layer=layer: (copies[layer][0], copies[layer][1]),
        }[layout]()
        for view, new in zip(views, (k + layer, v - layer), strict=True):
            for b, position in enumerate(POSITIONS):
                view[table[b, position // PAGE], position % PAGE] = new[b]
            of_each = [view[table[b]].reshape(-1, HEADS, DIM)[:length] for b, length in enumerate(LENGTHS)]
            tokens.append(np.concatenate(of_each))
    return copies, np.stack(tokens).reshape(LAYERS, -1, HEADS, DIM)


def attended(given: tuple[Tensor, ...], tokens: np.ndarray) -> np.ndarray:
    """O in float64 of the tokens of each layer."""
    q = given[0].double().numpy().reshape(2, HEADS, 2, DIM)  # [B, Hk, group, D]
    layers = []
    for k, v in (np.split(one.astype(np.float64), 2) for one in tokens):
        o, begin = np.zeros((2, 4, DIM), np.float64), 0
        for b, length in enumerate(LENGTHS):
            own = slice(begin, begin := begin + length)
            scores = np.einsum("hgd,nhd->hgn", q[b], k[own]) / np.sqrt(DIM)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            o[b] = np.einsum("hgn,nhd->hgd", weights / weights.sum(-1, keepdims=True), v[own]).reshape(4, DIM)
        layers.append(o)
    return np.stack(layers)


def check(layout: str, function: Callable[..., Any], pages: int) -> None:
    made, given = caches(layout, pages), operands(pages)
    copies, tokens = expected(layout, made, given)
    before = [tensor._version for tensor in made]
    o, found = function(LAYOUTS[layout][1](made), *given)
    for tensor, copy in zip(made, copies, strict=True):
        assert_bits_equal(tensor.numpy(), copy, what="cache")
    assert_bits_equal(found.numpy(), tokens, what="tokens")
    np.testing.assert_allclose(o.numpy(), attended(given, tokens), rtol=1e-4, atol=1e-5)
    assert all(tensor._version > version for tensor, version in zip(made, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_of_several_layers(layout: str) -> None:
    check(layout, step_of(layout), 9)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_while_the_number_of_pages_changes(layout: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step_of(layout), fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for pages in (9, 12, 20):
            check(layout, compiled, pages)


@pytest.mark.slow
def test_a_layer_that_changes_between_calls_of_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(append_paged_kv, fullgraph=True, dynamic=True)
    made, (_, *given) = caches("all layers", 9), operands(9)
    copies, _ = expected("all layers", made, operands(9))
    with torch.no_grad():
        for layer in range(LAYERS):
            compiled(given[0] + layer, given[1] - layer, *made, *given[2:], layer=layer)
    for tensor, copy in zip(made, copies, strict=True):
        assert_bits_equal(tensor.numpy(), copy, what="cache")


MISPLACED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], tuple[int, ...]]] = {
    "a layer": (lambda kv: (kv[1], kv[0]), (2, -1)),
    "a column": (lambda kv: (kv[:, 0], kv[:, 1]), (-1, 2)),
    "unbind": (lambda kv: kv.unbind(1), (-1, 2)),
    "K and V of one tensor": (lambda kv: kv.unbind(0), (2, -1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("view", MISPLACED)
def test_a_view_made_inside_that_would_be_written_elsewhere_is_refused(view: str) -> None:
    """Under the defaults it is right while its place is a number, and refused once sizes have changed."""
    of, axes = MISPLACED[view]

    def append(kv: Tensor, *given: Tensor) -> None:
        append_paged_kv(*given[:2], *of(kv), *given[2:])

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(append, fullgraph=True, dynamic=dynamic)
        with torch.no_grad():
            for pages in (9, 12, 20):
                _, *given = operands(pages)
                sizes = [pages if size < 0 else size for size in axes]
                kv, eager = (torch.zeros(*sizes, PAGE, HEADS, DIM) for _ in range(2))
                append(eager, *given)
                if dynamic or (axes[0] > 0 and pages > 9):
                    with pytest.raises(RuntimeError, match=r"made inside a compiled function.* Give the whole tensor"):
                        compiled(kv, *given)
                    assert not kv.any()
                    continue
                compiled(kv, *given)
                assert_bits_equal(kv.numpy(), eager.numpy(), what="cache")


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_slice_of_a_view_that_does_not_begin_where_its_tensor_does_is_refused(dynamic: bool) -> None:
    torch._dynamo.reset()
    _, *given = operands(9)
    compiled = torch.compile(
        lambda k, v: append_paged_kv(*given[:2], k[:8], v[:8], *given[2:]), fullgraph=True, dynamic=dynamic
    )
    made = caches("all layers", 10)
    with torch.no_grad(), pytest.raises(RuntimeError, match="made inside a compiled function"):
        compiled(made[0][1][1:], made[1][1][1:])


def test_a_backward_refuses_a_tensor_that_an_append_has_changed() -> None:
    """The gradient of the square of 64 ones would be 2 of each, and would be that of what was appended."""
    k_cache, v_cache = torch.ones(shape(4, LAYERS)), torch.ones(shape(4, LAYERS))
    factor = torch.ones((), requires_grad=True)
    _, k, v, _, requests, at = operands(4)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    for kv, layer in (((k_cache, v_cache), 1), ((k_cache[1], v_cache[1]), None)):
        loss = (factor * k_cache).sum()
        append_paged_kv(k, v, *kv, table, requests, at, layer=layer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        own = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
        append_paged_kv(k, v, *own, table, requests, at, layer=0)
        before = k_cache._version
        append_paged_kv(k, v, k_cache, v_cache, table, requests, at, layer=0)
    assert k_cache._version > before


@pytest.mark.parametrize(
    ("k_cache", "v_cache", "layer", "error", "message"),
    [
        (shape(9, LAYERS), shape(9, LAYERS), 3, ContractError, "layer: expected at most 2, got 3"),
        (shape(9, LAYERS), shape(9, LAYERS), -1, ContractError, "layer: expected at least 0"),
        (shape(9, LAYERS), shape(9, LAYERS), 1.0, ContractTypeError, "layer: expected an integer"),
        (shape(9, LAYERS), shape(9, 2), 0, ShapeError, "v_cache has 2 layers, k_cache has 3"),
        (shape(9), shape(9), 0, ShapeError, "k_cache: expected 5 dimensions where a layer is given, got shape"),
        (shape(9, LAYERS), None, None, ShapeError, "k_cache: dimension 0: expected 2"),
        (shape(9, LAYERS), None, 0, ShapeError, "k_cache: expected 6 dimensions where a layer is given and no v_cache"),
        (shape(9), None, None, ShapeError, "k_cache: expected 5 dimensions where no v_cache is given"),
    ],
)
def test_what_is_refused_of_a_layer(k_cache: Any, v_cache: Any, layer: Any, error: Any, message: str) -> None:
    q, k, v, table, requests, at = operands(9)
    kv = torch.zeros(k_cache), None if v_cache is None else torch.zeros(v_cache)
    for call in (
        lambda: append_paged_kv(k, v, *kv, table, requests, at, layer=layer),
        lambda: paged_attention(q, *kv, table, at + 1, layer=layer),
        lambda: gather_paged_kv(*kv, table, at + 1, sum(LENGTHS), layer=layer),
    ):
        with pytest.raises(error, match=message):
            call()
