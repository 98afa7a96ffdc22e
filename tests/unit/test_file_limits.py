"""A checkpoint that would take all memory or time: its chat template and its tokenizer are refused before they do.

What they try runs in a process of its own with little memory, which a missing limit would end.
"""

import json
import subprocess
import sys

import pytest
import tokenizers

from paged_kv.checkpoint.tokenizer_file import read_tokenizer
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.chat import ChatFormat
from paged_kv.serve.chat.template import Template
from support.refusals import refused

SECONDS, BYTES = 300, 6 << 30
"""The limits of the process; its libraries map some gigabytes."""
CHILD = """
import json, resource, sys
from pathlib import Path
from paged_kv.checkpoint.tokenizer_file import read_tokenizer
from paged_kv.errors import PagedKVError
from paged_kv.serve.chat.template import Template
resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
for kind, name, text in json.load(sys.stdin):
    try:
        if kind == "tokenizer":
            read_tokenizer(Path(text)).encode("a b " * 100_000)
        else:
            Template(text, {}).render([{"role": "user", "content": "a"}])
        result = "done"
    except PagedKVError as error:
        result = f"{type(error).__name__}: {error}"
    print(json.dumps([name, result]), flush=True)
"""
TEXT, OPERATIONS, NUMBERS = "it makes too much text", "it takes too many operations", "numbers that are too large"
DEEP, TUPLES = "values that are too deep", "tuples that are too large"
RARE, LONG = "a filter too much", "takes too long"


def shared(what, made="[n.{0}, n.{0}]", first="['x']"):
    """A value that holds another twice, sixty times over, and what is done with it."""
    steps = "".join("{% set n." + each + " = " + made.format(each) + " %}" for each in "ab")
    begun = f"{{% set n = namespace(a={first}, b={first}) %}}{{% for i in range(60) %}}{steps}{{% endfor %}}"
    return begun + "{{ " + what + " }}"


def grown(step, first="'x'", times=99):
    return (
        f"{{% set n = namespace(a={first}) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}{{{{ {{n.a: 1}} }}}}"
    )


