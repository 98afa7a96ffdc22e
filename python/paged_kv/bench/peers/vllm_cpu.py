"""vLLM's CPU kernels over their own paged cache: K and V `[pages, Hk, page_size, D]`, packed as its kernels like it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arrays.host import as_numpy
from paged_kv.bench.case_kinds import AttentionCase, Case
from paged_kv.bench.peer import Peer, repeat, torch_view
from paged_kv.bench.problems import Array, AttentionProblem
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, apply_cpu_target


class VllmAttention(Peer):
    """`cpu_attention_with_kv_cache`, planned outside the timed run as vLLM plans once for all layers."""

    page_size = 16
    isa = "vec16"

    def available(self, case: Case) -> str | None:
        import torch

        load_kernels()
        assert isinstance(case, AttentionCase)
        if case.kv_dtype != case.dtype:
            return "no float8 here"
        if self.isa == "amx":
            if case.dtype != "bfloat16":
                return "AMX takes bfloat16 alone"
            if not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
                return "this CPU has no AMX"
        return None

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        import torch

        self._ops = torch.ops._C
        case = problem.case
        self._case = case
        owned = [-(-length // self.page_size) for length in case.lengths]
        pages = np.random.default_rng(1).permutation(sum(owned)).astype(np.int32)
        table = np.zeros((len(owned), max(owned)), np.int32)
        slots: list[npt.NDArray[np.int64]] = []
        for row, own, length in zip(table, np.split(pages, np.cumsum(owned)[:-1]), case.lengths, strict=True):
            row[: len(own)] = own
            slots.append((own[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)).ravel()[:length])
        shape = (sum(owned), case.kv_heads, self.page_size, case.head_dim)
        k, v = (np.zeros(shape, problem.k.dtype) for _ in range(2))
        self._ops.cpu_attn_reshape_and_cache(
            *(torch_view(array) for array in (problem.k, problem.v, k, v)),
            torch.from_numpy(np.concatenate(slots)),
            self.isa,
            1.0,
            1.0,
            "auto",
        )
        self._k, self._v = (torch_view(repeat(array, copies)) for array in (k, v))
        self._q, self._table = torch_view(problem.q), torch.from_numpy(table)
        batch = len(owned)
        self._starts = torch.arange(batch + 1, dtype=torch.int32) * case.new_tokens
        self._lengths = torch.tensor(case.lengths, dtype=torch.int32)
        sizes = (batch, case.heads, case.kv_heads, case.head_dim, self._lengths, self._q.dtype, self._starts)
        self._plan = self._ops.get_scheduler_metadata(*sizes, True, -1, self.isa, True, None, "auto")
        self._o = torch.empty_like(self._q)

    def run(self, i: int) -> None:
        at = i % len(self._k)
        tensors = (self._q, self._k[at], self._v[at], self._o, self._starts, self._lengths)
        scale = self._case.head_dim**-0.5
        options = (scale, True, None, -1, self._table, 0.0, self._plan, None, None, 1.0, 1.0, "auto")
        self._ops.cpu_attention_with_kv_cache(*tensors, *options)

    def output(self) -> Array:
        return as_numpy(self._o, "output")


def load_kernels() -> None:
    """Makes vLLM's kernels torch operators, without importing vLLM.

    Raises:
        ImportError: it is not installed.
    """
    import torch

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'vllm'")
    load_library: Any = torch.ops.load_library
    load_library(str(Path(spec.submodule_search_locations[0]) / library(apply_cpu_target())))


def library(target: str | None) -> str:
    """The build of vLLM's kernels that its own start would load on a CPU of that target."""
    flags = REQUIRED_FLAGS.get(target or "", frozenset())
    if "avx512_bf16" in flags:
        return "_C.abi3.so"
    return "_C_AVX512.abi3.so" if "avx512f" in flags else "_C_AVX2.abi3.so"


class Vllm16(VllmAttention):
    name = "vLLM CPU, page 16"


class Vllm32(VllmAttention):
    name, page_size, isa = "vLLM CPU, page 32", 32, "vec"


class VllmAmx32(VllmAttention):
    name, page_size, isa = "vLLM CPU AMX, page 32", 32, "amx"


class VllmAmx64(VllmAttention):
    name, page_size, isa = "vLLM CPU AMX, page 64", 64, "amx"


class VllmAmx128(VllmAttention):
    name, page_size, isa = "vLLM CPU AMX, page 128", 128, "amx"
