"""Checkpoints with layers that draft tokens, and what these expect: transformers' own layers, fed by the formulas."""

import copy
import json
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paged_kv.engine.demo import byte_tokenizer
from support import gguf_files
from support.checkpoints import CONFIG, make_checkpoint, rewrite
from support.families import BASE, CASES, LATENT_CASES

DRAFTS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
"""Kinds of a layer that drafts, by the keys of lists with an entry a layer."""
QWEN = {
    "shared_head.norm": "mtp.norm",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "": "mtp.layers.0.",
}
"""Beginnings of names after that of a layer that drafts, and Qwen's names."""
ALL_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
"""No rounding of blocks chooses another one."""
IN_BLOCKS = ("eh_proj.weight", "attn_kv_b.weight", "token_embd.weight")
"""Endings of the names of tensors of a GGUF file that are in blocks."""


@dataclass
class Mtp:
    """A model and its layer of multi-token prediction, by transformers."""

    model: torch.nn.Module
    layer: torch.nn.Module
    """A model of the one layer, whose embeddings, last norm and head are the draft's."""
    own: dict
    """Its other tensors."""
    offset: float

    def expected(self, tokens, drafted):
        """The logits of the layer after each of `tokens`, `[n, vocab]`, and after each of the tokens that it drafted
        after them, whose hidden states are its own.
        """
        with torch.no_grad():
            text = torch.tensor([[*tokens, *drafted]])
            embedded = self.layer.get_input_embeddings()(text)[0]
            output = self.model(text[:, : len(tokens) - 1], output_hidden_states=True, use_cache=False)
            hidden = list(output.hidden_states[-1][0])
            hidden = [hidden[0], *hidden]
            while True:
                eps = self.model.config.rms_norm_eps
                e = rms_norm(embedded[: len(hidden)], self.own["enorm"] + self.offset, eps)
                h = rms_norm(torch.stack(hidden), self.own["hnorm"] + self.offset, eps)
                x = torch.cat([e, h], -1) @ self.own["eh_proj"].T
                output = self.layer(inputs_embeds=x[None], output_hidden_states=True, use_cache=False)
                if len(hidden) == len(text[0]):
                    return output.logits[0].numpy()
                own = output.hidden_states[-1] if self.offset else self.before_norm(x)
                hidden.append(own[0, -1])

    def before_norm(self, x):
        """The hidden states of the layer before its last norm."""
        seen = []
        hook = self.layer.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        self.layer(inputs_embeds=x[None], use_cache=False)
        hook.remove()
        return seen[0]


