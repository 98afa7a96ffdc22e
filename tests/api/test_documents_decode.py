"""The batch decode example of FlashInfer's documentation, with only the import and the device changed."""

import numpy as np
import torch

import paged_kv as flashinfer
from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from support.compare import assert_close
from support.decoding import load_variants


def test_batch_decode_with_32_layers(monkeypatch) -> None:
    load_variants()
    # 32 layers of random numbers take longer to make than to attend to: one set serves them all, rolled by a page each.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(128 + 32, 2, 16, 8, 128, generator=generator, dtype=torch.float16)
    made = iter(range(32))

    def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        if len(shape) == 5:
            layer = next(made)
            return noise[layer : layer + shape[0]]
        return torch.normal(0.0, 1.0, shape, generator=generator, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "randn", randn)

    num_layers = 32
    num_qo_heads = 64
    num_kv_heads = 8
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device="cpu")
    decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    kv_page_indices = torch.arange(max_num_pages).int().to("cpu")
    kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device="cpu")
    # 1 <= kv_last_page_len <= page_size
    kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device="cpu")
    kv_cache_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device="cpu")
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch decode attention
    decode_wrapper.plan(
        kv_page_indptr,
        kv_page_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        data_type=torch.float16,
    )
    queries = []
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half().to("cpu")
        kv_cache = kv_cache_at_layer[i]
        # compute batch decode attention, reuse auxiliary data structures for all layers
        o = decode_wrapper.run(q, kv_cache)
        queries.append(q)
        outputs.append(o)

    assert outputs[0].shape == torch.Size([7, 64, 128])
    assert outputs[0].dtype == torch.float16

    counts = np.diff(kv_page_indptr)
    table = np.zeros((batch_size, counts.max()), np.uint32)
    table[np.arange(counts.max()) < counts[:, None]] = kv_page_indices.numpy()
    lengths = ((counts - 1) * page_size + kv_last_page_len.numpy()).astype(np.int32)
    for i in range(num_layers):
        blocks = as_numpy(kv_cache_at_layer[i], "kv_cache")
        expected, _ = reference.attention(
            as_numpy(queries[i], "q"), blocks, blocks, table, np.arange(batch_size, dtype=np.int32), lengths
        )
        assert_close(as_numpy(outputs[i], "o"), expected, rel=2e-3, what=f"o of layer {i}")
