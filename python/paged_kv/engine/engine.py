"""The engine: requests come and go, and each step computes what all of them need next.

Prompts prefill in chunks beside samples that decode. Prompts that begin alike share pages, samples of one request too;
where pages run out, the sample that came last is computed again later.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import integer, shown
from paged_kv.engine.adapters import Adapters
from paged_kv.engine.batching import Batching
from paged_kv.engine.disk_prefixes import DiskPrefixes, DiskStates, DiskWindows
from paged_kv.engine.disk_tier import DiskPages, DiskTier
from paged_kv.engine.interfaces import AdaptedModel, EngineModel, Statistics, TextCoder, compile_structure
from paged_kv.engine.outputs import OutputStream
from paged_kv.engine.own_draft import OwnDraft
from paged_kv.engine.requests import (
    FinishReason,
    Link,
    Outbox,
    Output,
    Request,
    Sample,
    check_prompt,
    most_tokens,
)
from paged_kv.engine.resources import Batch, HybridPages, RequestPages, Resource, SharedPages
from paged_kv.engine.sampling import Choice, Sampling, choose, logprobs_of
from paged_kv.engine.speculation import DraftModel, NoSpeculation, Speculation
from paged_kv.engine.states import RequestStates, SharedStates
from paged_kv.engine.stop_text import StopText
from paged_kv.engine.windows import Windows
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PoolExhausted, RequestError
from paged_kv.graphs.models.adapters import NO_ADAPTER
from paged_kv.pool import PagePool, PrefixCache, WindowPages, pages_needed
from paged_kv.runtime.forks import renew_in_children

if TYPE_CHECKING:
    from paged_kv.engine.draft_layer import DraftLayer
    from paged_kv.engine.run_record import RunRecord

MAX_STEP_TOKENS = 2048
"""Tokens of one step at most: bounds the memory of a step's activations."""
MAX_RUNNING = 256
"""Samples of one step at most."""


