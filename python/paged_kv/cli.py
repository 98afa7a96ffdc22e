"""The command line: `paged-kv demo | generate | serve | warmup | doctor | bench`.

stdout carries results alone; progress, statistics and errors go to stderr. Bad input is one line and exit status 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paged_kv import __version__
from paged_kv.arguments import shown
from paged_kv.benchmarks.decode_cpu import bench
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.options import check_head_dim
from paged_kv.output import say, with_streams

if TYPE_CHECKING:  # MAX takes a third of a second to import: not for `--help`
    from paged_kv.engine.engine import Generation, Statistics
    from paged_kv.engine.model import DecoderModel
    from paged_kv.engine.tokenizer import Tokenizer

DEMO_PROMPTS = (
    "a",
    "the pages of a cache",
    "once a prompt is longer than a page, its keys and values go on in another page, anywhere in the pool",
    "shuffled " * 30,
)
DEMO_NEW_TOKENS = 48


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 fine, 1 a check or stdout failed, 2 bad input, 130 interrupted."""
    sys.exit(with_streams(lambda: _run(args)))


def _run(args: Sequence[str] | None) -> int:
    try:
        status = commands.main(args=args, prog_name="paged-kv", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return 2
    except click.ClickException as error:
        return _refuse(error.format_message())
    except PagedKVError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return 130
    return status if isinstance(status, int) else 0


def _refuse(message: str) -> int:
    say(f"error: {message}")
    return 2


def _set_threads(_context: click.Context, _option: click.Parameter, value: int | None) -> None:
    """Sets the number of threads before a command's own code can use MAX."""
    if value is not None:
        from paged_kv.runtime.threads import set_num_threads

        try:
            set_num_threads(value)
        except PagedKVError as error:
            raise ContractError(f"--threads: {error}") from error


threads_option = click.option(
    "--threads",
    type=int,
    callback=_set_threads,
    expose_value=False,
    metavar="N",
    help="Run on N threads of the CPU. Default: one a CPU that the process may run on.",
)
"""Of the commands that run kernels."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def commands() -> None:
    """A paged KV cache and decode attention for LLM inference on MAX."""


@commands.command()
@threads_option
@click.option("--explain", is_flag=True, help="Also say which attention kernel each pair of dtypes gets, and why.")
@click.option("--arch", help="With --explain: a GPU's architecture (sm_90a, gfx942, ...) instead of what is here.")
@click.option("--head-dim", type=int, default=128, show_default=True, help="With --explain.")
@click.option("--group", type=int, default=4, show_default=True, help="With --explain: query heads a KV head.")
@click.option("--page-size", type=int, default=16, show_default=True, help="With --explain.")
def doctor(explain: bool, arch: str | None, head_dim: int, group: int, page_size: int) -> int:
    """Print what was found: toolchain, CPU and its target, GPUs, cache folder."""
    from paged_kv.runtime.doctor import collect, explain_kernels, render

    for name, value in (("--group", group), ("--page-size", page_size)):
        if not 1 <= value < 2**31:
            raise ContractError(f"{name} must be at least 1 and below 2^31, not {shown(value)}")
    check_head_dim("--head-dim", head_dim)
    report = collect()
    click.echo(render(report))
    if explain:
        devices = report.architectures if arch is None else [arch]
        click.echo(explain_kernels(devices, head_dim, group, page_size, report.target))
    return report.exit_status


@commands.command()
@threads_option
@click.option(
    "--model", "folder", type=click.Path(path_type=Path), required=True, help="Checkpoint folder or GGUF file."
)
@click.option("--prompt", "prompts", multiple=True, required=True, help="Repeat it for a batch.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Most tokens after each prompt.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus sampling.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random streams, one a prompt.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of quantised models the cache's. Default: its own."
)
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens in a page of the cache.")
@click.option("--pages", type=int, help="Pages of the cache. Default: what these prompts can need.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Where it runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt, as it ends.")
def generate(
    folder: Path,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    dtype: str | None,
    page_size: int,
    pages: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Continue prompts with a checkpoint in Hugging Face format or a GGUF file, all of them as one batch."""
    from paged_kv.checkpoint.source import open_source
    from paged_kv.engine.engine import Generation
    from paged_kv.engine.sampling import Sampler
    from paged_kv.engine.scheduler import pages_for
    from paged_kv.engine.tokenizer import Tokenizer

    if page_size < 1:
        raise ContractError(f"--page-size must be at least 1, not {page_size}")
    if pages is not None and pages < 1:
        raise ContractError(f"--pages must be at least 1, not {pages}")
    sampler = Sampler(temperature, top_p, seed)
    source = open_source(folder)
    config = source.config
    tokenizer = Tokenizer(source.folder, config)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    needed = pages_for(config, encoded, max_new_tokens, page_size)
    if pages is not None and needed > pages:
        raise ContractError(f"--pages {pages} is too few: prompts and new tokens need {needed} pages of {page_size}")
    model = _load(folder, config.dtype if dtype is None else dtype, pages or needed, page_size, device)
    run = Generation(model, encoded, max_new_tokens, sampler, frozenset(config.eos_token_ids))
    _print_texts(run, tokenizer, prompts, as_json)
    _print_statistics(run.statistics, model)


@commands.command()
@click.option("--q-dtype", "q_dtypes", multiple=True, help="Of queries; repeat it. Default: all.")
@click.option("--kv-dtype", "kv_dtypes", multiple=True, help="Of caches; repeat it. Default: all.")
def warmup(q_dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...]) -> None:
    """Compile the kernels now, so that the first call does not wait."""
    from paged_kv.runtime.warmup import warmup as compile_variants

    say("compiling what is missing: a minute or two for all dtypes")
    for variant in compile_variants(q_dtypes or None, kv_dtypes or None):
        click.echo(f"ready: {variant}")


