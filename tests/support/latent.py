"""Latent caches for tests: shuffled pages whose other slots are NaN, and the op over them."""

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (as in cases.py)
import numpy as np
from max.dtype import DType

from paged_kv.options import LatentOptions
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant
from support import tiers
from support.harness import HOST, NONE, Place
from support.harness import LATENT_PAIRS as PAIRS

REL = {"float32": 1e-5, "bfloat16": 1e-2}
REL_FLOAT8 = 2e-2
LSE_TOL = 1e-5


@dataclass(frozen=True, eq=False)
class LatentCase:
    """Requests over a latent cache."""

    ckv: np.ndarray
    """`[pages, page_size, Dckv]`"""
    kpe: np.ndarray
    """`[pages, page_size, Dkpe]`, in the same array as ckv where they are joined."""
    lookup_table: np.ndarray
    lengths: np.ndarray
    """`[B]`"""
    q_nope: np.ndarray
    q_pe: np.ndarray
    row_batch: np.ndarray
    row_lengths: np.ndarray

    @property
    def csr(self) -> tuple[np.ndarray, np.ndarray]:
        """kv_indptr `[B + 1]` and kv_indices."""
        counts = -(-self.lengths // self.ckv.shape[1])
        used = np.arange(self.lookup_table.shape[1]) < counts[:, None]
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return indptr, self.lookup_table[used].astype(np.int32)


def build(
    lengths: tuple[int, ...],
    new_rows: tuple[int, ...],
    *,
    heads: int,
    widths: tuple[int, int],
    page_size: int,
    dtype: str,
    kv_dtype: str,
    joined: bool = False,
    padding: int = 0,
    seed: int = 0,
) -> LatentCase:
    """The last `new_rows[b]` tokens of each request are query rows; `padding` rows of request -1 follow."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 2
    slots = np.full((pages, page_size, sum(widths)), np.nan, np.float32)
    table = np.full((len(lengths), max(1, *counts)), 0xFFFFFFFF, np.uint32)
    free = iter(rng.permutation(pages))
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            table[b, column] = next(free)
        j = np.arange(length)
        slots[table[b, j // page_size], j % page_size] = rng.standard_normal((length, sum(widths)))
    slots = slots.astype(np.dtype(kv_dtype))
    ckv, kpe = slots[..., : widths[0]], slots[..., widths[0] :]
    if not joined:
        ckv, kpe = np.ascontiguousarray(ckv), np.ascontiguousarray(kpe)
    row_batch = np.repeat(np.arange(len(lengths)), new_rows)
    last = [np.arange(length - rows, length) + 1 for length, rows in zip(lengths, new_rows, strict=True)]
    row_lengths = np.maximum(np.concatenate([np.arange(0), *last]), 0)
    row_batch = np.concatenate([row_batch, np.full(padding, -1)]).astype(np.int32)
    row_lengths = np.concatenate([row_lengths, np.full(padding, 3)]).astype(np.int32)
    q = rng.standard_normal((len(row_batch), heads, sum(widths))).astype(np.dtype(dtype))
    q[row_batch < 0] = np.nan
    parts = np.ascontiguousarray(q[..., : widths[0]]), np.ascontiguousarray(q[..., widths[0] :])
    return LatentCase(ckv, kpe, table, np.array(lengths, np.int32), *parts, row_batch, row_lengths)


def load_variants() -> None:
    """Builds the libraries of latent attention."""
    default_runtime().load(_variants())


def _variants() -> list[Variant]:
    return [Variant("mla_attention", DType[q], DType[kv]) for q, kv in tiers.of(PAIRS)]


def mla_attention(
    case: LatentCase,
    *,
    sm_scale: float,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
    sinks: np.ndarray | None = None,
    on: Place = HOST,
) -> tuple[np.ndarray, np.ndarray]:
    """The op over a case, as `reference.mla_attention` computes it."""
    variant = Variant("mla_attention", DType[case.q_nope.dtype.name], DType[case.ckv.dtype.name])
    rows = [case.q_nope, case.q_pe, case.row_batch, case.row_lengths]
    storage = case.kpe[:, :, None], case.ckv[:, :, None], "NHD", 0
    numbers = LatentOptions(sm_scale, ckv_scale, kpe_scale).numbers()
    tensors = (NONE if sinks is None else sinks.astype(np.float32),)
    o, lse = on.execute(variant, rows, storage, case.lookup_table, tensors, (numbers,))
    return o, lse
