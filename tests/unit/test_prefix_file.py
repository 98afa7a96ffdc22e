"""Known prefixes that outlive a process: saved, loaded into another engine, and refused where they do not belong."""

import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Sampling
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError, PoolExhausted
from support.fake_model import VOCAB, FakeModel, alone
from support.refusals import refused

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 2000).tolist()


def answered(engine, prompt, namespace=None):
    return [token for output in engine.stream(prompt, Sampling(5), namespace=namespace) for token in output.tokens]


@pytest.fixture(params=[1, 5, 16])
def saved(request, tmp_path):
    """A file of the prompt's prefix, and the size of its pages."""
    engine = Engine(FakeModel(2100 // request.param, request.param))
    assert answered(engine, PROMPT) == alone(PROMPT, Sampling(5))
    path = tmp_path / "prefix.safetensors"
    assert engine.save_prefix(path, PROMPT) == 2000 // request.param * request.param
    assert engine.pool.num_used == 0
    assert list(tmp_path.iterdir()) == [path]
    return path, request.param


def test_an_engine_that_loads_a_prefix_answers_as_if_it_had_never_stopped(saved):
    path, page_size = saved
    model = FakeModel(2100 // page_size, page_size)
    engine = Engine(model)
    assert engine.load_prefix(path) == 2000 // page_size * page_size
    assert engine.pool.num_used == 0
    assert answered(engine, PROMPT) == alone(PROMPT, Sampling(5))
    assert model.computed == 4 + 2000 - (1999 // page_size * page_size)
    engine.pool.check_integrity()


def test_it_is_loaded_into_a_namespace(saved):
    path, page_size = saved
    engine = Engine(FakeModel(2 * 2100 // page_size, page_size))
    engine.load_prefix(path, namespace="tenant")
    answered(engine, PROMPT)
    assert engine.tokens_found == 0
    answered(engine, PROMPT, "tenant")
    assert engine.tokens_found > 1900


def test_loading_twice_keeps_one_copy(saved):
    path, page_size = saved
    engine = Engine(FakeModel(2 * 2100 // page_size, page_size))
    for _ in range(3):
        engine.load_prefix(path)
        assert engine.pool.num_cached == 2000 // page_size


def changed(path, *, metadata=None, **tensors):
    """Another file with some tensors or metadata replaced, in a file that safetensors reads."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as opened:
        said = opened.metadata()
    other = path.with_name("other")
    save_file(load_file(path) | tensors, other, metadata=said | (metadata or {}))
    return other


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "paged-kv prefix 2"),
        ("model", "another"),
        ("dtype", "bfloat16"),
        ("page_size", "7"),
        ("page_shape", "3x4"),
    ],
)
def test_a_file_of_another_model_or_kind_of_page_is_refused(saved, key, value):
    path, page_size = saved
    engine = Engine(FakeModel(2100 // page_size, page_size))
    message = f"{key} is '{value}', that of this model is"
    refused(engine.load_prefix, changed(path, metadata={key: value}), match=message)
    assert (engine.pool.num_used, engine.pool.num_cached) == (0, 0)


def test_a_file_whose_content_was_changed_is_refused(saved):
    path, page_size = saved
    engine = Engine(FakeModel(2100 // page_size, page_size))
    tensors = load_file(path)
    tokens, pages = tensors["tokens"].copy(), tensors["pages"].copy()
    tokens[3] += 1
    refused(engine.load_prefix, changed(path, tokens=tokens), match="is damaged")
    pages[-1, 0] ^= 1
    refused(engine.load_prefix, changed(path, pages=pages), match="is damaged")
    for wrong, message in (
        ({"tokens": tokens[:-1].copy()}, "tokens of int64 for"),
        ({"tokens": tokens.astype(np.int32)}, "of int32 for"),
        ({"pages": pages.astype(np.uint16)}, "pages are uint16"),
        ({"pages": np.ascontiguousarray(np.concatenate([pages, pages], axis=1))}, "pages are uint32"),
        ({"more": pages}, "holds other tensors"),
        ({"pages": np.array(3, np.uint32)}, r"pages are uint32 \[\]"),
    ):
        refused(engine.load_prefix, changed(path, **wrong), match=message)
    assert (engine.pool.num_used, engine.pool.num_cached) == (0, 0)


def test_a_file_that_is_cut_short_or_flipped_anywhere_is_refused(saved):
    path, page_size = saved
    engine = Engine(FakeModel(2100 // page_size, page_size))
    whole = path.read_bytes()
    other = path.with_name("other")
    rng = np.random.default_rng(1)
    for at in [0, 7, 8, 20, *rng.integers(0, len(whole), 60).tolist(), len(whole) - 1]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(rng.integers(8))
        for content in (whole[:at], bytes(flipped)):
            other.write_bytes(content)
            with pytest.raises(CheckpointError):
                engine.load_prefix(other)
    assert (engine.pool.num_used, engine.pool.num_cached) == (0, 0)


def test_what_cannot_be_saved_or_loaded_is_refused(saved, tmp_path):
    path, page_size = saved
    engine = Engine(FakeModel(2000 // page_size // 2, page_size))
    with pytest.raises(PoolExhausted):
        engine.load_prefix(path)
    with pytest.raises(ContractError, match="no page of it is in the cache"):
        engine.save_prefix(tmp_path / "new", [1, 2, 3])
    answered(engine, [1] * 40)
    refused(engine.save_prefix, tmp_path / "missing" / "new", [1] * 40, match="cannot be written")
    for wrong in (None, 5, b"\0"):
        with pytest.raises((ContractTypeError, CheckpointError)):
            engine.load_prefix(wrong)
    os.mkfifo(tmp_path / "pipe")
    for wrong, said in (
        ("missing", "cannot be read"),
        (".", "cannot be read"),
        ("pipe", "not a reg"),
        ("/dev/zero", "not a reg"),
    ):
        refused(engine.load_prefix, tmp_path / wrong, match=said)
    alone_engine = Engine(FakeModel(40, 4), share_prefixes=False)
    with pytest.raises(ContractError, match="share_prefixes"):
        alone_engine.load_prefix(path)
    assert engine.pool.num_used == 0


KEY = b"a secret of sixteen bytes or more"


def test_a_key_tells_who_wrote_a_file(saved, tmp_path):
    plain, page_size = saved
    engine = Engine(FakeModel(2100 // page_size, page_size))
    engine.load_prefix(plain)
    keyed = tmp_path / "keyed"
    engine.save_prefix(keyed, PROMPT, key=KEY)
    other = Engine(FakeModel(2100 // page_size, page_size))
    for path, key, message in (
        (keyed, KEY + b"!", "or the key is another"),
        (keyed, None, "was saved with a key"),
        (plain, KEY, "was saved without a key"),
        (changed(keyed, metadata={"hmac-sha256": "\u00e9"}), KEY, "is damaged"),
        (changed(keyed, pages=load_file(keyed)["pages"] ^ 1), KEY, "is damaged"),
    ):
        refused(other.load_prefix, path, key=key, match=message)
    assert (other.pool.num_used, other.pool.num_cached) == (0, 0)
    for wrong, error in (("text" * 9, ContractTypeError), (b"short", ContractError)):
        with pytest.raises(error, match="key must"):
            other.load_prefix(keyed, key=wrong)
        with pytest.raises(error, match="key must"):
            engine.save_prefix(keyed, PROMPT, key=wrong)
    assert other.load_prefix(keyed, key=KEY) == 2000 // page_size * page_size
    assert answered(other, PROMPT) == alone(PROMPT, Sampling(5))
