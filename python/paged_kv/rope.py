"""FlashInfer's module of this name: `paged_kv.flashinfer.rope`."""

from paged_kv.flashinfer.rope import *  # noqa: F403
from paged_kv.flashinfer.rope import __all__ as __all__
