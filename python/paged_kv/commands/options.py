"""Parts that several commands share: options, loading a model, and the lines about what was computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paged_kv.arguments import printable, shown
from paged_kv.engine.sampling import Kind, Sampling
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.files import read_regular
from paged_kv.kv_formats import CODE_DTYPES, KVFormat
from paged_kv.options import CACHE_ROTATIONS, CacheRotation
from paged_kv.output import say
from paged_kv.structured_output import MOST_CHARACTERS, Grammar, JsonSchema, Regex, Structure

if TYPE_CHECKING:  # MAX takes a third of a second to import: not for `--help`
    from paged_kv.checkpoint.draft_layers import DraftSource
    from paged_kv.checkpoint.source import Source
    from paged_kv.engine.interfaces import Statistics
    from paged_kv.engine.model import DecoderModel


def _set_threads(_context: click.Context, option: click.Parameter, value: int | None) -> None:
    from paged_kv.runtime.threads import set_num_threads

    _set(set_num_threads, option, value)


def _set_numa(_context: click.Context, option: click.Parameter, value: str | None) -> None:
    from paged_kv.numa import set_numa

    _set(set_numa, option, value)


def _set(call: Callable[[Any], None], option: click.Parameter, value: int | str | None) -> None:
    """Sets what holds for the process, before a command's own code can use MAX."""
    if value is not None:
        try:
            call(value)
        except PagedKVError as error:
            raise ContractError(f"{option.opts[0]}: {error}") from error


numa_option = click.option(
    "--numa",
    is_eager=True,  # before --threads, which starts threads
    callback=_set_numa,
    expose_value=False,
    metavar="NODE|interleave",
    help="Run on the CPUs and memory of one NUMA node, or take memory from all nodes by turns.",
)
"""The option of the commands that load a model for long."""


def _set_deterministic(_context: click.Context, _option: click.Parameter, value: bool) -> None:
    from paged_kv.runtime.determinism import set_deterministic

    set_deterministic(value)


deterministic_option = click.option(
    "--deterministic",
    is_flag=True,
    callback=_set_deterministic,
    expose_value=False,
    help="Compute bitwise identical logits in any batch, in bfloat16 on CPUs with AMX too. Other CPUs always do."
    " Without it those are faster.",
)
"""The option of the commands that run a model on a CPU."""

threads_option = click.option(
    "--threads",
    type=int,
    callback=_set_threads,
    expose_value=False,
    metavar="N",
    help="Run on N threads of the CPU. Default: one a CPU that the process may run on.",
)
"""The option of the commands that run kernels."""

cache_dtype_option = click.option(
    "--cache-dtype",
    type=click.Choice(CODE_DTYPES),
    help="Keep K and V as codes with a scale a token and KV head. Default: as --dtype.",
)

rotation_option = click.option(
    "--cache-rotation",
    type=click.Choice(CACHE_ROTATIONS),
    help="Rotate q and k before the cache, so that few bits keep more of k; head_dim is a power of two.",
)

device_option = click.option(
    "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Where it runs."
)

lora_option = click.option(
    "--lora", multiple=True, metavar="NAME=PATH", help="Load a LoRA adapter, which answers by its name; repeat it."
)
"""The option of the commands that take adapters by name."""


def _pairs(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, float]]:
    """Parse `5=-1.5`, which may be given several times."""
    pairs = []
    for value in values:
        token, _, number = value.partition("=")
        try:
            pairs.append((token, float(number)))
        except ValueError:
            raise ContractError(f"{option.opts[0]}: expected TOKEN=NUMBER, got {shown(value)}") from None
    return pairs


