"""The ops, run by MAX on NumPy (`ml_dtypes`) arrays, with the oracle's own signatures.

So a test reads `assert_close(harness.attention(...), reference.attention(...))`. `on` is where: the CPU, or a
`gpu.harness.Gpu`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.arrays.dtypes import RAW
from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.types import HostMemory
from paged_kv.errors import ContractError
from paged_kv.graphs.ops import CODES
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.reference import cache_views
from paged_kv.runtime.session import GraphRuntime, Runtime, default_runtime
from paged_kv.runtime.variants import Variant
from support import tiers
from support.cases import DTYPES
from support.compare import assert_bits_equal
from support.op_graphs import one_process_at_a_time

# Of q and of the cache; a cache narrower than its queries is legal.
PAIRS = (
    *((dtype, dtype) for dtype in DTYPES),
    ("float32", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
)
MASKED_PAIRS = (*((dtype, dtype) for dtype in DTYPES), ("bfloat16", "float8_e4m3fn"))
"""Dtypes of q and of the cache in masked attention."""
LATENT_PAIRS = tuple(
    pair
    for pair in (("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float32", "float32"))
    if pair[0] in DTYPES
)
OTHER_OUTPUTS = tuple((dtype, "float32") for dtype in ("bfloat16",) if dtype in DTYPES)
"""Dtypes of q and of an output that is not q's."""
STORED = {name: dtype for dtype, name in CODES.items()}
"""The dtype of the memory of codes."""
CODE_PAIRS = (
    *(("float32", codes) for codes in CODE_DTYPES),
    ("float16", "int8"),
    *(("bfloat16", codes) for codes in CODE_DTYPES),
)
"""Dtypes of q and of a cache of codes; append and gather take the first two and the last, masked attention the last."""
BITS = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32}
NONE = np.zeros(0, np.float32)
Storage = tuple[np.ndarray, np.ndarray, str, int]
"""k_blocks and v_blocks (or one array twice), layout, layer."""


class Place(Protocol):
    """The device that an op runs on."""

    def execute(
        self,
        variant: Variant,
        rows: list[np.ndarray],
        storage: Storage,
        lookup_table: np.ndarray,
        tensors: tuple[np.ndarray, ...] = (),
        numbers: tuple[np.ndarray | np.generic, ...] = (),
    ) -> tuple[np.ndarray, ...]:
        """The results of one variant, free of MAX's memory; what it writes to `storage` is there.

        Args:
            rows: The operands before the storage.
            tensors: Those behind the lookup table that lie where the op runs.
            numbers: Those that lie in the host's memory.
        """
        ...


def cache_operands(k: np.ndarray, v: np.ndarray) -> tuple[HostMemory, HostMemory, np.ndarray]:
    """The cache's operands of an op over strided memory."""
    return Pages(k, v).operands()


class Host:
    """The CPU: ops read and write the arrays' own memory."""

    def execute(
        self,
        variant: Variant,
        rows: list[np.ndarray],
        storage: Storage,
        lookup_table: np.ndarray,
        tensors: tuple[np.ndarray, ...] = (),
        numbers: tuple[np.ndarray | np.generic, ...] = (),
    ) -> tuple[np.ndarray, ...]:
        views = cache_views(*storage)
        if variant.op in ("append", "gather") and variant.dtype == variant.kv_dtype:
            views = tuple(map(as_bits, views))
        *blocks, view = cache_operands(*views)
        if variant.op == "mla_attention":  # head_dim of V at the end, which others have where it is not K's
            view = np.append(view[:12], views[1].shape[-1])
        inputs = [to_buffer(np.ascontiguousarray(row)) for row in rows]
        options = [np.array(option) for option in (*tensors, *numbers)]
        table = np.ascontiguousarray(lookup_table)
        results = runtime().execute(
            variant, *inputs, *(to_buffer(flat(each)) for each in blocks), table, view, *options
        )
        return tuple(to_numpy(result).copy() for result in results)


