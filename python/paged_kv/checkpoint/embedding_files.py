"""What the files of a checkpoint say about embedding and ranking texts.

sentence-transformers' `modules.json` names the pooling, dense layers and the norm after a model, a GGUF file its
`pooling_type`; a classifier's weights, or two tokens of the vocabulary, make a model that ranks documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, TypeAlias

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
Task = Literal["generate", "embed", "rerank"]
Pooling = Literal["last", "mean", "first"]

MODULES = "modules.json"
SETTINGS = ("config_sentence_transformers.json", "sentence_bert_config.json")
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""Older files have a flag for each pooling, `pooling_mode_*`."""
_GGUF_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
_GGUF_RANK = 4
_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: np.asarray(1 / (1 + np.exp(-x)), np.float32),
}
_CLASSIFIER, _BASE = "ForSequenceClassification", "Model"
"""Ends of the names of architectures without a head of their own."""
_MOST_BYTES = 1 << 20


def normed(x: Array) -> Array:
    """The rows of `x` `[n, size]` divided by their Euclidean norms."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class Dense:
    """`activation(x @ weight.T + bias)`."""

    weight: Array
    """`[out, in]` float32."""
    bias: Array | None
    activation: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        y = x @ self.weight.T
        return self.activation(y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class EmbeddingRecipe:
    """How a vector is made of the hidden states of a text."""

    task: ClassVar[Task] = "embed"
    output: ClassVar[Literal["hidden"]] = "hidden"
    pooling: Pooling = "last"
    modules: tuple[Callable[[Array], Array], ...] = (normed,)
    """What follows the pooling, in order: each takes `[n, in]` and returns `[n, out]` float32."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that precede a text, by name."""
    default_prompt: str | None = None
    dimensions: tuple[int, ...] | None = None
    """Sizes to which a vector may be cut (Matryoshka); None: the checkpoint names none, any may be asked for."""
    max_tokens: int | None = None
    """Tokens of the longest text, where they are fewer than the model's context."""

    def finish(self, x: Array) -> Array:
        """The vectors `[n, size]` of pooled hidden states `[n, hidden]`."""
        for module in self.modules:
            x = module(x)
        return x


@dataclass(frozen=True)
class RerankRecipe:
    """How the score of a query and a document is made of the last token of both in a template."""

    task: ClassVar[Task] = "rerank"
    pooling: ClassVar[Pooling] = "last"
    max_tokens: ClassVar[None] = None
    template: tuple[str, str, str]
    """What precedes the pair; the pair, with {instruction}, {query} and {document}; what follows it."""
    head: Array | None = None
    """The classifier `[1 or 2, hidden]` float32; None where two tokens' logits are compared."""
    bias: Array | None = None
    answers: tuple[int, int] | None = None
    """The tokens whose logits are compared: yes and no. Named by their texts where None, and `head` is None."""

    @property
    def output(self) -> Literal["logits", "hidden"]:
        """What the step computes."""
        return "logits" if self.head is None else "hidden"

    def finish(self, x: Array) -> Array:
        """Scores from 0 to 1, `[n, 1]`: the share of the first of two classes, or the sigmoid of a single one; from
        hidden states `[n, hidden]` or logits `[n, vocab]`.
        """
        if self.head is not None:
            y = x @ self.head.T + (0 if self.bias is None else self.bias)
        else:
            assert self.answers is not None
            y = x[:, list(self.answers)]
        difference = y[:, :1] - y[:, 1:] if y.shape[1] == 2 else y
        return np.asarray(1 / (1 + np.exp(-difference.astype(np.float64))), np.float32)


Recipe: TypeAlias = EmbeddingRecipe | RerankRecipe

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
    if "LogitScore" in kinds or any(name.endswith(_CLASSIFIER) for name in names):
        return "rerank"
    is_base = any(name.endswith(_BASE) for name in names)
    return "embed" if kinds or is_base or not source.config.causal else "generate"


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
    scores = next((file for kind, file in modules if kind == "LogitScore"), None)
    if scores is not None:
        fields = Fields.read(scores / "config.json")
        most = source.config.vocab_size - 1
        answers = fields.integer("true_token_id", None, most, 0), fields.integer("false_token_id", None, most, 0)
        return source, RerankRecipe(QWEN3_TEMPLATE, answers=answers)
    if "score.weight" not in source.checkpoint.tensors:
        return source, RerankRecipe(QWEN3_TEMPLATE)
    head = source.checkpoint.load_tensor("score.weight", (1, source.config.hidden_size))
    return _headless(source, "score.weight"), RerankRecipe(QWEN3_TEMPLATE, head)


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
    file = folder / MODULES
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
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore"):
            problem = "expected Transformer, Pooling, Dense, Normalize, Dropout or LogitScore"
            raise CheckpointError(f"{file}: type: {problem}, got {shown(kind)}")
        if kind == "Transformer" and path.parts:
            raise CheckpointError(f"{file}: path: expected the transformer's to be empty, got {shown(str(path))}")
    return [(kind, folder / path) for kind, path in modules]


