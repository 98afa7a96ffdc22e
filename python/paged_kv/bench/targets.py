"""The CPU family that is measured, and what each case should reach on it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paged_kv.bench.case_kinds import Case, Versus
from paged_kv.bench.cases import AMX, CASES
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, choose_cpu_target


@dataclass(frozen=True)
class Goal:
    """The target of a case."""

    share: float | None = None
    """A share of the read bandwidth; None: for information."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By a comparison's label, the least factor; comparisons that are not named are for information."""
    either: bool = False
    """True if one of these is enough."""


ROTARY = {f"rope-{name}": Goal(None, {"our own, rotated in the cache": 0.5}) for name in ("bf16", "f32", "prefill")}

WITHOUT_AMX = {
    "bf16": Goal(0.8, {"vLLM CPU, page 16": 2.5}, either=True),
    "f32": Goal(0.8, {"vLLM CPU, best page size": 1.7}),
    "group1": Goal(0.75),
    "group2": Goal(0.75),
    "group8": Goal(0.75),
    "group16": Goal(0.5),
    "hnd": Goal(0.8),
    "page1": Goal(0.8),
    "page128": Goal(0.8),
    "max-layout": Goal(0.75),
    "e4m3": Goal(None, {"our own bf16 KV": 1.5}),
    "linear-1": Goal(0.85, {"torch": 1.2}),
    "linear-8": Goal(0.75, {"torch": 1.2}),
    "linear-q4_k-1": Goal(0.8, {"MAX qmatmul": 1}),
    "linear-q4_k-8": Goal(0.6, {"MAX qmatmul": 1}),
    **{
        f"linear-{encoding}-{n}": Goal(None, {"MAX qmatmul": 1})
        for encoding, rows in (("q4_k", (4, 64)), ("q4_0", (1, 4, 8, 64)), ("q6_k", (1, 4, 8, 64)))
        for n in rows
    },
    "linear-q8_0-1": Goal(0.8),
    "linear-q8_0-8": Goal(0.6),
    "step-1": Goal(None, {"vLLM CPU": 1.1, "llama.cpp": 1.2}),
    "step-8": Goal(None, {"vLLM CPU": 1.1}),
    "step-prefill": Goal(None, {"vLLM CPU": 1, "Hugging Face transformers": 1.3}),
    **{
        f"step-{kind}-{name}": Goal(None, {"llama.cpp": factor})
        for kind in ("q8_0", "q4_k_m", "experts")
        for name, factor in (("1", 1.2), ("8", 2), ("prefill", 1))
    },
    "prefill": Goal(None, {"torch SDPA, contiguous": 2.5}),
    "prefill-wrapper": Goal(None, {"torch SDPA, contiguous": 1.2, "vLLM CPU, best page size": 1}),
    "prefill-cached": Goal(None, {"torch SDPA, contiguous": 1.2, "vLLM CPU, best page size": 1}),
    "mla-16": Goal(None, {"vLLM CPU MLA, page 16": 1, "torch, contiguous": 2}),
    "mla-64": Goal(None, {"vLLM CPU MLA, page 16": 1, "torch, contiguous": 2}),
    "new4": Goal(None, {"our own, 1 new token": 0.8}),
    **ROTARY,
    "cascade-8": Goal(None, {"our own flat decode": 4}),
    "cascade-32": Goal(None, {"our own flat decode": 4}),
}
"""On CPUs with bfloat16 dot products and no AMX; cases that are not named are measured for information."""

WITHOUT_BF16 = {
    "bf16": Goal(None, {"vLLM CPU, page 16": 1.5, "torch SDPA, contiguous": 2}, either=True),
    **ROTARY,
}
"""On CPUs that have no bfloat16 instruction at all."""


def cpu_family() -> str:
    """The CPU target that the kernels are compiled for here, by LLVM's name; the architecture where MAX chooses."""
    return choose_cpu_target(CpuInfo.read()) or platform.machine().lower()


def cases_of(family: str) -> tuple[Case, ...]:
    """The grid with the goals of a CPU family. The numbers in `CASES` are those of CPUs with AMX."""
    flags = REQUIRED_FLAGS.get(family)
    if flags is not None and "amx_bf16" in flags:
        return CASES
    goals = {} if flags is None else WITHOUT_AMX if "avx512_bf16" in flags else WITHOUT_BF16
    return tuple(_with_goal(case, goals.get(case.name, Goal())) for case in CASES)


def _with_goal(case: Case, goal: Goal) -> Case:
    """The case with other numbers, and without the peers that need AMX."""
    versus = [replace(one, at_least=goal.factors.get(one.label)) for one in case.versus if one.peers != AMX]
    if case.name == "bf16":  # AMX is what page sizes other than 16 are measured with elsewhere
        versus.insert(1, Versus("vLLM CPU, page 32", ("vllm-32",)))
    return replace(case, share=goal.share, versus=tuple(versus), either=goal.either)
