"""FlashInfer's module of this name: `paged_kv.flashinfer.cascade`."""

from paged_kv.flashinfer.cascade import *  # noqa: F403
from paged_kv.flashinfer.cascade import __all__ as __all__
