"""vLLM's engine with the plugin gives the tokens that it gives without, in an environment that has vLLM."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from paged_kv.errors import ToolchainError
from paged_kv.vllm import register

ENGINE = Path(__file__).parent / "engine.py"
SECONDS = 900
"""The time of all cases in one process; they take two minutes."""


def prompts() -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(128) for _ in range(length)] for length in (1, 2, 31, 32, 33, 65, 140, 300)]


def case(family: str, dtype: str = "float32", *, eager: bool = True, **options: Any) -> dict[str, Any]:
    tokens = 12 if dtype == "float32" else 1
    made = {"family": family, "dtype": dtype, "eager": eager, "tokens": tokens, "options": options}
    return made | {"prompts": prompts()}


CASES = {
    "Llama": case("Llama"),
    "a window": case("Mistral", sliding_window=48),
    "windows, soft caps": case("Gemma2", sliding_window=48, query_pre_attn_scalar=32),
    "a compiled graph, bfloat16": case("Llama", "bfloat16", eager=False),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return what the engine gives without the plugin and with it."""
    found = {}
    for plugins in ("", "paged_kv"):
        folder = tmp_path_factory.mktemp("vllm")
        (folder / "cases.json").write_text(json.dumps(list(CASES.values())))
        environment = os.environ | {
            "VLLM_PLUGINS": plugins,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, str(ENGINE), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert not done.returncode, done.stderr[-3000:]
        found[plugins] = [json.loads(line) for line in done.stdout.splitlines()]
    return found


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["dtype"] == "float32"])
def test_greedy_tokens(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    theirs, ours = (results[plugins][list(CASES).index(name)] for plugins in ("", "paged_kv"))
    assert "paged_kv" not in theirs["backend"]
    assert ours["backend"] == "paged_kv.vllm.backend.PagedBackend"
    assert ours["tokens"] == theirs["tokens"]


def test_logits_of_bfloat16(results: dict[str, list[dict[str, Any]]]) -> None:
    """Linear layers too are this package's, inside a compiled graph."""
    number = list(CASES).index("a compiled graph, bfloat16")
    theirs, ours = (np.array(results[plugins][number]["logits"]) for plugins in ("", "paged_kv"))
    assert not np.array_equal(ours, theirs)
    assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def test_the_plugin_does_nothing_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "from paged_kv.vllm import register; register();"
        "from vllm.model_executor.layers import utils; print(utils.dispatch_cpu_unquantized_gemm.__module__)"
    )
    for plugins, module in ((None, "vllm.model_executor.layers.utils"), ("paged_kv", "paged_kv.vllm.backend")):
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.split()[-1] == module
    monkeypatch.setenv("VLLM_PLUGINS", "other,paged_kv")
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    with pytest.raises(ToolchainError, match=r"knows the internals of vLLM 0.32, 0.33.1 is installed"):
        register()
