"""Run the ops: libraries of kernels on the CPU, and on a GPU a session of MAX with a graph for each variant.

On a GPU a cold compile costs some 25 s for one graph and little more for a few, so a variant that is missing is
compiled together with its bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Module

from paged_kv.errors import ToolchainError
from paged_kv.runtime import host_calls
from paged_kv.runtime.announce import announce
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.cpu_target import apply_cpu_target
from paged_kv.runtime.forks import check_not_forked
from paged_kv.runtime.variants import Variant


class Runtime:
    """The ops on the CPU, and MAX's session there, which starts where a graph is loaded. Threads may share one.

    Args:
        sources: The folder of the Mojo sources that kernels are compiled from; the package's where None.
    """

    device = DeviceRef.CPU()
    """As graphs name it."""
    architecture = ""
    """The name of a GPU, its number included, which is part of a graph."""

    def __init__(self, sources: Path | None = None) -> None:
        self._sources = sources
        self._session: InferenceSession | None = None

    @cached_property
    def driver_device(self) -> Device:
        """The device, as the driver has it; with it MAX's threads start.

        Raises:
            ToolchainError: this process was forked off one in which MAX ran.
        """
        check_not_forked()
        apply_cpu_target()
        return CPU()

    @property
    def session(self) -> InferenceSession:
        """MAX's.

        Raises:
            ToolchainError: as `driver_device`.
        """
        check_not_forked()
        if self._session is None:
            self._session = InferenceSession(devices=[self.driver_device])
        return self._session

    def load(self, variants: Iterable[Variant]) -> None:
        """Loads the libraries of some variants, or builds them.

        Raises:
            ToolchainError: as `host_calls.load_variants`.
        """
        host_calls.load_variants(variants)

    def execute(self, variant: Variant, *inputs: Any) -> list[Any]:
        """Runs one variant; see `Variant.build` for the inputs. Raises as `host_calls.execute`."""
        return host_calls.execute(variant, *inputs, sources=self._sources)


class GraphRuntime(Runtime):
    """The ops in graphs of a MAX session, one a variant, which is how a GPU runs them."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[Variant, Model] = {}
        self._loading = Lock()

    def load(self, variants: Iterable[Variant]) -> None:
        """Loads those of `wanted` that are missing, compiled together where the disk has them not.

        Raises:
            ToolchainError: as `load_graphs`.
        """
        check_not_forked()  # first: the parent's lock may be held for ever here
        with self._loading:
            self._load({variant for variant in variants if variant not in self._models})

    def _load(self, variants: set[Variant]) -> None:
        missing = sorted(variants, key=lambda variant: variant.name)
        if not missing:
            return
        by_name = {variant.name: variant for variant in missing}

        def build(module: Module, names: Sequence[str]) -> None:
            for name in names:
                by_name[name].build(module, self.device)

        listed = ", ".join(str(variant) for variant in missing)
        models = load_graphs(
            self.session,
            {name: variant.key(self.architecture) for name, variant in by_name.items()},
            build,
            on_compile=lambda: announce(f"paged-kv: compiling {listed}: about 25 s, once on this machine"),
        )
        self._models.update({variant: models[variant.name] for variant in missing})

    def execute(self, variant: Variant, *inputs: Any) -> list[Any]:
        """Runs one variant, loading its bundle first where needed; arrays of the host go in as they are."""
        check_not_forked()
        model = self._models.get(variant)
        if model is None:
            self.load(variant.bundle())
            model = self._models[variant]
        return model.execute(*(Buffer.from_dlpack(each) if isinstance(each, np.ndarray) else each for each in inputs))


class GpuRuntime(GraphRuntime):
    """A MAX session on a GPU.

    Args:
        gpu: The number of the GPU.

    Raises:
        ToolchainError: MAX does not see that GPU, or this process was forked off one in which MAX ran.
    """

    def __init__(self, gpu: int) -> None:
        super().__init__()
        check_not_forked()
        apply_cpu_target()
        try:
            accelerator = Accelerator(gpu)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ToolchainError(f"GPU {gpu}: MAX finds no such device ({reason})") from error
        self.driver_device, self.device = accelerator, DeviceRef.GPU(gpu)
        self.architecture = f"{accelerator.api} {accelerator.architecture_name} {gpu}"
        self._session = InferenceSession(devices=[CPU(), accelerator])


_RUNTIMES: dict[int | None, Runtime] = {}
_MAKING = Lock()


def runtime_on(gpu: int | None) -> Runtime:
    """The one runtime of this process on a GPU, or on the CPU.

    Raises:
        ToolchainError: as `GpuRuntime`.
    """
    runtime = _RUNTIMES.get(gpu)
    if runtime is None:
        with _MAKING:
            runtime = _RUNTIMES.get(gpu) or (Runtime() if gpu is None else GpuRuntime(gpu))
            _RUNTIMES[gpu] = runtime
    return runtime


def default_runtime() -> Runtime:
    """The one runtime of this process on the CPU."""
    return runtime_on(None)
