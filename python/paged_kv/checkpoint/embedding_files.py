"""What the files of a checkpoint say about embedding and ranking texts.

sentence-transformers' `modules.json` names the pooling, dense layers and the norm after a model, a GGUF file its
`pooling_type`; a classifier's weights, or two tokens of the vocabulary, make a model that ranks documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import shown
from paged_kv.checkpoint.gguf import GgufCheckpoint
from paged_kv.checkpoint.source import Source
from paged_kv.checkpoint.weights import open_files
from paged_kv.errors import CheckpointError
from paged_kv.files import read_regular
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.tensors import expected_tensors

Array: TypeAlias = npt.NDArray[np.float32]
Module: TypeAlias = Callable[[Array], Array]
"""Takes `[n, in]` and returns `[n, out]` float32."""
Task = Literal["generate", "embed", "rerank"]
Pooling = Literal["last", "mean", "first"]

_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""Older files have a flag for each pooling, `pooling_mode_*`."""
_GGUF_POOLINGS: Mapping[int, Pooling] = {0: "last", 1: "mean", 2: "first", 3: "last", 4: "last"}
_GGUF_RANK = 4
_ACTIVATIONS: Mapping[str, Module] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: np.asarray(1 / (1 + np.exp(-x)), np.float32),
}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore")
"""Modules of sentence-transformers."""
_MOST_BYTES = 1 << 20


def normed(x: Array) -> Array:
    """The rows of `x` `[n, size]` divided by their Euclidean norms."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def probability(logits: Array) -> Array:
    """Scores from 0 to 1, `[n, 1]`: the share of the first of two classes `[n, 2]`, or the sigmoid of one `[n, 1]`."""
    difference = logits[:, :1] - logits[:, 1:] if logits.shape[1] == 2 else logits
    return np.asarray(1 / (1 + np.exp(-difference.astype(np.float64))), np.float32)


@dataclass(frozen=True)
class Dense:
    """`activation(x @ weight.T + bias)`."""

    weight: Array
    """`[out, in]` float32."""
    bias: Array | None = None
    activation: Module = _ACTIVATIONS["Identity"]

    def __call__(self, x: Array) -> Array:
        y = x @ self.weight.T
        return self.activation(y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class Recipe:
    """How the vector of a text, or the score of a query and a document, is made of what the step computes."""

    pooling: Pooling = "last"
    modules: tuple[Module, ...] = (normed,)
    """What follows the pooling, in order."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that precede a text, by name."""
    default_prompt: str | None = None
    dimensions: tuple[int, ...] | None = None
    """Sizes to which a vector may be cut (Matryoshka); None: the checkpoint names none, any may be asked for."""
    max_tokens: int | None = None
    """Tokens of the longest text, where they are fewer than the model's context."""
    template: tuple[str, str, str] | None = None
    """Of a model that ranks: what precedes the pair; the pair, with {instruction}, {query} and {document}; what follows
    it. None: the model embeds.
    """
    output: Literal["logits", "hidden"] = "hidden"
    """What the step computes."""

    @property
    def task(self) -> Task:
        """The model's use: "embed" or "rerank"."""
        return "embed" if self.template is None else "rerank"

    def finish(self, x: Array) -> Array:
        """The vectors `[n, size]`, or scores `[n, 1]`, of pooled hidden states `[n, hidden]` or logits `[n, vocab]`."""
        for module in self.modules:
            x = module(x)
        return np.asarray(x, np.float32)

    def scores(self, rows: Array) -> Array:
        """The scores `[n]` of what was computed of the tokens of `TextEncoder.pairs`."""
        if self.task == "rerank":
            return rows[:, 0]
        vectors = normed(rows)
        return vectors[1:] @ vectors[0]


QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""The prompt that Qwen3-Reranker's model card has."""
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def task_of(source: Source) -> Task:
    """What the checkpoint is for, by its files alone.

    Raises:
        CheckpointError: `modules.json` has a module that this package does not compute.
    """
    if isinstance(source.checkpoint, GgufCheckpoint):
        pooling = _gguf_pooling(source.checkpoint)
        return "rerank" if pooling == _GGUF_RANK else "embed" if pooling or not source.config.causal else "generate"
    kinds = [kind for kind, _ in _modules(source.folder)]
    names = _config(source).get("architectures") or ()
    if "LogitScore" in kinds or any(name.endswith("ForSequenceClassification") for name in names):
        return "rerank"
    has_no_head = any(name.endswith("Model") for name in names)
    return "embed" if kinds or has_no_head or not source.config.causal else "generate"


