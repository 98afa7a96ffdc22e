"""Cases of servers: models, cases, which systems are alive together, and what ours is meant to reach."""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.bench.weight_cases import StepCase

MODELS = {
    "small": StepCase(
        "small",
        "100 M parameters",
        layers=12,
        hidden=768,
        intermediate=2048,
        heads=12,
        kv_heads=4,
        vocab=16384,
        context=0,
    ),
    "large": StepCase("large", "1.1 G parameters", context=0),
}
"""Shapes of Llama checkpoints; the rest of a `StepCase` is not used."""


@dataclass(frozen=True)
class ServeCase:
    """`batch` requests at once, each with a prompt of `context` tokens that no other has."""

    model: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}x{self.context}"

    @property
    def title(self) -> str:
        return f"{MODELS[self.model].title}, B {self.batch}, context {self.context}"

    @property
    def new_tokens(self) -> int:
        """That a request generates in a turn: a few seconds of decoding."""
        return 64 if self.model == "small" else 24


CONTEXTS = (512, 2048, 4096)
CASES = (
    *(ServeCase(model, batch, context) for model in MODELS for batch in (1, 8) for context in CONTEXTS),
    ServeCase("large", 32, 512),
)
SIZES = ((8, 4608), (32, 1024))
"""The requests at once and the longest one that servers are started for; a case is measured with the first that holds
it. Lengths are multiples of MAX's page of 128 tokens."""


def size_of(case: ServeCase) -> tuple[int, int]:
    """The entry of SIZES that holds a case."""
    return next(size for size in SIZES if case.batch <= size[0])


@dataclass(frozen=True)
class Versus:
    """Ours over another system, in tokens a second of decoding, both in the same turn."""

    ours: str
    other: str
    one: float | None = None
    """The least factor at batch 1; None: for information."""
    eight: float | None = None
    long: float | None = None
    """At a context of 4096, whatever the batch, where more is meant to be reached there."""

    def at_least(self, case: ServeCase) -> float | None:
        wanted = [self.one if case.batch == 1 else self.eight, self.long if case.context == 4096 else None]
        return max((one for one in wanted if one is not None), default=None)


VERSUS = (
    Versus("ours-bf16", "max-f32", eight=2.0),
    Versus("ours-bf16", "vllm-bf16", one=1.0, eight=1.0),
    Versus("ours-bf16", "llama-bf16"),
    Versus("ours-f32", "max-f32", long=1.2),
    Versus("ours-q4k", "max-q4k", one=1.0, eight=1.2, long=1.2),
    Versus("ours-q4k", "llama-q4k", one=1.2, eight=2.0),
)
ENGINE = ("ours-bf16", "engine-bf16")
"""A server, and the steps of the small engine on the same weights: the difference is what serving costs."""

TOGETHER = {
    "small": {
        "bf16": ("ours-bf16", "ours-f32", "max-f32", "vllm-bf16", "llama-bf16", "engine-bf16"),
        "q4_k": ("ours-q4k", "max-q4k", "llama-q4k"),
    },
    "large": {
        "bf16": ("ours-bf16", "max-f32"),
        "peers": ("ours-bf16", "vllm-bf16", "llama-bf16", "engine-bf16"),
        "f32": ("ours-f32", "max-f32"),
        "q4_k": ("ours-q4k", "max-q4k", "llama-q4k"),
    },
}
"""By model and group: systems whose processes are alive at the same time, all but one of them stopped. As many as 24 GB
hold, so that a turn measures them one right after the other."""
FRESH_TOKENS = 8192
"""Tokens of prompts that a system reads in one case: so many turns have new prompts, at least one. The others repeat
those of the last, which the servers' prefix caches hold, and measure decoding alone."""


def fresh_turns(case: ServeCase, turns: int) -> int:
    return max(1, min(turns, FRESH_TOKENS // (case.batch * case.context)))
