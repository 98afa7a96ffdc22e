"""Measurements beside `paged-kv bench`, a script a question; none of it is in the wheel.

Run them from the root of the checkout, `python -m benchmarks.NAME`: `pages` (the tables and pictures of `paged-kv bench
--all`), `serve_cpu` (servers in turns), `api_overhead`, `sampling_cpu`
and `pool_cpu` (the Python layers), `speculation_cpu` (drafts), `transformers_cpu` and `vllm_cpu` (the package inside
other programs), `transformers_sweep` (every decoder of transformers), `ray_cpu` and `routing_sim` (replicas),
`cache_quality` and `perplexity` (what few bits cost), `tune` (the choices of a CPU family), `decode_gpu` and
`gpu_bundle` (a GPU, here or on a bare host).
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
