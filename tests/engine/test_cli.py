"""`paged-kv` from end to end, on the demo checkpoint: what it prints where, and how it refuses."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

import paged_kv
from paged_kv.checkpoint.config import load_config
from paged_kv.cli import _run
from paged_kv.commands.demo import ENDINGS, NEW_TOKENS
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.pool import pages_needed
from support.checkpoints import rewrite
from support.limits import SECONDS, limited

PROMPTS = ("Once upon a time", "ü", "the sea, the sea, the open sea")
STATISTICS = r"""prompt: (\d+) tokens, \d+\.\d tokens/s
decode: (\d+) tokens, \d+\.\d tokens/s
pages: (\d+) used, of (\d+) \((\d+) tokens, (\d+) bytes each\): (\d+) tokens in (?:float32|bfloat16)
"""


@pytest.fixture
def run(capsys):
    """Runs a command; stdout and stderr of one that ends well."""

    def run(*args):
        assert _run([str(arg) for arg in args]) == 0
        out, err = capsys.readouterr()
        return out, err

    return run


@pytest.fixture
def generate(run, folder):
    def generate(*args, model=folder, prompts=PROMPTS[:1]):
        return run("generate", "--model", model, *(f"--prompt={prompt}" for prompt in prompts), *args)

    return generate


COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests were started in the background
from paged_kv.cli import main
main()
"""


def process(*args):
    """The command in a process of its own."""
    command = [sys.executable, "-c", COMMAND, *map(str, args)]
    return limited(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def tokens_of(folder, *texts):
    tokenizer = Tokenizer(folder, load_config(folder))
    return [tokenizer.encode(text) for text in texts]


def test_demo_shows_what_paging_is_for_and_that_the_tokens_are_right(run):
    out, err = run("demo")
    total = len(ENDINGS) * NEW_TOKENS
    assert f"paged tokens equal to those of a recompute without a cache: {total} of {total}\n" in out
    found, of = map(int, re.search(r"(\d+) of (\d+) prompt tokens were in the cache", out).groups())
    assert 0.5 * of < found < of
    assert int(re.search(r"Pages copied: (\d+)", out)[1]) > 0
    assert int(re.search(r"(\d+) times a prompt gave its pages back", out)[1]) > 0
    assert f"Texts that are the same: {len(ENDINGS)} of {len(ENDINGS)}" in out
    assert all(f"   {ending}" in out for ending in ENDINGS)
    assert re.search(STATISTICS, err)


def test_demo_speaks(run):
    """Most words that it says are frequent ones of the text that it was trained on, which are tokens of their own."""
    out, _ = run("demo")
    vocabulary = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    known = {token.removeprefix("Ġ").lower() for token in vocabulary if token.startswith("Ġ")}
    said = re.findall("[a-z]+", out.split("2. Samples")[1].split("Pages copied")[0].lower())
    assert len(said) > 60
    assert sum(word in known for word in said) > 0.7 * len(said)


def test_demo_fails_where_a_token_is_wrong(capsys, monkeypatch):
    from paged_kv.engine import uncached_forward as oracle

    recompute = oracle.recompute
    monkeypatch.setattr(oracle, "recompute", lambda *args: np.roll(recompute(*args), 1, axis=0))
    assert _run(["demo"]) == 1
    assert int(re.search(r"(\d+) of 160\n", capsys.readouterr().out)[1]) < 100


def test_one_prompt_gives_its_text_alone(generate, folder):
    """The text is that of transformers' own greedy search."""
    out, err = generate("--max-new-tokens", 40)
    (tokens,) = tokens_of(folder, PROMPTS[0])
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokens])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0]
    assert out == transformers.AutoTokenizer.from_pretrained(folder).decode(theirs[len(tokens) :]) + "\n"
    assert re.fullmatch(STATISTICS, err.removeprefix(compiling(err)))


def compiling(err):
    """The line that tells of a compile, where there was one."""
    return err[: err.index("\n") + 1] if err.startswith("compiling") else ""


def test_several_prompts_come_under_headings_in_order(generate, folder):
    out, err = generate("--max-new-tokens", 20, prompts=PROMPTS)
    alone = [generate("--max-new-tokens", 20, prompts=[prompt])[0] for prompt in PROMPTS]
    sections = [
        f"=== prompt {i}: {prompt}\n{text}" for i, (prompt, text) in enumerate(zip(PROMPTS, alone, strict=True), 1)
    ]
    assert out == "\n".join(sections)
    prompt, decode, used, pages, size, page_bytes, room = map(int, re.search(STATISTICS, err).groups())
    lengths = [len(tokens) for tokens in tokens_of(folder, *PROMPTS)]
    assert prompt == sum(lengths)
    assert decode == 3 * 19  # the first of each prompt's tokens comes from its prefill
    assert used == pages == sum(pages_needed(length + 19, 16) for length in lengths)
    assert (size, room) == (16, 16 * pages)
    assert page_bytes == 16 * 2 * 4 * 2 * 32 * 4  # K and V, layers, KV heads, head_dim, bytes