class Engine:
    """Serves requests with one model.

    `step` computes; everything else only notes what is wanted, so any thread may call it meanwhile. What is wrong with
    a request is refused by `add_request`, and what goes wrong with it later ends its sample alone. What the model
    raises, and what comes from outside (KeyboardInterrupt), `step` raises: outputs that were decided before come from
    the next one, and all samples give their pages back and are computed again, from the tokens that they have.

    Args:
        model: Owns the pages; the engine says who has which.
        tokenizer: For prompts that are texts, and for texts of outputs; None where both are tokens.
        max_step_tokens: Tokens of a step at most: longer prompts prefill in chunks.
        max_running: Samples of a step at most; a prompt counts for all its samples.
        num_pages: How many of the model's pages to use; all where None.
        share_prefixes: Whether prompts that begin alike share pages.
        max_gap: Seconds that a step should take at most in which samples decode: it gets fewer tokens of prompts, by
            how long earlier steps took. None: no limit but `max_step_tokens`.
        disk: Where full pages of prefixes are kept as well, and found after a restart (`disk_tier`). The model's
            weights are read once for it.
        speculate: What drafts tokens to come, which a step then judges together (`speculation`): "lookup" for the text
            so far, a smaller model with the same tokens, whose pages nothing else uses, or the `draft_layer` that the
            model was loaded with: "mtp" or "eagle3". None: nothing.

    Raises:
        ContractTypeError, ContractError: a number is no positive integer, or `num_pages` more than the model has; the
            folder of `disk` is not the user's own, or its limit is less than a page; `disk` without `share_prefixes`;
            `speculate` is none of these, a model with recurrent layers, or a draft layer that the model has not.
    """

    def __init__(
        self,
        model: EngineModel,
        tokenizer: TextCoder | None = None,
        *,
        max_step_tokens: int = MAX_STEP_TOKENS,
        max_running: int = MAX_RUNNING,
        num_pages: int | None = None,
        share_prefixes: bool = True,
        max_gap: float | None = None,
        disk: DiskTier | None = None,
        speculate: Literal["lookup", "mtp", "eagle3"] | EngineModel | None = None,
    ) -> None:
        self.model = model
        self.statistics = Statistics()
        self.record: RunRecord | None = None
        """Takes what steps compute, where there is one: the model's `new_record`."""
        pages = model.num_pages if num_pages is None else integer("num_pages", num_pages, 1, model.num_pages)
        self.pool = PagePool(pages, model.page_size, model.num_states)
        self._tokenizer = tokenizer
        self._max_running = integer("max_running", max_running, 1)
        if disk is not None and not isinstance(disk, DiskTier):
            raise ContractTypeError(f"disk: expected a DiskTier, got {shown(disk)}")
        if disk is not None and not share_prefixes:
            raise ContractError("disk: requires share_prefixes=True")
        max_step_tokens = integer("max_step_tokens", max_step_tokens, 1)
        if max_gap is not None and not (isinstance(max_gap, int | float) and 0 < max_gap < 1e9):
            raise ContractError(f"max_gap: expected a positive number of seconds, got {shown(max_gap)}")
        self._own_draft = _own_draft(speculate, model, self.pool)
        self._speculation = _speculation(speculate, model, max_step_tokens, share_prefixes, self._own_draft)
        self._disk = None if disk is None else DiskPages(disk, model)
        self.window_pool = PagePool(model.num_window_pages, model.page_size) if model.num_window_pages else None
        """The pages of the layers with windows; None where they have none of their own."""
        self._pages, others = resources_of(model, self.pool, self.window_pool, self._disk, share_prefixes)
        self._resources = [self._pages, *others, *([] if self._own_draft is None else [self._own_draft])]
        self._batching = Batching(
            self._resources,
            self._speculation,
            page_size=model.page_size,
            max_step_tokens=max_step_tokens,
            max_running=self._max_running,
            max_gap=max_gap,
        )
        self._numbers = count()
        self._submitted: deque[Request] = deque()  # requests to add or to end, since the last step
        self._unfinished: dict[int, Request] = {}
        self._outputs = Outbox()  # of the requests that no stream reads
        self._interrupted = False  # an exception ended the last step, or one is under way
        self._stepping = RLock()
        renew_in_children(self, Engine._renew_lock)

    def _renew_lock(self) -> None:
        """Lets a forked child step; where another thread was inside a step, as after one that raised."""
        if not self._stepping._is_owned():  # type: ignore[attr-defined]
            self._stepping = RLock()

    @property
    def preemptions(self) -> int:
        """The number of times that a sample gave its pages back before its end, to be computed again."""
        return self._batching.preemptions

    @property
    def tokens_found(self) -> int:
        """Tokens of prompts whose K and V were in the cache already."""
        return self._batching.tokens_found

    @property
    def tokens_restored(self) -> int:
        """Tokens whose K and V were read from the disk tier."""
        return sum(resource.tokens_restored for resource in self._resources)

    def flush(self) -> None:
        """Waits until the disk tier, if there is one, has written all pages that it was given."""
        if self._disk is not None:
            self._disk.flush()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self.model.adapters.names if isinstance(self.model, AdaptedModel) else ()

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Loads a LoRA adapter, which requests then name; steps go on meanwhile.

        Args:
            name: The name that requests have for it.
            path: A folder of PEFT, or a GGUF file.

        Raises:
            ContractTypeError, ContractError: the name is no text, is empty or in use; the model can have no adapters.
            CheckpointError: there is no adapter that this package runs, or it is not for this model.
        """
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that have it go on. Raises `ContractError` where there is none of that name."""
        self._adapters.unload(name)

    @property
    def _adapters(self) -> Adapters:
        if not isinstance(self.model, AdaptedModel):
            raise ContractError("adapter: this model can have none")
        return self.model.adapters

    @property
    def num_waiting(self) -> int:
        """Samples that have no pages yet, or gave them back."""
        return len(self._batching.waiting) + len(self._submitted)

    @property
    def num_running(self) -> int:
        """Samples that have pages."""
        return len(self._batching.running)

    @property
    def running(self) -> frozenset[int]:
        """The requests that have pages. Where a step raised, these are the ones that it may have held."""
        return frozenset(sample.request.number for sample in self._batching.running)

    @property
    def is_idle(self) -> bool:
        """True if every request has ended, and `step` has returned all it has."""
        return not self._unfinished and not self._submitted and self._outputs.is_empty

    def has_ended(self, request: int) -> bool:
        """Return whether all samples of a request have ended, or it was aborted."""
        return request not in self._unfinished

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
        adapter: str | None = None,
    ) -> int:
        """Adds a request; its first output comes from a later `step`.

        Args:
            prompt: A text, where there is a tokenizer, or token ids.
            sampling: How tokens are chosen, and where a sample ends.
            n: Samples of the prompt, which share its pages.
            namespace: Prompts of different namespaces share nothing.
            adapter: The name of a loaded adapter that computes the request; None for the model itself. Prompts share
                pages with those of equal adapters alone.

        Returns:
            The request's number, which its outputs have.

        Raises:
            ContractTypeError, ContractError: an argument has the wrong type or is out of range; the prompt is empty,
                too long for the model, or has a token that is not in the vocabulary; no adapter has the name.
            PoolExhausted: the prompt and its new tokens need more pages than there are.
            ToolchainError: it has a structure, and llguidance is not installed.
        """
        return self.add(self.prepare(prompt, sampling, n, namespace=namespace, adapter=adapter))

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
        adapter: str | None = None,
    ) -> Request:
        """Make a request for `add`: the part of `add_request` that may take long, for a structure. Raises as that."""
        return self._request(prompt, sampling, n, namespace, adapter, self._outputs)

    def add(self, request: Request) -> int:
        """Adds a request that was prepared, once; returns its number."""
        self._unfinished[request.number] = request
        self._submitted.append(request)
        return request.number

    def abort(self, request: int) -> None:
        """Ends a request before the next step; it has no more outputs.

        Raises:
            RequestError: it is unknown, or has ended.
        """
        try:
            submitted = self._unfinished.get(request)
        except Exception:  # a `__hash__` may raise anything
            submitted = None
        if submitted is None:
            raise RequestError(f"request {shown(request)} is unknown, or has ended")
        submitted.aborted = True
        self._submitted.append(submitted)
        self._unfinished.pop(submitted.number, None)

    def step(self) -> list[Output]:
        """Computes the next tokens; returns what came of them, nothing where no request is left or only prompts ran.

        Outputs of requests that a stream reads go there instead. Those of a step that raised come from the next one.

        Raises:
            ContractError: the thread is inside a step: a decoder or a signal handler called it.
        """
        self.advance()
        return self._outputs.take()

    def advance(self) -> None:
        """Computes the next tokens and leaves their outputs to those who read them. Raises as `step`."""
        self._refuse_inside()
        with self._stepping:
            if self._interrupted:
                self._recover()
            self._interrupted = True
            self._take_submitted()
            began = time.perf_counter()
            if batch := self._batching.next_batch():
                counts = [_logit_rows(sample, new) for sample, new in batch]
                self._continue(batch, counts, self._execute(batch, counts, began))
            self._interrupted = False

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
        adapter: str | None = None,
    ) -> OutputStream:
        """Adds a request and iterates over its outputs; computes steps, for all requests, where none has come yet.

        An iterator that is closed or dropped before its end aborts the request. Raises as `add_request`, at once.
        """
        request = self._request(prompt, sampling, n, namespace, adapter, Outbox())
        outputs = OutputStream(self, request)
        self.add(request)
        return outputs

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prompt. Raises as `add_request`."""
        if isinstance(prompt, str) and self._tokenizer is not None:
            prompt = self._tokenizer.encode(prompt)
        return check_prompt(self.model.config, "prompt", prompt)

    def _request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None,
        n: int,
        namespace: Hashable,
        adapter: str | None,
        outbox: Outbox,
    ) -> Request:
        """A request that is not added yet. Raises as `add_request`."""
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ContractTypeError(f"sampling: expected a Sampling, got {shown(sampling)}")
        n = integer("n", n, 1, self._max_running)
        config, tokens = self.model.config, self.encode(prompt)
        if sampling.stop and self._tokenizer is None:
            raise ContractError("stop: texts that end a sample need a tokenizer")
        sampling.check_vocabulary(config.vocab_size)
        loaded = None if adapter is None else self._adapters.of_name(adapter)
        if loaded is not None:
            if self.record is not None:
                raise ContractError("adapter: a run record sees the model's own steps alone")
            namespace = (loaded.digest, *(namespace if type(namespace) is tuple else (namespace,)))
        root = None if self._disk is None else self._disk.root(namespace)
        namespace = self._pages.namespace(namespace)
        limit = most_tokens(config, tokens, sampling)
        needed = pages_needed(limit - 1, self.pool.page_size)
        if needed > self.pool.num_pages:
            raise PoolExhausted(
                f"prompt of {len(tokens)} tokens with up to {limit - len(tokens)} new ones needs {needed} pages of"
                f" {self.pool.page_size}, the pool has {self.pool.num_pages}"
            )
        structure = compile_structure(self._tokenizer, sampling.structured_output)
        end = sampling.end_tokens(config.eos_token_ids)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        number = next(self._numbers)
        return Request(
            number, tokens, sampling, n, namespace, seed, limit, end, outbox, structure, root=root, adapter=loaded
        )

    def _refuse_inside(self) -> None:
        if self._stepping._is_owned():  # type: ignore[attr-defined]
            raise ContractError("this thread is inside a step: decoders and signal handlers may not call the engine")

    def _take_submitted(self) -> None:
        while self._submitted:
            request = self._submitted[0]
            if request.aborted:
                self._unfinished.pop(request.number, None)
                for sample in self._batching.samples.values():
                    if sample.request is request:
                        self._batching.end(sample)
                request.adapter = None
            else:
                self._batching.add(Sample(request, 0, list(request.prompt)))
            self._submitted.popleft()  # last: an exception before it does all again

    def _execute(self, batch: Batch, counts: list[int], began: float) -> npt.NDArray[np.float32]:
        """Logits after the last `counts[i]` tokens of each sample; all of them are in the cache afterwards."""
        planned = time.perf_counter()
        drafted = [max(0, sample.cached + len(new) - len(sample.tokens)) for sample, new in batch]
        total = sum(len(new) for _, new in batch)
        prompts = sum(len(new) for sample, new in batch if sample.cached < len(sample.request.prompt))
        memory = self._batching.memory(batch)
        if self.record is not None:
            self.record.begin([(sample.key, sample.cached, new) for sample, new in batch], counts)
        adapters = [NO_ADAPTER if (of := sample.request.adapter) is None else of.index for sample, _ in batch]
        logits = self.model.step(
            [new for _, new in batch],
            [sample.cached for sample, _ in batch],
            memory.pages,
            counts if any(count > 1 for count in counts) else None,
            memory.states,
            memory.window_pages,
            **({} if set(adapters) == {NO_ADAPTER} else {"adapters": adapters}),
        )
        if self._own_draft is not None:
            self._own_draft.stepped(batch, memory.pages, self.model.hidden)  # type: ignore[attr-defined]
        ended = time.perf_counter()
        if self.record is not None:
            self.record.end(logits)
        self.statistics.add_step(ended - began, prompts, total - prompts - sum(drafted), self.pool.num_used)
        self._batching.timed(batch, ended - began)
        if not prompts:
            self._speculation.timed(total, ended - planned)
        return logits

    def _continue(self, batch: Batch, counts: list[int], logits: npt.NDArray[np.float32]) -> None:
        """Gives the next token to samples whose tokens are all in the cache, and to those that begin with them.

        Where it is the one that was drafted, the next row of logits gives the one after it.
        """
        # Each with the row of its logits, how many of its drafts were right, and those that follow.
        turn: list[tuple[Sample, int, int, list[int]]] = []
        row = 0
        for (sample, new), rows_of_it in zip(batch, counts, strict=True):
            cached = sample.cached + len(new)
            drafts = new[len(sample.tokens) - sample.cached :]
            if sample.request.wants_prompt:
                _add_prompt_logprobs(sample, logits[row : row + rows_of_it])
            if cached < len(sample.tokens):
                self._batching.computed(sample, cached)
            else:
                samples = [sample, *(self._batching.fork(sample) if sample.forks else [])]
                turn += [(each, row + rows_of_it - 1 - len(drafts), 0, drafts) for each in samples]
            row += rows_of_it
        while turn:
            rows, samples = [row for _, row, _, _ in turn], [sample for sample, _, _, _ in turn]
            choices = choose(logits, rows, [sample.history for sample in samples])
            further = []
            for (sample, row, right, drafts), choice in zip(turn, choices, strict=True):
                output = self._next_output(sample, choice)
                self._give(sample, output)
                if drafts and output.tokens == (drafts[0],) and output.finish is None:
                    further.append((sample, row + 1, right + 1, drafts[1:]))
                elif right or drafts:
                    self.statistics.add_drafts(right, right + len(drafts))
                    self._speculation.learn(sample, right, right + len(drafts))
            turn = further

    def _next_output(self, sample: Sample, choice: Choice | ContractError) -> Output:
        request = sample.request
        if isinstance(choice, ContractError):
            return _failed(sample, f"request {request.number}: {choice}")
        token = choice.token
        try:
            decoder = sample.text or self._begin_text(sample)
            structure = sample.history.structure
            new = len(sample.tokens) + 1 - len(request.prompt)
            text, stops, at_end = _decode(sample, decoder, token, new)
            finish: FinishReason | None = None
            if stops or at_end:
                finish = "stop"
            elif len(sample.tokens) + 1 >= request.limit:
                finish = "length"
            if finish is not None and not stops:
                rest, stops = decoder.flush()
                text, finish = text + rest, "stop" if stops else finish
            if structure is not None:
                structure.add_text(text)
                if finish == "stop" and not structure.is_whole():
                    # By a stop text, by a stop token within it, or by a tokenizer that spells tokens in two ways.
                    return _failed(sample, f"request {request.number}: its text ended before its structure did")
        except Exception as error:  # a decoder may raise anything
            return _failed(sample, error)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        of_prompt = tuple(request.prompt_logprobs) if new == 1 and sample.index == 0 else ()
        return Output(*sample.key, (token,), text, finish, None, logprobs, request.cached, of_prompt)

    def _begin_text(self, sample: Sample) -> StopText:
        """Make a sample's decoder; it and the structure take the tokens that the sample has. A decoder may raise."""
        request = sample.request
        skips = request.sampling.skip_special_tokens
        stream = None if self._tokenizer is None else self._tokenizer.stream(skip_special_tokens=skips)
        decoder = StopText(stream, tuple(request.sampling.stop))
        for new, token in enumerate(sample.tokens[len(request.prompt) :], 1):
            text, _, _ = _decode(sample, decoder, token, new)
            if sample.history.structure is not None:
                sample.history.structure.add_text(text)
        sample.text = decoder
        return decoder

    def _give(self, sample: Sample, output: Output) -> None:
        """Gives a sample its next output; K and V of its tokens before are in its pages, where it has not failed."""
        length = len(sample.tokens)
        if output.error is None:
            self._batching.computed(sample, length)
        sample.request.outbox.last.next = link = Link(sample, length, output)  # from here on it counts
        self._note(link)

    def _note(self, link: Link) -> None:
        """Notes an output that was given. After an exception that is done again, until the link is the last one."""
        sample, request = link.sample, link.sample.request
        sample.tokens[link.length :] = link.output.tokens
        if link.output.finish is not None:
            request.ended.add(sample.index)
            self._batching.end(sample)
            if len(request.ended) == request.samples:
                self._unfinished.pop(request.number, None)
                request.adapter = None
        request.outbox.last = link

    def _recover(self) -> None:
        """Begins again after an exception: what was given counts, all else is computed again."""
        # Not those of samples that wait or run: one that has ended may be in neither list already.
        for outbox in {self._outputs, *(request.outbox for request in list(self._unfinished.values()))}:
            if outbox.last.next is not None:
                self._note(outbox.last.next)
        for sample in self._batching.restart():
            if len(sample.tokens) > len(sample.request.prompt):
                try:
                    self._begin_text(sample)
                except Exception as error:
                    self._give(sample, _failed(sample, error))


