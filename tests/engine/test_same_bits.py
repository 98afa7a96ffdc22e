"""A token's logits are bitwise identical in any batch, with any chunks of its prompt, pages and number of threads."""

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


def run(turns, model, **options):
    """The record of a run, and its engine. Each turn's prompts are added at once and run to their ends; before, every
    page is NaN.
    """
    poison(model)
    engine = Engine(model, **options)
    engine.record = model.new_record()
    for prompts in turns:
        for prompt in prompts:
            engine.add_request(prompt, Sampling(NEW, **SAMPLED))
        while not engine.is_idle:
            engine.step()
    engine.flush()
    return engine.record, engine


def recorded(model, *turns, of=(0, 0), **options):
    """The record of one request."""
    record, _ = run(turns, model, **options)
    record.samples = {(0, 0): record.samples[of]}
    return record


def with_drafts(model, draft):
    """Most drafts are refused, since another model makes them."""
    record, engine = run([[PROMPT]], model, speculate=draft)
    assert engine.statistics.draft_tokens > 0
    return record


def from_disk(model, folder):
    """After a restart: most of the prompt is in files, which another cut of it made."""
    disk = DiskTier(folder, 1 << 30)
    recorded(model, [PROMPT], disk=disk, max_step_tokens=13)
    return recorded(model, [PROMPT], disk=disk)


def ways(model=None, draft=None, folder=None):
    """The record of each way to compute the prompt's request."""
    once, again = [PROMPT], [[*PROMPT[:100], *OTHERS[0]]]
    return {
        **{f"steps of {most}": partial(recorded, model, once, max_step_tokens=most) for most in (1, 8, 13, 64)},
        "company": partial(recorded, model, [PROMPT, *OTHERS], max_step_tokens=40),
        "preemption": partial(recorded, model, [PROMPT, *OTHERS], max_step_tokens=64, num_pages=16),
        "drafts": partial(with_drafts, model, draft),
        "a shared prefix": partial(recorded, model, again, once, of=(1, 0), max_step_tokens=50),
        "a restart": partial(from_disk, model, folder),
    }


REUSES = ("a shared prefix", "a restart")
"""Ways that take most of the prompt from the cache; of a state it may have no copy that is far enough."""


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(models, tmp_path, kind, way):
    draft = models["bfloat16" if kind == "float32" else "float32"]
    alone = recorded(models[kind], [PROMPT])
    (difference,) = differences(alone, ways(models[kind], draft, tmp_path)[way]())
    assert (difference.position, difference.parted, difference.operation, difference.largest) == (None, None, "", 0)
    whole = len(PROMPT) + NEW - 1
    if way not in REUSES:
        assert difference.compared == whole
    elif not models[kind].num_states:
        assert NEW <= difference.compared < whole - 64


def test_threads_change_no_bit():
    """Those of a process are chosen once, so another process computes on one thread."""
    arguments = "generate --max-new-tokens 30 --ignore-end --temperature 1 --seed 3 --logprobs 3 --json"
    command = [sys.executable, "-m", "paged_kv", *arguments.split(), "--model", FOLDER, "--prompt", "ab " * 90]
    start = partial(subprocess.run, capture_output=True, text=True, timeout=300, check=True)
    texts = [start([*command, "--threads", str(n)]).stdout for n in (1, len(allowed_cpus()))]
    assert texts[0] == texts[1] != ""
