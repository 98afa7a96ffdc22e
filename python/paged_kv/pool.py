"""The page pool: which request owns which pages, in which order. Pure Python: it handles page ids, never data."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from paged_kv.arguments import integer
from paged_kv.errors import IntegrityError, PoolExhausted, RequestError


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps partly: `ceil(num_tokens / page_size)`.

    Raises:
        ContractTypeError: an argument is not an integer.
        ContractError: `num_tokens` is negative or `page_size` is below 1.
    """
    return -(-integer("num_tokens", num_tokens, 0) // integer("page_size", page_size, 1))


class PagePool:
    """`num_pages` pages of `page_size` token slots each, handed to requests and taken back.

    A request's length counts the tokens it has slots for: token j lives in page `pages(request_id)[j // page_size]`,
    slot `j % page_size`. Every operation does all it says, or raises and changes nothing. Taking or returning a page
    is O(1), and the page returned last is taken first. Request ids are any hashable values. Not thread-safe.

    Raises:
        ContractTypeError: an argument is not an integer.
        ContractError: `num_pages` is negative or `page_size` is below 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = integer("num_pages", num_pages, 0)
        self._page_size = integer("page_size", page_size, 1)
        self._free = list(reversed(range(self._num_pages)))  # a stack: page 0 is on top
        self._requests: dict[Hashable, _Request] = {}

    @property
    def num_pages(self) -> int:
        """Pages in the pool, free and used."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Token slots in a page."""
        return self._page_size

    @property
    def num_free(self) -> int:
        """Pages no request owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages requests own."""
        return self._num_pages - len(self._free)

    def start(self, request_id: Hashable, num_tokens: int = 0) -> tuple[int, ...]:
        """Adds a request with a prompt of `num_tokens` tokens and returns its pages, in token order.

        Raises:
            RequestError: the request has been started and not freed.
            PoolExhausted: the prompt needs more pages than are free.
            ContractTypeError, ContractError: `num_tokens` is not an integer, or negative.
        """
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} has already been started")
        request = _Request()
        added = self._grow(request_id, request, num_tokens)
        self._requests[request_id] = request
        return added

    def reserve(self, request_id: Hashable, num_tokens: int = 1) -> tuple[int, ...]:
        """Lengthens a request by `num_tokens` tokens and returns the pages this added, in token order; often none.

        Raises:
            RequestError: the request is unknown.
            PoolExhausted: the tokens need more new pages than are free.
            ContractTypeError, ContractError: `num_tokens` is not an integer, or negative.
        """
        return self._grow(request_id, self._find(request_id), num_tokens)

    def free(self, request_id: Hashable) -> None:
        """Forgets a request and returns its pages to the pool, its first page on top of the free list.

        Raises:
            RequestError: the request is unknown, or was freed before.
        """
        request = self._find(request_id)
        del self._requests[request_id]
        self._free.extend(reversed(request.pages))

    def pages(self, request_id: Hashable) -> tuple[int, ...]:
        """The request's pages in token order: `ceil(length / page_size)` page ids.

        Raises:
            RequestError: the request is unknown.
        """
        return tuple(self._find(request_id).pages)

    def length(self, request_id: Hashable) -> int:
        """The tokens the request has slots for.

        Raises:
            RequestError: the request is unknown.
        """
        return self._find(request_id).length

    def check_integrity(self) -> None:
        """Checks the allocator state, in O(num_pages): each page has one holder, each request has the pages it needs.

        The holders are the free list and the requests, so `num_free + num_used == num_pages` is checked as well.

        Raises:
            IntegrityError: names the first violation found.
        """
        holder_of: dict[int, str] = {}
        for holder, pages in self._holders():
            for page in pages:
                if type(page) is not int or not 0 <= page < self._num_pages:
                    raise IntegrityError(f"{holder} holds page {page!r}, not one of the pool's {self._num_pages} pages")
                if page in holder_of:
                    raise IntegrityError(f"page {page} is held twice: by {holder_of[page]} and by {holder}")
                holder_of[page] = holder
        for page in range(self._num_pages):
            if page not in holder_of:
                raise IntegrityError(f"page {page} is leaked: neither free nor held by a request")
        for request_id, request in self._requests.items():
            if request.length < 0:
                raise IntegrityError(f"request {request_id!r} has length {request.length}")
            held, needed = len(request.pages), pages_needed(request.length, self._page_size)
            if held != needed:
                raise IntegrityError(
                    f"request {request_id!r} of length {request.length} holds {held} pages, not {needed}"
                )

    def _holders(self) -> Iterator[tuple[str, list[int]]]:
        """Everything that can hold a page, with a name for messages."""
        yield "the free list", self._free
        for request_id, request in self._requests.items():
            yield f"request {request_id!r}", request.pages

    def _find(self, request_id: Hashable) -> "_Request":
        """The request's record, or RequestError."""
        try:
            return self._requests[request_id]
        except KeyError:
            raise RequestError(f"request {request_id!r} is unknown: never started, or freed") from None

    def _grow(self, request_id: Hashable, request: "_Request", num_tokens: int) -> tuple[int, ...]:
        """Lengthens `request` in place, all or nothing; returns the pages added."""
        length = request.length + integer(f"request {request_id!r}: num_tokens", num_tokens, 0)
        needed = pages_needed(length, self._page_size) - len(request.pages)
        if needed > self.num_free:
            raise PoolExhausted(
                f"request {request_id!r}: num_tokens={num_tokens} needs {needed} more pages,"
                f" {self.num_free} of {self._num_pages} are free"
            )
        added = tuple(self._free.pop() for _ in range(needed))
        request.pages.extend(added)
        request.length = length
        return added


@dataclass
class _Request:
    """The allocator state of one request: its length in tokens, and its pages in token order."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
