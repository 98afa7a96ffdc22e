"""A token's logits are the same to the bit however its prompt is cut, whoever shares its steps, pages and threads."""

import numpy as np
import pytest
from max.dtype import DType

from paged_kv import set_deterministic
from paged_kv.engine.engine import Engine
from paged_kv.engine.run_record import differences
from paged_kv.engine.sampling import Sampling
from support.checkpoints import make_checkpoint
from support.families import make_cases
from support.llama_family import Member, load_family, poison

PAGES = (16, 80)
"""Slots of a page, and pages."""
NEW = 24
KINDS = {
    "float32": ("llama", DType.float32),
    "bfloat16": ("llama", DType.bfloat16),
    "int8": ("plain", DType.bfloat16, "int8", None),
    "int4, rotated": ("plain", DType.bfloat16, "int4", "hadamard"),
    "windows": ("gemma3", DType.float32),
    "sinks and experts": ("gpt_oss", DType.float32),
    "experts": ("qwen3_moe", DType.bfloat16),
    "latent": ("lite", DType.float32),
    "delta rule": ("qwen3_next", DType.float32),
    "state space": ("nemotron_h", DType.float32),
    "convolutions": ("lfm2", DType.float32),
}
"""A case of transformers each or a plain Llama, the dtype of its step, and how its cache is stored."""
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 256, 150).tolist()
OTHERS = [RNG.integers(0, 256, length).tolist() for length in (33, 1, 190)]
"""Beside it, before it, or with the same first tokens."""
SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_end": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = make_cases({case for case, *_ in KINDS.values()} - {"plain"}, tmp_path_factory.mktemp("families"))
    make_checkpoint(folder / "plain")
    members = {name: Member(folder / case, dtype, *PAGES, *cache) for name, (case, dtype, *cache) in KINDS.items()}
    set_deterministic()  # of no effect without AMX
    try:
        return load_family(members)
    finally:
        set_deterministic(False)


def recorded(model, prompts, **options):
    """The record of the first prompt's request, all of them added at once, each page NaN before."""
    poison(model)
    engine = Engine(model, **options)
    engine.record = model.new_record()
    for prompt in prompts:
        engine.add_request(prompt, Sampling(NEW, **SAMPLED))
    while not engine.is_idle:
        engine.step()
    engine.close() if hasattr(engine, "close") else None
    record = engine.record
    record.samples = {key: sample for key, sample in record.samples.items() if key == (0, 0)}
    return record


def cut(tokens):
    return lambda model, _: recorded(model, [PROMPT], max_step_tokens=tokens)


def in_company(model, _):
    return recorded(model, [PROMPT, *OTHERS], max_step_tokens=40)


WAYS = {
    **{f"in steps of {tokens}": cut(tokens) for tokens in (1, 8, 13, 64)},
    "in company": in_company,
    "preempted": lambda model, _: recorded(model, [PROMPT, *OTHERS], max_step_tokens=64, num_pages=16),
    "drafts": lambda model, _: recorded(model, [PROMPT], speculate="lookup"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(models, tmp_path, kind, way):
    alone = recorded(models[kind], [PROMPT])
    other = WAYS[way](models[kind], tmp_path)
    (difference,) = differences(alone, other)
    assert (difference.position, difference.parted, difference.operation, difference.largest) == (None, None, "", 0)
    assert difference.compared == len(PROMPT) + NEW - 1