def test_json_says_the_same_in_lines(generate):
    plain, _ = generate("--max-new-tokens", 20, prompts=PROMPTS)
    out, err = generate("--max-new-tokens", 20, "--json", prompts=PROMPTS)
    records = sorted(map(json.loads, out.splitlines()), key=lambda record: record["index"])
    assert [record["prompt"] for record in records] == list(PROMPTS)
    headed = [f"=== prompt {r['index'] + 1}: {r['prompt']}\n{r['text']}\n" for r in records]
    assert plain == "\n".join(headed)
    assert all(record["tokens"] == 20 and record["finish_reason"] == "length" for record in records)
    assert "ü" in out  # not escaped
    assert re.search(STATISTICS, err)


@pytest.mark.slow
def test_greedy_twice_and_seeds_once_more_are_equal(generate):
    def text(*args):
        return generate("--max-new-tokens", 40, *args)[0]

    sampled = ["--temperature", 1.5, "--top-p", 0.9]
    assert text() == text("--seed", 5) == text("--temperature", 0)
    assert text(*sampled, "--seed", 5) == text(*sampled, "--seed", 5)
    assert len({text(), text(*sampled), text(*sampled, "--seed", 5), text(*sampled, "--seed", 6)}) == 4
    assert text("--temperature", 1.5, "--top-p", 1e-9) == text()


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [(), ("--temperature", 0.7, "--seed", 3)])
def test_guesses_change_no_text(generate, copy, sampled):
    """By the text, which repeats itself, and by a copy of the model, which is always right."""
    plain, _ = generate("--max-new-tokens", 60, *sampled)
    for speculate in ("lookup", copy):
        out, err = generate("--max-new-tokens", 60, "--speculate", speculate, *sampled)
        assert out == plain
        right, drafted = map(int, re.search(r"drafts: (\d+) of (\d+) were accepted\n", err).groups())
        assert "compiling" not in err
    assert right == drafted > 5


def test_an_end_token_stops_its_prompt_alone(generate, copy):
    whole = [json.loads(line)["text"] for line in generate("--json", prompts=PROMPTS)[0].splitlines()]
    end = whole[0][10]
    (tokens,) = tokens_of(copy, end)
    rewrite(copy / "generation_config.json", eos_token_id=[1, tokens[-1]])
    out, err = generate("--json", model=copy, prompts=PROMPTS)
    assert "compiling" not in err  # what ends a text is no part of the graph
    records = sorted(map(json.loads, out.splitlines()), key=lambda record: record["index"])
    for record, text in zip(records, whole, strict=True):
        before, found, _ = text.partition(end)
        assert record["text"] == before  # without the text of the token that ended it
        assert record["finish_reason"] == ("stop" if found else "length")
    assert records[0]["tokens"] <= 11


def test_pages_of_5(generate):
    exact, _ = generate("--max-new-tokens", 8)
    out, err = generate("--page-size", 5, "--max-new-tokens", 8)
    assert out == exact
    *_, used, pages, size, page_bytes, _ = map(int, re.search(STATISTICS, err).groups())
    assert (used, pages) == (5, 5)  # 17 tokens and 7 new ones
    assert (size, page_bytes) == (5, 5 * 2 * 4 * 2 * 32 * 4)


def test_more_pages_than_needed_change_nothing(generate):
    assert generate()[0] == generate("--pages", 99)[0]


def test_a_full_context_gives_one_token(generate, copy):
    rewrite(copy / "config.json", max_position_embeddings=17)
    out, _ = generate("--json", model=copy)
    assert json.loads(out)["tokens"] == 1


def test_text_streams_in_a_process_of_its_own(folder, generate):
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    with process("generate", "--model", folder, "--max-new-tokens", "20", *prompts) as child:
        out, err = child.communicate(timeout=SECONDS)
    assert (child.returncode, out) == (0, generate("--max-new-tokens", 20, prompts=PROMPTS)[0])
    assert re.fullmatch(STATISTICS, err)


@pytest.mark.slow
def test_a_reader_that_leaves_early_gets_no_traceback(folder):
    with process("generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "4000") as child:
        assert len(child.stdout.read(1)) == 1
        child.stdout.close()
        err = child.stderr.read()
    assert child.returncode == 1
    assert "Traceback" not in err
    assert "Error" not in err


@pytest.mark.slow
def test_an_interrupted_run_says_so(folder):
    with process("generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "4000") as child:
        child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        err = child.stderr.read()
    assert (child.returncode, err.strip()) == (130, "interrupted")


@pytest.mark.slow
def test_bad_input_in_a_process_of_its_own(tmp_path):
    with process("generate", "--model", tmp_path / "none", "--prompt", "hello") as child:
        out, err = child.communicate(timeout=SECONDS)
    assert (child.returncode, out, err) == (2, "", f"error: {tmp_path}/none: no such folder\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], ["demo", "doctor", "generate"]),
        (["generate", "-h"], ["--max-new-tokens", "--page-size"]),
        (["--version"], [paged_kv.__version__]),
        (["doctor"], ["max", "mojo", "target", "all is well"]),
    ],
)
def test_what_needs_no_model(run, args, words):
    out, err = run(*args)
    assert all(word in out for word in words)
    assert err == ""
