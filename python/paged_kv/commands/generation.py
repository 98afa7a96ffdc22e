"""What `paged-kv generate` does with its options: it opens checkpoints, encodes prompts, runs an engine and prints.

It imports MAX, which takes a third of a second: the command imports it when it runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from paged_kv.arguments import integer, printable
from paged_kv.checkpoint.draft_layers import DraftSource, draft_source
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.checkpoint.weights import Checkpoint
from paged_kv.commands.live import live_view
from paged_kv.commands.options import load_model, print_statistics
from paged_kv.commands.printing import Printer
from paged_kv.commands.prompts import Lines, PromptLine, RefusedLine, encode, lines_of, read
from paged_kv.commands.trace import output_file, traced
from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import MAX_RUNNING, Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.sampling import Sampling
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.output import say
from paged_kv.runtime.profile_table import profile_lines
from paged_kv.runtime.step_profile import StepProfile


@dataclass(frozen=True)
class GenerateOptions:
    """The command's options, without those of sampling and structures."""

    folder: Path
    prompts: tuple[str, ...]
    source: str | None
    samples: int
    dtype: str | None
    cache_dtype: KVFormat | None
    cache_rotation: CacheRotation | None
    page_size: int
    pages: int | None
    max_step_tokens: int
    device: str
    kv_disk: Path | None
    kv_disk_gb: float
    speculate: str | None
    lora: Path | None
    as_json: bool
    live: bool | None
    trace: Path | None
    profile: bool
    logits: Path | None

    def check(self, max_tokens: int) -> None:
        """Checks what depends on no checkpoint.

        Raises:
            ContractTypeError, ContractError: a number is out of range, or two options exclude each other.
        """
        sizes = {"--page-size": self.page_size, "--pages": self.pages, "--max-new-tokens": max_tokens}
        for name, value in (sizes | {"--max-step-tokens": self.max_step_tokens}).items():
            if value is not None:
                integer(name, value, 1)
        integer("--n", self.samples, 1, MAX_RUNNING)
        if bool(self.prompts) == (self.source is not None):
            raise ContractError("give prompts by --prompt or by --input, one of the two")
        if self.profile and self.speculate is not None:
            raise ContractError("--profile is not for --speculate, whose steps are of other kinds")
        if self.profile and self.logits is not None:
            raise ContractError("--profile is not for --logits, which runs the operations one by one")
        if self.lora is not None and (self.profile or self.logits is not None):
            raise ContractError("--lora is not for --profile and --logits, which see the model's own steps alone")
        if not 0 < self.kv_disk_gb < 1e9:
            raise ContractError(f"--kv-disk-gb: expected a number above 0 and below 10^9, got {self.kv_disk_gb}")

    def disk(self) -> DiskTier | None:
        """The disk tier, where there is one. Raises as `DiskTier`."""
        return None if self.kv_disk is None else DiskTier(self.kv_disk, max(int(self.kv_disk_gb * 1e9), 1))


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of the command, and the checkpoints that they are for."""

    source: Source
    draft: Source | DraftSource | None
    """The smaller checkpoint, or the draft layer, of --speculate."""
    tokenizer: Tokenizer
    lines: Lines
    num_pages: int
    """The pages that all samples can need at once, at least 1."""

    @property
    def config(self) -> DecoderConfig:
        """The model's sizes."""
        return self.source.config

    @classmethod
    def of(cls, options: GenerateOptions, sampling: Sampling) -> PromptBatch:
        """Opens the checkpoints and encodes the prompts.

        Raises:
            CheckpointError: a checkpoint cannot be opened.
            ContractError: the draft has other tokens; a prompt of --prompt is refused, or needs more than --pages.
        """
        source = open_source(options.folder)
        tokenizer = Tokenizer(source, source.config)
        draft: Source | DraftSource | None = draft_source(options.speculate, source)
        if draft is None and options.speculate not in (None, "lookup"):
            draft = open_source(Path(str(options.speculate)))
        if isinstance(draft, Source) and draft.tokenizer()[0].get_vocab() != source.tokenizer()[0].get_vocab():
            raise ContractError(f"--speculate {printable(options.speculate)}: its tokens are not those of --model")
        if options.source is None:
            lines = lines_of(options.prompts, sampling, options.samples)
        else:
            lines = read(options.source, sampling, options.samples)
        lines = encode(lines, tokenizer, source.config)
        if options.source is None:
            for line in lines:
                if isinstance(line, RefusedLine):
                    raise ContractError(line.error)
        size = options.page_size
        pages = [(line.pages(source.config, size), line.n) for line in lines if isinstance(line, PromptLine)]
        longest = max((count for count, _ in pages), default=0)
        if options.source is None and options.pages is not None and longest > options.pages:
            raise ContractError(
                f"--pages {options.pages} is too few: a prompt and its new tokens need {longest} pages of {size}"
            )
        return cls(source, draft, tokenizer, lines, max(sum(count * n for count, n in pages), 1))


