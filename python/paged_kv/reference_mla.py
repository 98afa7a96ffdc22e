"""The NumPy float64 oracle of latent attention (MLA), in the words of `reference.py`."""

import numpy as np

from paged_kv.reference import attention


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
