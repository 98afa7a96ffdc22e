"""Known prefixes that outlive the process without being asked to: each full page is a file of a folder.

A page is known by a chain of SHA-256: of the model's digest, what computed it, the kind of page and the namespace, then
of the tokens of each page. The name of a page's file is the chain's digest with the page's own tokens; the file has the
format of `page_file`, and says in its metadata the digest before it. A reader compares all of that and the tokens
themselves, and the SHA-256 of the content, before a page of the model is written. So a file that is damaged, cut short,
renamed or of another model is as if it were missing. It tells damage, not malice: the folder is the user's alone.

The state of a hybrid model at the end of a page is a file beside the page's, with the same name but for its ending: a
prompt begins where both are there. So is the page of the layers with windows, where these have their own: a prompt
begins where those are there that its first token to compute sees.

Pages are written behind. A step copies a new page's bits into a queue, which has a limit; a thread writes them and ends
when the queue is empty, so a process that ends waits for what is queued. What the queue has no place for is offered
again with the next page of the same sample. Pages are read inside a step, when a sample gets its pages.

The files of all processes are within the limit at any time. A writer holds the lock of the folder, removes the
pages used least recently until the new one fits, writes it under another name, and renames it. A process that is killed
leaves at most that other name, for which room had been made; the next one removes it. Times of use are those of the
files: a sample that ends sets them for its whole chain, the last page oldest, so that chains are shortened from their
ends. Nothing is synced to the disk: what a crash of the machine tears, the SHA-256 tells.

Whatever the disk refuses turns the tier off for this process, with one `RuntimeWarning`; requests go on without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import integer, shown
from paged_kv.engine.page_file import Bits, BitsKind, PagedModel, metadata_of, pack, page_bits, state_bits, unpack
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from paged_kv.files import is_own
from paged_kv.options import NO_PAGE
from paged_kv.pool import EvictionOrder

QUEUE_BYTES = 1 << 28
"""The most bytes of pages that wait to be written: they are copies."""
LOCK_SECONDS = 5.0
"""The seconds that a writer waits for another process; then what is queued is dropped."""
_PAGE, _STATE, _WINDOW = "page", "state", "window"
"""Kinds of files, and the endings of their names."""
_NAME = re.compile(rf"[0-9a-f]{{64}}\.({_PAGE}|{_STATE}|{_WINDOW})")
_LOCK = "lock"
_UNFINISHED = "unfinished"
_OWNER_BYTES = 32
_OPEN = getattr(os, "O_CLOEXEC", 0) | os.O_NOFOLLOW | os.O_NONBLOCK
_PLAIN = (str, bytes, int, bool, type(None))


@dataclass(frozen=True)
class DiskTier:
    """The folder in which an engine keeps full pages of prefixes, so that a restarted one finds them.

    Raises:
        ContractTypeError, ContractError: `folder` is no path; `bytes` is no positive integer.
    """

    folder: Path | str
    """Made, for this user alone, where it is missing. Engines, models and processes may share it."""
    bytes: int
    """The most that all files in it may have together."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not isinstance(os.fspath(self.folder), str):
            raise ContractTypeError(f"folder: expected a path, got {shown(self.folder)}")
        if not os.fspath(self.folder) or "\0" in os.fspath(self.folder):
            raise ContractError(f"folder: expected the path of a folder, got {shown(self.folder)}")
        object.__setattr__(self, "bytes", integer("bytes", self.bytes, 1))

    def check(self) -> None:
        """Makes the folder where it is missing; one that cannot be made turns the tier off later.

        Raises:
            ContractError: it is another user's, others can write to it, or it is no folder.
        """
        with suppress(OSError):
            os.close(_open_folder(Path(self.folder)))


class _File(NamedTuple):
    """A page or a state to be written."""

    name: str
    ending: str
    before: bytes
    """The digest of the chain before its page."""
    tokens: npt.NDArray[np.int64]
    bits: Bits


class _Used(NamedTuple):
    """The files of pages and states that a sample had."""

    names: list[str]


