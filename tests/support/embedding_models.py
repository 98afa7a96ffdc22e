"""Tiny checkpoints that embed and rank texts, in the formats of published ones, and their oracle in torch."""

import json

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from paged_kv.engine.demo import EOS_ID
from support.checkpoints import make_checkpoint, rewrite

TEXTS = ["Paris", "the capital of France is a city " * 4, "x", "water boils " * 9, "öl\n"]
QUERY, DOCUMENTS = "what boils?", ["water boils " * 20, "stones", "milk"]
DENSE = ((96, "Tanh", True), (40, "Identity", False))
"""The width, the activation and whether there is a bias of EmbeddingGemma's kind of dense layers."""
PROMPTS = {"query": "search: ", "document": ""}
CASES = {
    "qwen3, last": ("Qwen3", "lasttoken", {"pad_token_id": None}),
    "mistral, end token, last": ("Mistral", "lasttoken", {"eos_token_id": EOS_ID, "sliding_window": None}),
    "gemma3 both ways, mean, dense": (
        "Gemma3",
        "mean",
        {"use_bidirectional_attention": True, "sliding_window": 12, "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3, first": ("Qwen3", "cls", {}),
}  # fmt: skip


def make_embedding(folder, name):
    """The checkpoint of a case as sentence-transformers has it, and its model without a head."""
    family, pooling, overrides = CASES[name]
    decoder = make_checkpoint(folder, family=family, **overrides)
    model = decoder.model
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)  # without a head, and without `model.` in the names of tensors
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    flag = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[pooling]
    rewrite_new(folder / "1_Pooling/config.json", word_embedding_dimension=48, **{f"pooling_mode_{flag}": True})
    if pooling == "mean":
        for index, (module, _) in enumerate(dense_layers(48)):
            activation, place = DENSE[index][1], f"{index + 2}_Dense"
            (folder / place).mkdir()
            linear = module[0]
            sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
            kind = {"Tanh": "torch.nn.modules.activation.Tanh", "Identity": "torch.nn.modules.linear.Identity"}
            rewrite_new(
                folder / place / "config.json", **sizes, bias=DENSE[index][2], activation_function=kind[activation]
            )
            tensors = {f"linear.{key}": value.contiguous() for key, value in linear.state_dict().items()}
            save_file(tensors, folder / place / "model.safetensors")
            modules.append((place, "Dense"))
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    rewrite_new(folder / "config_sentence_transformers.json", prompts=PROMPTS, default_prompt_name=None)
    rewrite_new(folder / "sentence_bert_config.json", max_seq_length=300, do_lower_case=False)
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    rewrite_new(folder / "tokenizer_config.json", **tokens, add_eos_token="eos_token_id" in overrides)
    return model


def rewrite_new(file, **values):
    """A new file of JSON."""
    file.write_text("{}")
    rewrite(file, **values)


def dense_layers(size):
    """The dense layers as modules of torch, and their widths."""
    generator = torch.Generator().manual_seed(5)
    layers = []
    for width, activation, has_bias in DENSE:
        linear = torch.nn.Linear(size, width, bias=has_bias)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / size**0.5)
        layers.append((torch.nn.Sequential(linear, getattr(torch.nn, activation)()), width))
        size = width
    return layers


def expected_vectors(folder, name, model, texts):
    """sentence-transformers' recipe written out: the vectors `[n, size]` of texts."""
    _, pooling, overrides = CASES[name]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = []
    for text in texts:
        tokens = tokenizer.encode(text).ids + ([EOS_ID] if "eos_token_id" in overrides else [])
        with torch.no_grad():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0]
        row = {"lasttoken": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling]
        with torch.no_grad():
            for module, _ in dense_layers(48) if pooling == "mean" else ():
                row = module(row)
        rows.append(row / row.norm())
    return torch.stack(rows).numpy()


def make_reranker(folder, *, classifier=False):
    """A Qwen3 checkpoint that ranks by the tokens yes and no, or by a classifier of one class, and its model."""
    model = make_checkpoint(folder, family="Qwen3", vocab_size=261, add_bos=False)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if classifier:
        config = transformers.Qwen3Config.from_pretrained(folder, num_labels=1, pad_token_id=258)
        ranker = transformers.Qwen3ForSequenceClassification(config).eval()
        ranker.model.load_state_dict(model.model.state_dict())
        (folder / "model.safetensors").unlink()
        ranker.save_pretrained(folder)
        return ranker
    return model


def expected_scores(folder, model):
    """The scores of `DOCUMENTS`, by Qwen3-Reranker's model card: its three pieces of tokens one after the other."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    scores = []
    for document in DOCUMENTS:
        pair = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
        tokens = [token for text in (before, pair, after) for token in tokenizer.encode(text).ids]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        if logits.ndim == 1:
            scores.append(torch.sigmoid(logits)[0])
        else:
            answers = [tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]
            scores.append(torch.softmax(logits[-1, answers], 0)[1])
    return torch.stack(scores).numpy()
