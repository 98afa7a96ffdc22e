"""A trace of pages: JSON lines, first what the pool is, then each event with its time in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from paged_kv.arguments import printable
from paged_kv.errors import ContractError
from paged_kv.files import write_regular
from paged_kv.pool import PageEvent, PagePool

FORMAT = "paged-kv page events 1"


@contextmanager
def output_file(option: str, path: Path | None, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any] | None]:
    """The empty file that an option names, opened before what takes long; None where there is no path.

    Raises:
        ContractError: it cannot be written, or is no regular file.
    """
    if path is None:
        yield None
        return
    try:
        file = write_regular(path, mode)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        raise _unwritten(option, path, error) from None
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            raise _unwritten(option, path, error) from None


@contextmanager
def traced(pool: PagePool, file: IO[str] | None, **details: Any) -> Iterator[None]:
    """Writes what happens to the pool's pages to a file of `output_file` until it leaves; to none where it is None.

    The first line has `details` of the pages too.
    """
    if file is None:
        yield
        return
    head = {"format": FORMAT, "pages": pool.num_pages, "page_size": pool.page_size, **details}
    file.write(json.dumps(head) + "\n")
    began = time.monotonic()

    def write(event: PageEvent) -> None:
        request = ".".join(map(str, event.request_id)) if isinstance(event.request_id, tuple) else None
        record = {
            "seconds": round(time.monotonic() - began, 6),
            "event": event.kind,
            "request": request,
            "pages": event.pages,
        }
        file.write(json.dumps(record) + "\n")

    pool.listen(write)
    try:
        yield
    finally:
        pool.unlisten(write)


def _unwritten(option: str, path: Path, error: Exception) -> ContractError:
    return ContractError(f"{option} {printable(path)}: cannot be written: {printable(error)}")
