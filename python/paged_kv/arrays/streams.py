"""The order of MAX's stream and torch's on one GPU.

No call waits for the device: MAX's stream is made to wait for torch's current one, and that for MAX's when the call was
enqueued. On the host nothing has to be ordered.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
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
        with self._both() as (of_max, of_torch):
            of_max.wait_stream(of_torch)
            try:
                yield
            finally:
                of_torch.wait_stream(of_max)

    def after_torch(self) -> None:
        """MAX's stream waits for torch's current one: for buffers that torch has just written."""
        if not self.device.is_host:
            with self._both() as (of_max, of_torch):
                of_max.wait_stream(of_torch)

    def before_torch(self) -> None:
        """The other way round: for buffers that torch is about to read."""
        if not self.device.is_host:
            with self._both() as (of_max, of_torch):
                of_torch.wait_stream(of_max)

    @contextmanager
    def _both(self) -> Iterator[tuple[Any, Any]]:
        torch = sys.modules["torch"]
        with torch.cuda.device(self.device.id):
            # MAX's stream may be the legacy default one, which has no handle.
            handle = self.device.default_queue.native_stream_handle
            of_max = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
            yield of_max, torch.cuda.current_stream()
