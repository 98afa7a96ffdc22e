"""The grid: what is measured, and against whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paged_kv.bench.case_kinds import AppendCase, AttentionCase, Case, LinearCase, StepCase, Versus
from paged_kv.errors import ContractError
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

PEERS = {
    "torch": "paged_kv.bench.peers.torch_cpu:TorchAttention",
    "gather": "paged_kv.bench.peers.torch_cpu:TorchGather",
    "torch-linear": "paged_kv.bench.peers.torch_cpu:TorchLinear",
    "transformers": "paged_kv.bench.peers.transformers_llama:TransformersStep",
    "vllm-16": "paged_kv.bench.peers.vllm_cpu:Vllm16",
    "vllm-32": "paged_kv.bench.peers.vllm_cpu:Vllm32",
    "vllm-amx-32": "paged_kv.bench.peers.vllm_cpu:VllmAmx32",
    "vllm-amx-64": "paged_kv.bench.peers.vllm_cpu:VllmAmx64",
    "vllm-amx-128": "paged_kv.bench.peers.vllm_cpu:VllmAmx128",
    "max": "paged_kv.bench.peers.max_flash:MaxAttention",
}
"""The other systems: each is imported only when it runs."""

AMX = Versus("vLLM CPU AMX, best page size", ("vllm-amx-32", "vllm-amx-64", "vllm-amx-128"))
VLLM = Versus("vLLM CPU, best page size", ("vllm-16", "vllm-32"))
TORCH = Versus("torch SDPA, contiguous", ("torch",))
MAX = Versus("MAX flash_attention_ragged", ("max",))
TRANSFORMERS = Versus("Hugging Face transformers", ("transformers",))

FLOAT32: dict[str, object] = {"dtype": "float32", "kv_dtype": "float32"}
PREFILL: dict[str, object] = {"lengths": (2048,), "new_tokens": 2048}


def _attention(name: str, title: str, *versus: Versus, **changes: object) -> AttentionCase:
    return AttentionCase(name, title, versus, **changes)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    _attention(
        "bf16",
        "bf16, NHD, page 16, B 8, 32/8, L 4096",
        Versus("vLLM CPU, page 16", ("vllm-16",)),
        Versus("vLLM CPU, page 32", ("vllm-32",)),
        AMX,
        TORCH,
        Versus("torch gather + SDPA", ("gather",)),
        MAX,
    ),
    _attention("f32", "f32, same", VLLM, MAX, TORCH, **FLOAT32),
    _attention("f16", "f16, same", TORCH, dtype="float16", kv_dtype="float16"),
    *(_attention(f"group{group}", f"bf16, group {group} ({8 * group}/8)", heads=8 * group) for group in (1, 2, 8, 16)),
    _attention("long", "bf16, B 1, L 65536", AMX, lengths=(65536,)),
    _attention("uneven", "bf16, one request of 32768, 31 of 128", lengths=(32768, *(128,) * 31)),
    _attention("hnd", "bf16, HND", layout="HND"),
    _attention("page1", "bf16, page 1", page_size=1),
    _attention("page128", "bf16, page 128", page_size=128),
    _attention("max-layout", "bf16, MAX layout (all layers in one array)", layout="MAX"),
    _attention("e4m3", "e4m3 KV, bf16 q, L 8192", kv_dtype="float8_e4m3fn", lengths=(8192,) * 8),
    *(
        _attention(
            f"{codes}-{length}-group{group}",
            f"{codes} KV, bf16 q, group {group}, B {batch}, L {length}",
            kv_dtype=codes,
            heads=8 * group,
            lengths=(length,) * batch,
        )
        for codes in ("int8", "int4")
        for length, batch in ((8192, 8), (32768, 2))
        for group in (4, 8)
    ),
    _attention("new4", "multi-token decode, 4 new tokens a request", new_tokens=4),
    AppendCase("append-8x1", "append 8 x 1 token, bf16", batch=8, tokens=1),
    AppendCase("append-4096", "append 1 x 4096 tokens, bf16"),
    *(
        AppendCase(
            f"append-{codes}-{batch}x{tokens}",
            f"append {batch} x {tokens} token{'s' * (tokens > 1)}, bf16 to {codes}",
            batch=batch,
            tokens=tokens,
            kv_dtype=codes,
        )
        for codes in CODE_DTYPES
        for batch, tokens in ((8, 1), (1, 4096))
    ),
    *(
        LinearCase(
            f"linear-{rows}",
            f"linear bf16, 8192 x 4096, {rows} row{'s' * (rows > 1)}",
            (Versus("torch", ("torch-linear",)),),
            rows=rows,
        )
        for rows in (1, 8, 64, 256)
    ),
    *(
        StepCase(
            f"step-{batch}",
            f"decode step, 1.1 G parameters, bf16, B {batch}, context 1024",
            (TRANSFORMERS,),
            batch=batch,
        )
        for batch in (1, 8)
    ),
    StepCase("step-prefill", "prefill step, 256 new tokens, same model", (TRANSFORMERS,), tokens=256, context=0),
    _attention("prefill", "prefill attention bf16, 2048 new tokens, 32/8", TORCH, **PREFILL),
    *(
        _attention(f"rope-{name}", f"{name}, keys rotated as they are read", rope_theta=1e4, **changes)
        for name, changes in (("bf16", {}), ("f32", FLOAT32), ("prefill", PREFILL))
    ),
)

QUICK = ("bf16", "append-4096", "linear-1")


def cases_of(family: str, cases: Sequence[Case] = CASES) -> tuple[Case, ...]:
    """The grid on a CPU family, by LLVM's name: without the comparisons that need AMX where it has none."""
    if "amx_bf16" in REQUIRED_FLAGS.get(family, ()):
        return tuple(cases)
    return tuple(replace(case, versus=tuple(one for one in case.versus if one != AMX)) for case in cases)


@dataclass(frozen=True)
class Selection:
    """The cases that run, and if peers do."""

    cases: tuple[Case, ...] = CASES
    with_peers: bool = True

    @staticmethod
    def of(names: Sequence[str], *, quick: bool = False, with_peers: bool, cases: Sequence[Case] = CASES) -> Selection:
        """Those of `cases` that are named, all where none is.

        Raises:
            ContractError: a name is that of no case.
        """
        by_name = {case.name: case for case in cases}
        chosen = names or (QUICK if quick else tuple(by_name))
        for name in chosen:
            if name not in by_name:
                raise ContractError(f"--cases: {name!r} is none of {', '.join(by_name)}")
        return Selection(tuple(by_name[name] for name in dict.fromkeys(chosen)), with_peers and not quick)
