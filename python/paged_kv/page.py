"""FlashInfer's module of this name: `paged_kv.flashinfer.page`."""

from paged_kv.flashinfer.page import *  # noqa: F403
from paged_kv.flashinfer.page import __all__ as __all__
