"""FlashInfer's module of this name: `paged_kv.flashinfer.gdn_decode`."""

from paged_kv.flashinfer.gdn_decode import *  # noqa: F403
from paged_kv.flashinfer.gdn_decode import __all__ as __all__