def open_embedding(source: Source, task: Task | None = None) -> tuple[Source, Recipe]:
    """The model without the weights that its step does not read, and how its vectors or scores are made.

    Args:
        task: "embed" or "rerank" a checkpoint whose files do not say so; `task_of` where it is None.

    Raises:
        CheckpointError: its files ask for what this package does not compute, or it generates texts.
    """
    task = task or task_of(source)
    if task == "generate":
        problem = "expected a model that embeds or ranks texts, got one that generates them; task= chooses another use"
        raise CheckpointError(f"{source.folder}: {problem}")
    if isinstance(source.checkpoint, GgufCheckpoint):
        return _open_gguf(source, source.checkpoint, task)
    modules = _modules(source.folder)
    if task == "embed":
        return _headless(source), _embedding_recipe(source, modules)
    if not source.config.causal or _config(source).get("model_type") != "qwen3":
        raise _config(source).error("model_type", "expected a model whose prompt for ranking is published, qwen3")
    for kind, folder in modules:
        if kind == "LogitScore":
            fields, most = Fields.read(folder / "config.json"), source.config.vocab_size - 1
            answers = [fields.integer(name, None, most, 0) for name in ("true_token_id", "false_token_id")]
            return source, _comparing(QWEN3_TEMPLATE, answers)
    if "score.weight" not in source.checkpoint.tensors:
        return source, _comparing(QWEN3_TEMPLATE, _yes_and_no(source))
    head = Dense(source.checkpoint.load_tensor("score.weight", (1, source.config.hidden_size)))
    return _headless(source, "score.weight"), Recipe(modules=(head, probability), template=QWEN3_TEMPLATE)


def optional_fields(file: Path) -> Fields:
    """The JSON object in a file; an empty one where there is no file. Raises CheckpointError."""
    return Fields.read(file) if file.is_file() else Fields(file, {})


def _comparing(template: tuple[str, str, str], answers: list[int]) -> Recipe:
    """Scores by the logits of two tokens, yes and no."""
    return Recipe(modules=(lambda logits: probability(logits[:, answers]),), template=template, output="logits")


def _yes_and_no(source: Source) -> list[int]:
    tokenizer, file = source.tokenizer()
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    if yes is None or no is None:
        raise CheckpointError(f'{file}: expected "yes" and "no" to be one token each')
    return [yes, no]


def _headless(source: Source, *names: str) -> Source:
    """The source as its step without a head reads it: without those tensors, and without `lm_head`."""
    config = replace(source.config, tie_word_embeddings=True, head_bias=False)
    expected = expected_tensors(config)
    config = replace(config, encodings=tuple(each for each in config.encodings if each[0] in expected))
    checkpoint = source.checkpoint
    if isinstance(checkpoint, GgufCheckpoint):
        header = checkpoint.header
        left = {name: tensor for name, tensor in header.tensors.items() if name not in ("output.weight", *names)}
        return replace(source, config=config, checkpoint=GgufCheckpoint(replace(header, tensors=left)))
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in ("lm_head.bias", *names)}
    return replace(source, config=config, checkpoint=replace(checkpoint, tensors=tensors))


