"""The servers that `serve_cpu.py` measures, by the key that `serve_cases.py` calls them."""

from __future__ import annotations

from importlib import import_module

from benchmarks.servers.base import System

SYSTEMS = {
    "ours-bf16": ("http:Ours", "bfloat16"),
    "ours-f32": ("http:Ours", "float32"),
    "ours-q4k": ("http:Ours", "q4_k"),
    "max-f32": ("http:BuiltIn", "float32"),
    "max-q4k": ("http:BuiltIn", "q4_k"),
    "vllm-bf16": ("http:Vllm", "bfloat16"),
    "llama-bf16": ("http:LlamaServer", "bfloat16"),
    "llama-q4k": ("http:LlamaServer", "q4_k"),
    "engine-bf16": ("engine_steps:EngineSteps", "bfloat16"),
}


def make_system(key: str) -> System:
    """The system of that key, not started."""
    where, weights = SYSTEMS[key]
    module, _, name = where.partition(":")
    system: System = getattr(import_module(f"benchmarks.servers.{module}"), name)(weights)
    return system
