"""Layers that draft tokens from a model's hidden states: their logits by the published formulas, on shared pages, from
files of all kinds; and texts with them, which are those without.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.checkpoint.draft_layers import draft_source, mtp_source
from paged_kv.checkpoint.source import open_source
from paged_kv.engine import load
from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.requests import Sampling
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.pool import pages_needed
from paged_kv.serve.loading import set_up
from paged_kv.serve.settings import Settings
from paged_kv.structured_output import Regex
from support.checkpoints import rewrite
from support.draft_heads import make_eagle, make_mtp
from support.families import make_cases
from support.llama_family import poison
from support.made import Made

RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 256, 70).tolist()
OTHERS = [RNG.integers(0, 256, length).tolist() for length in (33, 1, 90)]
NEW = 11
"""With the long prompt they end with a page."""
EAGLES = {
    "eagle3": {},
    "eagle3, layers chosen": {"layers": [1, 4, 7], "adds_normed": True},
    "eagle3, windows": {"family": "Mistral", "sliding_window": 21},  # the model's pages are kept: the head has none
}
GGUF = {"glm4moe": 0.05, "deepseek2": 0.1}
"""Files with tensors in blocks, and the error that the rounding of activations makes."""
CASES = ("glm4_moe", "qwen3_next", "qwen3_5", "v3", "glm4_moe_lite", *EAGLES)
CASES += tuple(pytest.param(name, marks=pytest.mark.slow) for name in GGUF)


@dataclass
class Case:
    model: DecoderModel
    oracle: object
    speculate: str
    folder: object
    tokens: object
    """Those that the layer knows."""
    error: float
    """Of logits, relative to the largest."""


@dataclass
class Seen:
    """The logits that a layer gave after some texts, by the text and the number of its tokens that were drafts."""

    rows: dict = field(default_factory=dict)

    def watch(self, engine):
        """Looks at what drafts with a model's own layer, and lets it draft three tokens wherever it may."""
        engine._speculation._counts = lambda samples, most, rows: [min(3, each) for each in most]  # noqa: ARG005
        draft, lengths = engine._own_draft, {}
        logits_of, begin = draft._logits, draft.propose

        def propose(samples, *rest):
            lengths.update((sample.key, len(sample.tokens)) for sample in samples)
            return begin(samples, *rest)

        def logits(texts):
            result = logits_of(texts)
            for row, (key, text) in zip(result[0], texts.items(), strict=True):
                place = tuple(text), len(text) - lengths[key]
                np.testing.assert_array_equal(row, self.rows.setdefault(place, row))
            return result

        draft._logits, draft.propose = logits, propose
        return engine


def run(model, speculate, *turns, n=1, sampling=None, **options):
    """The texts of each turn's prompts, which are added at once and run to their ends; what the layer gave; the engine.
    Before, every page is NaN.
    """
    poison(model)
    seen, texts = Seen(), {}
    engine = seen.watch(Engine(model, speculate=speculate, **options))
    for prompts in turns:
        for prompt in prompts:
            engine.add_request(prompt, sampling or Sampling(NEW, ignore_end=True), n)
        while not engine.is_idle:
            for output in engine.step():
                assert output.error is None
                texts.setdefault((output.request, output.sample), []).extend(output.tokens)
    engine.flush()
    engine.pool.check_integrity()
    return texts, seen.rows, engine


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")

    def make(name):
        if name in EAGLES:
            at, kind = folder / name, "eagle3"
            oracle, path, speculate = make_eagle(at, **EAGLES[name]), at / "model", at / "head"
        else:
            (oracle, path), kind = make_mtp(name, folder / name), "mtp"
            speculate = kind
        source = open_source(path)
        draft = draft_source(speculate, source)
        model = DecoderModel.from_folder(source, dtype=DType.float32, num_pages=80, page_size=16, draft=draft)
        tokens = slice(None) if draft.tokens is None else draft.tokens
        return Case(model, oracle, kind, path, tokens, GGUF.get(name, 1e-4))

    return Made(make)


