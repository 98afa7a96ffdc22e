"""The grid of `paged-kv bench` with more peers, and the cases that it does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.decode_cpu.latent import LatentCase
from benchmarks.decode_cpu.quantised import MAX_ENCODINGS, ExpertCase, QuantisedCase
from benchmarks.decode_cpu.steps import FileStepCase
from benchmarks.decode_cpu.wrappers import CascadeCase, PrefillCase
from paged_kv.bench import cases
from paged_kv.bench.case_kinds import Case, Versus
from paged_kv.graphs.encodings import ENCODINGS, Encoding

_HERE = "benchmarks.decode_cpu"
PEERS = cases.PEERS | {
    "ort": f"{_HERE}.onnxruntime_gqa:OnnxRuntimeAttention",
    "max-quantised": f"{_HERE}.quantised:MaxQuantised",
    "torch-mla": f"{_HERE}.latent:TorchMatmul",
    "torch-mla-sdpa": f"{_HERE}.latent:TorchSdpa",
    "vllm-mla": f"{_HERE}.latent:VllmLatent",
    "ours-bf16": f"{_HERE}.variants:OursBfloat16",
    "ours-bf16-append": f"{_HERE}.variants:OursBfloat16Append",
    "ours-experts": f"{_HERE}.quantised:OursBfloat16Experts",
    "ours-1": f"{_HERE}.variants:OursOneToken",
    "ours-rotated": f"{_HERE}.variants:OursRotated",
    "ours-flat": f"{_HERE}.wrappers:OursFlat",
    "vllm-step": f"{_HERE}.vllm_step:VllmStep",
    "llama.cpp": f"{_HERE}.llama_cpp:LlamaCppStep",
    "openvino": f"{_HERE}.openvino_step:OpenVinoStep",
}

_ORT = Versus("ONNX Runtime GQA", ("ort",))
_BFLOAT16 = Versus("our own bf16 KV", ("ours-bf16",))
_APPEND = Versus("our own bf16 append", ("ours-bf16-append",))
_ROTATED = Versus("our own, rotated in the cache", ("ours-rotated",))
_LLAMA_CPP = Versus("llama.cpp", ("llama.cpp",))
_OPENVINO = Versus("OpenVINO", ("openvino",))
_MORE: dict[str, tuple[Versus, ...]] = {
    "f32": (_ORT,),
    "f16": (_ORT,),
    "e4m3": (_BFLOAT16,),
    **{case.name: (_BFLOAT16,) for case in cases.CASES if case.name.startswith(("int8-", "int4-"))},
    **{case.name: (_APPEND,) for case in cases.CASES if case.name.startswith(("append-int8-", "append-int4-"))},
    **{case.name: (_ROTATED,) for case in cases.CASES if case.name.startswith("rope-")},
    **{
        name: (Versus("vLLM CPU", ("vllm-step",)), _LLAMA_CPP, _OPENVINO)
        for name in ("step-1", "step-8", "step-prefill")
    },
    "new4": (Versus("our own, 1 new token", ("ours-1",)),),
}
"""Comparisons beside those of `paged-kv bench`, by case."""

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
    *(replace(case, versus=(*case.versus, *_MORE.get(case.name, ()))) for case in cases.CASES),
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
        FileStepCase(
            f"step-{kind}-{name}",
            f"{what} step, {model}, {title}",
            (_LLAMA_CPP,) if kind == "experts" else (_LLAMA_CPP, _OPENVINO),
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
        PrefillCase(name, title, (cases.TORCH, cases.VLLM), lengths=(context + new,), new_tokens=new)
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
