"""`max serve` with this package's architectures: families answer as transformers does, and MAX has what they use of it.

All other families are registered by the same rule (`max_serve/architectures.py`), and their steps compared in
tests/engine: Gemma 3's has windows, two rotations and norms that Llama's has not.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

if find_spec("sse_starlette") is None or find_spec("zmq") is None:
    pytest.skip("MAX's server is not installed: pip install -e '.[test-max-serve]'", allow_module_level=True)

import torch
import transformers
from max.driver import Buffer
from max.nn.kv_cache import KVCacheInputsPerDevice

from paged_kv.errors import ContractError
from paged_kv.max_serve import config, graph, model, tokenizer
from support.checkpoints import write_config
from support.families import make_case
from support.limits import end_with_parent, limited
from support.max_private import SERVER, find, private_names, takes
from support.ports import free_ports

PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (1, 3, 40, 100, 129, 180)]
"""A page has 128 tokens."""
NEW_TOKENS = 12
FLAGS = ("--max-length", "256", "--max-batch-size", "8", "--enable-prefix-caching", "--max-batch-input-tokens", "64")
START_SECONDS, ANSWER_SECONDS = 900, 300
CASES = [("gemma3", "float32", 1e-4), ("llama", "bfloat16", 5e-2)]
if os.environ.get("PAGED_KV_MAX_SERVE") != "all":  # a server compiles for three minutes
    CASES = CASES[:1]


@contextlib.contextmanager
def serving(folder, log, *flags):
    """A server of a checkpoint, as a user starts it; gives a function that posts a request."""
    port, _ = free_ports()
    scripts = Path(sys.executable).parent  # MAX starts the `python3` that PATH has first
    command = [str(scripts / "max"), "serve", "--model-path", str(folder), "--served-model-name", "tiny"]
    command += ["--custom-architectures", "paged_kv.max_serve", "--devices", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
    variables = {"MAX_SERVE_METRIC_RECORDING_METHOD": "NOOP", "OTEL_SDK_DISABLED": "true"}
    environment = os.environ | variables | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}

    def post(**body):
        """The status and the decoded answer of a completion."""
        data = json.dumps({"model": "tiny", "max_tokens": NEW_TOKENS, "temperature": 0} | body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, env=environment, preexec_fn=end_with_parent)
    with limited(started, 2 * START_SECONDS) as process:
        try:
            end = time.monotonic() + START_SECONDS
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
                time.sleep(0.2)
            else:
                pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
            yield post
        finally:
            process.terminate()


def complete(post):
    """The new tokens of all prompts, asked at the same time."""

    def ask(prompt):
        status, answer = post(prompt=prompt, return_token_ids=True, ignore_eos=True)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def assert_likeliest(folder, answers, tie):
    """Each new token is the likeliest of transformers, or its logit is within `tie` of the likeliest's, relatively."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, new in zip(PROMPTS, answers, strict=True):
        assert len(new) == NEW_TOKENS
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + new[:-1]])).logits[0, -NEW_TOKENS:]
        chosen = logits[range(NEW_TOKENS), new]
        assert bool((logits.amax(-1) - chosen <= tie * logits.abs().amax(-1)).all()), len(prompt)


def assert_refusals(post):
    """A field that MAX lets through and no step computes is refused, and the server goes on."""
    for prompt, message in ([[]], "no tokens"), ([5, 100_000], "token 100000, the vocabulary is 0 to"):
        status, answer = post(prompt=prompt)
        assert status == 400, answer
        assert message in json.dumps(answer)
    status, answer = post(prompt=[5, 6], echo=True, logprobs=1)
    assert (status, "--enable-echo" in json.dumps(answer)) == (400, True)
    assert post(prompt=[5, 6], top_k=1 << 31, temperature=1)[0] == 200  # MAX would allocate memory for all of them


