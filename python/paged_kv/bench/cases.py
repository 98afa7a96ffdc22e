"""The grid: what is measured, against whom, and what it is meant to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paged_kv.bench.case_kinds import (
    MAX_ENCODINGS,
    AppendCase,
    AttentionCase,
    CascadeCase,
    Case,
    ExpertCase,
    LatentCase,
    LinearCase,
    PrefillCase,
    QuantisedCase,
    StepCase,
    Versus,
)
from paged_kv.graphs.encodings import ENCODINGS, Encoding
from paged_kv.kv_formats import CODE_DTYPES

AMX = ("vllm-amx-32", "vllm-amx-64", "vllm-amx-128")
AMX_LABEL = "vLLM CPU AMX, best page size"

ROTATED = Versus("our own, rotated in the cache", ("ours-rotated",), 0.5)
FLOAT32: dict[str, object] = {"dtype": "float32", "kv_dtype": "float32"}
PREFILL: dict[str, object] = {"lengths": (2048,), "new_tokens": 2048}

_BASE = AttentionCase(
    "bf16",
    "bf16, NHD, page 16, B 8, 32/8, L 4096",
    0.85,
    (
        Versus("vLLM CPU, page 16", ("vllm-16",), 2.5),
        Versus(AMX_LABEL, AMX, 1.2),
        Versus("torch SDPA, contiguous", ("torch",), 2.5),
        Versus("torch gather + SDPA", ("gather",), 20),
        Versus("MAX flash_attention_ragged", ("max",)),
    ),
)


def _variant(name: str, title: str, share: float | None = 0.85, *versus: Versus, **changes: object) -> AttentionCase:
    fields: dict[str, object] = {"name": name, "title": title, "share": share, "versus": versus, **changes}
    return replace(_BASE, **fields)  # type: ignore[arg-type]


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
    _BASE,
    _variant(
        "f32",
        "f32, same",
        0.85,
        Versus("vLLM CPU, best page size", ("vllm-16", "vllm-32"), 1.7),
        Versus("MAX flash_attention_ragged", ("max",), 5),
        Versus("ONNX Runtime GQA", ("ort",), 2),
        Versus("torch SDPA, contiguous", ("torch",)),
        **FLOAT32,
    ),
    _variant(
        "f16",
        "f16, same",
        0.85,
        Versus("ONNX Runtime GQA", ("ort",), 3),
        Versus("torch SDPA, contiguous", ("torch",)),
        dtype="float16",
        kv_dtype="float16",
    ),
    *(_variant(f"group{group}", f"bf16, group {group} ({8 * group}/8)", heads=8 * group) for group in (1, 2, 8)),
    _variant("group16", "bf16, group 16 (128/8)", 0.7, heads=128),
    _variant("long", "bf16, B 1, L 65536", 0.85, Versus(AMX_LABEL, AMX, 1.2), lengths=(65536,)),
    _variant("uneven", "bf16, one request of 32768, 31 of 128", 0.8, lengths=(32768, *(128,) * 31)),
    _variant("hnd", "bf16, HND", layout="HND"),
    _variant("page1", "bf16, page 1", 0.6, page_size=1),
    _variant("page128", "bf16, page 128", 0.9, page_size=128),
    _variant("max-layout", "bf16, MAX layout (all layers in one array)", layout="MAX"),
    _variant(
        "e4m3",
        "e4m3 KV, bf16 q, L 8192",
        0.7,
        Versus("our own bf16 KV", ("ours-bf16",), 1.4),
        kv_dtype="float8_e4m3fn",
        lengths=(8192,) * 8,
    ),
    *(
        _variant(
            f"{codes}-{length}-group{group}",
            f"{codes} KV, bf16 q, group {group}, B {batch}, L {length}",
            None,
            Versus("our own bf16 KV", ("ours-bf16",), factor),
            kv_dtype=codes,
            heads=8 * group,
            lengths=(length,) * batch,
        )
        for codes, factor in (("int8", 1.8), ("int4", 2.5))
        for length, batch in ((8192, 8), (32768, 2))
        for group in (4, 8)
    ),
    _variant(
        "new4",
        "multi-token decode, 4 new tokens a request",
        None,
        Versus("our own, 1 new token", ("ours-1",), 0.8),
        new_tokens=4,
    ),
    AppendCase("append-8x1", "append 8 x 1 token, bf16", batch=8, tokens=1),
    AppendCase("append-4096", "append 1 x 4096 tokens, bf16", 0.8),
    *(
        AppendCase(
            f"append-{codes}-{batch}x{tokens}",
            f"append {batch} x {tokens} token{'s' * (tokens > 1)}, bf16 to {codes}",
            None,
            (Versus("our own bf16 append", ("ours-bf16-append",), 0.67),),
            batch=batch,
            tokens=tokens,
            kv_dtype=codes,
        )
        for codes in CODE_DTYPES
        for batch, tokens in ((8, 1), (1, 4096))
    ),
    LinearCase("linear-1", "linear bf16, 8192 x 4096, 1 row", 0.85, (Versus("torch", ("torch-linear",), 1),)),
    LinearCase("linear-8", "linear bf16, 8192 x 4096, 8 rows", 0.85, (Versus("torch", ("torch-linear",), 1),), rows=8),
    *(
        LinearCase(
            f"linear-{n}", f"linear bf16, 8192 x 4096, {n} rows", None, (Versus("torch", ("torch-linear",), 1),), rows=n
        )
        for n in (64, 256)
    ),
    *(
        QuantisedCase(
            f"linear-{encoding.lower()}-{n}",
            f"linear {encoding}, 8192 x 4096, {n} row{'s' * (n > 1)}",
            {1: 0.8, 8: 0.6}.get(n),
            (Versus("MAX qmatmul", ("max-quantised",), 1),) if encoding in MAX_ENCODINGS else (),
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
            None if encoding is None else 0.8,
            () if encoding is None else (Versus("our own bf16 experts", ("ours-experts",)),),
            dtype="bfloat16" if encoding is None else "float32",
            encoding=encoding,
        )
        for name, encoding in _EXPERTS.items()
    ),
    *(
        StepCase(
            f"step-{batch}",
            f"decode step, 1.1 G parameters, bf16, B {batch}, context 1024",
            0.7,
            (
                Versus("vLLM CPU", ("vllm-step",)),
                Versus("Hugging Face transformers", ("transformers",), 1.3),
                Versus("llama.cpp", ("llama.cpp",), 1),
            ),
            batch=batch,
        )
        for batch in (1, 8)
    ),
    StepCase(
        "step-prefill",
        "prefill step, 256 new tokens, same model",
        None,
        (
            Versus("vLLM CPU", ("vllm-step",)),
            Versus("Hugging Face transformers", ("transformers",), 1),
            Versus("llama.cpp", ("llama.cpp",)),
        ),
        tokens=256,
        context=0,
    ),
    *(
        StepCase(
            f"step-{kind}-{name}",
            f"{what} step, {model}, {title}",
            None,
            (Versus("llama.cpp", ("llama.cpp",), factor),),
            batch=batch,
            tokens=tokens,
            context=context,
            **sizes,
        )
        for kind, (model, sizes) in _FILES.items()
        for name, what, title, factor, batch, tokens, context in (
            ("1", "decode", "B 1, context 1024", 1.2, 1, 1, 1024),
            ("8", "decode", "B 8, context 1024", 2, 8, 1, 1024),
            ("prefill", "prefill", "256 new tokens", 1, 1, 256, 0),
        )
    ),
    _variant(
        "prefill",
        "prefill attention bf16, 2048 new tokens, 32/8",
        None,
        Versus("torch SDPA, contiguous", ("torch",), 1),
        **PREFILL,
    ),
    *(
        _variant(f"rope-{name}", f"{name}, keys rotated as they are read", None, ROTATED, rope_theta=1e4, **changes)
        for name, changes in (("bf16", {}), ("f32", FLOAT32), ("prefill", PREFILL))
    ),
    *(
        CascadeCase(
            f"cascade-{heads}",
            f"cascade bf16, 16 requests, 8192 tokens shared, 256 own, 32/{heads}",
            None,
            (Versus("our own flat decode", ("ours-flat",), 4),),
            kv_heads=heads,
        )
        for heads in (8, 32)
    ),
    *(
        PrefillCase(
            name,
            title,
            None,
            (
                Versus("torch SDPA, contiguous", ("torch",), 1.2),
                Versus("vLLM CPU, best page size", ("vllm-16", "vllm-32"), 1),
            ),
            lengths=(context + new,),
            new_tokens=new,
        )
        for name, title, context, new in (
            ("prefill-wrapper", "prefill wrapper bf16, 2048 new tokens, 32/8", 0, 2048),
            ("prefill-cached", "prefill wrapper bf16, 512 new after 8192 cached, 32/8", 8192, 512),
        )
    ),
    *(
        LatentCase(
            f"mla-{page_size}",
            f"MLA decode bf16, 128 heads, 512 + 64, B 8, L 4096, page {page_size}",
            None,
            (
                Versus("vLLM CPU MLA, page 16", ("vllm-mla",), 1),
                Versus("torch, contiguous", ("torch-mla", "torch-mla-sdpa"), 2),
            ),
            page_size=page_size,
        )
        for page_size in (16, 64)
    ),
)

QUICK = ("bf16", "append-4096", "linear-1")


@dataclass(frozen=True)
class Selection:
    """The cases that run, and if peers do."""

    cases: tuple[Case, ...] = field(default=CASES)
    with_peers: bool = True

    @staticmethod
    def of(names: Sequence[str], *, quick: bool, with_peers: bool, cases: Sequence[Case] = CASES) -> Selection:
        """Those of `cases` that are named, all where none is. Raises `KeyError` with the first name that is no case."""
        by_name = {case.name: case for case in cases}
        chosen = names or (QUICK if quick else tuple(by_name))
        return Selection(tuple(by_name[name] for name in dict.fromkeys(chosen)), with_peers and not quick)
