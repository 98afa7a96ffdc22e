"""Checkpoints with layers that draft tokens, and what these expect: transformers' own layers, fed by the formulas."""

import json
import shutil
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import make_checkpoint, rewrite
from support.families import BASE, CASES, LATENT_CASES

ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
QWEN = ("qwen3_next", "qwen3_5")


@dataclass
class Mtp:
    """A model and its layer of multi-token prediction, by transformers."""

    model: torch.nn.Module
    layer: torch.nn.Module
    """A model of the one layer, whose last norm and head are the draft's."""
    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: torch.Tensor
    offset: float

    def expected(self, tokens, drafted):
        """The logits of the layer after each of `tokens`, `[n, vocab]`, and after each of the tokens that it drafted
        after them, whose hidden states are its own.
        """
        with torch.no_grad():
            text = torch.tensor([[*tokens, *drafted]])
            embedded = self.model.get_input_embeddings()(text)[0]
            output = self.model(text[:, : len(tokens) - 1], output_hidden_states=True)
            hidden = list(output.hidden_states[-1][0])
            hidden = [hidden[0], *hidden]
            while True:
                eps = self.model.config.rms_norm_eps
                e = rms_norm(embedded[: len(hidden)], self.enorm + self.offset, eps)
                h = rms_norm(torch.stack(hidden), self.hnorm + self.offset, eps)
                x = torch.cat([e, h], -1) @ self.eh_proj.T
                output = self.layer(inputs_embeds=x[None], output_hidden_states=True)
                if len(hidden) == len(text[0]):
                    return output.logits[0].numpy()
                own = output.hidden_states[-1] if self.offset else self.before_norm(x)
                hidden.append(own[0, -1])

    def before_norm(self, x):
        """The hidden states of the layer before its last norm."""
        seen = []
        hook = self.layer.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        self.layer(inputs_embeds=x[None])
        hook.remove()
        return seen[0]


