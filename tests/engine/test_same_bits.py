"""A token's logits are bitwise identical in any batch, with any chunks of its prompt, pages and number of threads."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from max.dtype import DType

from paged_kv import set_deterministic
from paged_kv.engine.demo_model import FOLDER
from paged_kv.runtime.threads import allowed_cpus
from support.checkpoints import make_checkpoint
from support.families import make_cases
from support.llama_family import Member, load_family
from support.same_bits import PAGES, WAYS, Case, assert_same_bits

KINDS = {
    "llama": ("llama", DType.float32),
    "llama in bfloat16": ("llama", DType.bfloat16),
    "int8": ("plain", DType.bfloat16, "int8", None),
    "int4, rotated": ("plain", DType.bfloat16, "int4", "hadamard"),
    "windows": ("gemma3", DType.float32),
    "sinks and experts": ("gpt_oss", DType.float32),
    "experts": ("glm4_moe", DType.bfloat16),
    "latent": ("lite", DType.float32),
    "delta rule": ("qwen3_next", DType.float32),
    "state space": ("nemotron_h", DType.float32),
    "convolutions": ("lfm2", DType.float32),
}
"""A case of transformers each or a plain Llama, the dtype of its step, and how its cache is stored."""
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 256, 150).tolist()
OTHERS = [RNG.integers(0, 256, length).tolist() for length in (33, 1, 190)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_cases({case for case, *_ in KINDS.values()} - {"plain"}, tmp_path_factory.mktemp("families"))
    make_checkpoint(folder / "plain")
    return folder


@pytest.fixture(scope="module")
def draft(folder):
    return load(folder, "plain", DType.bfloat16)


@pytest.fixture(scope="module", params=[pytest.param(kind, id=f"{kind}-{of[1].name}") for kind, of in KINDS.items()])
def case(folder, draft, request):
    return Case(load(folder, *KINDS[request.param]), PROMPT, OTHERS, draft)


def load(folder, case, dtype, *cache):
    set_deterministic()  # of no effect without AMX
    try:
        return load_family({case: Member(folder / case, dtype, *PAGES, *cache)})[case]
    finally:
        set_deterministic(False)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(case, way, tmp_path):
    assert_same_bits(case, way, tmp_path)


@pytest.mark.slow
def test_threads_change_no_bit():
    """Those of a process are chosen once, so another process computes on one thread."""
    arguments = "generate --max-new-tokens 30 --ignore-end --temperature 1 --seed 3 --logprobs 3 --json"
    command = [sys.executable, "-m", "paged_kv", *arguments.split(), "--model", FOLDER, "--prompt", "ab " * 90]
    start = partial(subprocess.run, capture_output=True, text=True, timeout=300, check=True)
    texts = [start([*command, "--threads", str(n)]).stdout for n in (1, len(allowed_cpus()))]
    assert texts[0] == texts[1] != ""
