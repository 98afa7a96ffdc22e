"""Attention over shared parts of contexts: the names, argument order and meaning of FlashInfer's `cascade` module.

The wrappers attend to each shared part once and merge the states; the functions below merge states of any origin.

A state is what attention over one set of keys gives: the output `v` and the base-2 logarithm `s` of the softmax's
denominator, float32. States over disjoint sets of keys merge into the state over their union. A state with
`s = -inf` has seen no key: its `v` is ignored, whatever it holds, NaN included.

Any array on the CPU comes in, and torch and MAX arrays on one GPU; results have the kind of the first argument and lie
beside it. Sums are float32; an lse of +inf or NaN makes its row NaN.
Letters in shapes: S rows (tokens), n states, H heads, D head dimension.
"""

from __future__ import annotations

from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_alike
from paged_kv.arrays.overlap import check_written
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.merge_states import checked_mask, checked_state, merge, merge_two
from paged_kv.errors import ContractError
from paged_kv.multi_level import MultiLevelCascadeAttentionWrapper
from paged_kv.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def merge_state(v_a: ArrayT, s_a: SupportsDLPack, v_b: SupportsDLPack, s_b: SupportsDLPack) -> tuple[ArrayT, ArrayT]:
    """Merges two states, as FlashInfer's `merge_state`.

    Args:
        v_a, v_b: `[S, H, D]` float32, float16 or bfloat16, both of one dtype.
        s_a, s_b: `[S, H]` float32, base 2.

    Returns:
        v `[S, H, D]` in the dtype of `v_a` and s `[S, H]` float32; 0 and -inf where both sides are empty.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
    """
    device = devices.device_of(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    a = checked_state(device, v_a, s_a, ("v_a", "s_a"), rank=3)
    b = checked_state(device, v_b, s_b, ("v_b", "s_b"), rank=3)
    check_alike(b[0], a[0], "v_b", "v_a's")
    v, s = merge_two(device, a, b)
    return device.like(v_a, v), device.like(v_a, s)


def merge_state_in_place(
    v: SupportsDLPack,
    s: SupportsDLPack,
    v_other: SupportsDLPack,
    s_other: SupportsDLPack,
    mask: SupportsDLPack | None = None,
) -> None:
    """Merges a second state into `(v, s)`, in place, as FlashInfer's `merge_state_in_place`.

    Args:
        v, v_other: `[S, H, D]` float32, float16 or bfloat16, both of one dtype.
        s, s_other: `[S, H]` float32, base 2.
        mask: `[S]` bool: only rows where it is true are merged, the others keep their bits; None merges all.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
        ContractError: `v` or `s` cannot be written, or shares memory with another argument or within itself.
    """
    device = devices.device_of(v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    ours = checked_state(device, v, s, ("v", "s"), rank=3)
    other = checked_state(device, v_other, s_other, ("v_other", "s_other"), rank=3)
    check_alike(other[0], ours[0], "v_other", "v's")
    rows = None if mask is None else checked_mask(device, mask, len(ours[0]))
    for name, view in zip(("v", "s"), ours, strict=True):
        if not device.is_writable(view):
            raise ContractError(f"{name} is read-only, and is to be changed in place")
    read = [("v_other", other[0]), ("s_other", other[1]), *([] if rows is None else [("mask", rows)])]
    check_written(device, [("v", ours[0]), ("s", ours[1])], read)
    for view, merged in zip(ours, merge_two(device, ours, other), strict=True):
        chosen = merged
        if rows is not None:
            chosen = device.select(rows.reshape(-1, *[1] * (view.ndim - 1)), merged, view)
        device.write(view, chosen)


def merge_states(v: ArrayT, s: SupportsDLPack) -> tuple[ArrayT, ArrayT]:
    """Merges `n` states at once, as FlashInfer's `merge_states`.

    Args:
        v: `[S, n, H, D]` float32, float16 or bfloat16. The states are the second dimension.
        s: `[S, n, H]` float32, base 2.

    Returns:
        v `[S, H, D]` in the dtype of `v` and s `[S, H]` float32; 0 and -inf where all states are empty, or n = 0.

    Raises:
        ShapeError: a rank or shape differs from the above.
        ContractTypeError: an argument is no array of these dtypes.
    """
    device = devices.device_of(v=v, s=s)
    merged_v, merged_s = merge(device, *checked_state(device, v, s, ("v", "s"), rank=4))
    return device.like(v, merged_v), device.like(v, merged_s)