@commands.command()
@threads_option
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Where it runs.")
def demo(device: str) -> int:
    """Decode four prompts with a small made-up model, and check the tokens against a recompute without a cache."""
    from paged_kv.arrays.host import to_numpy
    from paged_kv.checkpoint.config import load_config
    from paged_kv.engine.demo import write_demo_checkpoint
    from paged_kv.engine.engine import Generation
    from paged_kv.engine.recompute import recompute
    from paged_kv.engine.sampling import Sampler
    from paged_kv.engine.scheduler import pages_for
    from paged_kv.engine.tokenizer import Tokenizer
    from paged_kv.runtime.cache_folder import cache_path

    folder = write_demo_checkpoint(cache_path() / "demo")
    say(f"model: {folder} (random weights: its text is noise)")
    config = load_config(folder)
    tokenizer = Tokenizer(folder, config)
    encoded = [tokenizer.encode(prompt) for prompt in DEMO_PROMPTS]
    model = _load(folder, "float32", pages_for(config, encoded, DEMO_NEW_TOKENS, 16), 16, device)
    run = Generation(model, encoded, DEMO_NEW_TOKENS, Sampler(), frozenset(config.eos_token_ids))
    generated = _print_texts(run, tokenizer, DEMO_PROMPTS, as_json=False)
    _print_statistics(run.statistics, model)

    weights = {name: to_numpy(buffer) for name, buffer in model.weights.items()}
    equal = 0
    for prompt, new in zip(encoded, generated, strict=True):
        logits = recompute(config, weights, [*prompt, *new[:-1]])  # [T, vocab]
        equal += sum(int(row.argmax()) == token for row, token in zip(logits[len(prompt) - 1 :], new, strict=True))
    total = sum(map(len, generated))
    click.echo(f"\npaged tokens equal to those of a recompute without a cache: {equal} of {total}")
    return 0 if equal == total else 1


