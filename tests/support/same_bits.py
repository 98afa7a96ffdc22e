"""The ways to compute one prompt and the tokens after it, all of which give the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.run_record import RunRecord, differences
from paged_kv.engine.sampling import Sampling
from support.llama_family import poison

PAGES = (16, 80)
"""Slots of a page, and pages, that a model needs."""
NEW = 24
WAYS = (
    *(f"steps of {most}" for most in (1, 8, 13, 64)),
    "company",
    "preemption",
    "drafts",
    "a shared prefix",
    "a restart",
)
REUSES = ("a shared prefix", "a restart")
"""Ways that take most of the prompt from the cache; of a state it may have no copy that is far enough."""
SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_end": True}


@dataclass
class Case:
    """A model and its prompts."""

    model: DecoderModel
    prompt: list[int]
    """About 150 tokens."""
    others: Sequence[list[int]]
    """Prompts in the same batch; the first also follows the prompt's first tokens, as a request before it."""
    draft: object
    """As `speculate` of `Engine`."""

    @cached_property
    def alone(self) -> RunRecord:
        """The record of the prompt's request, all of it in one step."""
        return self.recorded([self.prompt])

    def by(self, way: str, folder: Path) -> RunRecord:
        """The record of the prompt's request, computed in one of WAYS; `folder` is empty."""
        prompt, others = self.prompt, self.others
        if way.startswith("steps of "):
            return self.recorded([prompt], max_step_tokens=int(way.removeprefix("steps of ")))
        again = [[*prompt[:100], *others[0]]]
        ways: dict[str, Callable[[], RunRecord]] = {
            "company": partial(self.recorded, [prompt, *others], max_step_tokens=40),
            "preemption": partial(self._preempted, [prompt, *others]),
            "drafts": self._with_drafts,
            "a shared prefix": partial(self.recorded, again, [prompt], of=(1, 0), max_step_tokens=50),
            "a restart": partial(self._from_disk, folder),
        }
        return ways[way]()

    def recorded(self, *turns: list[list[int]], of: tuple[int, int] = (0, 0), **options) -> RunRecord:
        """The record of one request."""
        record, _ = self._run(turns, **options)
        record.samples = {(0, 0): record.samples[of]}
        return record

    def _run(self, turns: Sequence[list[list[int]]], **options) -> tuple[RunRecord, Engine]:
        """Each turn's prompts are added at once and run to their ends; before, every page is NaN."""
        poison(self.model)
        engine = Engine(self.model, **options)
        engine.record = self.model.new_record()
        for prompts in turns:
            for prompt in prompts:
                engine.add_request(prompt, Sampling(NEW, **SAMPLED))
            while not engine.is_idle:
                engine.step()
        engine.flush()
        return engine.record, engine

    def _preempted(self, prompts: list[list[int]]) -> RunRecord:
        record, engine = self._run([prompts], max_step_tokens=64, num_pages=14)
        assert engine.preemptions > 0
        record.samples = {(0, 0): record.samples[0, 0]}
        return record

    def _with_drafts(self) -> RunRecord:
        """Most drafts are refused, since another model makes them or texts do not repeat themselves."""
        record, engine = self._run([[self.prompt]], speculate=self.draft)
        assert engine.statistics.draft_tokens > 0
        return record

    def _from_disk(self, folder: Path) -> RunRecord:
        """After a restart: most of the prompt is in files, which another cut of it made."""
        disk = DiskTier(folder, 1 << 30)
        self.recorded([self.prompt], disk=disk, max_step_tokens=13)
        return self.recorded([self.prompt], disk=disk)


def assert_same_bits(case: Case, way: str, folder: Path) -> None:
    """Holds a way to the bits of the prompt alone in one step; `folder` is empty."""
    (difference,) = differences(case.alone, case.by(way, folder))
    assert (difference.position, difference.parted, difference.operation, difference.largest) == (None, None, "", 0)
    whole = len(case.prompt) + NEW - 1
    if way not in REUSES:
        assert difference.compared == whole
    elif not case.model.num_states:
        assert NEW <= difference.compared < whole - 64
