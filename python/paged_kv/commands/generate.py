"""`paged-kv generate`: continues prompts with a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from paged_kv.arguments import integer, printable
from paged_kv.commands.options import (
    cache_dtype_option,
    deterministic_option,
    device_option,
    load_model,
    numa_option,
    print_statistics,
    rotation_option,
    sampling_options,
    structure_of,
    structure_options,
    threads_option,
)
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.output import say


@click.command()
@numa_option
@threads_option
@deterministic_option
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Checkpoint folder, GGUF file, or a hub's `org/name[:Q4_K_M]`.",
)
@click.option("--prompt", "prompts", multiple=True, help="Repeat it for a batch.")
@click.option(
    "--input", "source", metavar="FILE", help="JSON lines with a prompt and options each; - is stdin. Implies --json."
)
@click.option("--n", "samples", type=int, default=1, show_default=True, help="Samples of each prompt.")
@sampling_options(seed=0)
@structure_options
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of quantised models the cache's. Default: its own."
)
@cache_dtype_option
@rotation_option
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens in a page of the cache.")
@click.option("--pages", type=int, help="Pages of the cache. Default: what these prompts can need.")
@click.option("--max-step-tokens", type=int, default=2048, show_default=True, help="Tokens of one step at most.")
@device_option
@click.option(
    "--kv-disk", type=click.Path(path_type=Path), metavar="DIR", help="Keep pages of prefixes there, and find them."
)
@click.option(
    "--kv-disk-gb", type=float, default=10.0, show_default=True, help="The most that --kv-disk may hold, in 10^9 bytes."
)
@click.option(
    "--speculate",
    metavar="lookup|DRAFT",
    help="Draft tokens by the text so far, or by a smaller checkpoint: same texts.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a sample, as it ends. --logprobs implies it.")
@click.option("--live/--no-live", default=None, help="Show what the engine does. Default: where only stderr is shown.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write what happens to pages, for `paged-kv inspect`.")
@click.option("--profile", is_flag=True, help="Show where the time of steps goes, by operation and by layer.")
@click.option(
    "--logits", type=click.Path(path_type=Path), metavar="FILE", help="Write what each step gives, for `paged-kv diff`."
)
def generate(
    folder: Path,
    prompts: tuple[str, ...],
    source: str | None,
    samples: int,
    dtype: str | None,
    cache_dtype: KVFormat | None,
    cache_rotation: CacheRotation | None,
    page_size: int,
    pages: int | None,
    max_step_tokens: int,
    device: str,
    kv_disk: Path | None,
    kv_disk_gb: float,
    speculate: str | None,
    as_json: bool,
    live: bool | None,
    trace: Path | None,
    profile: bool,
    logits: Path | None,
    json_schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    **options: Any,
) -> int:
    """Continue prompts with a checkpoint in Hugging Face format or a GGUF file, all of them as one batch.

    A line of --input is an object with "prompt", a text or token ids, and perhaps "n", "namespace", "max_tokens" and
    the other fields of Sampling: "temperature", "top_p", "top_k", "stop" and so on, as the options here with _ for -;
    "json_schema" and "grammar" are the schema and the grammar themselves.
    Options say what a line leaves out. A line that is malformed, or that the model cannot take, is an object with
    "error" and a line on stderr; the others go on, and the exit status is 1.
    """
    from paged_kv.checkpoint.source import open_source
    from paged_kv.checkpoint.weights import Checkpoint
    from paged_kv.commands.live import live_view
    from paged_kv.commands.printing import Printer
    from paged_kv.commands.prompts import PromptLine, RefusedLine, encode, given, read
    from paged_kv.commands.trace import output_file, traced
    from paged_kv.engine.disk_tier import DiskTier
    from paged_kv.engine.engine import MAX_RUNNING, Engine
    from paged_kv.engine.tokenizer import Tokenizer
    from paged_kv.runtime.profile_table import profile_lines

    sizes = {"--page-size": page_size, "--pages": pages, "--max-new-tokens": options["max_tokens"]}
    for name, value in (sizes | {"--max-step-tokens": max_step_tokens}).items():
        if value is not None:
            integer(name, value, 1)
    integer("--n", samples, 1, MAX_RUNNING)
    if bool(prompts) == (source is not None):
        raise ContractError("give prompts by --prompt or by --input, one of the two")
    if profile and speculate is not None:
        raise ContractError("--profile is not for --speculate, whose steps are of other kinds")
    if profile and logits is not None:
        raise ContractError("--profile is not for --logits, which runs the operations one by one")
    if not 0 < kv_disk_gb < 1e9:
        raise ContractError(f"--kv-disk-gb must be above 0 and below 10^9, not {kv_disk_gb}")
    disk = None if kv_disk is None else DiskTier(kv_disk, max(int(kv_disk_gb * 1e9), 1))
    sampling = Sampling(**options, structured_output=structure_of(json_schema, regex, grammar))
    opened = open_source(folder)
    config = opened.config
    tokenizer = Tokenizer(opened, config)
    draft = None if speculate in (None, "lookup") else open_source(Path(str(speculate)))
    if draft is not None and draft.tokenizer()[0].get_vocab() != opened.tokenizer()[0].get_vocab():
        raise ContractError(f"--speculate {printable(speculate)}: its tokens are not those of --model")
    lines = given(prompts, sampling, samples) if source is None else read(source, sampling, samples)
    lines = encode(lines, tokenizer, config)
    asked = [line for line in lines if isinstance(line, PromptLine)]
    for line in lines:
        if isinstance(line, RefusedLine) and source is None:
            raise ContractError(line.error)
    each = [line.pages(config, page_size) for line in asked]
    if pages is not None and source is None and max(each) > pages:
        raise ContractError(
            f"--pages {pages} is too few: a prompt and its new tokens need {max(each)} pages of {page_size}"
        )
    needed = sum(count * line.n for count, line in zip(each, asked, strict=True))
    given_dtype, dtype = dtype is not None, config.dtype if dtype is None else dtype
    if isinstance(opened.checkpoint, Checkpoint) and opened.checkpoint.packing is not None:
        kinds = " and ".join(dict.fromkeys(encoding for _, encoding in config.encodings))
        kept = f"stay packed, as {kinds}" if kinds else f"are dequantised to {dtype or 'float32'} at load"
        say(f"{opened.checkpoint.packing.describe()} {kept}")
    with output_file("--trace", trace) as file, output_file("--logits", logits, "wb") as record_file:
        model = load_model(opened, dtype, pages or max(needed, 1), page_size, device, cache_dtype, cache_rotation)
        draft_model: Any = speculate
        if draft is not None:
            its_dtype = dtype if given_dtype else draft.config.dtype
            draft_model = load_model(draft, its_dtype, model.num_pages, page_size, device)
        engine = Engine(model, tokenizer, max_step_tokens=max_step_tokens, disk=disk, speculate=draft_model)
        profiles = model.profile_steps() if profile else None
        engine.record = None if record_file is None else model.new_record()
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        printer = Printer(as_json=as_json or source is not None or has_logprobs)
        for line in lines:
            try:
                if isinstance(line, PromptLine):
                    number = engine.add_request(line.tokens, line.sampling, line.n, namespace=line.namespace)
                    printer.expect(number, line)
                else:
                    printer.refuse(line)
            except PagedKVError as error:  # more pages or samples than there may be
                if source is None:
                    raise
                printer.refuse(RefusedLine(line.index, str(error)))
        shows = sys.stderr.isatty() and not sys.stdout.isatty() if live is None else live
        of_pages = {"cache_dtype": model.page_kind[0], "page_bytes": model.page_bytes}
        with traced(engine.pool, file, **of_pages), live_view(engine, shows):
            printer.start()
            began = perf_counter()
            while not engine.is_idle:
                for output in engine.step():
                    printer.add(output)
            seconds = perf_counter() - began
        if record_file is not None and engine.record is not None:
            engine.record.write(record_file)
        print_statistics(engine.statistics, model)
        if profiles is not None:
            for row in profile_lines(profiles, seconds, "plans, sampling, text"):
                say(row)
        if speculate is not None:
            found = engine.statistics
            say(f"drafts: {found.accepted_tokens} of {found.draft_tokens} were accepted")
        if disk is not None:
            engine.flush()
            say(f"disk: {engine.tokens_restored} tokens read from {printable(disk.folder)}")
        return int(printer.failed)
