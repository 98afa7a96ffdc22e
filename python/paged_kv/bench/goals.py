"""The targets of the cases, by CPU family, and what reaches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paged_kv.bench.case_kinds import Case
from paged_kv.bench.results import Row
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS


@dataclass(frozen=True)
class Goal:
    """The target of a case."""

    share: float | None = None
    """A share of the read bandwidth; None: for information."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By a comparison's label, the least factor; comparisons that are not named are for information."""
    either: bool = False
    """True if one of these is enough."""


Goals = Mapping[str, Goal]
"""By case; cases that are not named are measured for information."""
_TORCH, _VLLM = "torch SDPA, contiguous", "vLLM CPU, best page size"
_AMX, _TRANSFORMERS = "vLLM CPU AMX, best page size", "Hugging Face transformers"

EVERYWHERE = {f"rope-{name}": Goal(None, {"our own, rotated in the cache": 0.5}) for name in ("bf16", "f32", "prefill")}

WITH_BF16 = {
    **EVERYWHERE,
    "linear-q8_0-1": Goal(0.8),
    "linear-q8_0-8": Goal(0.6),
    **{
        f"linear-{encoding}-{n}": Goal({1: 0.8, 8: 0.6}.get(n) if encoding == "q4_k" else None, {"MAX qmatmul": 1})
        for encoding in ("q4_0", "q4_k", "q6_k")
        for n in (1, 4, 8, 64)
    },
    **{
        f"step-{kind}-{name}": Goal(None, {"llama.cpp": factor} | ({} if kind == "experts" else {"OpenVINO": ahead}))
        for kind in ("q8_0", "q4_k_m", "experts")
        for name, factor, ahead in (("1", 1.2, 1.1), ("8", 2, 1.1), ("prefill", 1, 1.2))
    },
    **{name: Goal(None, {_TORCH: 1.2, _VLLM: 1}) for name in ("prefill-wrapper", "prefill-cached")},
    **{f"mla-{size}": Goal(None, {"vLLM CPU MLA, page 16": 1, "torch, contiguous": 2}) for size in (16, 64)},
    "new4": Goal(None, {"our own, 1 new token": 0.8}),
    **{f"cascade-{heads}": Goal(None, {"our own flat decode": 4}) for heads in (8, 32)},
}
"""On CPUs with bfloat16 dot products."""

WITH_AMX: Goals = {
    **WITH_BF16,
    "bf16": Goal(0.85, {"vLLM CPU, page 16": 2.5, _AMX: 1.2, _TORCH: 2.5, "torch gather + SDPA": 20}),
    "f32": Goal(0.85, {_VLLM: 1.7, "MAX flash_attention_ragged": 5, "ONNX Runtime GQA": 2}),
    "f16": Goal(0.85, {"ONNX Runtime GQA": 3}),
    **dict.fromkeys(("group1", "group2", "group8", "hnd", "max-layout"), Goal(0.85)),
    "group16": Goal(0.7),
    "long": Goal(0.85, {_AMX: 1.2}),
    "uneven": Goal(0.8),
    "page1": Goal(0.6),
    "page128": Goal(0.9),
    "e4m3": Goal(0.7, {"our own bf16 KV": 1.4}),
    **{
        f"{codes}-{length}-group{group}": Goal(None, {"our own bf16 KV": factor})
        for codes, factor in (("int8", 1.8), ("int4", 2.5))
        for length in (8192, 32768)
        for group in (4, 8)
    },
    "append-4096": Goal(0.8),
    **{
        f"append-{codes}-{size}": Goal(None, {"our own bf16 append": 0.67})
        for codes in ("int8", "int4")
        for size in ("8x1", "1x4096")
    },
    **{f"linear-{n}": Goal({1: 0.85, 8: 0.85}.get(n), {"torch": 1}) for n in (1, 8, 64, 256)},
    **{
        f"linear-{encoding}-{n}": Goal(share)
        for encoding in ("q5_k", "iq4_nl", "iq4_xs", "mxfp4", "int4", "int8")
        for n, share in ((1, 0.8), (8, 0.6))
    },
    **{
        f"linear-{encoding}-{n}": Goal({1: 0.8, 8: 0.6}.get(n), {"MAX qmatmul": 1})
        for encoding in ("q4_0", "q4_k", "q6_k")
        for n in (1, 4, 8, 64)
    },
    "experts-q4_k": Goal(0.8),
    "experts-mxfp4": Goal(0.8),
    **{f"step-{batch}": Goal(0.7, {_TRANSFORMERS: 1.3, "llama.cpp": 1}) for batch in (1, 8)},
    "step-prefill": Goal(None, {_TRANSFORMERS: 1}),
    "prefill": Goal(None, {_TORCH: 1}),
}