_KINDS: dict[Kind, dict[str, Any]] = {
    "number": {"type": float, "show_default": True},
    "integer": {"type": int, "show_default": True},
    "flag": {"is_flag": True},
    "texts": {"multiple": True},
    "tokens": {"type": int, "multiple": True},
    "biases": {"multiple": True, "callback": _pairs, "metavar": "TOKEN=NUMBER"},
}

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(*left_out: str, **defaults: Any) -> Callable[[Command], Command]:
    """An option for each field of `Sampling` but some and its structure, which the command gets by the field's name.

    Args:
        left_out: Fields without an option.
        defaults: Those that are not the field's own.
    """

    def decorate(command: Command) -> Command:
        for each in reversed(fields(Sampling)):
            if each.name not in left_out and each.metadata["kind"] != "structure":
                flag = each.metadata["flag"] or "--" + each.name.replace("_", "-")
                default = defaults.get(each.name, each.default)
                kind = _KINDS[each.metadata["kind"]]
                command = click.option(flag, each.name, default=default, help=each.metadata["help"], **kind)(command)
        return command

    return decorate


def structure_options(command: Command) -> Command:
    """`--json-schema`, `--regex` and `--grammar`, which the command gets by these names."""
    file = click.Path(path_type=Path)
    for option in (
        click.option("--grammar", type=file, metavar="FILE", help="Texts of a grammar: llguidance's kind of Lark."),
        click.option("--regex", metavar="PATTERN", help="Texts that a regular expression matches as a whole."),
        click.option("--json-schema", type=file, metavar="FILE", help="JSON that is valid by the schema in a file."),
    ):
        command = option(command)
    return command


def structure_of(json_schema: Path | None, regex: str | None, grammar: Path | None) -> Structure | None:
    """The structure that these options give.

    Raises:
        ContractTypeError, ContractError: there are several, a file cannot be read, or a structure is malformed.
    """
    structures = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    names = [name for name, value in structures.items() if value is not None]
    if len(names) > 1:
        raise ContractError(f"a text has one structure: {' or '.join(names)}, not both")
    if json_schema is not None:
        return JsonSchema(_read_structure("--json-schema", json_schema))
    if grammar is not None:
        return Grammar(_read_structure("--grammar", grammar))
    return None if regex is None else Regex(regex)


def _read_structure(name: str, path: Path) -> str:
    try:
        return read_regular(path, 4 * MOST_CHARACTERS).decode()
    except (OSError, ValueError) as error:
        raise ContractError(f"{name} {printable(path)}: cannot be read: {printable(error)}") from None


def load_model(
    model: Path | Source,
    dtype: str | None,
    num_pages: int,
    page_size: int,
    device: str,
    kv_format: KVFormat | None = None,
    cache_rotation: CacheRotation | None = None,
    draft: DraftSource | None = None,
) -> DecoderModel:
    """The model of a checkpoint, with a bar for its weights; bfloat16 or else float32."""
    from max.dtype import DType

    from paged_kv.checkpoint.weights import progress_bar
    from paged_kv.engine.model import DecoderModel
    from paged_kv.runtime.session import runtime_on

    runtime = runtime_on(0 if device == "gpu" else None)
    with progress_bar("weights") as on_progress:
        return DecoderModel.from_folder(
            model,
            dtype=DType.bfloat16 if dtype == "bfloat16" else DType.float32,
            num_pages=num_pages,
            page_size=page_size,
            on_progress=on_progress,
            runtime=runtime,
            kv_format=kv_format,
            cache_rotation=cache_rotation,
            draft=draft,
            on_compile=lambda: say("compiling the decode step: half a minute, once for this kind of model and machine"),
        )


def print_statistics(statistics: Statistics, model: DecoderModel) -> None:
    """Tokens, times and pages, on stderr."""

    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s" if seconds else f"{tokens} tokens"

    say(f"prompt: {rate(statistics.prompt_tokens, statistics.prefill_seconds)}")
    say(f"decode: {rate(statistics.decode_tokens, statistics.decode_seconds)}")
    used, size = statistics.peak_pages, model.page_size
    room = f"{model.num_pages * size} tokens in {model.page_kind[0]}"
    say(f"pages: {used} used, of {model.num_pages} ({size} tokens, {model.page_bytes} bytes each): {room}")
    if model.num_window_pages:
        say(f"pages of layers with windows: {model.num_window_pages} ({model.window_page_bytes} bytes each)")
