"""Measurements beside `paged-kv bench`, a script a question; none of it is in the wheel.

Run them from the root of the checkout, `python -m benchmarks.NAME`: `api_overhead`, `pool_cpu` and `prefix_cpu` (what
the Python layers cost), `transformers_cpu` (prompts and memory of transformers, on pages and not), `serve_cpu` (servers
in turns), `tune` (the choices of a CPU family), `decode_gpu` and `gpu_bundle` (a GPU, here or on a bare host), `pages`
(the tables of README.md and docs/performance.md).
"""
