"""`paged-kv generate`: continues prompts with a checkpoint."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from paged_kv.commands.options import (
    cache_dtype_option,
    deterministic_option,
    device_option,
    numa_option,
    rotation_option,
    sampling_options,
    structure_of,
    structure_options,
    threads_option,
)
from paged_kv.engine.sampling import Sampling


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
    metavar="lookup|mtp|DRAFT",
    help="Draft tokens by the text so far, by the model's MTP layer, by a smaller checkpoint or an EAGLE-3 head: same"
    " texts.",
)
@click.option("--lora", type=click.Path(path_type=Path), metavar="PATH", help="A LoRA adapter for all prompts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a sample, as it ends. --logprobs implies it.")
@click.option("--live/--no-live", default=None, help="Show what the engine does. Default: where only stderr is shown.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write what happens to pages, for `paged-kv inspect`.")
@click.option("--profile", is_flag=True, help="Show where the time of steps goes, by operation and by layer.")
@click.option(
    "--logits", type=click.Path(path_type=Path), metavar="FILE", help="Write what each step gives, for `paged-kv diff`."
)
def generate(json_schema: Path | None, regex: str | None, grammar: Path | None, **options: Any) -> int:
    """Continue prompts with a checkpoint in Hugging Face format or a GGUF file, all of them as one batch.

    A line of --input is an object with "prompt", a text or token ids, and perhaps "n", "namespace", "max_tokens" and
    the other fields of Sampling: "temperature", "top_p", "top_k", "stop" and so on, as the options here with _ for -;
    "json_schema" and "grammar" are the schema and the grammar themselves.
    Options say what a line leaves out. A line that is malformed, or that the model cannot take, is an object with
    "error" and a line on stderr; the others go on, and the exit status is 1.
    """
    from paged_kv.commands.generation import GenerateOptions, run

    own = GenerateOptions(**{each.name: options.pop(each.name) for each in fields(GenerateOptions)})
    own.check(options["max_tokens"])
    return run(own, Sampling(**options, structured_output=structure_of(json_schema, regex, grammar)))
