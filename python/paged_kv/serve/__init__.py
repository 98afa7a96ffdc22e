"""Model families for MAX Serve, with this package's kernels: `max serve --custom-architectures paged_kv.serve ...`.

MAX brings the scheduler, the pages, the prefix cache and the OpenAI API; the graph of a step is the one that
`paged_kv.engine` runs. It needs the `serve` extra.
"""

from paged_kv.serve.architectures import ARCHITECTURES

__all__ = ["ARCHITECTURES"]
