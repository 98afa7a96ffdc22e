"""FlashInfer's module of this name: `paged_kv.flashinfer.mamba`."""

from paged_kv.flashinfer.mamba import *  # noqa: F403
from paged_kv.flashinfer.mamba import __all__ as __all__
