"""The cases and the peers: what is measured, and against whom.

A case is a kind and its sizes (`case_kinds`, `weight_cases`). A peer is a `peer.Peer`: a name, a check that it is
installed, and a run of a case. `job.take_turns` times both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paged_kv.bench.case_kinds import (
    AppendCase,
    AttentionCase,
    CascadeCase,
    Case,
    LatentCase,
    PrefillCase,
    Versus,
)
from paged_kv.bench.weight_cases import MAX_ENCODINGS, ExpertCase, LinearCase, QuantisedCase, StepCase
from paged_kv.errors import ContractError
from paged_kv.graphs.encodings import ENCODINGS, Encoding
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

PEERS = {
    "torch": "peers.torch_cpu:TorchAttention",
    "gather": "peers.torch_cpu:TorchGather",
    "torch-linear": "peers.torch_cpu:TorchLinear",
    "torch-mla": "peers.latent:TorchMatmul",
    "torch-mla-sdpa": "peers.latent:TorchSdpa",
    "transformers": "peers.transformers_llama:TransformersStep",
    "vllm-16": "peers.vllm_cpu:Vllm16",
    "vllm-32": "peers.vllm_cpu:Vllm32",
    "vllm-amx-32": "peers.vllm_cpu:VllmAmx32",
    "vllm-amx-64": "peers.vllm_cpu:VllmAmx64",
    "vllm-amx-128": "peers.vllm_cpu:VllmAmx128",
    "vllm-mla": "peers.latent:VllmLatent",
    "vllm-step": "peers.vllm_step:VllmStep",
    "max": "peers.max_cpu:MaxAttention",
    "max-quantised": "peers.max_cpu:MaxQuantised",
    "ort": "peers.onnxruntime_gqa:OnnxRuntimeAttention",
    "llama.cpp": "peers.llama_cpp:LlamaCppStep",
    "openvino": "peers.openvino_step:OpenVinoStep",
    "ours-bf16": "variants:OursBfloat16",
    "ours-bf16-append": "variants:OursBfloat16Append",
    "ours-experts": "quantised:OursBfloat16Experts",
    "ours-1": "variants:OursOneToken",
    "ours-rotated": "variants:OursRotated",
    "ours-flat": "wrappers:OursFlat",
}
"""The other systems, by module and class in this package: each is imported only when it runs."""

AMX = Versus("vLLM CPU AMX, best page size", ("vllm-amx-32", "vllm-amx-64", "vllm-amx-128"))
VLLM = Versus("vLLM CPU, best page size", ("vllm-16", "vllm-32"))
TORCH = Versus("torch SDPA, contiguous", ("torch",))
MAX = Versus("MAX flash_attention_ragged", ("max",))
TRANSFORMERS = Versus("Hugging Face transformers", ("transformers",))
ORT = Versus("ONNX Runtime GQA", ("ort",))
OUR_BFLOAT16 = Versus("our own bf16 KV", ("ours-bf16",))
OUR_APPEND = Versus("our own bf16 append", ("ours-bf16-append",))
OUR_ROTATED = Versus("our own, rotated in the cache", ("ours-rotated",))
OUR_ONE_TOKEN = Versus("our own, 1 new token", ("ours-1",))
VLLM_STEP = Versus("vLLM CPU", ("vllm-step",))
LLAMA_CPP = Versus("llama.cpp", ("llama.cpp",))
OPENVINO = Versus("OpenVINO", ("openvino",))
STEPS = (TRANSFORMERS, VLLM_STEP, LLAMA_CPP, OPENVINO)
WITH_ALL = {ORT, OUR_BFLOAT16, OUR_APPEND, OUR_ROTATED, OUR_ONE_TOKEN, VLLM_STEP, LLAMA_CPP, OPENVINO}
"""Comparisons of the usual cases that `--all` makes."""

FLOAT32: dict[str, object] = {"dtype": "float32", "kv_dtype": "float32"}
PREFILL: dict[str, object] = {"lengths": (2048,), "new_tokens": 2048}


def _attention(name: str, title: str, *versus: Versus, **changes: object) -> AttentionCase:
    return AttentionCase(name, title, versus, **changes)  # type: ignore[arg-type]


USUAL: tuple[Case, ...] = (
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
    _attention("f32", "f32, same", VLLM, MAX, TORCH, ORT, **FLOAT32),
    _attention("f16", "f16, same", TORCH, ORT, dtype="float16", kv_dtype="float16"),
    *(_attention(f"group{group}", f"bf16, group {group} ({8 * group}/8)", heads=8 * group) for group in (1, 2, 8, 16)),
    _attention("long", "bf16, B 1, L 65536", AMX, lengths=(65536,)),
    _attention("uneven", "bf16, one request of 32768, 31 of 128", lengths=(32768, *(128,) * 31)),
    _attention("hnd", "bf16, HND", layout="HND"),
    _attention("page1", "bf16, page 1", page_size=1),
    _attention("page128", "bf16, page 128", page_size=128),
    _attention("max-layout", "bf16, MAX layout (all layers in one array)", layout="MAX"),
    _attention("e4m3", "e4m3 KV, bf16 q, L 8192", OUR_BFLOAT16, kv_dtype="float8_e4m3fn", lengths=(8192,) * 8),
    *(
        _attention(
            f"{codes}-{length}-group{group}",
            f"{codes} KV, bf16 q, group {group}, B {batch}, L {length}",
            OUR_BFLOAT16,
            kv_dtype=codes,
            heads=8 * group,
            lengths=(length,) * batch,
        )
        for codes in ("int8", "int4")
        for length, batch in ((8192, 8), (32768, 2))
        for group in (4, 8)
    ),
    _attention("new4", "multi-token decode, 4 new tokens a request", OUR_ONE_TOKEN, new_tokens=4),
    AppendCase("append-8x1", "append 8 x 1 token, bf16", batch=8, tokens=1),
    AppendCase("append-4096", "append 1 x 4096 tokens, bf16"),
    *(
        AppendCase(
            f"append-{codes}-{batch}x{tokens}",
            f"append {batch} x {tokens} token{'s' * (tokens > 1)}, bf16 to {codes}",
            (OUR_APPEND,),
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
            STEPS,
            batch=batch,
        )
        for batch in (1, 8)
    ),
    StepCase("step-prefill", "prefill step, 256 new tokens, same model", STEPS, tokens=256, context=0),
    _attention("prefill", "prefill attention bf16, 2048 new tokens, 32/8", TORCH, **PREFILL),
    *(
        _attention(f"rope-{name}", f"{name}, keys rotated as they are read", OUR_ROTATED, rope_theta=1e4, **changes)
        for name, changes in (("bf16", {}), ("f32", FLOAT32), ("prefill", PREFILL))
    ),
)

_MIXTURE = {"experts": 128, "chosen": 8, "intermediate": 768, "layers": 6, "kv_heads": 4, "head_dim": 128}
"""Layers of Qwen3-30B-A3B, 6 of 48."""
_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "q8_0": ("1.1 G parameters, Q8_0", {"file_type": "Q8_0"}),
    "q4_k_m": ("1.1 G parameters, Q4_K_M", {"file_type": "Q4_K_M"}),
    "experts": ("8 of 128 experts, 3.9 G parameters, Q4_K_M", {"file_type": "Q4_K_M", **_MIXTURE}),
}
"""Models in files of quantised weights."""
_EXPERTS: dict[str, Encoding | None] = {"bf16": None, "Q4_K": "Q4_K", "MXFP4": "MXFP4"}

CASES: tuple[Case, ...] = (
    *USUAL,
    *(
        QuantisedCase(
            f"linear-{encoding.lower()}-{n}",
            f"linear {encoding}, 8192 x 4096, {n} row{'s' * (n > 1)}",
            (Versus("MAX qmatmul", ("max-quantised",)),) if encoding in MAX_ENCODINGS else (),
            rows=n,
            encoding=encoding,
        )
        for encoding in ENCODINGS
        for n in (1, 4, 8, 64)
    ),
    *(
        ExpertCase(
            f"experts-{name.lower()}",
            f"experts {name}, 8 of 64, 2048 x 4096, 1 row",
            () if encoding is None else (Versus("our own bf16 experts", ("ours-experts",)),),
            dtype="bfloat16" if encoding is None else "float32",
            encoding=encoding,
        )
        for name, encoding in _EXPERTS.items()
    ),
    *(
        StepCase(
            f"step-{kind}-{name}",
            f"{what} step, {model}, {title}",
            (LLAMA_CPP,) if kind == "experts" else (LLAMA_CPP, OPENVINO),
            batch=batch,
            tokens=tokens,
            context=context,
            **sizes,
        )
        for kind, (model, sizes) in _FILES.items()
        for name, what, title, batch, tokens, context in (
            ("1", "decode", "B 1, context 1024", 1, 1, 1024),
            ("8", "decode", "B 8, context 1024", 8, 1, 1024),
            ("prefill", "prefill", "256 new tokens", 1, 256, 0),
        )
    ),
    *(
        CascadeCase(
            f"cascade-{heads}",
            f"cascade bf16, 16 requests, 8192 tokens shared, 256 own, 32/{heads}",
            (Versus("our own flat decode", ("ours-flat",)),),
            kv_heads=heads,
        )
        for heads in (8, 32)
    ),
    *(
        PrefillCase(name, title, (TORCH, VLLM), lengths=(context + new,), new_tokens=new)
        for name, title, context, new in (
            ("prefill-wrapper", "prefill wrapper bf16, 2048 new tokens, 32/8", 0, 2048),
            ("prefill-cached", "prefill wrapper bf16, 512 new after 8192 cached, 32/8", 8192, 512),
        )
    ),
    *(
        LatentCase(
            f"mla-{page_size}",
            f"MLA decode bf16, 128 heads, 512 + 64, B 8, L 4096, page {page_size}",
            (
                Versus("vLLM CPU MLA, page 16", ("vllm-mla",)),
                Versus("torch, contiguous", ("torch-mla", "torch-mla-sdpa")),
            ),
            page_size=page_size,
        )
        for page_size in (16, 64)
    ),
)
"""Those of `--all`."""

QUICK = ("bf16", "append-4096", "linear-1")


def cases_of(family: str, *, every: bool = False) -> tuple[Case, ...]:
    """The cases on a CPU family, by LLVM's name, without comparisons that need AMX where it has none.

    Args:
        family: The CPU family.
        every: All cases and comparisons, in place of the usual ones.
    """
    left_out = set() if every else set(WITH_ALL)
    if "amx_bf16" not in REQUIRED_FLAGS.get(family, ()):
        left_out.add(AMX)
    return tuple(
        replace(case, versus=tuple(one for one in case.versus if one not in left_out))
        for case in (CASES if every else USUAL)
    )


def selected(cases: Sequence[Case], names: Sequence[str]) -> tuple[Case, ...]:
    """Those of `cases` that are named, all where none is.

    Raises:
        ContractError: a name is that of no case.
    """
    by_name = {case.name: case for case in cases}
    for name in names:
        if name not in by_name:
            raise ContractError(f"--cases: expected one of {', '.join(by_name)}, got {name!r}")
    return tuple(by_name[name] for name in dict.fromkeys(names or by_name))
