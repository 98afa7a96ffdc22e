"""Launches of kernels, as the driver lists them on a GPU; without one the list is that of a stand-in."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from max.driver import LaunchTraceEntry

from paged_kv.runtime import kernel_launches
from paged_kv.runtime.kernel_launches import Launch, kernel_label, launched

KINDS = LaunchTraceEntry.OperationKind


def entry(name: str, kind: KINDS = KINDS.KERNEL_LAUNCH) -> SimpleNamespace:
    sizes = {
        f"{what}_{axis}": size for what in ("grid", "block") for axis, size in zip("xyz", (160, 2, 1), strict=True)
    }
    return SimpleNamespace(name=name, kind=kind, shared_mem_bytes=99, stream_index=3, **sizes)


@pytest.fixture
def entries(monkeypatch):
    """The launches that the driver recorded, which it says at the end."""
    recorded: list[SimpleNamespace] = []

    @contextmanager
    def launch_trace():
        given: list[SimpleNamespace] = []
        yield given
        given += recorded

    monkeypatch.setattr(kernel_launches, "launch_trace", launch_trace)
    return recorded


def test_kernels_are_named_and_copies_left_out(entries):
    names = ["mojo_ops_attention_gpu_schedu6A6A_1f", "mojo_ops_attention_gpu_hopper6A6A_2", "fill_kernel"]
    entries += [entry("cuMemcpyHtoD", KINDS.MEMCPY), *map(entry, names), entry("cuMemsetD8", KINDS.MEMSET)]
    with launched() as found:
        assert found == []
    assert [launch.kernel for launch in found] == ["gpu/schedule", "gpu/hopper", "fill_kernel"]
    assert set(found) == {Launch(launch.kernel, (160, 2, 1), (160, 2, 1), 99, 3) for launch in found}


def test_nothing_is_launched_where_there_is_no_gpu():
    """By the driver itself."""
    with launched() as found:
        pass
    assert found == []


@pytest.mark.parametrize("name", ["generic", "mojo_ops_transfer_gpu_append6A_3", "attention_gpu_hopper"])
def test_another_kernel_keeps_its_name(name):
    assert kernel_label(name) == name