def run(options: GenerateOptions, sampling: Sampling) -> int:
    """Runs the command with options that were checked; returns its exit status."""
    disk, batch = options.disk(), PromptBatch.of(options, sampling)
    with output_file("--trace", options.trace) as trace, output_file("--logits", options.logits, "wb") as record_file:
        engine, model = _load(options, batch, disk)
        profiles = model.profile_steps() if options.profile else None
        engine.record = None if record_file is None else model.new_record()
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        printer = Printer(as_json=options.as_json or options.source is not None or has_logprobs)
        adapter = None if options.lora is None else str(options.lora)
        if adapter is not None:
            engine.load_adapter(adapter, adapter)
        _add_requests(engine, batch.lines, printer, adapter, refuses_all=options.source is None)
        shows = sys.stderr.isatty() and not sys.stdout.isatty() if options.live is None else options.live
        of_pages = {"cache_dtype": model.page_kind[0], "page_bytes": model.page_bytes}
        with traced(engine.pool, trace, **of_pages), live_view(engine, shows):
            printer.start()
            began = perf_counter()
            while not engine.is_idle:
                for output in engine.step():
                    printer.add(output)
            seconds = perf_counter() - began
        if record_file is not None and engine.record is not None:
            engine.record.write(record_file)
        print_statistics(engine.statistics, model)
        _print_options_statistics(engine, profiles, seconds, options.speculate, disk)
        return int(printer.failed)


def _load(options: GenerateOptions, batch: PromptBatch, disk: DiskTier | None) -> tuple[Engine, DecoderModel]:
    """The engine, and the model that it runs."""
    dtype = options.dtype or batch.config.dtype
    _say_packing(batch.source, dtype)
    num_pages = batch.num_pages if options.pages is None else options.pages
    size = options.page_size, options.device
    layer = batch.draft if isinstance(batch.draft, DraftSource) else None
    model = load_model(batch.source, dtype, num_pages, *size, options.cache_dtype, options.cache_rotation, layer)
    speculate: Any = options.speculate if layer is None else layer.head.kind
    if isinstance(batch.draft, Source):
        speculate = load_model(batch.draft, options.dtype or batch.draft.config.dtype, model.num_pages, *size)
    steps = options.max_step_tokens
    return Engine(model, batch.tokenizer, max_step_tokens=steps, disk=disk, speculate=speculate), model


def _say_packing(source: Source, dtype: str | None) -> None:
    """Says how packed weights are loaded, where a checkpoint has some."""
    if isinstance(source.checkpoint, Checkpoint) and source.checkpoint.packing is not None:
        encodings = " and ".join(dict.fromkeys(encoding for _, encoding in source.config.encodings))
        use = f"stay packed, as {encodings}" if encodings else f"are dequantised to {dtype or 'float32'} at load"
        say(f"{source.checkpoint.packing.describe()} {use}")


def _add_requests(engine: Engine, lines: Lines, printer: Printer, adapter: str | None, *, refuses_all: bool) -> None:
    """Adds a request for each line.

    Raises:
        PagedKVError: with `refuses_all`, one needs more pages or samples than there may be.
    """
    for line in lines:
        try:
            if isinstance(line, PromptLine):
                number = engine.add_request(
                    line.tokens, line.sampling, line.n, namespace=line.namespace, adapter=adapter
                )
                printer.expect(number, line)
            else:
                printer.refuse(line)
        except PagedKVError as error:
            if refuses_all:
                raise
            printer.refuse(RefusedLine(line.index, str(error)))


def _print_options_statistics(
    engine: Engine,
    profiles: tuple[StepProfile, StepProfile] | None,
    seconds: float,
    speculate: str | None,
    disk: DiskTier | None,
) -> None:
    """What --profile, --speculate and --kv-disk print, on stderr."""
    if profiles is not None:
        for row in profile_lines(profiles, seconds, "plans, sampling, text"):
            say(row)
    if speculate is not None:
        say(f"drafts: {engine.statistics.accepted_tokens} of {engine.statistics.draft_tokens} were accepted")
    if disk is not None:
        engine.flush()
        say(f"disk: {engine.tokens_restored} tokens read from {printable(disk.folder)}")
