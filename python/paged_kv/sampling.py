"""FlashInfer's module of this name: `paged_kv.flashinfer.sampling`."""

from paged_kv.flashinfer.sampling import *  # noqa: F403
from paged_kv.flashinfer.sampling import __all__ as __all__
