"""FlashInfer's module of this name: `paged_kv.flashinfer.gdn_prefill`."""

from paged_kv.flashinfer.gdn_prefill import *  # noqa: F403
from paged_kv.flashinfer.gdn_prefill import __all__ as __all__
