"""The other systems that are compared where they are installed: torch, transformers, vLLM's kernels, and MAX."""