WITHOUT_AMX: Goals = {
    **WITH_BF16,
    "bf16": Goal(0.8, {"vLLM CPU, page 16": 2.5}, either=True),
    "f32": Goal(0.8, {_VLLM: 1.7}),
    **dict.fromkeys(("group1", "group2", "group8", "max-layout"), Goal(0.75)),
    "group16": Goal(0.5),
    **dict.fromkeys(("hnd", "page1", "page128"), Goal(0.8)),
    "e4m3": Goal(None, {"our own bf16 KV": 1.5}),
    "linear-1": Goal(0.85, {"torch": 1.2}),
    "linear-8": Goal(0.75, {"torch": 1.2}),
    "step-1": Goal(None, {"vLLM CPU": 1.1, "llama.cpp": 1.2}),
    "step-8": Goal(None, {"vLLM CPU": 1.1}),
    "step-prefill": Goal(None, {"vLLM CPU": 1, _TRANSFORMERS: 1.3}),
    "prefill": Goal(None, {_TORCH: 2.5}),
}
"""On CPUs with bfloat16 dot products and no AMX."""

WITHOUT_BF16: Goals = {
    **EVERYWHERE,
    "bf16": Goal(0.75, {"vLLM CPU, page 16": 1.5, _TORCH: 2}),
    "f32": Goal(0.85),
    "hnd": Goal(0.75),
    "group8": Goal(0.4),
    "group16": Goal(0.22),
    "prefill": Goal(None, {_TORCH: 1.5}),
    "step-prefill": Goal(None, dict.fromkeys(("vLLM CPU", _TRANSFORMERS, "llama.cpp"), 1)),
    **{
        f"step-{kind}-{name}": Goal(None, {"llama.cpp": factor, "OpenVINO": ahead})
        for kind, name, factor, ahead in (
            ("q8_0", "1", 1.1, 1.1),
            ("q4_k_m", "1", 1.3, 1.1),
            ("q8_0", "prefill", 1, 1),
            ("q4_k_m", "prefill", 1, 1),
        )
    },
}
"""On CPUs that have no bfloat16 instruction at all."""


def goals_of(family: str) -> Goals:
    """The targets on a CPU family, by LLVM's name; none on other architectures."""
    flags = REQUIRED_FLAGS.get(family)
    if flags is None:
        return {}
    return WITH_AMX if "amx_bf16" in flags else WITHOUT_AMX if "avx512_bf16" in flags else WITHOUT_BF16


def with_goal(row: Row, goals: Goals) -> Row:
    """The row of a run, with its targets."""
    goal = goals.get(row["case"], Goal())
    versus = [{**one, "at_least": goal.factors.get(one["label"])} for one in row["versus"]]
    return {**row, "share_target": goal.share, "either": goal.either, "versus": versus}


def met(row: Row) -> bool | None:
    """Return whether a row reaches all it should; None where it has no target."""
    pairs = [] if row["share_target"] is None else [(row["share"], row["share_target"])]
    pairs += [(one["ratio"], one["at_least"]) for one in row["versus"] if one["at_least"] is not None]
    reached = [value >= least for value, least in pairs if value is not None]
    if not reached:
        return None
    return (any(reached) if row["either"] else all(reached)) and bool(row["right"])


def described(case: Case, goals: Goals) -> str:
    """`0.85 of the bandwidth, 2.5x vLLM CPU, page 16`: the targets of a case, of the comparisons that it makes."""
    goal = goals.get(case.name, Goal())
    targets = [] if goal.share is None else [f"{goal.share:g} of the bandwidth"]
    labels = {versus.label for versus in case.versus}
    targets += [f"{factor:g}x {label}" for label, factor in goal.factors.items() if label in labels]
    return (" or " if goal.either else ", ").join(targets) or "no target"
