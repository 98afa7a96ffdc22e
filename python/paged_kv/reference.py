"""The NumPy float64 oracle: what every op must compute, with the ops' own signatures, written to be read.

Letters in shapes: B requests, R rows (query tokens), N new tokens, Hq query heads, Hk KV heads, D head dimension.
Page tables are dense: `lookup_table [B, max_pages]` uint32, where token j of request b lives in page
`lookup_table[b, j // page_size]`, slot `j % page_size`; entries past a request's used pages are never looked at.
K and V are storage of any float dtype, ml_dtypes' bfloat16 and float8 included, in one of these arrangements:

    rank  layout  arrays
    4     NHD     k_blocks and v_blocks, each [pages, page_size, Hk, D]
    4     HND     k_blocks and v_blocks, each [pages, Hk, page_size, D]
    5     NHD     one array passed as both, [pages, 2, page_size, Hk, D]
    5     HND     one array passed as both, [pages, 2, Hk, page_size, D]
    6     NHD     one array passed as both, [pages, 2, layers, page_size, Hk, D]; `layer` selects

A cache of codes is an array whose last dimension holds a head's codes and its scale (`kv_formats.py`): `quantised`
makes such heads, `widened` the numbers that they stand for, as which the other functions take them.

The ops enforce the contract of their inputs; the oracle trusts them. A page id or a position past the arrays is NumPy's
IndexError, before anything is written.
"""

import numpy as np

from paged_kv.errors import ContractError, ShapeError
from paged_kv.kv_formats import FORMATS, TABLE


def cache_views(
    k_blocks: np.ndarray, v_blocks: np.ndarray, layout: str = "NHD", layer: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """K and V as `[page, slot, head, dim]` views of the storage: writing to them writes to the cache.

    Raises:
        ShapeError: the rank is not 4, 5 or 6.
        ContractError: the layout is unknown or not one of this rank's, or the layer does not exist.
    """
    rank = k_blocks.ndim
    if rank not in (4, 5, 6) or v_blocks.ndim != rank:
        raise ShapeError(f"k_blocks, v_blocks: expected one rank of 4, 5 or 6, got {rank} and {v_blocks.ndim}")
    if layout not in (("NHD",) if rank == 6 else ("NHD", "HND")):
        raise ContractError(f"layout: expected NHD, or HND below rank 6, got {layout!r} at rank {rank}")
    layers = k_blocks.shape[2] if rank == 6 else 1
    if not 0 <= layer < layers:
        raise ContractError(f"layer: expected [0, {layers}), got {layer}")
    if rank == 6:
        return k_blocks[:, 0, layer], v_blocks[:, 1, layer]
    k, v = (k_blocks, v_blocks) if rank == 4 else (k_blocks[:, 0], v_blocks[:, 1])
    return (k, v) if layout == "NHD" else (k.swapaxes(1, 2), v.swapaxes(1, 2))


def quantised(x: np.ndarray, kv_format: str) -> np.ndarray:
    """Heads `[..., D]` as a cache of codes stores them, `[..., stored_head]` of the format's memory.

    The scale of int8 is the greatest magnitude of the head over 127, at most such that 127 times it is finite; of
    int4 it is the element of greatest magnitude, the negative one of two, over -8. A code is the nearest integer to x
    over the scale, of int4 at most 7, in float32 as the ops have it. A head that is not all finite has scale NaN and
    codes 0. One whose scale is below float32's normal numbers has scale 0 and codes 0.
    """
    codes, x = TABLE[kv_format], x.astype(np.float32)
    with np.errstate(all="ignore"):
        scale = codes.scale(x.max(-1, keepdims=True), x.min(-1, keepdims=True))
        scale = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(0), scale)
        scale = np.where(np.isfinite(x).all(-1, keepdims=True), scale, np.float32(np.nan))
        numbers = codes.pack(np.where(np.isfinite(scale) & (scale != 0), x * (np.float32(1) / scale), 0))
    return np.concatenate([numbers, scale.view(codes.memory)], -1)