def _embedding_recipe(source: Source, modules: list[tuple[str, Path]]) -> EmbeddingRecipe:
    recipe = EmbeddingRecipe(dimensions=_dimensions(_config(source)))
    settings, limits = (
        Fields.read(source.folder / name) if (source.folder / name).is_file() else Fields(source.folder / name, {})
        for name in SETTINGS
    )
    limits.refuse("do_lower_case", "not supported")
    prompts = settings.section("prompts") or Fields(settings.file, {})
    for name, prompt in prompts.values.items():
        if not isinstance(prompt, str):
            raise prompts.error(name, "expected a text")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts.values:
        raise settings.error("default_prompt_name", "expected one of prompts")
    longest = None if limits.get("max_seq_length") is None else limits.integer("max_seq_length")
    recipe = replace(recipe, prompts=dict(prompts.values), default_prompt=default, max_tokens=longest)
    if not modules:
        return recipe
    pooling: Pooling | None = None
    steps: list[Callable[[Array], Array]] = []
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
        raise CheckpointError(f"{source.folder / MODULES}: expected a Pooling module, got none")
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
    mode = fields.get("pooling_mode")
    if mode is None:
        modes = [name for name in _FLAGS if fields.boolean(f"pooling_mode_{name}")]
        mode = modes[0].removesuffix("_tokens").removesuffix("_token") if len(modes) == 1 else modes or "mean"
    if not isinstance(mode, str) or mode not in _POOLINGS:
        problem = f"expected {' or '.join(_POOLINGS)}, got {shown(mode)}"
        raise CheckpointError(f"{fields.file}: pooling_mode: {problem}")
    return _POOLINGS[mode]


def _dense(folder: Path, size: int) -> Dense:
    fields = Fields.read(folder / "config.json")
    fields.refuse("use_residual", "not supported")
    rows, columns = fields.integer("out_features"), fields.integer("in_features")
    if columns != size:
        raise fields.error("in_features", f"expected {size}")
    name = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise fields.error("activation_function", f"expected one of {', '.join(_ACTIVATIONS)}")
    weights = open_files([folder / "model.safetensors"])
    has_bias = fields.boolean("bias", True)
    bias = weights.load_tensor("linear.bias", (rows,)) if has_bias else None
    return Dense(weights.load_tensor("linear.weight", (rows, columns)), bias, _ACTIVATIONS[name])


def _gguf_pooling(checkpoint: GgufCheckpoint) -> int:
    """The file's `pooling_type`: 0 where it has none."""
    metadata = checkpoint.header.metadata
    pooling: Any = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if pooling not in (0, _GGUF_RANK, *_GGUF_POOLINGS):
        raise CheckpointError(f"{checkpoint.header.file}: pooling_type: expected 0 to 4, got {shown(pooling)}")
    return int(pooling)


def _open_gguf(source: Source, checkpoint: GgufCheckpoint, task: Task) -> tuple[Source, Recipe]:
    hidden, tensors = source.config.hidden_size, checkpoint.header.tensors
    if task == "embed":
        modules: list[Callable[[Array], Array]] = []
        size = hidden
        for name in ("dense_2.weight", "dense_3.weight"):  # EmbeddingGemma's, without biases and activations
            if name in tensors:
                modules.append(dense := Dense(checkpoint.load_tensor(name, (-1, size)), None, _ACTIVATIONS["Identity"]))
                size = len(dense.weight)
        pooling = _GGUF_POOLINGS.get(_gguf_pooling(checkpoint), "last")
        return _headless(source, "dense_2.weight", "dense_3.weight"), EmbeddingRecipe(pooling, (*modules, normed))
    written = checkpoint.header.metadata.get("tokenizer.chat_template.rerank")
    template = QWEN3_TEMPLATE
    if isinstance(written, str) and "{document}" in written:
        start, _, end = written.partition("{document}")
        template = ("", f"{start}{{document}}", end)
    elif checkpoint.header.metadata.get("general.architecture") != "qwen3":
        raise CheckpointError(f"{checkpoint.header.file}: tokenizer.chat_template.rerank is missing")
    if "cls.output.weight" not in tensors:
        return source, RerankRecipe(template)
    head = checkpoint.load_tensor("cls.output.weight", (-1, hidden))
    if len(head) not in (1, 2):
        raise CheckpointError(f"{checkpoint.header.file}: cls.output.weight: expected 1 or 2 rows, got {len(head)}")
    bias = checkpoint.load_tensor("cls.output.bias", (len(head),)) if "cls.output.bias" in tensors else None
    return _headless(source, "cls.output.weight", "cls.output.bias"), RerankRecipe(template, head, bias)
