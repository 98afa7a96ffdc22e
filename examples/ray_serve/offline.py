"""JSON lines in, JSON lines out, on a pool of two engines: `python examples/ray_serve/offline.py IN.jsonl OUT`.

A line has an `id` and a `prompt`, and may have fields of `Sampling`. Started again, it computes what is not in OUT yet.
"""

from __future__ import annotations

import sys

from paged_kv.engine import Sampling
from paged_kv.ray import generate


def main() -> None:
    source, output = sys.argv[1:]
    done = generate(source, "demo", output, sampling=Sampling(max_tokens=32, temperature=0.8), engines=2)
    print(f"{done.rows} rows computed, {done.failed} of them failed, {done.found} were there")


if __name__ == "__main__":
    main()
