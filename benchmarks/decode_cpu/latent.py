"""Latent attention (MLA) of a decode step: this package's op, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from max.dtype import DType

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.bench.case_kinds import DTYPE_BYTES, Case
from paged_kv.bench.ours import Ours, page_table
from paged_kv.bench.peers.base import Peer, repeat, torch_view
from paged_kv.bench.peers.vllm_cpu import load_kernels
from paged_kv.bench.problems import TOLERANCE, Array, Problem, bits, normal, relative_error
from paged_kv.options import LatentOptions
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant

LATENT_SCALE = (128 + 64) ** -0.5
"""The scale of latent attention's logits."""
_SAMPLED_REQUESTS = 4


@dataclass(frozen=True)
class LatentCase(Case):
    """A decode step of latent attention (MLA): `batch` requests of `length` tokens."""

    problem = "benchmarks.decode_cpu.latent:LatentProblem"
    ours = "benchmarks.decode_cpu.latent:OursLatent"

    batch: int = 8
    length: int = 4096
    heads: int = 128
    ckv: int = 512
    kpe: int = 64
    dtype: str = "bfloat16"
    page_size: int = 16

    @property
    def bytes(self) -> int:
        return self.batch * self.length * (self.ckv + self.kpe) * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.length * self.heads * (2 * self.ckv + self.kpe)


class LatentProblem(Problem):
    """The same of latent attention (MLA); queries went through the up-projection of K before, for all systems."""

    def __init__(self, case: LatentCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = TOLERANCE[case.dtype]
        width = case.ckv + case.kpe
        self.q = normal(rng, (case.batch, case.heads, width), case.dtype)  # [B, H, Dckv + Dkpe]
        self.tokens = normal(rng, (case.batch, case.length, width), case.dtype)  # [B, L, Dckv + Dkpe]

    def error(self, output: Array) -> float:
        case = self.case
        if output.shape != (case.batch, case.heads, case.ckv):
            return float("inf")
        some = min(_SAMPLED_REQUESTS, case.batch)
        q, tokens = self.q[:some], self.tokens[:some]  # a page a request
        (nope, pe), (ckv, kpe) = (np.split(array, [case.ckv], -1) for array in (q, tokens))
        pages, lengths = np.arange(some), np.full(some, case.length)
        expected, _ = reference.mla_attention(nope, pe, ckv, kpe, pages[:, None], pages, lengths, sm_scale=LATENT_SCALE)
        return max(map(relative_error, output[:some], expected))


class OursLatent(Ours):
    def prepare(self, problem: LatentProblem, copies: int) -> None:
        case = problem.case
        self._variant = Variant("mla_attention", DType[case.dtype], DType[case.dtype])
        self._runtime = default_runtime()
        self._runtime.load([self._variant])
        owned = [case.length // case.page_size] * case.batch
        slots = np.empty((copies, sum(owned), case.page_size, case.ckv + case.kpe), problem.q.dtype)
        self.memory = slots
        lengths = np.full(case.batch, case.length, np.int32)
        rows = [
            np.ascontiguousarray(array)
            for array in (problem.q[..., : case.ckv], problem.q[..., case.ckv :], np.arange(case.batch, dtype=np.int32))
        ]
        rows.append(lengths)
        options = [np.zeros(0, np.float32), LatentOptions(LATENT_SCALE).numbers()]
        rng = np.random.default_rng(1)
        self._inputs = []
        for cache in slots:
            table = page_table(owned, rng)
            bits(cache)[table.reshape(-1)] = bits(problem.tokens).reshape(cache.shape)
            kpe, ckv = cache[:, :, None, case.ckv :], cache[:, :, None, : case.ckv]
            k, v, view = Pages(kpe, ckv).operands()
            self._inputs.append([*rows, k, v, table, view, *options])

    def run(self, i: int) -> None:
        self._o = self._runtime.execute(self._variant, *self._inputs[i % len(self._inputs)])[0]

    def output(self) -> Array:
        return self._o


class _TorchLatent(Peer):
    """Over contiguous tokens `[B, L, Dckv + Dkpe]`."""

    _o: Any

    def available(self, case: Case) -> str | None:
        import torch  # noqa: F401

        return None if isinstance(case, LatentCase) else "no such case"

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

    def available(self, case: Case) -> str | None:
        load_kernels()
        return None if isinstance(case, LatentCase) else "no such case"

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
