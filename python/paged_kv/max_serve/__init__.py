"""Model families for MAX Serve, with this package's kernels: `max serve --custom-architectures paged_kv.max_serve ...`.

MAX brings the scheduler, the pages, the prefix cache, sampling and the OpenAI API; the graph of a step is the one that
`paged_kv.engine` runs. It needs the `max-serve` extra.
"""

from paged_kv.max_serve.architectures import ARCHITECTURES

__all__ = ["ARCHITECTURES"]
