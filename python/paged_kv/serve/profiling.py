"""The time of an engine's steps while an operator asks for it: vLLM's routes, which answer with a table."""

from __future__ import annotations

import asyncio
from time import perf_counter

from paged_kv.engine.model import DecoderModel
from paged_kv.errors import ContractError
from paged_kv.runtime.profile_table import profile_lines
from paged_kv.runtime.step_profile import StepProfile, copied_bytes_per_second


class Profiling:
    """The times of a model's steps between `start` and `stop`; no clock is read at other times.

    Raises:
        ContractError: MAX runs the steps.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._started: tuple[tuple[StepProfile, StepProfile], float] | None = None
        copied_bytes_per_second(model.profile_steps()[0].dtype)  # now, not during steps of requests
        model.end_profile()

    def start(self) -> None:
        """Begins anew, whether or not it has been started."""
        self._started = self._model.profile_steps(), perf_counter()

    async def stop(self) -> list[str]:
        """The lines of the table, once the step that runs has ended.

        Raises:
            ContractError: it has not been started.
        """
        if self._started is None:
            raise ContractError("no profile has been started: POST /start_profile begins one")
        (profiles, began), self._started = self._started, None
        await asyncio.to_thread(self._model.end_profile)
        return profile_lines(profiles, perf_counter() - began, "plans, sampling, text, waiting for requests")