def rms_norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def make_mtp(case, folder, **overrides):
    """A case of `families` with one more layer that drafts; its file has the layer by the family's names."""
    family, values = (CASES | LATENT_CASES)[case]
    values = BASE | values | overrides
    model = make_checkpoint(folder, family=family, **values)
    own = {key: value for key, value in ONE_LAYER.items() if key in values or key[0] in "nf"}
    if case not in ("glm4_moe", "v3"):
        own.pop("first_k_dense_replace")
    layer = make_checkpoint(folder / "layer", family=family, seed=1, **values | own)
    generator = torch.Generator().manual_seed(2)
    hidden = model.config.hidden_size
    enorm, hnorm = (1 + 0.3 * torch.randn(hidden, generator=generator) for _ in range(2))
    eh_proj = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    stored = load_file(folder / "layer" / "model.safetensors")
    at = f"model.layers.{model.config.num_hidden_layers}."
    names = {"eh_proj": f"{at}eh_proj", "enorm": f"{at}enorm", "hnorm": f"{at}hnorm", "norm": f"{at}shared_head.norm"}
    if case in QWEN:
        at, stem = "mtp.layers.0.", "mtp.pre_fc_norm"
        names = {"eh_proj": "mtp.fc", "enorm": f"{stem}_embedding", "hnorm": f"{stem}_hidden", "norm": "mtp.norm"}
    tensors = {at + name.removeprefix("model.layers.0."): x for name, x in stored.items() if ".layers.0." in name}
    tensors |= {f"{names[name]}.weight": x for name, x in (("enorm", enorm), ("hnorm", hnorm), ("eh_proj", eh_proj))}
    tensors[f"{names['norm']}.weight"] = stored["model.norm.weight"]
    with torch.no_grad():
        layer.lm_head.weight.copy_(model.lm_head.weight)
    if case not in QWEN:
        rewrite(folder / "config.json", num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    return Mtp(model, layer, enorm, hnorm, eh_proj, 1.0 if case in QWEN else 0.0)


@dataclass
class Eagle:
    """A model by transformers, and an EAGLE-3 head of it by its paper's formulas, in float64."""

    model: torch.nn.Module
    tensors: dict
    layers: tuple[int, ...]
    heads: tuple[int, int]
    adds_normed: bool

    def expected(self, tokens, drafted):
        """As `Mtp.expected`, logits of the head's own tokens."""
        with torch.no_grad():
            text = torch.tensor([[*tokens, *drafted]])
            embedded = self.model.get_input_embeddings()(text)[0].double()
            states = self.model(text[:, : len(tokens) - 1], output_hidden_states=True).hidden_states
            weights = {name: x.double() if x.is_floating_point() else x for name, x in self.tensors.items()}
            hidden = list(torch.cat([states[layer][0] for layer in self.layers], -1).double() @ weights["fc.weight"].T)
            hidden = [hidden[0], *hidden]
            while True:
                x = self._layer(weights, embedded[: len(hidden)], torch.stack(hidden))
                if len(hidden) == len(text[0]):
                    return (rms_norm(x, weights["norm.weight"], 1e-5) @ weights["lm_head.weight"].T).numpy()
                hidden.append(x[-1])

    def _layer(self, weights, embedded, hidden):
        at, (heads, kv_heads) = "midlayer.", self.heads
        normed = rms_norm(hidden, weights[f"{at}hidden_norm.weight"], 1e-5)
        x = torch.cat([rms_norm(embedded, weights[f"{at}input_layernorm.weight"], 1e-5), normed], -1)
        q, k, v = (x @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        count, dim = len(x), k.shape[1] // kv_heads
        q, k, v = (y.reshape(count, -1, dim).transpose(0, 1) for y in (q, k, v))
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
        q, k = (rotate(y, torch.cat([angles, angles], -1)) for y in (q, k))
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        scores = (q @ k.transpose(1, 2)) / dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        o = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        y = (normed if self.adds_normed else hidden) + o @ weights[f"{at}self_attn.o_proj.weight"].T
        z = rms_norm(y, weights[f"{at}post_attention_layernorm.weight"], 1e-5)
        gate, up, down = (weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return y + (torch.nn.functional.silu(z @ gate.T) * (z @ up.T)) @ down.T


def rotate(x, angles):
    halves = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    return x * angles.cos() + halves * angles.sin()


def make_eagle(folder, *, draft_vocab=100, adds_normed=False, layers=None, family="Llama", **overrides):
    """A model in `folder`/model and an EAGLE-3 head of it in `folder`/head, which drafts some of its tokens alone."""
    values = BASE | {"num_hidden_layers": 8} | overrides
    model = make_checkpoint(folder / "model", family=family, **values)
    hidden, vocab, (heads, kv_heads, dim) = model.config.hidden_size, model.config.vocab_size, (4, 2, 16)
    inner, both = 80, 2 * hidden
    linear = {
        "self_attn.q": (heads * dim, both),
        "self_attn.k": (kv_heads * dim, both),
        "self_attn.o": (hidden, heads * dim),
    }
    linear |= {"self_attn.v": linear["self_attn.k"], "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden)}
    sizes = {f"midlayer.{name}_proj": size for name, size in (linear | {"mlp.down": (hidden, inner)}).items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    sizes |= {"fc": (hidden, 3 * hidden), "norm": (hidden,), "lm_head": (draft_vocab, hidden)}
    sizes |= {f"midlayer.{name}": (hidden,) for name in norms}
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in sizes.items():
        noise = torch.randn(size, generator=generator)
        tensors[f"{name}.weight"] = 1 + 0.3 * noise if len(size) == 1 else noise / size[1] ** 0.5
    tokens = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = tokens - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "rms_norm_eps": 1e-5}
    config |= {"vocab_size": vocab, "draft_vocab_size": draft_vocab, "norm_before_residual": adds_normed}
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    if layers is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "head" / "model.safetensors")
    return Eagle(model, tensors, tuple(layers or (2, 4, 5)), (heads, kv_heads), adds_normed)


def make_certain(folder, target):
    """A copy of a checkpoint of `make_mtp`, or of the model of `make_eagle` and its head, whose next token depends on
    the last one alone, and whose draft layer knows it; returns its folder and `speculate`.

    Attention and MLPs give zeros. The input of an MTP layer is the last token's embedding, so it says what the model
    says. The hidden state of an EAGLE-3 head is the embedding of the token before, of which its first draft follows.
    """
    if not (folder.parent / "head").exists():
        shutil.copytree(folder, target, dirs_exist_ok=True)
        tensors = silenced(target / "model.safetensors")
        offset = float("mtp.fc.weight" in tensors)
        model_norm = tensors["model.norm.weight"]
        for name, x in tensors.items():
            if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
                tensors[name] = torch.cat([torch.eye(len(x)), torch.zeros(len(x), len(x))], 1)
            elif name.endswith(("enorm.weight", "pre_fc_norm_embedding.weight")):
                tensors[name] = torch.ones_like(x) - offset
            elif name.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
                tensors[name] = model_norm.clone()
        save_file(tensors, target / "model.safetensors")
        return target, "mtp"
    for part in ("model", "head"):
        shutil.copytree(folder.parent / part, target / part)
    of_model, head = (silenced(target / part / "model.safetensors") for part in ("model", "head"))
    embeddings = of_model["model.embed_tokens.weight"]
    before = torch.randperm(len(embeddings), generator=torch.Generator().manual_seed(7))
    of_model["lm_head.weight"] = embeddings[before]  # the token that each follows
    for tensors, name in ((of_model, "model.norm.weight"), (head, "norm.weight")):
        tensors[name] = torch.ones_like(tensors[name])
    head["lm_head.weight"] = embeddings[before[before]][head["d2t"] + torch.arange(len(head["d2t"]))]
    hidden = len(head["fc.weight"])
    head["fc.weight"] = torch.eye(hidden).repeat(1, 3)
    save_file(of_model, target / "model" / "model.safetensors")
    save_file(head, target / "head" / "model.safetensors")
    return target / "model", target / "head"


def silenced(file):
    """The tensors of a file whose attention and MLPs give zeros."""
    outputs = ("o_proj", "down_proj", "out_proj")
    return {
        name: torch.zeros_like(x) if name.rpartition(".")[0].endswith(outputs) else x
        for name, x in load_file(file).items()
    }