def widened(stored: np.ndarray) -> np.ndarray:
    """The numbers that heads of codes stand for, `[..., D]` float64."""
    codes = TABLE[FORMATS[stored.dtype.name]]
    numbers = np.ascontiguousarray(stored)
    split = -(4 // stored.itemsize)
    return codes.unpack(numbers[..., :split]) * numbers[..., split:].copy().view(np.float32).astype(np.float64)


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
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    rope_theta: float | None = None,
    rope_scale: float = 1.0,
    row_positions: np.ndarray | None = None,
    token_offsets: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    mask_starts: np.ndarray | None = None,
    mask_firsts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of query rows over the pages: one row a request is a decode step, one row a token a causal prefill.

    Row r, of request b = row_batch[r], sees the first L = row_lengths[r] tokens of b and stands at position L - 1:

        x_j = sm_scale * q_scale * k_scale * dot(rope(q, L - 1), rope(k_j, j))   rope only with a rope_theta
        x_j = x_j + alibi_slopes[h] * j
        x_j = cap * tanh(x_j / cap)                                              cap = logits_soft_cap > 0
        keep j >= L - 1 - window_left                                            -1: keep all
        lse = log2(exp(sinks[h]) + sum_j exp(x_j))
        o   = v_scale * sum_j exp(x_j) * v_j / 2^lse

    A sink is one more natural-log logit, with no value of its own: it is in the denominator, so it is in `lse` too, and
    2^lse stays what `o` was divided by. Partial results to be merged must therefore count the sinks exactly once.

    As `masked_attention`, its rows and tokens may stand anywhere, and its rows may have masks: token j of request b
    stands at position t = token_offsets[b] + j, row r at p = row_positions[r]; t takes the place of j above and p that
    of L - 1, but for the lengths. Row r keeps j < row_lengths[r] where t >= p - window_left and bit
    mask_starts[r] + j - mask_firsts[r] of `mask` is set, or j < mask_firsts[r].

    Args:
        q: `[R, Hq, D]`, any float dtype; query head h reads KV head h // (Hq / Hk).
        row_batch: `[R]` int32; -1 marks a padding row.
        row_lengths: `[R]` int32, in tokens, the row's own token included.
        sm_scale: 1 / sqrt(D) when None.
        alibi_slopes, sinks: `[Hq]`.
        row_positions: `[R]` int32; row_lengths[r] - 1 + token_offsets[b] when None.
        token_offsets: `[B]` int32; 0 when None.
        mask: `[bytes]` uint8, the lowest bit of a byte first.
        mask_starts: `[R]` int64; -1, or None: no mask.
        mask_firsts: `[R]` int32; 0 when None.

    Returns:
        o `[R, Hq, Dv]` float64, Dv the head dimension of V, and lse `[R, Hq]` float64 in base 2; 0 and -inf for padding
        rows and rows that see no token.

    Raises:
        ShapeError, ContractError: Hk does not divide Hq; or as `cache_views`.

    Examples:
        >>> pages = np.ones((8, 2, 4, 2, 8))  # every value is 1, and so is each average
        >>> o, lse = attention(np.zeros((1, 4, 8)), pages, pages, np.array([[6, 3]]), np.array([0]), np.array([6]))
        >>> o.shape, o.min().round(3).item(), lse[0, 0].round(3).item()
        ((1, 4, 8), 1.0, 2.585)
    """
    keys, values = cache_views(k_blocks, v_blocks, layout, layer)
    (rows, q_heads, head_dim), kv_heads = q.shape, keys.shape[2]
    if q_heads % kv_heads:
        raise ShapeError(f"q: expected a multiple of the cache's {kv_heads} KV heads, got {q_heads}")
    scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * q_scale * k_scale
    bits = np.unpackbits(np.zeros(0, np.uint8) if mask is None else mask, bitorder="little").astype(bool)

    o = np.zeros((rows, q_heads, values.shape[3]), np.float64)
    lse = np.full((rows, q_heads), -np.inf, np.float64)
    for r in np.flatnonzero((row_batch >= 0) & (row_lengths > 0)):
        b, length = int(row_batch[r]), int(row_lengths[r])
        offset = 0 if token_offsets is None else int(token_offsets[b])
        position = length - 1 + offset if row_positions is None else int(row_positions[r])
        start, first = (-1 if mask_starts is None else mask_starts[r]), (0 if mask_firsts is None else mask_firsts[r])
        oldest = 0 if window_left < 0 else position - window_left - offset
        j = _seen(length, oldest, bits, int(start), int(first))  # the slot of any other token may hold NaN
        if len(j) == 0:
            continue
        at = _address(lookup_table, np.array(b), j, keys.shape[1])
        k, v, query = keys[at].astype(np.float64), values[at].astype(np.float64), q[r].astype(np.float64)
        if rope_theta is not None:
            k = rope(k, offset + j, rope_theta, rope_scale)
            query = rope(query[None], np.array([position]), rope_theta, rope_scale)[0]
        query = query.reshape(kv_heads, q_heads // kv_heads, head_dim)
        x = scale * np.einsum("hgd,jhd->hgj", query, k).reshape(q_heads, len(j))
        if alibi_slopes is not None:
            x += alibi_slopes[:, None] * (offset + j)
        x = logits_soft_cap * np.tanh(x / logits_soft_cap) if logits_soft_cap > 0 else x
        o[r], lse[r] = _softmax_v(x, v, sinks)
    return o * v_scale, lse


masked_attention = attention
"""The op `attention` takes all but the last five arguments, `masked_attention` takes all."""


def mla_attention(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    ckv: np.ndarray,
    kpe: np.ndarray,
    lookup_table: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    *,
    sm_scale: float,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Latent attention (MLA): `attention` with one KV head, keys `[ckv_j, kpe_j]` and values `ckv_j`.

    Args:
        q_nope, q_pe: `[R, H, Dckv]` and `[R, H, Dkpe]`, any float dtype.
        ckv, kpe: the storage, `[pages, page_size, Dckv]` and `[pages, page_size, Dkpe]`.
        sm_scale: multiplies `ckv_scale * (q_nope . ckv_j) + kpe_scale * (q_pe . kpe_j)`.
        ckv_scale: multiplies the values too.
        kpe_scale: see `sm_scale`.
        sinks: `[H]`.

    Returns:
        o `[R, H, Dckv]` and lse `[R, H]` in base 2, float64.
    """
    values = ckv.astype(np.float64)[:, :, None] * ckv_scale  # [pages, page_size, 1, Dckv]
    keys = np.concatenate([values, kpe.astype(np.float64)[:, :, None] * kpe_scale], axis=-1)
    q = np.concatenate([q_nope.astype(np.float64), q_pe.astype(np.float64)], axis=-1)
    return attention(q, keys, values, lookup_table, row_batch, row_lengths, sm_scale=sm_scale, sinks=sinks)


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
) -> None:
    """Writes token i of `k_new` and `v_new` `[N, Hk, D]` to `positions[i]` of request `batch_indices[i]`, in place.

    Rows of floats become codes in a cache of codes. `batch_indices` and `positions` are `[N]` int32; a token of batch
    -1 is skipped. Raises as `cache_views`.
    """
    k, v = cache_views(k_blocks, v_blocks, layout, layer)
    stored = batch_indices >= 0
    at = _address(lookup_table, batch_indices[stored], positions[stored], k.shape[1])
    for pages, new in ((k, k_new), (v, v_new)):
        kv_format = None if new.dtype == pages.dtype else FORMATS.get(pages.dtype.name)
        pages[at] = new[stored] if kv_format is None else quantised(new[stored], kv_format)


