"""The choice of a process that a row of attention has the same bits whatever else is in its call."""

from __future__ import annotations

from paged_kv.arguments import shown
from paged_kv.errors import ContractTypeError
from paged_kv.options import CHOICES


def set_deterministic(deterministic: bool = True) -> None:
    """Gives each row of attention on the CPU the same bits whatever else is in its call, in this process.

    Say it before models are loaded and wrappers are planned. It changes what CPUs with AMX do for queries in bfloat16
    alone: matrix tiles, which take blocks of more than a few rows, add in another order than vectors. Elsewhere rows
    have the same bits as it is. GPUs do not follow it.

    Args:
        deterministic: False takes matrix tiles again.

    Raises:
        ContractTypeError: it is not a bool.
    """
    if not isinstance(deterministic, bool):
        raise ContractTypeError(f"deterministic: expected a bool, got {shown(deterministic)}")
    CHOICES.deterministic = deterministic
