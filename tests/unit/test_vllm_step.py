"""vLLM as a peer of whole steps: the checkpoint it reads, and the process that is asked for a step at a time."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from paged_kv.bench.model_files import write_folder
from paged_kv.bench.peers.vllm_step import PYTHON, VllmStep, environment
from paged_kv.bench.problems import problem_of
from paged_kv.bench.weight_cases import StepCase

TINY = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 70}

# A vLLM that only counts: a prompt longer than 4 tokens takes two steps, logits are token numbers.
STAND_IN = """
from types import SimpleNamespace as Thing

__version__ = "0"

def EngineArgs(**options):
    assert (options["max_logprobs"], options["logprobs_mode"]) == (-1, "raw_logits")
    return options

SamplingParams = Thing

class LLMEngine:
    def __init__(self):
        self.requests = []

    @classmethod
    def from_engine_args(cls, options):
        print("a log line")
        return cls()

    def add_request(self, name, prompt, params):
        self.requests.append(Thing(name=name, wait=len(prompt["prompt_token_ids"]) > 4, params=params, made=[]))

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        answers = []
        for request in self.requests:
            if request.wait:
                request.wait = False
                continue
            request.made.append(1)
            logprobs = [{token: Thing(logprob=float(token)) for token in range(70)}]
            output = Thing(token_ids=request.made, logprobs=logprobs)
            answers.append(Thing(finished=len(request.made) == request.params.max_tokens, outputs=[output]))
        self.requests = [one for one in self.requests if len(one.made) < one.params.max_tokens]
        if FAULT and len(answers) == 2:
            raise ValueError("out of pages")
        return answers

FAULT = False
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text(STAND_IN)
    (folder / "_C.py").write_text("")
    monkeypatch.setenv(PYTHON, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder / "__init__.py"


@pytest.mark.parametrize("steps", [{"context": 16}, {"context": 0, "tokens": 6}], ids=["decode", "prefill"])
def test_a_step_is_run_when_it_is_asked_for(stand_in, steps):  # noqa: ARG001
    case = StepCase("", "", batch=2, **TINY, **steps)
    problem, peer = problem_of(case), VllmStep()
    assert peer.available(case) is None
    peer.prepare(problem, 1)
    for i in range(3):
        peer.run(i)
    assert np.array_equal(peer.output(), np.arange(70, dtype=np.float32)[None])
    assert peer.error(problem) > problem.tolerance  # the stand-in computes nothing
    assert not list(Path(peer._folder.name).glob("*.safetensors"))  # 2 GB, not needed once loaded
    peer._engine.process.stdin.close()
    assert peer._engine.process.wait(10) == 0


def test_an_engine_that_dies_says_why(stand_in):
    stand_in.write_text(STAND_IN.replace("FAULT = False", "FAULT = True"))
    peer = VllmStep()
    with pytest.raises(RuntimeError, match="ValueError: out of pages"):
        peer.prepare(problem_of(StepCase("", "", batch=2, context=16, **TINY)), 1)


def test_an_environment_without_vllm_is_told(monkeypatch, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('No module named vllm')")
    monkeypatch.setenv(PYTHON, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ImportError, match="No module named vllm"):
        VllmStep().available(StepCase("", ""))


def test_vllm_gets_all_cores_and_no_folder_of_the_user(tmp_path):
    found = environment(sys.executable, tmp_path)
    assert found["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert found["VLLM_CACHE_ROOT"] == str(tmp_path)
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_checkpoint_is_the_problem_s_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    problem = problem_of(StepCase("", "", batch=1, context=0, tokens=6, dtype="float32", **TINY))
    write_folder(problem, tmp_path, "float32", {"bos_token_id": None, "eos_token_id": None})
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        logits = model(torch.from_numpy(problem.tokens.astype(np.int64))).logits[:, -1].numpy()
    assert problem.error(logits) < 1e-5