def copy_pages(k_blocks: np.ndarray, v_blocks: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
    """Copies page `sources[i]` to page `targets[i]` of both arrays, in place; both arguments are `[N]` int32.

    An array that holds K and V, or all layers, is passed twice and copied whole.
    """
    for blocks in {id(blocks): blocks for blocks in (k_blocks, v_blocks)}.values():
        blocks[targets] = blocks[sources]


def gather(
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    lengths: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `lengths[b]` tokens of every request, made contiguous; `lengths` is `[B]`, any integer dtype.

    Returns K and V `[sum(lengths), Hk, D]` in the cache's dtype, in request order, and `indptr [B + 1]` int32:
    request b's tokens are rows `indptr[b]` to `indptr[b + 1]`. Raises as `cache_views`.
    """
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch, positions = ragged_rows(indptr, np.zeros_like(lengths), int(indptr[-1]))
    k, v = cache_views(k_blocks, v_blocks, layout, layer)
    at = _address(lookup_table, batch, positions, k.shape[1])
    return k[at], v[at], indptr


def ragged_rows(row_offsets: np.ndarray, cache_lengths: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The request and the position of each of `num_rows` new tokens, both `[num_rows]` int32.

    Request b's new tokens are rows `row_offsets[b]` to `row_offsets[b + 1]` (`[B + 1]`, from 0) and follow the
    `cache_lengths[b]` (`[B]`) tokens it already has. Rows past `row_offsets[B]` are padding: batch -1, position 0.
    """
    offsets = row_offsets.astype(np.int64)
    batch = np.repeat(np.arange(len(cache_lengths)), np.diff(offsets))  # [rows that are not padding]
    positions = cache_lengths.astype(np.int64)[batch] + np.arange(len(batch)) - offsets[batch]
    padding = (0, num_rows - len(batch))
    return (
        np.pad(batch, padding, constant_values=-1).astype(np.int32),
        np.pad(positions, padding).astype(np.int32),
    )


def merge(o_a: np.ndarray, lse_a: np.ndarray, o_b: np.ndarray, lse_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention over two disjoint sets of keys, from `o [..., D]` and the base-2 `lse [...]` over each; float64.

    A side whose lse is -inf has seen no key: its `o` is ignored, whatever it holds. Both -inf: o = 0, lse = -inf.
    """
    highest = np.maximum(lse_a, lse_b, dtype=np.float64)
    base = np.where(np.isneginf(highest), 0.0, highest)  # -inf - -inf would be NaN
    weight_a, weight_b = np.exp2(lse_a - base)[..., None], np.exp2(lse_b - base)[..., None]
    total = np.maximum(weight_a + weight_b, 1.0)  # below 1 only when both sides are empty
    o = (weight_a * np.where(weight_a > 0, o_a, 0.0) + weight_b * np.where(weight_b > 0, o_b, 0.0)) / total
    return o, highest + np.log2(total[..., 0])


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The ALiBi slope of each of `num_heads` heads, `[num_heads]` float64.

    With n the largest power of two up to `num_heads`, head h < n has 2^(-8 (h + 1) / n); the rest take every other
    slope of a model of 2n heads, 2^(-4 (2 (h - n) + 1) / n).
    """
    n = 1 << num_heads.bit_length() - 1
    h = np.arange(num_heads)
    return np.exp2(np.where(h < n, -8 * (h + 1) / n, -4 * (2 * (h - n) + 1) / n))


def rope(x: np.ndarray, positions: np.ndarray, theta: float = 1e4, scale: float = 1.0) -> np.ndarray:
    """Rotates `x [T, H, D]`, whose row t stands at `positions[t]`, half-split: element i pairs with element i + D / 2.

    The angle is `position * theta^(-2 i / D) / scale`. Returns `[T, H, D]` float64; raises ShapeError for odd D.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ShapeError(f"x: expected an even head_dim, got {head_dim}")
    frequency = theta ** (-2 * np.arange(head_dim // 2) / head_dim) / scale
    angle = np.asarray(positions)[:, None, None] * frequency  # [T, 1, D / 2]
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], axis=-1
    )


def _address(
    lookup_table: np.ndarray, batch: np.ndarray, positions: np.ndarray, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The page and the slot of each position of its request, to index a `[page, slot, head, dim]` view with."""
    return lookup_table[batch, positions // page_size], positions % page_size


def _seen(length: int, oldest: int, bits: np.ndarray, start: int, first: int) -> np.ndarray:
    """The tokens below `length` that a row sees, ascending: from `oldest` on, and where `start` is not -1 those before
    `first` and those whose bit is set, the bit of token j being `bits[start + j - first]`.
    """
    tokens = np.arange(length)
    seen = tokens >= oldest
    if start >= 0:
        seen[first:] &= bits[start + np.arange(max(0, length - first))]
    return tokens[seen]


def _softmax_v(x: np.ndarray, v: np.ndarray, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """softmax(x) . V and the base-2 lse, from natural-log logits `x [Hq, L]`, `v [L, Hk, D]` and `sinks [Hq]`."""
    q_heads, length = x.shape
    kv_heads = v.shape[1]
    sink = np.full(q_heads, -np.inf, np.float64) if sinks is None else sinks.astype(np.float64)
    highest = np.maximum(x.max(axis=1), sink)
    p = np.exp(x - highest[:, None])
    denominator = p.sum(axis=1) + np.exp(sink - highest)
    p = (p / denominator[:, None]).reshape(kv_heads, q_heads // kv_heads, length)
    o = np.einsum("hgj,jhd->hgd", p, v).reshape(q_heads, v.shape[2])
    return o, (highest + np.log(denominator)) / np.log(2)