def rms_norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def make_mtp(case, folder, certain=False):
    """A checkpoint whose layer past the last one drafts: a case of `families` in `folder`, or of `gguf_files` in a file
    there. GLM-4.7-Flash's layer has its own embeddings and head; the GGUF file of DeepSeek's is of the older layout.

    Args:
        certain: The next token depends on the last one alone, and the layer knows it: attention and MLPs give zeros,
            and the layer's input is the last token's embedding. GGUF files are of the newer layout and not in blocks.

    Returns:
        What the layer expects, and the path.
    """
    is_gguf, offset = case in gguf_files.MODELS, float(case.startswith("qwen"))
    folder.mkdir()
    if is_gguf:
        whole = gguf_files.make_model(case, num_hidden_layers=3, **ALL_EXPERTS)
    else:
        family, values = (CASES | LATENT_CASES)[case]
        layers = values.get("num_hidden_layers", CONFIG["num_hidden_layers"]) + 1
        values = BASE | values | {"num_hidden_layers": layers}
        values |= {key: [*values[key], kind] for key, kind in DRAFTS.items() if key in values}
        whole = make_checkpoint(folder, family=family, **values)
    count, hidden = whole.config.num_hidden_layers - 1, whole.config.hidden_size
    generator = torch.Generator().manual_seed(2)
    own = {name: 1 + 0.3 * torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    if certain:
        silence(whole)
        own["enorm"], own["eh_proj"] = torch.full((hidden,), 1024 - offset), torch.eye(hidden, 2 * hidden)
        own["shared_head.norm"] = whole.model.norm.weight.detach().clone()
    elif case == "glm4_moe_lite":
        sizes = whole.lm_head.weight.shape
        more = {name: torch.randn(sizes, generator=generator) for name in ("embed_tokens", "shared_head.head")}
        own |= {name: x / hidden**0.5 for name, x in more.items()}
    if is_gguf:
        path = folder / "model.gguf"
        byte_tokenizer(add_bos=True).save(str(folder / "tokenizer.json"))
        gguf_files.write_gguf(
            path,
            whole,
            lambda name: "Q8_0" if not certain and name.endswith(IN_BLOCKS) else "F32",
            metadata={f"{case}.nextn_predict_layers": 1},
            more_tensors={f"blk.{count}.nextn.{name.replace('.', '_')}.weight": x.numpy() for name, x in own.items()},
            unsplit=not certain,
        )
    else:
        path, at, file = folder, f"model.layers.{count}.", folder / "model.safetensors"
        whole.save_pretrained(folder)
        tensors = load_file(file) | {f"{at}{name}.weight": x for name, x in own.items()}
        if offset:
            starts = {at + theirs: ours for theirs, ours in QWEN.items()}
            tensors = {renamed(name, starts): x for name, x in tensors.items()}
        save_file(tensors, file)
        config = json.loads((folder / "config.json").read_text())
        lists = {key: config[key][:count] for key in DRAFTS if key in config}
        more = {} if offset else {"num_nextn_predict_layers": 1}
        rewrite(folder / "config.json", num_hidden_layers=count, **lists, **more)
    return Mtp(*parts(whole, own), own, offset), path


def parts(whole, own):
    """The model without its last layer, and one of this layer alone with the tensors of `own`."""
    model, layer = copy.deepcopy(whole), copy.deepcopy(whole)
    model.model.layers, layer.model.layers = model.model.layers[:-1], layer.model.layers[-1:]
    model.config.num_hidden_layers, layer.config.num_hidden_layers = len(model.model.layers), 1
    layer.config.layer_types = ["full_attention"]
    with torch.no_grad():
        layer.model.norm.weight.copy_(own["shared_head.norm"])
        if "embed_tokens" in own:
            layer.model.embed_tokens.weight.copy_(own["embed_tokens"])
            layer.lm_head.weight.copy_(own["shared_head.head"])
    return model, layer


def renamed(name, starts):
    """A name with the first of these beginnings that it has replaced."""
    start = next((start for start in starts if name.startswith(start)), None)
    return name if start is None else starts[start] + name.removeprefix(start)


def silence(model):
    """Makes the attention and MLPs of a model give zeros; its embeddings are large beside the epsilons of norms."""
    outputs = ("o_proj", "down_proj", "out_proj")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight").removesuffix(".bias").endswith(outputs):
                parameter.zero_()
        if not model.config.tie_word_embeddings:
            model.get_input_embeddings().weight.mul_(1024)


@dataclass
class Eagle:
    """A model by transformers, and an EAGLE-3 head of it by its paper's formulas, in float64."""

    model: torch.nn.Module
    tensors: dict
    layers: tuple[int, ...]
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
        at, count = "midlayer.", len(hidden)
        normed = rms_norm(hidden, weights[f"{at}hidden_norm.weight"], 1e-5)
        x = torch.cat([rms_norm(embedded, weights[f"{at}input_layernorm.weight"], 1e-5), normed], -1)
        q, k, v = (x @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (y.reshape(1, count, -1, 16).transpose(1, 2) for y in (q, k, v))
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(8).double() / 8)
        angles = torch.cat([angles, angles], -1)[None]
        q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2).reshape(count, -1)
        y = (normed if self.adds_normed else hidden) + o @ weights[f"{at}self_attn.o_proj.weight"].T
        z = rms_norm(y, weights[f"{at}post_attention_layernorm.weight"], 1e-5)
        gate, up, down = (weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return y + (torch.nn.functional.silu(z @ gate.T) * (z @ up.T)) @ down.T


def make_eagle(folder, *, certain=False, adds_normed=False, layers=None, family="Llama", **overrides):
    """A model in `folder`/model and an EAGLE-3 head of it in `folder`/head, which drafts 100 of its tokens alone.

    Args:
        certain: As of `make_mtp`. The hidden state of the head is the embedding of the token before, of which the first
            draft follows.

    Returns:
        What the head expects.
    """
    model = make_checkpoint(folder / "model", family=family, **BASE | {"num_hidden_layers": 8} | overrides)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 80}
    llama = make_checkpoint(folder / "head", seed=5, **BASE | sizes)
    hidden, vocab, draft_vocab = model.config.hidden_size, model.config.vocab_size, 100
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    starts = {"model.layers.0.": "midlayer.", "model.norm.": "norm.", "model.embed_tokens.": "embed_tokens."}
    tensors = {renamed(name, starts): x for name, x in llama.state_dict().items()}
    del tensors["embed_tokens.weight"]
    for name in "qkv":
        x = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([x, x.flip(1)], 1)
    tensors |= {
        "midlayer.hidden_norm.weight": tensors["midlayer.input_layernorm.weight"].flip(0),
        "fc.weight": torch.randn(hidden, 3 * hidden, generator=generator) / (3 * hidden) ** 0.5,
        "lm_head.weight": tensors["lm_head.weight"][tokens],
        "d2t": tokens - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True),
    }
    if certain:
        silence(model)
        silence(llama)
        embeddings = model.model.embed_tokens.weight.detach()
        before = torch.randperm(vocab, generator=generator)  # the token that each follows
        with torch.no_grad():
            model.lm_head.weight.copy_(embeddings[before] / 1024)
            model.model.norm.weight.fill_(1)
            llama.model.norm.weight.fill_(1)
        model.save_pretrained(folder / "model")
        tensors["lm_head.weight"] = embeddings[before[before]][tokens] / 1024
        tensors["fc.weight"] = torch.eye(hidden).repeat(1, 3)
    options = {"draft_vocab_size": draft_vocab, "norm_before_residual": adds_normed}
    if layers is not None:
        options["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    rewrite(folder / "head" / "config.json", architectures=["LlamaForCausalLMEagle3"], **options)
    save_file(tensors, folder / "head" / "model.safetensors")
    return Eagle(model, tensors, tuple(layers or (2, 4, 5)), adds_normed)
