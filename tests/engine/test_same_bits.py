"""A token's logits are the same to the bit however its prompt is cut, whoever shares its steps, pages and threads."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from max.dtype import DType

from paged_kv import set_deterministic
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.run_record import differences
from paged_kv.engine.sampling import Sampling
from paged_kv.runtime.threads import allowed_cpus
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


def recorded(model, *turns, of=(0, 0), **options):
    """The record of one request. Each turn's prompts are added at once and run to their ends; pages are NaN before."""
    poison(model)
    engine = Engine(model, **options)
    engine.record = model.new_record()
    for prompts in turns:
        for prompt in prompts:
            engine.add_request(prompt, Sampling(NEW, **SAMPLED))
        while not engine.is_idle:
            engine.step()
    engine.flush()
    engine.record.samples = {(0, 0): engine.record.samples[of]}
    return engine.record


def from_disk(model, folder):
    """After a restart: most of the prompt is in files, which another cut of it made."""
    disk = DiskTier(folder, 1 << 30)
    recorded(model, [PROMPT], disk=disk, max_step_tokens=13)
    return recorded(model, [PROMPT], disk=disk)


WAYS = {
    **{
        f"steps of {tokens}": lambda model, _, most=tokens: recorded(model, [PROMPT], max_step_tokens=most)
        for tokens in (1, 8, 13, 64)
    },
    "company": lambda model, _: recorded(model, [PROMPT, *OTHERS], max_step_tokens=40),
    "preemption": lambda model, _: recorded(model, [PROMPT, *OTHERS], max_step_tokens=64, num_pages=16),
    "drafts": lambda model, _: recorded(model, [PROMPT], speculate="lookup"),
    "a shared prefix": lambda model, _: recorded(
        model, [[*PROMPT[:100], *OTHERS[0]]], [PROMPT], of=(1, 0), max_step_tokens=50
    ),
    "a restart": from_disk,
}
REUSES = ("a shared prefix", "a restart")
"""Ways that take most of the prompt from the cache; of a state it may have no copy that is far enough."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(models, tmp_path, kind, way):
    alone = recorded(models[kind], [PROMPT])
    (difference,) = differences(alone, WAYS[way](models[kind], tmp_path))
    assert (difference.position, difference.parted, difference.operation, difference.largest) == (None, None, "", 0)
    whole = len(PROMPT) + NEW - 1
    if way not in REUSES:
        assert difference.compared == whole
    elif not models[kind].num_states:
        assert NEW <= difference.compared < whole - 64


def test_threads_change_no_bit():
    """Those of a process are chosen once, so another process computes on one thread."""
    command = [sys.executable, "-m", "paged_kv", "generate", "--model", FOLDER, "--prompt", "ab " * 90]
    command += [
        "--max-new-tokens",
        "30",
        "--ignore-end",
        "--temperature",
        "1",
        "--seed",
        "3",
        "--logprobs",
        "3",
        "--json",
    ]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=300, check=True)
    texts = [run([*command, "--json", "--threads", str(n)]).stdout for n in (1, len(allowed_cpus()))]
    assert texts[0] == texts[1] != ""