@commands.command("serve")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[DIR] [-- MAX'S OWN FLAGS]")
@click.option("--demo", "use_demo", is_flag=True, help="Serve a small made-up model; no DIR then.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 is any that is free.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--max-batch-size", type=int, default=16, show_default=True, help="Requests that decode together.")
@click.option("--page-size", type=int, default=128, show_default=True, help="Tokens in a page of the cache.")
def serve_command(arguments: tuple[str, ...], use_demo: bool, **options: Any) -> None:
    """Serve a checkpoint folder with MAX Serve, for OpenAI's clients. `max serve --help` lists MAX's own flags."""
    from paged_kv.engine.demo import write_demo_checkpoint
    from paged_kv.runtime.cache_folder import cache_path
    from paged_kv.serve.launch import Request, serve

    folders, flags = ((), arguments) if use_demo else (arguments[:1], arguments[1:])
    if (not use_demo and not folders) or not all(flag.startswith("-") for flag in flags[:1]):
        raise ContractError("name one folder or --demo; MAX's own flags follow after --")
    folder = Path(folders[0]) if folders else write_demo_checkpoint(cache_path() / "demo")
    serve(Request(folder, flags=flags, **options))


commands.add_command(bench)


def _load(folder: Path, dtype: str | None, num_pages: int, page_size: int, device: str) -> DecoderModel:
    from max.dtype import DType

    from paged_kv.checkpoint.weights import progress_bar
    from paged_kv.engine.model import DecoderModel
    from paged_kv.runtime.session import runtime_on

    runtime = runtime_on(0 if device == "gpu" else None)
    with progress_bar("weights") as on_progress:
        return DecoderModel.from_folder(
            folder,
            dtype=DType.bfloat16 if dtype == "bfloat16" else DType.float32,
            num_pages=num_pages,
            page_size=page_size,
            on_progress=on_progress,
            runtime=runtime,
            on_compile=lambda: say("compiling the decode step: about a minute, once for this model and machine"),
        )


def _print_texts(run: Generation, tokenizer: Tokenizer, prompts: Sequence[str], as_json: bool) -> list[list[int]]:
    """Prints each prompt's text as it is generated; returns the generated tokens, by prompt.

    One prompt's text streams at a time, in order: the text of the others is kept until then.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting = ["" for _ in prompts]
    streams = [tokenizer.stream() for _ in prompts]
    done: set[int] = set()
    shown = 0

    def heading(index: int) -> str:
        return "" if len(prompts) == 1 else f"{chr(10) * (index > 0)}=== prompt {index + 1}: {prompts[index]}\n"

    if not as_json:
        click.echo(heading(0), nl=False)
    for emitted in run:
        index = emitted.request
        tokens[index].append(emitted.token)
        waiting[index] += streams[index].push(emitted.token)
        if emitted.finish:
            waiting[index] += streams[index].flush()
            done.add(index)
        if as_json:
            if emitted.finish:
                record = {
                    "prompt": prompts[index],
                    "text": waiting[index],
                    "tokens": len(tokens[index]),
                    "finish_reason": emitted.finish,
                    "index": index,
                }
                click.echo(json.dumps(record, ensure_ascii=False))
            continue
        while shown < len(prompts):
            click.echo(waiting[shown], nl=False)
            waiting[shown] = ""
            if shown not in done:
                break
            click.echo()
            shown += 1
            if shown < len(prompts):
                click.echo(heading(shown), nl=False)
    return tokens


def _print_statistics(statistics: Statistics, model: DecoderModel) -> None:
    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s" if seconds else f"{tokens} tokens"

    say(f"prompt: {rate(statistics.prompt_tokens, statistics.prefill_seconds)}")
    say(f"decode: {rate(statistics.decode_tokens, statistics.decode_seconds)}")
    used = statistics.peak_pages
    say(f"pages: {used} used, of {model.num_pages} ({model.page_size} tokens, {model.page_bytes} bytes each)")
