"""A paged KV cache and decode attention for LLM inference on MAX."""

__version__ = "0.1.0"
