"""FlashInfer's module of this name: `paged_kv.flashinfer.mla`."""

from paged_kv.flashinfer.mla import *  # noqa: F403
from paged_kv.flashinfer.mla import __all__ as __all__