LOOP = "{% for i in range(99999) %}"
TEMPLATES = {
    OPERATIONS: [
        f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
        LOOP + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        LOOP + "{{ 'x' in range(99999) }}{% endfor %}",
        "{{ [1]|slice(10**9)|list }}",
        LOOP + "{{ [1]|map('string')|list|length }}{{ [1]|map('string')|list|length }}{% endfor %}",
    ],
    TEXT: [
        "{{ 'x' * 10**9 }}", "{% set x = 1000000000 * ('a',) %}", "{% set x = [1] * 10**9 %}",
        grown("{% set n.a = n.a ~ n.a %}"), grown("{% set n.a = n.a + n.a %}"),
        "{% autoescape true %}" + grown("{% set n.a = n.a ~ n.a ~ '<' %}", "'<'|safe") + "{% endautoescape %}",
        "{{ 'x'|center(10**9) }}", "{{ 'x'|center(1000000000) }}",
        "{% autoescape 'x'|center(1000000000) %}{% endautoescape %}",
        "{{ 'x'.center(10**9) }}", "{{ 'x'.zfill(10**9) }}", "{{ '\\t'.expandtabs(10**9) }}",
        "{{ (['x' * 10000] * 100000)|join }}", "{{ range(99999)|join('x' * 100000) }}",
        "{{ ('x' * 100000).join(['a'] * 100000) }}",
        "{{ ('\\n' * 100000)|indent(100000, true, true) }}", "{{ 'a\\nb'|indent(10**10) }}",
        "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '%1000000000d'|format(1) }}",
        "{{ '%((a)b)1000000000d' % {'(a)b': 1} }}",
        "{{ '%.1000000000f' % 1.0 }}", "{{ ('%(a)s' * 10000) % {'a': 'x' * 100000} }}", "{{ '%1000000000d' is odd }}",
        "{{ '{:1000000000}'.format(1) }}", "{{ '{:{w}}'.format(1, w=10**9) }}",
        "{{ ('{0}' * 100000).format('x' * 100000) }}",
        "{{ ('{:1000000000}'|attr('format'))(1) }}", "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}", "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
        "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}", "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|tojson(indent=10**9) }}", "{{ ([1] * 10000)|tojson(separators=('x' * 10000, ':')) }}",
        "{{ ([[1] * 10] * 100000)|sum(start=[]) }}",
        "{{ lipsum(n=10**9) }}", "{{ strftime_now('%Y' * 10**6) }}",
        shared("n.a"), shared("n.a|tojson"), shared("n.a == n.b"), shared("n.a in [n.b]"), shared("n.a is eq(n.b)"),
        shared("'%s' % n.a"),
        shared("'{!r}'.format(n.a)"), shared("n.a ~ ''"), shared("[n.a].index(n.b)"), shared("[n.a, n.b]|sort"),
        shared("n.a is lower"),
        shared("n.a|string", "{{'a': n.{0}, 'b': n.{0}}}", "{}"), shared("n.a.items()", "{{'a': n.{0}, 'b': n.{0}}}",
        "{}"),
        "{% set n = namespace(l=[]) %}{% set x = 'x' * 1000000 %}" + LOOP + "{% set n.l = n.l + [x[1:]] %}{% endfor %}",
        "{% set x %}" + LOOP + "y" * 50000 + "{% endfor %}{% endset %}", LOOP + "y" * 50000 + "{% endfor %}",
        "{% filter upper %}" + LOOP + "y" * 50000 + "{% endfor %}{% endfilter %}",
    ],
    NUMBERS: [
        "{{ 10**(10**8) }}", grown("{% set n.a = n.a * n.a %}", "3"), "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ 1.5|round(10**9, 'ceil') }}",
        "{{ ('f' * 10**6)|int(base=16) }}",
    ],
    TUPLES: [
        grown("{% set n.a = (n.a, n.a) %}"), grown("{% set n.a = (n.a,) %}", times=99999),
        "{% macro f() %}{% set n.a = varargs %}{% endmacro %}" + grown("{{ f(n.a) }}", "(1,)", 99999),
        grown("{% set n.a = {'a': n.a}|items|first %}", times=99999),
        grown("{% set n.a = dict(a=n.a)|dictsort|first %}", times=99999),
    ],
    "too many filters": [grown("{% set n.a = n.a|map('upper') %}", times=99999)],
    DEEP: ["{% set n = namespace(a=1) %}{% for i in range(2000) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a }}"],
    RARE: ["{{ ('a@b.c ' * 200000)|urlize }}", "{{ ('<!--x-->' * 200000)|striptags }}",
    "{{ ('a ' * 500000)|wordwrap(1) }}"],
    LONG: ["{{ ('a' * 2000000).rfind('b' + 'a' * 1000000) }}", "{{ ('a' * 2000000).strip('b' * 2000000 + 'a') }}"],
    "encodes too much": ["{{ ('\u00e9a' * 100000).encode('punycode') }}"],
    "they are too deep": ["{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block a %}{{ self.a() }}{% endblock %}"],
}  # fmt: skip


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def steps(name, *parts):
    return {"type": "Sequence", name: list(parts)}


