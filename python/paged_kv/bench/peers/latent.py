"""Latent attention (MLA) by torch, over contiguous tokens, and by vLLM's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays.host import as_numpy
from paged_kv.bench.case_kinds import Case
from paged_kv.bench.latent import LATENT_SCALE, LatentProblem
from paged_kv.bench.ours import page_table
from paged_kv.bench.peer import Peer, repeat, torch_view
from paged_kv.bench.peers.vllm_cpu import load_kernels
from paged_kv.bench.problems import Array, bits


class _TorchLatent(Peer):
    """Over contiguous tokens `[B, L, Dckv + Dkpe]`."""

    packages = ("torch",)
    _o: Any

    def prepare(self, problem: LatentProblem, copies: int) -> None:
        self._ckv = problem.case.ckv
        self._q, self._tokens = torch_view(problem.q), torch_view(repeat(problem.tokens, copies))

    def output(self) -> Array:
        return as_numpy(self._o.contiguous(), "output")


class TorchMatmul(_TorchLatent):
    """Two products of matrices and a softmax in float32 between them."""

    name = "torch matmul, contiguous"

    def run(self, i: int) -> None:
        import torch

        tokens = self._tokens[i % len(self._tokens)]
        weights = torch.softmax(torch.matmul(self._q, tokens.mT).mul_(LATENT_SCALE), -1, dtype=torch.float32)
        self._o = torch.matmul(weights.to(tokens.dtype), tokens[..., : self._ckv])


class TorchSdpa(_TorchLatent):
    """`scaled_dot_product_attention` of one head whose query rows are the heads."""

    name = "torch SDPA over latents, contiguous"

    def run(self, i: int) -> None:
        import torch

        k = self._tokens[i % len(self._tokens)][:, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        self._o = attend(self._q[:, None], k, k[..., : self._ckv], scale=LATENT_SCALE)[:, 0]


class VllmLatent(Peer):
    """`mla_decode_kvcache` over vLLM's own pages of 16."""

    name, page_size = "vLLM CPU MLA, page 16", 16

    def available(self, case: Case) -> str | None:  # noqa: ARG002
        load_kernels()
        return None

    def prepare(self, problem: LatentProblem, copies: int) -> None:
        import torch

        case = problem.case
        pages = case.length // self.page_size
        table = page_table([pages] * case.batch, np.random.default_rng(1)).astype(np.int32)
        slots = np.empty((case.batch * pages, self.page_size, case.ckv + case.kpe), problem.q.dtype)
        bits(slots)[table.reshape(-1)] = bits(problem.tokens).reshape(slots.shape)
        self._q, self._slots = torch_view(problem.q), torch_view(repeat(slots, copies))
        self._table = torch.from_numpy(table)
        self._lengths = torch.full((case.batch,), case.length, dtype=torch.int32)
        self._o = torch.empty((case.batch, case.heads, case.ckv), dtype=self._q.dtype)
        self._decode: Any = torch.ops._C.mla_decode_kvcache

    def run(self, i: int) -> None:
        cache = self._slots[i % len(self._slots)]
        self._decode(self._o, self._q, cache, LATENT_SCALE, self._table, self._lengths)

    def output(self) -> Array:
        return as_numpy(self._o, "output")
