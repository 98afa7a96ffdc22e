"""FlashInfer's module of this name: `paged_kv.flashinfer.prefill`."""

from paged_kv.flashinfer.prefill import *  # noqa: F403
from paged_kv.flashinfer.prefill import __all__ as __all__
