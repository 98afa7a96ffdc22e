"""The oracle against transformers: it must not share a mistake with the model it checks."""

import numpy as np
import pytest
import torch

from paged_kv.checkpoint.config import load_config
from paged_kv.engine.uncached_forward import recompute
from paged_kv.errors import ContractError
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import LLAMA3, make_checkpoint, relative_error


def build(folder, **overrides):
    model = make_checkpoint(folder, **overrides)
    config, state = load_config(folder), model.state_dict()
    return config, model, {name: state[name].numpy() for name in expected_tensors(config)}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 32},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
        {"num_key_value_heads": 4, "rope_theta": 1000.0},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rms_norm_eps": 0.1},
    ],
)
def test_logits_are_those_of_transformers(tmp_path, overrides):
    config, model, weights = build(tmp_path, **overrides)
    tokens = torch.randint(0, config.vocab_size, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens).logits[0].numpy()
        exact = model.double()(tokens).logits[0].numpy()
    tokens = tokens[0].tolist()
    ours = recompute(config, weights, tokens, np.float32)
    assert ours.dtype == np.float32
    assert ours.shape == (150, config.vocab_size)
    assert relative_error(ours, theirs) < 1e-5
    # In float64, transformers too takes frequencies in float32, but angles as well.
    assert relative_error(recompute(config, weights, tokens), exact) < 1e-5


@pytest.mark.parametrize("tokens", [[], [259], [-1], [[1]]])
def test_bad_tokens_are_refused(tmp_path, tokens):
    config, _, weights = build(tmp_path)
    with pytest.raises(ContractError, match="tokens: expected"):
        recompute(config, weights, tokens)
