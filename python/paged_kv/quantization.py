"""FlashInfer's module of this name: `paged_kv.flashinfer.quantization`."""

from paged_kv.flashinfer.quantization import *  # noqa: F403
from paged_kv.flashinfer.quantization import __all__ as __all__