class DiskPages:
    """The pages of one model in a folder. One thread at a time reads and offers; another one, its own, writes.

    Args:
        tier: The folder and its limit.
        model: Whose pages they are.

    Raises:
        ContractError: the folder is another user's, or others can write to it; its place is taken by something else; a
            single page is larger than the limit.
    """

    def __init__(self, tier: DiskTier, model: PagedModel) -> None:
        self._path, self._limit, self._model = Path(tier.folder), tier.bytes, model
        self._metadata = metadata_of(model) | {"kernels": model.kernels}
        self._kinds: dict[str, BitsKind] = {_PAGE: page_bits(model)}
        if model.num_states:
            self._kinds[_STATE] = state_bits(model)
        if model.num_window_pages:
            self._kinds[_WINDOW] = page_bits(model, windows=True)
        no_tokens = np.zeros(model.page_size, np.int64)
        self._file_bytes = {
            ending: len(pack(no_tokens, np.zeros((1, *kind.shape), kind.dtype), self._metadata_of(bytes(32), ending)))
            for ending, kind in self._kinds.items()
        }
        self._most_queued = {ending: max(1, QUEUE_BYTES // size) for ending, size in self._file_bytes.items()}
        for ending, size in self._file_bytes.items():
            if size + _OWNER_BYTES > self._limit:
                raise ContractError(f"bytes: a {ending}'s file has {size} bytes, the limit is {self._limit}")
        self._own = secrets.token_hex(_OWNER_BYTES // 2).encode()
        self._sizes: dict[str, int] = {}  # the files of the folder and their bytes; true until another process writes
        self._bytes = 0  # of all of them
        self._order: EvictionOrder[str] = EvictionOrder()
        self._missing: set[str] = set()  # those of them that a reader missed, or removed
        self._queue: SimpleQueue[_File | _Used] = SimpleQueue()
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._folder = -1
        self.off = False
        """True if the disk has failed: nothing is read or written any more."""
        try:
            self._folder = _open_folder(self._path)
        except OSError as error:
            self._fail(error)
        else:
            self._wake()  # looks at what is there

    def __del__(self) -> None:
        if getattr(self, "_folder", -1) >= 0:
            with suppress(OSError):
                os.close(self._folder)

    def root(self, namespace: Hashable) -> bytes | None:
        """Return the digest that the chains of a namespace begin with; None where it has no name that another process
        would know.

        Names are None, texts, bytes, numbers and tuples of them; nothing of any other object is called.
        """
        parts = namespace if type(namespace) is tuple else (namespace,)
        if any(type(part) not in _PLAIN for part in parts):
            return None
        try:
            name = repr(namespace)
        except ValueError:  # a number of thousands of digits
            return None
        return hashlib.sha256(json.dumps([self._metadata, name], sort_keys=True).encode()).digest()

    def grow(self, chain: list[bytes], tokens: Sequence[int], count: int) -> None:
        """Appends to a chain, at first a root alone, until it has the digests of the first `count` pages of tokens."""
        for at in range(len(chain) - 1, count):
            chain.append(hashlib.sha256(chain[at] + self._tokens(tokens, at).tobytes()).digest())

    def restore(self, chain: Sequence[bytes], tokens: Sequence[int], first: int, pages: Sequence[int]) -> int:
        """Reads pages `first` on of a chain into pages of the model, up to one that is missing.

        Args:
            chain: The digests that `grow` made.
            tokens: Those of the chain.
            first: The page of the chain that goes to `pages[0]`.
            pages: The pages of the model, in use by no request.

        Returns:
            How many were written; the others are as before.
        """
        for at, page in enumerate(pages, first):
            bits = self._read(chain, tokens, at, _PAGE)
            if bits is None:
                self._miss(chain[at + 1 :], _PAGE)
                return at - first
            self._model.write_pages([page], bits)
        return len(pages)

    def restore_with_state(
        self, chain: Sequence[bytes], tokens: Sequence[int], first: int, pages: Sequence[int], slot: int
    ) -> int:
        """Reads pages as `restore` does, up to the last one whose state is there too, and this into a slot.

        Returns how many pages were read; 0 where any of them is missing.
        """
        at = first + len(pages)
        while at > first and not self._has(_name(chain[at], _STATE)):
            at -= 1
        if self.off or at == first or self.restore(chain, tokens, first, pages[: at - first]) < at - first:
            return 0
        bits = self._read(chain, tokens, at - 1, _STATE)
        if bits is None:
            self._miss(chain[at : at + 1], _STATE)
            return 0
        self._model.write_states([slot], bits)
        return at - first

    def restore_with_windows(
        self,
        chain: Sequence[bytes],
        tokens: Sequence[int],
        first: int,
        pages: Sequence[int],
        seen: Callable[[int], range],
        take: Callable[[int], Mapping[int, int]],
    ) -> int:
        """Reads pages as `restore` does, up to the last one after which the pages of windows that a token sees are
        there too, and these.

        Args:
            seen: The places in the chain that a token after so many pages sees; those before `first` are in the model.
            take: Gives pages of windows, by their places, for those from `first` on that such a token sees.

        Returns how many pages were read; 0 where any of them is missing.
        """
        at = first + len(pages)
        for place in reversed(range(first, at)):
            if place in seen(at) and not self._has(_name(chain[place + 1], _WINDOW)):
                at = place
        if self.off or at == first or self.restore(chain, tokens, first, pages[: at - first]) < at - first:
            return 0
        window_bits = {}
        for place in seen(at):
            if place >= first:
                bits = self._read(chain, tokens, place, _WINDOW)
                if bits is None:
                    self._miss(chain[place + 1 : place + 2], _WINDOW)
                    return 0
                window_bits[place] = bits
        for place, page in take(at).items():
            self._model.write_pages([page], window_bits[place], windows=True)
        return at - first

    def offer(
        self,
        chain: Sequence[bytes],
        tokens: Sequence[int],
        first: int,
        pages: Sequence[int],
        *,
        windows: bool = False,
    ) -> int:
        """Queues pages `first` on of a chain that the folder lacks, or pages of windows, as copies. Arguments as of
        `restore`; those that are `NO_PAGE` are left out.

        Returns the first page of the chain that there was no place for, else the one after the last.
        """
        at, end, ending = first, first + len(pages), _WINDOW if windows else _PAGE
        while at < end and not self.off:
            name, page = _name(chain[at + 1], ending), pages[at - first]
            if page != NO_PAGE and (name not in self._sizes or name in self._missing):
                if self._queue.qsize() >= self._most_queued[ending]:
                    break
                bits = self._model.read_pages([page], windows=windows)
                self._queue.put(_File(name, ending, chain[at], self._tokens(tokens, at), bits))
            at += 1
        if not self._queue.empty():
            self._wake()
        return at

    def offer_state(self, chain: Sequence[bytes], tokens: Sequence[int], count: int, slot: int) -> None:
        """Queues the state after the first `count` pages of a chain, which is in a slot, where the folder lacks it."""
        name = _name(chain[count], _STATE)
        is_there = name in self._sizes and name not in self._missing
        if not is_there and not self.off and self._queue.qsize() < self._most_queued[_STATE]:
            bits = self._model.read_states([slot])
            self._queue.put(_File(name, _STATE, chain[count - 1], self._tokens(tokens, count - 1), bits))
            self._wake()

    def used(self, chain: Sequence[bytes]) -> None:
        """Says that a sample had these pages until now."""
        if len(chain) > 1 and not self.off and self._queue.qsize() < 2 * self._most_queued[_PAGE]:
            self._queue.put(_Used([_name(digest, ending) for digest in chain[1:] for ending in self._kinds]))
            self._wake()

    def flush(self) -> None:
        """Waits until all that is queued is written, or the tier is off."""
        while True:
            with self._lock:
                worker = self._worker
            if worker is None or not worker.is_alive():  # as after a fork
                return
            worker.join()

    def _metadata_of(self, before: bytes, ending: str) -> dict[str, str]:
        return self._metadata | {"after": before.hex()} | ({} if ending == _PAGE else {"kind": ending})

    def _miss(self, chain: Sequence[bytes], ending: str) -> None:
        """Notes that the first file of a chain is not there; if it was, those after it may be gone too."""
        if _name(chain[0], ending) in self._sizes:
            names = (_name(digest, ending) for digest in chain)
            self._missing.update(name for name in names if not self._has(name))

    def _tokens(self, tokens: Sequence[int], page: int) -> npt.NDArray[np.int64]:
        """Those of one page."""
        size = self._model.page_size
        return np.array(tokens[page * size : (page + 1) * size], np.int64)

    def _read(self, chain: Sequence[bytes], of_chain: Sequence[int], at: int, ending: str) -> Bits | None:
        """The bits of page `at` of a chain or of the state after it, `[1, ...]`; None where it is not there as it
        should be.
        """
        if self.off:
            return None
        name, before, tokens = _name(chain[at + 1], ending), chain[at], self._tokens(of_chain, at)
        size = self._file_bytes[ending]
        try:
            number = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if _is_taken(self._folder, name):  # by a symbolic link, a socket
                return None
            self._fail(error)
            return None
        try:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or not is_own(status):
                os.close(number)
                return None
            with open(number, "rb") as file:
                data = file.read(size + 1) if status.st_size == size else b""
            metadata = self._metadata_of(before, ending)
            stored, bits = unpack(name, data, self._kinds[ending], self._model.page_size, metadata)
            if (stored == tokens).all():
                return bits
        except CheckpointError:
            pass
        except OSError as error:
            self._fail(error)
            return None
        with suppress(OSError):  # it is damaged: as if it were missing, and written again
            os.unlink(name, dir_fd=self._folder)
        return None

    def _wake(self) -> None:
        """Sees to it that a thread carries out what is queued."""
        with self._lock:
            if self.off or (self._worker is not None and self._worker.is_alive()):
                return
            # One whose start is interrupted and that runs all the same excludes a second one by the folder's lock.
            self._worker = threading.Thread(target=self._work, name="paged-kv disk tier")
            try:
                self._worker.start()
            except RuntimeError as error:
                self._fail(error)  # no more threads, or the interpreter is about to end

    def _work(self) -> None:
        while True:
            try:
                self._carry_out()
            except Exception as error:
                self._fail(error)
            with self._lock:
                if self.off or self._queue.empty():
                    self._worker = None
                    return

    def _carry_out(self) -> None:
        """All that is queued."""
        with self._locked() as mine:
            if mine:
                self._forget_missing()
                self._make_room(0)
            while True:
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    return
                if not mine:
                    continue  # drop it
                if isinstance(item, _Used):
                    self._touch(item.names)
                elif item.name not in self._sizes:
                    self._write(item)

    def _has(self, name: str) -> bool:
        return os.access(name, os.F_OK, dir_fd=self._folder, follow_symlinks=False)

    def _forget_missing(self) -> None:
        """Looks for the files that readers missed."""
        for name in list(self._missing):
            if not self._has(name):
                self._forget(name)
            self._missing.discard(name)

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)
        self._order.forget([name])

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Holds the folder's lock and knows what is in it; False where another process does not let go."""
        number = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder)
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OSError(f"{_LOCK} is no plain file")
            end = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        yield False
                        return
                    time.sleep(0.002)
            if os.pread(number, _OWNER_BYTES + 1, 0) != self._own:  # before anything is changed: this process may end
                self._scan()
                os.ftruncate(number, 0)
                _write_all(number, self._own)
            yield True
        finally:
            os.close(number)

    def _scan(self) -> None:
        """Finds out what is there. Who has the lock removes what a writer that was killed left."""
        with suppress(FileNotFoundError):
            os.unlink(_UNFINISHED, dir_fd=self._folder)
        sizes, times = {}, {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # removed by a reader
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and is_own(status):
                            sizes[entry.name], times[entry.name] = status.st_size, status.st_mtime_ns
        self._sizes, self._bytes, self._order = sizes, sum(sizes.values()), EvictionOrder()
        self._order.use(sorted(sizes, key=times.__getitem__, reverse=True))

    def _make_room(self, size: int) -> None:
        """Removes the files that are evicted first until `size` more bytes fit."""
        while self._sizes and self._bytes + size + _OWNER_BYTES > self._limit:
            (name,) = self._order.first(1)
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
            self._forget(name)

    def _write(self, file: _File) -> None:
        """Writes a file, whole or not at all."""
        data, name = pack(file.tokens, file.bits, self._metadata_of(file.before, file.ending)), file.name
        self._make_room(len(data))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
            number = os.open(_UNFINISHED, flags, 0o600, dir_fd=self._folder)
            try:
                _write_all(number, data)
            finally:
                os.close(number)
            os.rename(_UNFINISHED, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(_UNFINISHED, dir_fd=self._folder)
            if isinstance(error, IsADirectoryError):  # somebody's folder has the page's name
                return
            raise
        self._sizes[name] = len(data)
        self._bytes += len(data)
        self._order.use([name])

    def _touch(self, names: Sequence[str]) -> None:
        """Says, to this process and by the files' times to others, that a chain was used until now."""
        now = time.time_ns()
        here = [name for name in names if name in self._sizes]
        for depth, name in enumerate(here):
            used = now - 1000 * depth
            with suppress(FileNotFoundError):
                os.utime(name, ns=(used, used), dir_fd=self._folder, follow_symlinks=False)
        self._order.use(here)

    def _fail(self, error: BaseException) -> None:
        """Turns the tier off."""
        if self.off:
            return
        self.off = True
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        warnings.warn(f"the disk tier in {self._path} is off: {error}", RuntimeWarning, 2)


def _open_folder(path: Path) -> int:
    """A descriptor of the folder, made where it is missing.

    Raises:
        OSError: it cannot be made or opened.
        ContractError: it is not the user's own, or is no folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # looked at below
        path.mkdir(mode=0o700)
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | getattr(os, "O_CLOEXEC", 0))
    except NotADirectoryError:
        raise ContractError(f"folder: {path} is no folder") from None
    status = os.fstat(number)
    if is_own(status):
        return number
    os.close(number)
    raise ContractError(
        f"folder: {path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}: it must be a folder of"
        f" user {os.geteuid()} that no other user can write to, or texts could be changed by them"
    )


def _is_taken(folder: int, name: str) -> bool:
    """Return whether something that is no plain file has a page's name."""
    with suppress(OSError):
        return not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]


def _name(digest: bytes, ending: str) -> str:
    return f"{digest.hex()}.{ending}"