def resources_of(
    model: EngineModel, pool: PagePool, window_pool: PagePool | None, disk: DiskPages | None, share_prefixes: bool
) -> tuple[RequestPages, list[Resource]]:
    """The memory that samples of a model have: their pages, and what comes after these."""
    config, resources = model.config, list[Resource]()
    windows = None
    if window_pool is not None:
        window_pages = WindowPages(window_pool, config.longest_window)
        windows = Windows(window_pages, partial(model.copy_page, windows=True))
    sees_all = getattr(model, "draft_layer", None) is not None  # its draft layer has no window
    has_windows_alone = windows is None and not sees_all and min(config.windows, default=-1) >= 0
    window_left = config.longest_window if has_windows_alone else None
    if not share_prefixes:
        if model.num_states:
            resources.append(RequestStates(pool))
        return RequestPages(pool, model.copy_page, window_left), resources + ([] if windows is None else [windows])
    prefixes = PrefixCache(pool, windows=None if windows is None else windows.windows)
    pages = (HybridPages if model.num_states else SharedPages)(prefixes, model.copy_page, window_left)
    if model.num_states:
        resources.append(SharedStates(prefixes))
    if windows is not None:
        resources.append(windows)
    if disk is not None:
        if windows is not None:
            resources.append(DiskWindows(disk, pages, windows))
        else:
            resources.append((DiskStates if model.num_states else DiskPrefixes)(disk, pages))
    return pages, resources


