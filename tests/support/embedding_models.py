"""Tiny checkpoints that embed and rank texts, in the formats of published ones, and their oracle in torch."""

import json

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from paged_kv.engine.demo import EOS_ID
from support.checkpoints import make_checkpoint

TEXTS = ["Paris", "the capital of France is a city " * 4, "x", "water boils " * 9, "öl\n"]
QUERY, DOCUMENTS = "what boils?", ["water boils " * 20, "stones", "milk"]
PROMPTS = {"query": "search: ", "document": ""}
CASES = {
    "qwen3, last": ("Qwen3", "lasttoken", {"pad_token_id": None}),
    "mistral, end token, last": ("Mistral", "lasttoken", {"eos_token_id": EOS_ID, "sliding_window": None}),
    "gemma3 both ways, mean, dense": (
        "Gemma3",
        "mean_tokens",
        {"use_bidirectional_attention": True, "sliding_window": 12, "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3, first": ("Qwen3", "cls_token", {}),
}  # fmt: skip
"""The family, sentence-transformers' pooling, and more of transformers' configuration."""


def make_embedding(folder, name):
    """The checkpoint of a case as sentence-transformers has it, and the vectors `[n, size]` that texts must have."""
    family, pooling, overrides = CASES[name]
    model = make_checkpoint(folder, family=family, **overrides).model
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)  # without a head, and without `model.` in the names of tensors
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    files = {
        "1_Pooling/config.json": {"word_embedding_dimension": 48, f"pooling_mode_{pooling}": True},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        "sentence_bert_config.json": {"max_seq_length": 300, "do_lower_case": False},
        "tokenizer_config.json": names | {"add_eos_token": "eos_token_id" in overrides},
    }
    dense = dense_layers(48) if pooling == "mean_tokens" else []
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    for index, (linear, activation) in enumerate(dense, 2):
        kinds[f"{index}_Dense"] = "Dense"
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        kind = f"{type(activation).__module__}.{type(activation).__name__}"
        config = sizes | {"bias": linear.bias is not None, "activation_function": kind}
        files[f"{index}_Dense/config.json"] = config
        (folder / f"{index}_Dense").mkdir()
        tensors = {f"linear.{key}": value for key, value in linear.state_dict().items()}
        save_file(tensors, folder / f"{index}_Dense/model.safetensors")
    kinds["4_Normalize"] = "Normalize"
    files["modules.json"] = modules(kinds)
    for file, values in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(values))
    end = [EOS_ID] if "eos_token_id" in overrides else []
    return lambda texts: expected_vectors(model, [each + end for each in tokens_of(folder, texts)], pooling, dense)


def modules(kinds):
    """`modules.json`, of modules' kinds by their folders."""
    return [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]


def dense_layers(size):
    """The dense layers of EmbeddingGemma's kind."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = torch.nn.Linear(size, 96), torch.nn.Linear(96, 40, bias=False)
    return [torch.nn.Sequential(first, torch.nn.Tanh()), torch.nn.Sequential(second, torch.nn.Identity())]


def tokens_of(folder, texts):
    """The tokens of texts by the folder's `tokenizer.json`."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


@torch.no_grad()
def expected_vectors(model, tokens, pooling="lasttoken", dense=()):
    """sentence-transformers' recipe written out: the vectors `[n, size]` of tokens, of a model without a head."""
    rows = []
    for each in tokens:
        hidden = model(torch.tensor([each])).last_hidden_state[0]
        row = {"lasttoken": hidden[-1], "mean_tokens": hidden.mean(0), "cls_token": hidden[0]}[pooling]
        for layer in dense:
            row = layer(row)
        rows.append(row / row.norm())
    return torch.stack(rows).numpy()


def make_reranker(folder, *, classifier=False):
    """A Qwen3 checkpoint that ranks by the tokens yes and no, or by a classifier of one class, and its model."""
    model = make_checkpoint(folder, family="Qwen3", vocab_size=261, add_bos=False)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if not classifier:
        return model
    config = transformers.Qwen3Config.from_pretrained(folder, num_labels=1, pad_token_id=258)
    ranker = transformers.Qwen3ForSequenceClassification(config).eval()
    ranker.model.load_state_dict(model.model.state_dict())
    (folder / "model.safetensors").unlink()
    ranker.save_pretrained(folder)
    return ranker


@torch.no_grad()
def expected_scores(folder, model):
    """The scores of `DOCUMENTS`, by Qwen3-Reranker's model card: its three pieces of tokens one after the other."""
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    scores = []
    for document in DOCUMENTS:
        pair = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
        tokens = [token for part in tokens_of(folder, (before, pair, after)) for token in part]
        logits = model(torch.tensor([tokens])).logits[0]
        yes_and_no = logits[-1, 259:] if logits.ndim == 2 else torch.stack([logits[0], torch.zeros(())])
        scores.append(torch.softmax(yes_and_no, 0)[0])
    return torch.stack(scores).numpy()
