"""Permission bits that count for root too: its rights to pass over them are taken from this thread for a while."""

import ctypes
import os
from contextlib import contextmanager

_VERSION = 0x20080522  # of the structures below
_PASS_OVER = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@contextmanager
def permissions_count():
    """For others than root they count anyway."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    try:
        sets[0].effective = before & ~_PASS_OVER
        assert libc.capset(ctypes.byref(header), sets) == 0
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0
