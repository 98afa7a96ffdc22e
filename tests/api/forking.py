"""A program that runs attention in child processes: `python forking.py WHEN HOW...`, for `test_forks.py`.

WHEN is what the parent has done before: "fresh" (imported the package), "planned", "ran", "operated" (a torch operator
on two threads of OpenMP), or "started" (MAX, as a graph does). Each HOW starts a child, and has a line: what its
run gave, its sum or the name and the text of its error.
"""

import multiprocessing
import os
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paged_kv import PagePool
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper
from paged_kv.errors import PagedKVError
from paged_kv.runtime.session import default_runtime
from paged_kv.torch import paged_attention


def planned() -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    table = [np.array(values, np.int32) for values in ([0, 1], [2], [16])]
    wrapper.plan(*table, 2, 1, 64, 16, q_data_type="float32")
    return wrapper


def attend(wrapper: BatchDecodeWithPagedKVCacheWrapper | None = None) -> str:
    """Return what `run` over ones gives: 2 heads of 64 ones."""
    q, pages = np.ones((1, 2, 64), np.float32), np.ones((4, 2, 16, 1, 64), np.float32)
    try:
        return str((wrapper or planned()).run(q, pages).sum())
    except PagedKVError as error:
        return f"{type(error).__name__}: {error}"


def operate() -> str:
    """128 times what the torch operator gives for ones, enough of them for two threads.

    Arrays are NumPy's: a torch op of that size would itself wait for a thread that a child has not.
    """
    q, k, v = (torch.from_numpy(np.ones(shape, np.float32)) for shape in ((1, 32, 64), *[(64, 16, 16, 64)] * 2))
    table, lengths = torch.arange(64, dtype=torch.int32)[None], torch.tensor([1024])
    try:
        return str(128 * float(paged_attention(q, k, v, table, lengths)[0].numpy().mean()))
    except PagedKVError as error:
        return f"{type(error).__name__}: {error}"


def pure_python(wrapper: BatchDecodeWithPagedKVCacheWrapper | None) -> str:
    """Return what needs no thread of MAX's: pages, plans, and arrays."""
    pool = PagePool(8, 16)
    pool.start("a", 40)
    planned()
    return f"{len(pool.pages('a'))} pages, {wrapper is None or 'requests of up to 16' in repr(wrapper)}"


class Ones(Dataset[str]):
    """Each sample is an attention."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> str:
        return attend()


def start() -> str:
    """Starts a session of MAX, as a graph needs one."""
    try:
        return type(default_runtime().session).__name__
    except PagedKVError as error:
        return f"{type(error).__name__}: {error}"


def in_child(how: str, wrapper: BatchDecodeWithPagedKVCacheWrapper | None) -> str:
    if how == "loader":
        return "; ".join(dict.fromkeys(sample for batch in DataLoader(Ones(), num_workers=2) for sample in batch))
    if how in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            return pool.apply(attend)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        found = {"pure": lambda: pure_python(wrapper), "operator": operate, "session": start}.get(
            how, lambda: attend(wrapper)
        )()
        os.write(writer, found.encode())
        if how == "exit":
            sys.exit(0)  # with all that Python and MAX do at the end of a process
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read()
    status = os.waitpid(child, 0)[1]
    return found if not status else f"{found} status {status}"


def main(when: str, *hows: str) -> None:
    torch.set_num_threads(2)
    wrapper: Any = None
    if when == "operated":
        assert operate() == "128.0"
    elif when == "started":
        start()
    elif when != "fresh":
        wrapper = planned()
    if when == "ran":
        assert attend(wrapper) == "128.0"
    for how in hows:
        print(in_child(how, wrapper), flush=True)  # before the next child has a copy of what waits to be written


if __name__ == "__main__":
    main(*sys.argv[1:])