@pytest.fixture(scope="module")
def certain(tmp_path_factory):
    """By name, a model whose next token depends on the last one alone, and the `speculate` that knows it."""
    folder = tmp_path_factory.mktemp("certain")

    def make(name):
        if name not in EAGLES:
            return make_mtp(name, folder / name, certain=True)[1], "mtp"
        make_eagle(folder / name, certain=True)
        return folder / name / "model", folder / name / "head"

    return Made(make)


@pytest.fixture(params=CASES)
def case(cases, request):
    return cases[request.param]


def test_logits_are_those_of_the_formula(case):
    """After the text, and after the layer's own hidden states; a prompt in chunks, and one of a token."""
    for prompt in (PROMPT, OTHERS[1]):
        _, rows, engine = run(case.model, case.speculate, [prompt], max_step_tokens=23)
        assert engine.statistics.draft_tokens > 20
        assert engine.statistics.peak_pages == pages_needed(len(prompt) + NEW - 1, 16)
        assert {drafted for _, drafted in rows} == {0, 1, 2}
        for text, drafted in rows:
            split = len(text) - drafted
            expected = case.oracle.expected(text[:split], text[split:])[-1]
            error = np.abs(rows[text, drafted][case.tokens] - expected).max()
            assert error < case.error * max(1, np.abs(expected).max()), (len(text), drafted)
    in_blocks = {name for name, _ in case.model.draft_layer.config.encodings}
    assert case.error < 0.01 or in_blocks >= {"model.eh_proj.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize("way", ["chunks", "company", "preemption", "a shared prefix", "samples", "a restart"])
@pytest.mark.parametrize("case", ["qwen3_next", "v3", "eagle3"], indirect=True)
def test_a_layer_gives_the_same_bits_whatever_was_shared_or_computed_again(case, way, tmp_path):
    """Its K and V, and the hidden state that it goes on from, are those of the text: chunks, pages, prefixes, disk."""
    alone_texts, alone, _ = run(case.model, case.speculate, [PROMPT])
    turns, options = [[PROMPT]], {}
    if way == "chunks":
        options = {"max_step_tokens": 13}
    elif way == "company":
        turns, options = [[PROMPT, *OTHERS]], {"max_step_tokens": 40}
    elif way == "preemption":
        turns, options = [[*OTHERS, PROMPT]], {"num_pages": 15}
    elif way == "a shared prefix":
        turns = [[[*PROMPT[:64], 5, 6]], [PROMPT], [PROMPT]]
    elif way == "samples":
        options = {"n": 3}
    else:
        options = {"disk": DiskTier(tmp_path, 1 << 30)}
        run(case.model, case.speculate, [[*PROMPT[:64], 5, 6]], **options)
    texts, rows, engine = run(case.model, case.speculate, *turns, **options)
    if way == "preemption":
        assert engine.preemptions
    if way in ("a shared prefix", "a restart"):
        assert max(engine.tokens_found, engine.tokens_restored) >= 48
    assert alone_texts[0, 0] in texts.values()
    common = alone.keys() & rows.keys()
    assert len(common) > len(alone) / (2 if way in ("company", "preemption") else 1) - 1  # others take rows of drafts
    for text in common:
        np.testing.assert_array_equal(rows[text], alone[text])


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "deepseek2", "eagle3"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(30, ignore_end=True),
        Sampling(30, temperature=1.0, top_p=0.8, seed=1, logprobs=2, ignore_end=True),
        Sampling(30, temperature=0.8, repetition_penalty=1.3, seed=2, logit_bias={3: 1.5, 4: -100}),
        Sampling(30, prompt_logprobs=1, logprobs=1, ignore_end=True),
        Sampling(30, temperature=1.0, seed=4, structured_output=Regex("[ab]+c")),
    ],
    ids=["greedy", "drawn", "penalties", "log-probabilities", "structure"],
)
def test_outputs_are_those_without_drafts(certain, name, sampling):
    """To the bit, and log-probabilities too; an MTP layer is right wherever no structure or penalty decides."""
    path, layer = certain[name]
    each_way = []
    for speculate in (None, layer):
        engine = load(path, num_pages=64, page_size=8, speculate=speculate)
        if speculate is not None:
            Seen().watch(engine)
        numbers = [engine.add_request(prompt, sampling, 2) for prompt in (PROMPT[:20], PROMPT[:1])]
        outputs = {(number, sample): [] for number in numbers for sample in range(2)}
        while not engine.is_idle:
            for each in engine.step():
                outputs[each.request, each.sample].append((each.tokens, each.text, each.finish, each.logprobs))
        each_way.append(outputs)
    assert each_way[0] == each_way[1]
    assert engine.statistics.draft_tokens > 0
    assert engine.statistics.accepted_tokens > 0 or sampling.structured_output is not None
    if layer == "mtp" and sampling.repetition_penalty == 1 and sampling.structured_output is None:
        assert engine.statistics.accepted_tokens == engine.statistics.draft_tokens


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("qwen3_5", DType.bfloat16, {}),
        ("qwen3_5", DType.float32, {"kv_format": "int8", "cache_rotation": "hadamard"}),
        pytest.param("glm4moe", DType.float32, {}, marks=pytest.mark.slow),
    ],
)
def test_a_layer_in_bfloat16_over_codes_and_in_blocks(cases, name, dtype, options):
    case = cases[name]
    source = open_source(case.folder)
    options = {"dtype": dtype, "num_pages": 80, "page_size": 16, **options}
    model = DecoderModel.from_folder(source, draft=mtp_source(source), **options)
    texts, rows, _ = run(model, "mtp", [PROMPT])
    plain = Engine(DecoderModel.from_folder(source, **options))
    assert texts[0, 0] == [token for each in plain.stream(PROMPT, Sampling(NEW)) for token in each.tokens]
    for text, drafted in rows:
        if drafted == 0:
            expected = case.oracle.expected(text, [])[-1]
            assert np.linalg.norm(rows[text, 0] - expected) < 0.1 * np.linalg.norm(expected)