LETTER = {"String": "a"}
ONE_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"id": "s", "ids": [0] * 5000, "tokens": ["a"] * 5000}
TOKENIZERS = {
    "a letter": {"normalizer": replace(LETTER, "b" * 10**6)},
    "an empty text": {"normalizer": replace({"String": ""}, "b" * 10**6)},
    "an expression": {"normalizer": replace({"Regex": "x*"}, "b" * 10**6)},
    "twenty steps": {"normalizer": steps("normalizers", *[replace(LETTER, "aa")] * 20)},
    "bytes of bytes": {"normalizer": steps("normalizers", *[{"type": "ByteLevel"}] * 20)},
    "before each part": {"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}},
    "an added token": {
        "normalizer": steps("normalizers", *[replace(LETTER, "aa")] * 40),
        "added_tokens": [{"id": 0, "content": "a", "special": False, "normalized": True}
                         | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
    },
    "a decoder": {"decoder": steps("decoders", *[replace(LETTER, "aa")] * 40)},
    "a text many times": {"post_processor": {"type": "TemplateProcessing",
    "single": [ONE_TEXT] * 1000, "pair": [ONE_TEXT], "special_tokens": {}}},
    "many tokens": {
        "post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "s", "type_id": 0}}, ONE_TEXT],
            "pair": [ONE_TEXT],
            "special_tokens": {"s": SPECIAL},
        }
    },
    "a map of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAG" + "Fh" * 1000}},
    "a prefix of parts": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [],
    "continuing_subword_prefix": "b" * 10**6}},
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The answers of a process for each template and tokenizer, by its text or name."""
    folder = tmp_path_factory.mktemp("tokenizers")
    jobs = [("template", text, text) for texts in TEMPLATES.values() for text in texts]
    for name, parts in TOKENIZERS.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads((FOLDER / "tokenizer.json").read_text()) | parts))
        jobs.append(("tokenizer", name, str(file)))
    child = subprocess.run(
        [sys.executable, "-c", CHILD.replace("BYTES", str(BYTES))],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    done = dict(map(json.loads, child.stdout.splitlines()))
    last = next((name for _, name, _ in jobs if name not in done), None)
    assert child.returncode == 0, f"the process ended at {last!r}: {child.stderr[-500:]}"
    return done


@pytest.mark.slow
@pytest.mark.parametrize("words", TEMPLATES)
def test_a_template_that_takes_too_much_is_refused(results, words):
    wrong = {text: results[text] for text in TEMPLATES[words] if words not in results[text]}
    assert not wrong
    assert all(results[text].startswith("ContractError: messages: the chat template ") for text in TEMPLATES[words])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_multiplies_a_text_is_refused(results, name):
    assert results[name].startswith("CheckpointError: ")
    assert f"{name}.json: " in results[name]


def test_a_template_past_its_limits_is_no_model_to_serve():
    loop = TEMPLATES[OPERATIONS][0]
    refused(ChatFormat, {"default": loop}, {}, match=f"the chat template cannot be used: {OPERATIONS}")
    refused(Template, "a" * 10**6, {}, match="expected at most 262144 characters, got 1000000")


def test_a_long_conversation_may_take_more():
    """As many steps as the square of its messages, and text as long as all that came before each of them."""
    quadratic = "{% set n = namespace(a='') %}{% for m in messages %}{% for o in messages %}{% endfor %}"
    template = Template(quadratic + "{% set n.a = n.a + m.content %}{% endfor %}{{ n.a }}", {})
    messages = [{"role": "user", "content": "x" * 200}] * 700
    assert template.render(messages) == "x" * 140_000


def test_real_tokenizers_are_read(tmp_path):
    """As SentencePiece's, BERT's and byte-level ones are written, and with the parts in another order."""
    normalizers = [
        steps("normalizers", {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")),
        steps("normalizers", {"type": "NFKC"}, replace({"Regex": " {2,}"}, "▁"), {"type": "Lowercase"}),
        None,
    ]
    values = json.loads((FOLDER / "tokenizer.json").read_text())
    file = tmp_path / "tokenizer.json"
    for normalizer in normalizers:
        for names in (list(values), list(values)[::-1]):
            file.write_text(json.dumps({name: values[name] for name in names} | {"normalizer": normalizer}))
            assert isinstance(read_tokenizer(file), tokenizers.Tokenizer)
    file.write_text('{"normalizer": null, ' + json.dumps(values)[1:])
    refused(read_tokenizer, file, match="a key is there twice")