def _own_draft(speculate: Any, model: EngineModel, pool: PagePool) -> OwnDraft | None:
    """What drafts with the model's own draft layer, where that is asked for."""
    if not isinstance(speculate, str) or speculate not in ("mtp", "eagle3"):
        return None
    layer: DraftLayer | None = getattr(model, "draft_layer", None)
    if layer is None or layer.kind != speculate:
        kind = "none" if layer is None else repr(layer.kind)
        raise ContractError(f"speculate: expected a model loaded with a draft layer {speculate!r}, got {kind}")
    return OwnDraft(layer, pool, model.copy_page, model.config.vocab_size)


def _speculation(
    speculate: Any, model: EngineModel, max_step_tokens: int, share_prefixes: bool, own_draft: OwnDraft | None
) -> Speculation:
    if speculate is None:
        return NoSpeculation()
    if own_draft is not None:
        return Speculation(own_draft)
    if isinstance(speculate, str) and speculate == "lookup":
        return Speculation()
    if isinstance(speculate, str) or not hasattr(speculate, "step"):
        raise ContractTypeError(f"speculate: expected 'lookup', 'mtp', 'eagle3' or a model, got {shown(speculate)}")
    if speculate is model:
        raise ContractError("speculate: the model cannot draft for itself: it would write to its own pages")
    if speculate.num_states:
        raise ContractError("speculate: a model with recurrent layers does not draft")
    if 0 < speculate.num_window_pages < speculate.num_pages:
        raise ContractError(
            f"speculate: num_window_pages of a draft model: expected 0 or num_pages={speculate.num_pages}, got"
            f" {speculate.num_window_pages}"
        )
    return Speculation(DraftModel(speculate, model.config.vocab_size, max_step_tokens, share_prefixes))


