"""`paged-kv embed`: vectors of texts, or scores of documents, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from paged_kv.arguments import printable
from paged_kv.commands.options import deterministic_option, numa_option, threads_option
from paged_kv.errors import ContractError
from paged_kv.files import read_regular

_PATH = click.Path(path_type=Path)


@click.command("embed")
@numa_option
@threads_option
@deterministic_option
@click.argument("texts", nargs=-1)
@click.option("--model", required=True, help="A checkpoint folder, a GGUF file, or a hub's model.")
@click.option("--input", "source", metavar="FILE", help="Texts, one a line; - is stdin.")
@click.option("--output", type=_PATH, metavar="FILE.npy", help="Write an array [texts, size] float32, no JSON lines.")
@click.option("--query", help="Score the texts as documents that answer it, the best first.")
@click.option("--task", type=click.Choice(["embed", "rerank"]), help="Of a checkpoint whose files do not say it.")
@click.option("--prompt-name", help="The checkpoint's prompt before each text, such as query.")
@click.option("--dimensions", type=int, help="Cut vectors to so many numbers (Matryoshka), and norm them again.")
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the context; else they are refused.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: the checkpoint's own.")
@click.option("--max-step-tokens", type=int, default=2048, show_default=True, help="Tokens of one step at most.")
def embed(
    texts: tuple[str, ...],
    model: str,
    source: str | None,
    output: Path | None,
    query: str | None,
    task: str | None,
    prompt_name: str | None,
    dimensions: int | None,
    truncate: bool,
    dtype: str | None,
    max_step_tokens: int,
) -> None:
    """Print a JSON line for each of TEXTS: its index and its embedding, or its relevance_score for --query."""
    import numpy as np

    from paged_kv.checkpoint.weights import progress_bar
    from paged_kv.engine.embedding import load_embedder

    if bool(texts) == (source is not None):
        raise ContractError("name TEXTS, or a file of them by --input")
    if query is not None and (prompt_name is not None or dimensions is not None):
        raise ContractError("--query: expected no --prompt-name and no --dimensions beside it")
    lines = list(texts) if source is None else _read(source)
    with progress_bar("weights") as on_progress:
        options = {"dtype": dtype, "max_step_tokens": max_step_tokens, "on_progress": on_progress}
        embedder = load_embedder(model, task=task, **options)  # type: ignore[arg-type]
    key = "embedding" if query is None else "relevance_score"
    if query is None:
        rows = embedder.embed(lines, prompt_name=prompt_name, dimensions=dimensions, truncate=truncate)
    else:
        rows = embedder.score(query, lines, truncate=truncate)
    if output is not None:
        try:
            with output.open("wb") as file:
                np.save(file, rows)
        except OSError as error:
            raise ContractError(f"--output {printable(output)}: cannot be written: {error}") from None
        return
    order = range(len(rows)) if query is None else np.argsort(-rows, kind="stable").tolist()
    for index in order:
        print(json.dumps({"index": index, key: rows[index].tolist()}))


def _read(source: str) -> list[str]:
    """The lines of a file, without empty ones. Raises ContractError."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else read_regular(source)
        return [line for line in data.decode().split("\n") if line.strip()]
    except (OSError, ValueError, AttributeError) as error:  # Python has no stdin where it is closed
        raise ContractError(f"--input {printable(source)}: cannot be read: {printable(error)}") from None
