"""The examples of FlashInfer's documentation for prefill and masks, with only the import and the device changed."""

import numpy as np
import pytest
import torch

import paged_kv as flashinfer
from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from support.compare import assert_close

pytestmark = pytest.mark.usefixtures("masked_variants")

NUM_LAYERS = 4
"""The documentation has 32."""


def at_layers(num_layers: int, *shape: int) -> list[torch.Tensor]:
    """Random float16 numbers for every layer: parts of one set, which takes less long to make than one a layer."""
    noise = torch.randn(shape[0] + num_layers, *shape[1:], generator=torch.Generator().manual_seed(0)).half()
    return [noise[i : i + shape[0]] for i in range(num_layers)]


def test_single_prefill() -> None:
    torch.manual_seed(0)
    qo_len = 128
    kv_len = 4096
    num_qo_heads = 32
    num_kv_heads = 4
    head_dim = 128
    q = torch.randn(qo_len, num_qo_heads, head_dim).half().to("cpu")
    k = torch.randn(kv_len, num_kv_heads, head_dim).half().to("cpu")
    v = torch.randn(kv_len, num_kv_heads, head_dim).half().to("cpu")
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, use_fp16_qk_reduction=True)
    assert o.shape == torch.Size([128, 32, 128])
    mask = torch.tril(torch.full((qo_len, kv_len), True, device="cpu"), diagonal=(kv_len - qo_len))
    o_custom = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)


def test_batch_prefill_over_pages() -> None:
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.zeros(128 * 1024 * 1024, dtype=torch.uint8, device="cpu")
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device="cpu")
    paged_kv_indices = torch.arange(max_num_pages).int().to("cpu")
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device="cpu")
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device="cpu")
    q_at_layer = at_layers(num_layers, nnz_qo, num_qo_heads, head_dim)
    kv_cache_at_layer = at_layers(num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim)
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)

    assert outputs[0].shape == torch.Size([100, 64, 128])

    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    pages = paged_kv_indptr[1:] - paged_kv_indptr[:-1]
    kv_len = (page_size * (pages - 1) + paged_kv_last_page_len).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device="cpu"),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())

    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        custom_mask=mask,
    )
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)

    table = np.zeros((batch_size, int(pages.max())), np.uint32)
    table[np.arange(table.shape[1]) < pages.numpy()[:, None]] = paged_kv_indices.numpy()
    batch = np.repeat(np.arange(batch_size), qo_len).astype(np.int32)
    lengths = np.concatenate([np.arange(kv - n, kv) + 1 for n, kv in zip(qo_len, kv_len, strict=True)])
    blocks = as_numpy(kv_cache_at_layer[-1], "kv_cache")
    rows = batch, lengths.astype(np.int32)
    expected, _ = reference.attention(as_numpy(q_at_layer[-1], "q"), blocks, blocks, table, *rows)
    assert_close(as_numpy(outputs[-1], "o"), expected, rel=2e-3, what="o of the last layer")


def test_batch_prefill_over_ragged_tokens() -> None:
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device="cpu")
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device="cpu")
    kv_indptr = qo_indptr.clone()
    q_at_layer = at_layers(num_layers, nnz_qo, num_qo_heads, head_dim)
    k_at_layer = at_layers(num_layers, nnz_kv, num_kv_heads, head_dim)
    v_at_layer = at_layers(num_layers, nnz_kv, num_kv_heads, head_dim)
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.plan(
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)

    assert outputs[0].shape == torch.Size([100, 64, 128])

    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device="cpu"),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())

    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, custom_mask=mask)
    outputs_custom_mask = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, k, v)
        outputs_custom_mask.append(o_custom)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)

    assert outputs_custom_mask[0].shape == torch.Size([100, 64, 128])
    first = [as_numpy(array[:33], "array") for array in (q_at_layer[0], k_at_layer[0], v_at_layer[0])]
    rows = np.zeros(33, np.int32), np.arange(1, 34, dtype=np.int32)
    expected, _ = reference.attention(first[0], first[1][None], first[2][None], np.zeros((1, 1), np.uint32), *rows)
    assert_close(as_numpy(outputs[0][:33], "o"), expected, rel=2e-3, what="o of the first request")


def test_packbits() -> None:
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool, device="cpu")
    x_packed = flashinfer.packbits(x)
    assert list(map(bin, x_packed.tolist())) == ["0b10110011"]


def test_segment_packbits() -> None:
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool, device="cpu")
    x_packed, new_indptr = flashinfer.segment_packbits(x, torch.tensor([0, 4, 7, 11], device="cpu"), bitorder="big")
    assert list(map(bin, x_packed.tolist())) == ["0b10110000", "0b100000", "0b11010000"]
    assert new_indptr.tolist() == [0, 1, 2, 3]
