"""A MAX session and the variants loaded in it: load a family together, keep it, execute.

A cold compile costs some 25 s for one graph and little more for a few, so a variant that is missing is compiled
together with its family.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from threading import Lock

from max.driver import CPU, Accelerator, Buffer, Device
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Module

from paged_kv.errors import ToolchainError
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.cpu_target import apply_cpu_target
from paged_kv.runtime.first_execution import execute
from paged_kv.runtime.forks import check_not_forked
from paged_kv.runtime.variants import Variant


class Runtime:
    """A MAX session on the CPU or on a GPU, and the variants loaded in it. Threads may share one.

    Args:
        gpu: The number of the GPU; None for the CPU.

    Raises:
        ToolchainError: MAX does not see that GPU, or this process was forked off one in which MAX ran.
    """

    driver_device: Device
    """The device that the variants run on, as the driver has it."""
    device: DeviceRef
    """The same device, as graphs name it."""
    architecture: str
    """Of a GPU, its number included, which is part of a graph; empty for the CPU."""

    def __init__(self, gpu: int | None = None) -> None:
        check_not_forked()
        apply_cpu_target()
        if gpu is None:
            self.driver_device, self.device, self.architecture = CPU(), DeviceRef.CPU(), ""
            self.session = InferenceSession(devices=[self.driver_device])
        else:
            try:
                accelerator = Accelerator(gpu)
            except (RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ToolchainError(f"GPU {gpu}: MAX finds no such device ({reason})") from error
            self.driver_device, self.device = accelerator, DeviceRef.GPU(gpu)
            self.architecture = f"{accelerator.api} {accelerator.architecture_name} {gpu}"
            self.session = InferenceSession(devices=[CPU(), accelerator])
        self._models: dict[Variant, Model] = {}
        self._loading = Lock()

    def load(self, wanted: Iterable[Variant], *, exact: bool = False) -> None:
        """Loads those of `wanted` that are missing, compiled together where the disk has them not.

        Args:
            wanted: The array API asks for `API_VARIANTS`, which may have been compiled ahead, and for few others.
            exact: Compile rather than take code that came with the package for a lower CPU target.

        Raises:
            ToolchainError: as `load_graphs`.
        """
        check_not_forked()  # first: the parent's lock may be held for ever here
        with self._loading:
            self._load({variant for variant in wanted if variant not in self._models}, exact)

    def _load(self, wanted: set[Variant], exact: bool) -> None:
        missing = sorted(wanted, key=lambda variant: variant.name)
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
            exact=exact,
            on_compile=lambda: announce(f"paged-kv: compiling {listed}: about 25 s, once on this machine"),
        )
        self._models.update({variant: models[variant.name] for variant in missing})

    def execute(self, variant: Variant, *inputs: Buffer) -> list[Buffer]:
        """Runs one variant, loading its family first where needed; see `Variant.build` for the inputs."""
        check_not_forked()
        model = self._models.get(variant)
        if model is None:
            self.load(variant.family())
            model = self._models[variant]
        return execute(model.execute, *inputs)


def announce(line: str) -> None:
    """One line on a terminal; nothing in logs and pipes."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


_RUNTIMES: dict[int | None, Runtime] = {}
_MAKING = Lock()


def runtime_on(gpu: int | None) -> Runtime:
    """The one runtime of this process on a GPU, or on the CPU.

    Raises:
        ToolchainError: as `Runtime`.
    """
    check_not_forked()
    runtime = _RUNTIMES.get(gpu)
    if runtime is None:
        with _MAKING:
            runtime = _RUNTIMES.get(gpu) or Runtime(gpu)
            _RUNTIMES[gpu] = runtime
    return runtime


def default_runtime() -> Runtime:
    """The one runtime of this process on the CPU."""
    return runtime_on(None)
