"""A trace of pages: JSON lines, first what the pool is, then each event with its time in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_kv.arguments import printable
from paged_kv.errors import ContractError
from paged_kv.pool import PageEvent, PagePool

FORMAT = "paged-kv page events 1"


@contextmanager
def traced(pool: PagePool, path: Path | None) -> Iterator[None]:
    """Writes what happens to the pool's pages to a file until it leaves; nothing where there is none.

    Raises:
        ContractError: the file cannot be written.
    """
    if path is None:
        yield
        return
    try:
        with path.open("w") as file:
            head = {"format": FORMAT, "pages": pool.num_pages, "page_size": pool.page_size}
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
    except OSError as error:
        raise ContractError(f"--trace {printable(path)}: cannot be written: {error}") from None
