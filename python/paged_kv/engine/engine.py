"""The engine: requests come and go, and each step computes what all of them need next.

Prompts prefill in chunks beside samples that decode. Prompts that begin alike share pages, samples of one request too;
where pages run out, the sample that came last is computed again later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import integer, shown
from paged_kv.engine.batching import Batching, Plan
from paged_kv.engine.interfaces import Model, Statistics, TextCoder
from paged_kv.engine.prefix_file import load_prefix, save_prefix
from paged_kv.engine.requests import FinishReason, Output, Request, Sample, Sampling, check_prompt, most_tokens
from paged_kv.engine.stop_text import StopText
from paged_kv.errors import ContractError, ContractTypeError, PoolExhausted, RequestError
from paged_kv.pool import PagePool, PrefixCache, pages_needed

MAX_STEP_TOKENS = 2048
"""Tokens of one step at most: bounds the memory of a step's activations."""
MAX_RUNNING = 256
"""Samples of one step at most."""


class Engine:
    """Serves requests with one model.

    `step` computes; everything else only notes what is wanted, so any thread may call it meanwhile. What is wrong with
    a request is refused by `add_request`, and what goes wrong later ends its sample alone.

    Args:
        model: Owns the pages; the engine says who has which.
        tokenizer: For prompts that are texts, and for texts of outputs; None where both are tokens.
        max_step_tokens: Tokens of a step at most: longer prompts prefill in chunks.
        max_running: Samples of a step at most.
        num_pages: How many of the model's pages to use; all where None.
        share_prefixes: Whether prompts that begin alike share pages.

    Raises:
        ContractTypeError, ContractError: a number is no positive integer, or `num_pages` more than the model has.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: TextCoder | None = None,
        *,
        max_step_tokens: int = MAX_STEP_TOKENS,
        max_running: int = MAX_RUNNING,
        num_pages: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self.model = model
        self.statistics = Statistics()
        pages = model.num_pages if num_pages is None else integer("num_pages", num_pages, 1, model.num_pages)
        self.pool = PagePool(pages, model.page_size)
        self._tokenizer = tokenizer
        self._max_running = integer("max_running", max_running, 1)
        self._batching = Batching(
            self.pool,
            model.copy_page,
            max_step_tokens=integer("max_step_tokens", max_step_tokens, 1),
            max_running=self._max_running,
            share_prefixes=share_prefixes,
        )
        windows = model.config.windows
        self._window_left = max(windows) if windows and min(windows) >= 0 else -1
        self._numbers = count()
        self._wanted: deque[Sample | int] = deque()  # samples to add and requests to abort, since the last step
        self._unfinished: dict[int, int] = {}  # requests, and how many of their samples have not ended
        self._unread: dict[int, deque[Output]] = {}  # of the requests that somebody iterates over
        self._stepping = Lock()

    @property
    def preemptions(self) -> int:
        """How often a sample gave its pages back before its end, to be computed again."""
        return self._batching.preemptions

    @property
    def tokens_found(self) -> int:
        """Tokens of prompts whose K and V were in the cache already."""
        return self._batching.tokens_found

    @property
    def num_waiting(self) -> int:
        """Samples that have no pages yet, or gave them back."""
        return len(self._batching.waiting) + len(self._wanted)

    @property
    def num_running(self) -> int:
        """Samples that have pages."""
        return len(self._batching.running)

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._unfinished and not self._wanted

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
    ) -> int:
        """Adds a request; its first output comes from a later `step`.

        Args:
            prompt: A text, where there is a tokenizer, or token ids.
            sampling: How tokens are chosen, and where a sample ends.
            n: Samples of the prompt, which share its pages.
            namespace: Prompts of different namespaces share nothing.

        Returns:
            The request's number, which its outputs have.

        Raises:
            ContractTypeError, ContractError: an argument has the wrong type or is out of range; the prompt is empty,
                too long for the model, or has a token that is not in the vocabulary.
            PoolExhausted: the prompt and its new tokens need more pages than there are.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ContractTypeError(f"sampling must be a Sampling, not {shown(sampling)}")
        n = integer("n", n, 1, self._max_running)
        config, tokens = self.model.config, self.encode(prompt)
        if sampling.stop and self._tokenizer is None:
            raise ContractError("stop: texts that end a sample need a tokenizer")
        try:
            hash(namespace)
        except Exception:  # a `__hash__` may raise anything
            raise ContractTypeError(f"namespace must be hashable, not {shown(namespace)}") from None
        limit = most_tokens(config, tokens, sampling)
        needed = pages_needed(limit - 1, self.pool.page_size)
        if needed > self.pool.num_pages:
            raise PoolExhausted(
                f"prompt of {len(tokens)} tokens with up to {limit - len(tokens)} new ones needs {needed} pages of"
                f" {self.pool.page_size}, the pool has {self.pool.num_pages}"
            )
        end = frozenset(sampling.stop_tokens) | frozenset(() if sampling.ignore_end else config.eos_token_ids)
        request = Request(
            next(self._numbers), tokens, sampling, n, namespace, sampling.sampler(), limit, frozenset(end)
        )
        self._unfinished[request.number] = n
        self._wanted.append(self._sample(request, 0))
        return request.number

    def abort(self, request: int) -> None:
        """Ends a request before the next step; it has no more outputs.

        Raises:
            RequestError: it is unknown, or has ended.
        """
        if self._unfinished.pop(request, None) is None:
            raise RequestError(f"request {shown(request)} is unknown, or has ended")
        self._unread.pop(request, None)
        self._wanted.append(request)

    def step(self) -> list[Output]:
        """Computes the next tokens; returns what came of them, nothing where no request is left or only prompts ran."""
        with self._stepping:
            self._take_wanted()
            plan = self._batching.plan()
            if not plan:
                return []
            logits = self._execute(plan)
            outputs: list[Output] = []
            for row, (sample, new) in enumerate(plan):
                self._batching.computed(sample, len(new))
                if sample.cached == len(sample.tokens):
                    outputs += self._continue(sample, logits[row : row + 1])
            outputs = [output for output in outputs if self._count(output)]
        for output in outputs:
            if (unread := self._unread.get(output.request)) is not None:
                unread.append(output)
        return outputs

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
    ) -> Iterator[Output]:
        """Adds a request and iterates over its outputs; computes steps, for all requests, where none has come yet.

        An iterator that is closed before its end aborts the request. Raises as `add_request`, at once.
        """
        number = self.add_request(prompt, sampling, n, namespace=namespace)
        self._unread[number] = deque()
        return self._outputs_of(number)

    def save_prefix(self, path: Path | str, prompt: str | Sequence[int], *, namespace: Hashable = None) -> int:
        """Writes the pages of a prompt's known prefix to a file (`prefix_file`); returns how many tokens it has.

        Raises:
            ContractTypeError, ContractError: as `add_request`, of the prompt; or nothing of it is known.
            CheckpointError: the file cannot be written.
        """
        tokens, prefixes = self.encode(prompt), self._known_prefixes()
        with self._stepping:
            return save_prefix(path, self.model, prefixes, ("file", next(self._numbers)), tokens, namespace)

    def load_prefix(self, path: Path | str, *, namespace: Hashable = None) -> int:
        """Reads a file of `save_prefix` into free pages, where prompts find it; returns how many tokens it has.

        Raises:
            CheckpointError: the file cannot be read, is damaged, or is of another model or kind of page.
            PoolExhausted: too few pages are free or cached.
            ContractError: the engine shares no prefixes.
        """
        prefixes = self._known_prefixes()
        with self._stepping:
            return load_prefix(path, self.model, prefixes, ("file", next(self._numbers)), namespace)

    def _known_prefixes(self) -> PrefixCache:
        if self._batching.prefixes is None:
            raise ContractError("share_prefixes: an engine without it knows no prefix")
        return self._batching.prefixes

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prompt. Raises as `add_request`."""
        if isinstance(prompt, str) and self._tokenizer is not None:
            prompt = self._tokenizer.encode(prompt)
        return check_prompt(self.model.config, "prompt", prompt)

    def _outputs_of(self, number: int) -> Iterator[Output]:
        unread = self._unread[number]
        try:
            while True:
                while unread:
                    yield unread.popleft()
                if number not in self._unfinished:
                    return
                self.step()
        finally:
            self._unread.pop(number, None)
            if number in self._unfinished:
                self.abort(number)

    def _sample(self, request: Request, index: int) -> Sample:
        decoder = None if self._tokenizer is None else self._tokenizer.stream()
        return Sample(request, index, StopText(decoder, tuple(request.sampling.stop)), list(request.prompt))

    def _take_wanted(self) -> None:
        while self._wanted:
            wanted = self._wanted.popleft()
            if isinstance(wanted, Sample):
                if wanted.request.number in self._unfinished:
                    self._batching.add(wanted)
                continue
            for sample in [*self._batching.running, *self._batching.waiting]:
                if sample.request.number == wanted:
                    self._batching.end(sample)

    def _execute(self, plan: Plan) -> npt.NDArray[np.float32]:
        """Logits `[len(plan), vocab]`; the new tokens are in the cache afterwards."""
        began = time.perf_counter()
        logits = self.model.step(
            [new for _, new in plan],
            [sample.cached for sample, _ in plan],
            [self.pool.pages(sample.key) for sample, _ in plan],
        )
        seconds = time.perf_counter() - began
        total = sum(len(new) for _, new in plan)
        prompts = sum(len(new) for sample, new in plan if sample.cached < len(sample.request.prompt))
        self.statistics.add_step(seconds, prompts, total - prompts, self.pool.num_used)
        return logits

    def _continue(self, sample: Sample, logits: npt.NDArray[np.float32]) -> Iterator[Output]:
        """Adds the next token to a sample whose tokens are all in the cache, and to those that begin with it."""
        samples = [sample]
        if sample.forks:
            for index in range(1, sample.request.samples):
                child = self._sample(sample.request, index)
                self._batching.fork(sample, child)
                samples.append(child)
        for each in samples:
            output = self._next_output(each, logits)
            if output.finish is not None:
                self._batching.end(each)
            elif self._window_left >= 0 and each.cached > self._window_left:
                self._batching.drop(each, each.cached - self._window_left)
            yield output

    def _next_output(self, sample: Sample, logits: npt.NDArray[np.float32]) -> Output:
        request = sample.request
        try:
            token = request.sampler(logits, [sample.index])[0]
        except ContractError as error:  # logits that are no numbers
            return Output(*sample.key, (), "", "error", str(error))
        sample.tokens.append(token)
        text, stops = sample.text.push(token)
        finish: FinishReason | None = None
        if stops or token in request.end_tokens:
            finish = "stop"
        elif len(sample.tokens) == request.limit:
            finish = "length"
        if finish is not None and not stops:
            rest, stops = sample.text.flush()
            text, finish = text + rest, "stop" if stops else finish
        return Output(*sample.key, (token,), text, finish)

    def _count(self, output: Output) -> bool:
        """Counts the samples that ended; False where the request was aborted meanwhile."""
        left = self._unfinished.get(output.request)
        if left is None:
            return False
        if output.finish is not None:
            if left == 1:
                self._unfinished.pop(output.request, None)
            else:
                self._unfinished[output.request] = left - 1
        return True
