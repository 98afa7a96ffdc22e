"""The servers that benchmarks/serve_cpu.py measures, by the key that `serve_cases.py` calls them."""

from __future__ import annotations

from importlib import import_module

from paged_kv.benchmarks.servers.base import System

SYSTEMS = {
    "ours-bf16": ("max_server:Ours", "bfloat16"),
    "ours-f32": ("max_server:Ours", "float32"),
    "ours-q4k": ("max_server:Ours", "q4_k"),
    "max-f32": ("max_server:BuiltIn", "float32"),
    "max-q4k": ("max_server:BuiltIn", "q4_k"),
    "vllm-bf16": ("vllm_server:Vllm", "bfloat16"),
    "llama-bf16": ("llama_server:LlamaServer", "bfloat16"),
    "llama-q4k": ("llama_server:LlamaServer", "q4_k"),
    "engine-bf16": ("engine_steps:EngineSteps", "bfloat16"),
}


def make_system(key: str) -> System:
    """The system of that key, not started."""
    where, weights = SYSTEMS[key]
    module, _, name = where.partition(":")
    system: System = getattr(import_module(f"paged_kv.benchmarks.servers.{module}"), name)(weights)
    return system
