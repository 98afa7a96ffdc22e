"""FlashInfer's module of this name: `paged_kv.flashinfer.attention`."""

from paged_kv.flashinfer.attention import *  # noqa: F403
from paged_kv.flashinfer.attention import __all__ as __all__