def test_a_layer_takes_memory_only_where_it_drafts(cases):
    case = cases["glm4_moe"]
    plain = load(case.folder, num_pages=80)
    assert plain.model.draft_layer is None
    assert case.model.page_bytes == plain.model.page_bytes // 3 * 4 + 4 * case.model.config.hidden_size
    setup = set_up(Settings(case.folder, "of the server", pages=80, speculate="mtp"))
    engine = setup.engine(Tokenizer(setup.source, setup.source.config))
    assert setup.size.page_bytes == engine.model.page_bytes == case.model.page_bytes
    texts = [[token for each in one.stream(PROMPT, Sampling(NEW)) for token in each.tokens] for one in (plain, engine)]
    assert texts[0] == texts[1]
    with pytest.raises(ContractError, match="expected a model loaded with a draft layer 'mtp', got none"):
        Engine(plain.model, speculate="mtp")
    with pytest.raises(ContractError, match="expected a model loaded with a draft layer 'eagle3', got 'mtp'"):
        Engine(case.model, speculate="eagle3")


def test_what_has_no_layer_is_refused_before_weights_are_read(cases, tmp_path):
    eagle = cases["eagle3"]
    with pytest.raises(ContractError, match="speculate: expected a checkpoint with an MTP layer"):
        load(eagle.folder, num_pages=8, speculate="mtp")
    head = eagle.folder.parent / "head"
    with pytest.raises(ContractError, match="hidden_size of the EAGLE-3 head: expected the model's 256, got 64"):
        load(make_cases(["lite"], tmp_path) / "lite", num_pages=8, speculate=head)
    for change, words in (
        ({"vocab_size": 300}, "vocab_size of the EAGLE-3 head: expected the model's 259, got 300"),
        ({"draft_vocab_size": 90}, "d2t: expected 90 distances to tokens of the model"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, "expected layers from 1 to 7 of the model"),
    ):
        text = (head / "config.json").read_text()
        rewrite(head / "config.json", **change)
        with pytest.raises((ContractError, CheckpointError), match=words):
            load(eagle.folder, num_pages=8, speculate=str(head))
        (head / "config.json").write_text(text)
