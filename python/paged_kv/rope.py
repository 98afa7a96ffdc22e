"""FlashInfer's module of this name: `paged_kv.flashinfer.rope` and `rope_float8`."""

from paged_kv.flashinfer import rope, rope_float8
from paged_kv.flashinfer.rope import *  # noqa: F403
from paged_kv.flashinfer.rope_float8 import *  # noqa: F403

__all__ = [*rope.__all__, *rope_float8.__all__]
