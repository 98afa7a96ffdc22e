"""Every error this package raises on purpose, one type for each thing a caller may want to tell apart.

A message is one line and names the argument, the request (where there is one) and the value that was refused.
"""


class PagedKVError(Exception):
    """Root of the package's errors: catches them all."""


class ContractError(PagedKVError, ValueError):
    """A value breaks the contract of the called function; nothing was written."""


class ContractTypeError(PagedKVError, TypeError):
    """An argument has a type or dtype that the called function does not take; nothing was written."""


class ShapeError(ContractError):
    """An array's rank or shape, or a head count, does not fit the other arguments."""


class PageTableError(ContractError):
    """A page table does not describe the cache: a page id, a position, an offset or a length is out of range."""


class RequestError(ContractError):
    """A request id is unknown, or was started twice."""


class PoolExhausted(ContractError):
    """Too few pages are free. Nothing was taken: free some request and ask again."""


class IntegrityError(ContractError):
    """The page pool's allocator state is inconsistent: a page was leaked, shared or counted wrongly."""


class CheckpointError(PagedKVError, ValueError):
    """A model checkpoint or its configuration cannot be used."""


class ToolchainError(PagedKVError, RuntimeError):
    """The compiler, driver or device that a call needs is missing or does not fit."""
