"""FlashInfer's module of this name: `paged_kv.flashinfer.decode`."""

from paged_kv.flashinfer.decode import *  # noqa: F403
from paged_kv.flashinfer.decode import __all__ as __all__
