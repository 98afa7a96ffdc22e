"""Greedy text over HTTP is the engine's own, alone and among others, whatever the engine is told."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest

from paged_kv.engine import DiskTier, Sampling, load
from paged_kv.engine.demo_model import FOLDER
from support.served import served

BEGIN = "And the LORD spake unto Moses, saying, "
PROMPTS = [
    BEGIN * (index % 5) + text for index, text in enumerate(("In the", "And", "Thou shalt", "a", "Behold, ") * 4)
]
PROMPTS = PROMPTS[:16]
NEW_TOKENS = 20


@lru_cache(1)
def alone(folder, kv_format=None, cache_rotation=None):
    """The tokens of each prompt, one after the other, from an engine without a server."""
    kind = {"kv_format": kv_format, "cache_rotation": cache_rotation}
    engine = load(folder, num_pages=128, page_size=16, dtype="float32", share_prefixes=False, **kind)
    sampling = Sampling(NEW_TOKENS, ignore_end=True)
    return [[token for each in engine.stream(prompt, sampling) for token in each.tokens] for prompt in PROMPTS]


def check(server, expected):
    def complete(prompt):
        return server.client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )

    def tokens(prompt):
        return complete(prompt).choices[0].token_ids

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(tokens, PROMPTS)) == expected
    assert [choice.token_ids for choice in complete(PROMPTS).choices] == expected
    assert tokens(PROMPTS[9]) == expected[9]
    assert server.engine.pool.num_used == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 24, "max_gap": 1e-6},
        {"speculate": "lookup"},
        {"num_pages": 24},
        {"share_prefixes": False, "page_size": 5},
        {"kv_format": "int4", "cache_rotation": "hadamard"},
        {"kv_format": "int4", "cache_rotation": "hadamard", "speculate": "lookup", "num_pages": 24},
    ],
    ids=str,
)
def test_of_the_demo(options):
    of_model = {name: options[name] for name in ("kv_format", "cache_rotation") if name in options}
    with served(**options) as server:
        check(server, alone(FOLDER, **of_model))
        assert "num_pages" not in options or server.metric("vllm:num_preemptions_total") > 0


def test_with_a_draft():
    draft = load(FOLDER, num_pages=512, page_size=16, dtype="float32").model
    with served(speculate=draft) as server:
        check(server, alone(FOLDER))
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def test_with_prefixes_on_disk(tmp_path):
    for _ in range(2):
        with served(disk=DiskTier(tmp_path / "kv", 10**9)) as server:
            check(server, alone(FOLDER))
            restored = server.metric("paged_kv:disk_tokens_total")
            server.engine.flush()
    assert restored > 0