def _logit_rows(sample: Sample, new: list[int]) -> int:
    """After how many of the tokens that a sample brings to a step its logits are wanted."""
    if sample.request.wants_prompt:
        return len(new)
    return 1 + max(0, sample.cached + len(new) - len(sample.tokens))


def _add_prompt_logprobs(sample: Sample, logits: npt.NDArray[np.float32]) -> None:
    """Notes those of the prompt's tokens that follow what a step computed; those that it has stay."""
    request = sample.request
    for at, row in enumerate(logits, sample.cached):
        if at == len(request.prompt_logprobs) and at + 1 < len(request.prompt):
            logprobs = logprobs_of(row, request.prompt[at + 1], request.sampling.prompt_logprobs or 0)
            request.prompt_logprobs.append(logprobs)


def _decode(sample: Sample, decoder: StopText, token: int, new: int) -> tuple[str, bool, bool]:
    """The text of a sample's `new`-th token; True if a stop text ends it; True if an end token or structure does."""
    request, structure = sample.request, sample.history.structure
    at_end = structure is not None and structure.push(token)
    if token in request.end_tokens:
        return "", False, True
    return *decoder.push(token, may_stop=new > request.sampling.min_tokens), at_end


def _failed(sample: Sample, error: Exception | str) -> Output:
    message = str(error) if isinstance(error, PagedKVError | str) else shown(error)
    return Output(*sample.key, (), "", "error", message)
