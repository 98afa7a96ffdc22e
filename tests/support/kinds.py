"""The same data as an array of each library, and the bytes behind any of them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from paged_kv.arrays.host import as_numpy, like, sample_array, to_buffer

WRITABLE = ("numpy", "torch", "max")
PLACED = (*WRITABLE, "gpu")
"""With torch tensors for which the CPU stands in as a GPU: of tests in tests/api whose parameter is called `kind`."""
KINDS = (*WRITABLE, "jax")
# Every kind with every index dtype that it has: JAX has no 64 bits by default.
INDEX_KINDS = [
    (kind, dtype) for kind in KINDS for dtype in ("int32", "int64", "uint32") if (kind, dtype) != ("jax", "int64")
]


def make(kind: str, array: np.ndarray) -> Any:
    """A copy of `array` as an array of `kind`."""
    kind = library(kind)
    if kind == "jax":
        return jnp.array(array)
    fresh = np.array(array, order="C")
    return to_buffer(fresh) if kind == "max" else like(sample_array(kind), fresh)


def library(kind: str) -> str:
    """Whose arrays those of `kind` are."""
    return "torch" if kind == "gpu" else kind


def kind_of(array: Any) -> str:
    """The library whose array it is, as `make` calls it."""
    owner = type(array).__module__.partition(".")[0]
    return "jax" if owner == "jaxlib" else owner


def bytes_of(arguments: Any) -> list[bytes]:
    """The contents of every array among the arguments, pairs included; other arguments count for nothing."""
    if isinstance(arguments, tuple | list):
        return [found for argument in arguments for found in bytes_of(argument)]
    return [as_numpy(arguments, "array").tobytes()] if hasattr(arguments, "__dlpack__") else []