def _config(source: Source) -> Fields:
    return Fields.read(source.folder / "config.json")


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The kind and the folder of each of sentence-transformers' modules; none without `modules.json`."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        entries = json.loads(read_regular(file, _MOST_BYTES))
        modules = [(str(each["type"]).rpartition(".")[2], PurePosixPath(each["path"])) for each in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a list of modules with type and path, got {shown(error)}") from None
    for kind, path in modules:
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{file}: path: expected a folder below its own, got {shown(str(path))}")
        if kind not in _KINDS:
            raise CheckpointError(f"{file}: type: expected {' or '.join(_KINDS)}, got {shown(kind)}")
        if kind == "Transformer" and path.parts:
            raise CheckpointError(f"{file}: path: expected the transformer's to be empty, got {shown(str(path))}")
    return [(kind, folder / path) for kind, path in modules]


def _embedding_recipe(source: Source, modules: list[tuple[str, Path]]) -> Recipe:
    settings = optional_fields(source.folder / "config_sentence_transformers.json")
    limits = optional_fields(source.folder / "sentence_bert_config.json")
    limits.refuse("do_lower_case", "not supported")
    prompts = settings.section("prompts") or Fields(settings.file, {})
    for name, prompt in prompts.values.items():
        if not isinstance(prompt, str):
            raise prompts.error(name, "expected a text")
    default = settings.get("default_prompt_name")
    if default not in (None, *prompts.values):
        raise settings.error("default_prompt_name", "expected one of prompts")
    longest = None if limits.get("max_seq_length") is None else limits.integer("max_seq_length")
    sizes = _dimensions(_config(source))
    recipe = Recipe(prompts=prompts.values, default_prompt=default, dimensions=sizes, max_tokens=longest)
    if not modules:
        return recipe
    pooling: Pooling | None = None
    steps: list[Module] = []
    size = source.config.hidden_size
    for kind, folder in modules:
        if kind == "Pooling":
            pooling = _pooling(Fields.read(folder / "config.json"))
        elif kind == "Normalize":
            steps.append(normed)
        elif kind == "Dense":
            steps.append(dense := _dense(folder, size))
            size = len(dense.weight)
    if pooling is None:
        raise CheckpointError(f"{source.folder / 'modules.json'}: expected a Pooling module, got none")
    return replace(recipe, pooling=pooling, modules=tuple(steps))


def _dimensions(config: Fields) -> tuple[int, ...] | None:
    """VLLM's keys of config.json about Matryoshka embeddings."""
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return () if config.get("is_matryoshka") is False else None
    hidden = config.integer("hidden_size")
    if not isinstance(sizes, list) or not all(type(each) is int and 0 < each <= hidden for each in sizes):
        raise config.error("matryoshka_dimensions", f"expected a list of sizes up to hidden_size = {hidden}")
    return tuple(sizes)


def _pooling(fields: Fields) -> Pooling:
    if fields.get("include_prompt") is False:
        raise fields.error("include_prompt", "expected true")
    modes = [name for name in _FLAGS if fields.boolean(f"pooling_mode_{name}")]
    mode = modes[0].removesuffix("_tokens").removesuffix("_token") if len(modes) == 1 else modes or "mean"
    pooling: Pooling = fields.with_defaults(pooling_mode=mode).one_of("pooling_mode", _POOLINGS)
    return pooling


def _dense(folder: Path, size: int) -> Dense:
    fields = Fields.read(folder / "config.json")
    fields.refuse("use_residual", "not supported")
    rows, columns = fields.integer("out_features"), fields.integer("in_features")
    if columns != size:
        raise fields.error("in_features", f"expected {size}")
    name = str(fields.get("activation_function") or "Tanh").rpartition(".")[2]
    activation = replace(fields, values={"activation_function": name}).one_of("activation_function", _ACTIVATIONS)
    weights = open_files([folder / "model.safetensors"])
    bias = weights.load_tensor("linear.bias", (rows,)) if fields.boolean("bias", True) else None
    return Dense(weights.load_tensor("linear.weight", (rows, columns)), bias, activation)


def _gguf_pooling(checkpoint: GgufCheckpoint) -> int:
    """The file's `pooling_type`: 0 where it has none."""
    metadata = checkpoint.header.metadata
    pooling: Any = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if pooling not in tuple(_GGUF_POOLINGS):
        raise CheckpointError(f"{checkpoint.header.file}: pooling_type: expected 0 to 4, got {shown(pooling)}")
    return int(pooling)


def _open_gguf(source: Source, checkpoint: GgufCheckpoint, task: Task) -> tuple[Source, Recipe]:
    size, tensors, metadata = source.config.hidden_size, checkpoint.header.tensors, checkpoint.header.metadata
    if task == "embed":
        modules: list[Module] = []
        for name in ("dense_2.weight", "dense_3.weight"):  # EmbeddingGemma's, without biases and activations
            if name in tensors:
                modules.append(dense := Dense(checkpoint.load_tensor(name, (-1, size))))
                size = len(dense.weight)
        recipe = Recipe(_GGUF_POOLINGS[_gguf_pooling(checkpoint)], (*modules, normed))
        return _headless(source, "dense_2.weight", "dense_3.weight"), recipe
    written = metadata.get("tokenizer.chat_template.rerank")
    template = QWEN3_TEMPLATE
    if isinstance(written, str) and "{document}" in written:
        start, _, end = written.partition("{document}")
        template = ("", f"{start}{{document}}", end)
    elif metadata.get("general.architecture") != "qwen3":
        raise CheckpointError(f"{checkpoint.header.file}: tokenizer.chat_template.rerank is missing")
    if "cls.output.weight" not in tensors:
        return source, _comparing(template, _yes_and_no(source))
    head = checkpoint.load_tensor("cls.output.weight", (-1, size))
    if len(head) not in (1, 2):
        raise CheckpointError(f"{checkpoint.header.file}: cls.output.weight: expected 1 or 2 rows, got {len(head)}")
    bias = checkpoint.load_tensor("cls.output.bias", (len(head),)) if "cls.output.bias" in tensors else None
    recipe = Recipe(modules=(Dense(head, bias), probability), template=template)
    return _headless(source, "cls.output.weight", "cls.output.bias"), recipe