@pytest.mark.parametrize(("family", "encoding", "tie"), CASES)
def test_greedy_tokens_are_those_of_transformers(family, encoding, tie, tmp_path):
    """Six requests at once, prefilled in pieces; the second time their prompts are in the prefix cache."""
    folder = tmp_path / "model"
    make_case(family, folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(folder, tmp_path / "log", "--quantization-encoding", encoding) as post:
        answers = complete(post)
        assert_likeliest(folder, answers, tie)
        if encoding == "float32":
            assert complete(post) == answers
            assert_refusals(post)
            assert complete(post) == answers


def test_pages_with_gaps_are_refused():
    """MAX's pool leaves gaps where caches of several page sizes share it; a family here has one."""
    names = ("kv_blocks", "cache_lengths", "lookup_table", "max_prompt_length", "max_cache_length", "page_stride")
    pages = KVCacheInputsPerDevice(**{name: Buffer.from_numpy(np.array([640])) for name in names})
    with pytest.raises(ContractError, match="kv_blocks: pages lie 640 elements apart"):
        object.__new__(model.ServedPipeline).execute(SimpleNamespace(kv_cache_inputs=pages))


SHARED = """
import sys
from pathlib import Path
import max.driver
max.driver.set_virtual_device_api("cuda")
max.driver.set_virtual_device_target_arch("sm_90a")
max.driver.set_virtual_device_count(2)
from max import tree
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.transformer import ReturnLogits
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.interfaces.batch_processor import ragged_kv_symbolic_input_tree
from paged_kv.checkpoint.config import load_config
from paged_kv.graphs.ops import kernels
from paged_kv.max_serve.graph import ServedStep
from paged_kv.runtime.kernel_library import kernel_library
config = load_config(Path(sys.argv[1]))
devices = [DeviceRef.GPU(0), DeviceRef.GPU(1)]
sizes = {"n_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "num_layers": config.num_hidden_layers}
kv_params = KVCacheConfig().to_params(dtype=DType.bfloat16, devices=devices, **sizes)
inputs = ragged_kv_symbolic_input_tree(kv_params=kv_params, device_refs=devices, include_signal_buffers=True)
step = ServedStep(config, DType.bfloat16, kv_params, devices, ReturnLogits.LAST_TOKEN)
print(step.trace(*tree.leaves(inputs), name="step", custom_extensions=[kernel_library(kernels())]))
"""


def test_two_gpus_share_the_heads_and_add_up_sums(tmp_path):
    """Read from the graph for two virtual GPUs, which nothing here can run."""
    folder = write_config(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4)
    # What an engine in this process adds to the environment can lead another Python astray.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MODULAR"))}
    command = [sys.executable, "-c", SHARED, str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    assert built.returncode == 0, built.stderr[-4000:]
    layers = 2
    assert built.stdout.count("paged_kv_append") == built.stdout.count("paged_kv_attention") == 2 * layers
    assert built.stdout.count("allreduce") >= 2 * layers


PRIVATE_NAMES = [each for title in SERVER for each in private_names(title)]
OURS = [config.ServedConfig, graph.ServedStep, model.ServedPipeline, tokenizer.ServedTokenizer]


@pytest.mark.parametrize("each", PRIVATE_NAMES, ids=lambda each: each.name)
def test_what_max_does_not_document_is_there(each):
    signature = takes(find(each.name))
    missing = [parameter for parameter in each.parameters if not re.search(rf"\b{parameter}\b", signature)]
    assert not missing, f"{each.name}{signature}"


def test_every_method_of_max_that_is_overridden_is_in_the_table():
    data = {"model_config_cls", "batch_processor_cls"}  # which MAX's class asks its subclasses for
    found = set()
    for owner in OURS:
        below = [base for base in owner.__mro__ if base.__module__.startswith("max.")]
        names = {name for name in vars(owner) if not name.startswith(("__", "_abc_", "_is_protocol"))}
        found |= {name for name in names - data for base in below if name in vars(base)}
    assert (
        {"execute", "new_context", "_load_state_dict"}
        <= found
        <= {each.name.rpartition(".")[2] for each in PRIVATE_NAMES}
    )
