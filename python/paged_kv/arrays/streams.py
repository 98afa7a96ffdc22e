"""The order of MAX's stream and torch's on one GPU.

No call waits for the device: MAX's stream is made to wait for torch's current one, and that for MAX's when the call was
enqueued. On the host nothing has to be ordered.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from max.driver import Device

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Streams:
    """MAX's stream on a device, and torch's current one there."""

    device: Device

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Work that is enqueued inside follows what torch's current stream holds, and precedes what comes after."""
        if self.device.is_host:
            yield
            return
        of_max, of_torch = self._both()
        of_max.wait_stream(of_torch)
        try:
            yield
        finally:
            of_torch.wait_stream(of_max)

    def after_torch(self) -> None:
        """MAX's stream waits for torch's current one: for buffers that torch has just written."""
        if not self.device.is_host:
            of_max, of_torch = self._both()
            of_max.wait_stream(of_torch)

    def before_torch(self) -> None:
        """The other way round: for buffers that torch is about to read."""
        if not self.device.is_host:
            of_max, of_torch = self._both()
            of_torch.wait_stream(of_max)

    def _both(self) -> tuple[Any, Any]:
        gpu = self.device.id
        of_max = _stream_of(self.device.default_queue.native_stream_handle, gpu)
        return of_max, sys.modules["torch"].cuda.current_stream(gpu)


@cache
def _stream_of(handle: int | None, gpu: int) -> Any:
    """A stream of MAX as torch knows it; the legacy default one has no handle."""
    cuda = sys.modules["torch"].cuda
    return cuda.ExternalStream(handle, gpu) if handle else cuda.default_stream(gpu)