def flat(memory: HostMemory) -> np.ndarray:
    """The elements of a cache's memory."""
    raw = memory.owner.view(RAW.get(memory.owner.dtype, memory.owner.dtype))  # as_strided does not know float8_e5m2
    elements = np.lib.stride_tricks.as_strided(raw, (memory.size,), (raw.itemsize,))
    return elements.view(memory.owner.dtype)


HOST = Host()


@cache
def graphs() -> Runtime:
    """Runs variants as graphs of MAX do, whose ops check their operands; calls of the API have no graph."""
    return GraphRuntime()


def _variants() -> list[Variant]:
    """Return what calls of tests/api execute."""
    copies = [Variant(op, bits, bits) for bits in BITS.values() for op in ("append", "gather")]
    merges = [Variant("merge", DType[dtype], DType[dtype]) for dtype in tiers.of(DTYPES)]
    attentions = [Variant("attention", DType[q], DType[kv]) for q, kv in tiers.of(PAIRS)]
    return [*copies, *merges, *attentions]


def _graph_variants() -> list[Variant]:
    """Return what tests/ops execute, and tests/api where the CPU stands in for a GPU."""
    masked = [Variant("masked_attention", DType[q], DType[kv]) for q, kv in tiers.of(MASKED_PAIRS)]
    latent = [Variant("mla_attention", DType[q], DType[kv]) for q, kv in tiers.of(LATENT_PAIRS)]
    codes = [(DType[q], STORED[kv]) for q, kv in tiers.of(CODE_PAIRS)]
    of_codes = [Variant(op, *pair) for pair in codes[:2] + codes[-1:] for op in ("append", "gather")]
    of_codes += [*(Variant("attention", *pair) for pair in codes), Variant("masked_attention", *codes[-1])]
    others = [
        Variant(op, DType[q], DType[q], DType[o]) for op in ("attention", "masked_attention") for q, o in OTHER_OUTPUTS
    ]
    found = [*_variants(), *masked, *latent, *of_codes, *others]
    return [one for one in dict.fromkeys(found) if one.op in ("append", "gather") or one.dtype.name in DTYPES]


@cache
def runtime() -> Runtime:
    """Graphs of all variants: a compile takes 15 to 25 s before its first graph, so one serves them all."""
    with one_process_at_a_time("variants"):
        graphs().load(_graph_variants())
    return graphs()


@cache
def libraries() -> None:
    """Builds the libraries that tests/api call."""
    default_runtime().load(_variants())


@cache
def masked_libraries() -> None:
    """Builds those of masked attention."""
    default_runtime().load([Variant("masked_attention", DType[q], DType[kv]) for q, kv in tiers.of(MASKED_PAIRS)])


@cache
def code_libraries() -> None:
    """Builds those of caches of codes."""
    default_runtime().load([Variant("attention", DType[q], STORED[kv]) for q, kv in tiers.of(CODE_PAIRS)])


def attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
    o_dtype: str | None = None,
    on: Place = HOST,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.attention`: o `[R, Hq, D]` in `o_dtype` or q's dtype, and lse `[R, Hq]` float32."""
    variant = Variant("attention", _dtype(q), _dtype(k_blocks), o_dtype and DType[o_dtype])
    storage = (k_blocks, v_blocks, layout, layer)
    return on.execute(variant, [q, row_batch, row_lengths], storage, lookup_table, *_options(q, **options))


def _options(
    q: np.ndarray,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    alibi_slopes: np.ndarray = NONE,
    sinks: np.ndarray = NONE,
    rope_theta: float | None = None,
    rope_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray | np.generic, ...]]:
    """The options of attention as operands, unchecked: tensors, and numbers of the host."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    numbers = [scale * q_scale * k_scale, logits_soft_cap, v_scale, rope_theta or 0.0, rope_scale, deterministic]
    tensors = alibi_slopes.astype(np.float32), sinks.astype(np.float32)
    return tensors, (np.int32(window_left), np.array(numbers, np.float32))


def masked_attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    *,
    row_positions: np.ndarray | None = None,
    token_offsets: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    mask_starts: np.ndarray | None = None,
    mask_firsts: np.ndarray | None = None,
    layout: str = "NHD",
    layer: int = 0,
    o_dtype: str | None = None,
    on: Place = HOST,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.masked_attention`: o `[R, Hq, Dv]` in `o_dtype` or q's dtype, and lse `[R, Hq]` float32."""
    variant = Variant("masked_attention", _dtype(q), _dtype(k_blocks), o_dtype and DType[o_dtype])
    storage = (k_blocks, v_blocks, layout, layer)
    codes = variant.dtype != variant.kv_dtype and variant.kv_dtype in CODES
    width = np.zeros(q.shape[-1] if codes else cache_views(*storage)[1].shape[-1], np.int8)
    row_masks = [
        np.zeros(0, dtype) if array is None else array
        for array, dtype in (
            (row_positions, np.int32),
            (token_offsets, np.int32),
            (mask, np.uint8),
            (mask_starts, np.int64),
            (mask_firsts, np.int32),
        )
    ]
    rows = [q, row_batch, row_lengths, *row_masks, width]
    return on.execute(variant, rows, storage, lookup_table, *_options(q, **options))


def append(
    k_new: np.ndarray,
    v_new: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
    on: Place = HOST,
) -> None:
    """As `reference.append`."""
    rows = [as_bits(k_new), as_bits(v_new), batch_indices, positions]
    on.execute(_moving("append", k_blocks), rows, (k_blocks, v_blocks, layout, layer), lookup_table)


def gather(
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    lengths: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
    on: Place = HOST,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `reference.gather`."""
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    how: dict[str, Any] = {"layout": layout, "layer": layer, "on": on}
    k, v = gather_rows(indptr, int(indptr[-1]), k_blocks, v_blocks, lookup_table, **how)
    return k, v, indptr


def gather_rows(
    indptr: np.ndarray,
    num_tokens: int,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
    on: Place = HOST,
) -> tuple[np.ndarray, np.ndarray]:
    """Gather as the op has it: K and V `[num_tokens, Hk, D]`, from any `indptr`."""
    storage = (k_blocks, v_blocks, layout, layer)
    rows = on.execute(_moving("gather", k_blocks), [indptr, like_of(num_tokens, storage)], storage, lookup_table)
    k, v = (row.view(k_blocks.dtype) for row in rows)
    return k, v


def like_of(num_tokens: int, storage: Storage) -> np.ndarray:
    """Return what tells gather the shape of its result."""
    keys, _ = cache_views(*storage)
    return np.zeros((num_tokens, *keys.shape[2:]), np.int8)


def as_bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers."""
    return array.view(f"u{array.itemsize}")


def _moving(op: str, blocks: np.ndarray) -> Variant:
    """Append and gather move bits: their variant goes by the size of an element."""
    bits = BITS[blocks.itemsize]
    return Variant(op, bits, bits)


def _dtype(array: np.ndarray) -> DType:
    return DType[array.dtype.name]


@contextmanager
def refused(*words: object, unchanged: tuple[np.ndarray, ...] = ()) -> Iterator[None]:
    """Expects a ValueError out of an op, whose one line holds each of `words`, and no byte of `unchanged` changed."""
    before = [array.copy() for array in unchanged]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - `op_message` matches it
        yield
    message = op_message(caught.value)
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", message), f"{word!s} is missing in: {message}"
    for array, copy in zip(unchanged, before, strict=True):
        assert_bits_equal(array, copy, what="after a refusal")


def op_message(error: BaseException) -> str:
    """The line that an op raised, out of what a program writes before it or MAX wraps around it."""
    if isinstance(error, ContractError):
        op, _, message = str(error).partition(": ")
        assert op.startswith("paged_kv_"), str(error)
        return message
    found = re.search(r'kernel named "[^"]+":\n([^\n]+)\n\nFusion info', str(error))
    assert found, f"not the one-line error of an op: {error}"
    return found[1]
