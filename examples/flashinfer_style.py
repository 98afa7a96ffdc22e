"""FlashInfer's calls: append new tokens to a paged cache, plan a batch, attend; then split a long request in two."""

import torch

import paged_kv as flashinfer

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16


def main() -> None:
    torch.manual_seed(0)
    kv_cache = torch.zeros(10, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    # Two requests of 20 and 33 tokens: request b owns the pages indices[indptr[b] : indptr[b + 1]].
    indptr = torch.tensor([0, 2, 5], dtype=torch.int32)
    indices = torch.tensor([7, 2, 4, 9, 1], dtype=torch.int32)
    last_page_len = torch.tensor([4, 1], dtype=torch.int32)

    # All of their tokens are new: write them to their pages, in place.
    offsets = torch.tensor([0, 20, 53], dtype=torch.int32)
    lengths = flashinfer.get_seq_lens(indptr, last_page_len, PAGE_SIZE)
    requests, positions = flashinfer.get_batch_indices_positions(offsets, lengths, 53)
    k, v = torch.randn(2, 53, KV_HEADS, HEAD_DIM).bfloat16()
    flashinfer.append_paged_kv_cache(k, v, requests, positions, kv_cache, indices, indptr, last_page_len)

    # One decode row for each request. The workspace that FlashInfer wants may be None here.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(indptr, indices, last_page_len, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type="bfloat16")
    q = torch.randn(2, HEADS, HEAD_DIM).bfloat16()
    o = wrapper.run(q, kv_cache)
    print(f"{lengths.tolist()} tokens, o {tuple(o.shape)} {o.dtype}")

    # The same answer for request 1 from two parts of its tokens: each state is an output with its lse.
    parts = [slice(20, 40), slice(40, 53)]
    states = [flashinfer.single_decode_with_kv_cache(q[1], k[part], v[part], return_lse=True) for part in parts]
    (v_a, s_a), (v_b, s_b) = ((v[None], s[None]) for v, s in states)
    merged, _ = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    difference = (merged[0].float() - o[1].float()).abs().max().item()
    print(f"merged from two parts: largest difference {difference:.4f}")


if __name__ == "__main__":
    main()
