"""Grammars in llama.cpp's notation: the texts that they have, and the mistakes in them that are named."""

import pytest

from paged_kv.engine.demo import byte_tokenizer
from paged_kv.errors import ContractError
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.sampling import read_structure
from paged_kv.structured_output import Grammar, StructureCompiler

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
# white space is one space at most
ws ::= | " "
"""
MOVES = r"""root ::= "1. " move " " move "\n"
move ::= (pawn | non-pawn | castle) [+#]?
non-pawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8]
castle ::= "O-O" "-O"?
"""
ROWS = [
    # grammar, texts that it has, texts that it has not
    (JSON, ['{"a": [1, {"b": "\\u00e9ü"}, true]}', "{}", '{"a":-1.5 }'], ["{", '{"a"}', "[]", '{"a":  1}', '{"a":01}']),
    (MOVES, ["1. e4 Nf6\n", "1. exd5+ O-O-O\n"], ["1. e9 Nf6\n", "1. e4 Nf6"]),
    (
        'root ::= (expr "=" [0-9]+ "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"',
        ["1+(2*3)=7\n", "1=1\n2-1=1\n"],
        ["1+=2\n", "(1=1\n", "1,1=1\n"],
    ),
    (
        r'root ::= [\u0041-\u005a\U0001F600-\U0001F64F]{2} "\u00e9\x21" [^\]\-^/.]',
        ["A😀é!x", "ZZé!\n"],
        ["aaé!x", "ZZé!/", "ZZé!^"],
    ),
    ("root ::= [ぁ-ゟ]+ .{2,} [a-]", ["ぁゟ\n\n-", "ぁxya"], ["xya", "ぁx-b"]),
    # Names that Lark does not have, or that would be one in it.
    (
        'root ::= start a-b a_b Ab 1\nstart ::= "s"\na-b ::= "x"\na_b ::= "y"\nAb ::= "z" root?\n1 ::= "1"',
        ["sxyz1", "sxyzsxyz11"],
        ["sxyz"],
    ),
    ('root::="a"|\r\n  "b"\r\n| #none\n "::=" | ', ["a", "b", "::=", ""], ["c"]),
    ('root ::= foo\nfoo ::= "a" |\n"b"', ["a", "b"], ["ab"]),
    ('root ::= "<" x ">"\nx ::= "a" y "c" | "ab" "d"\ny ::= "b"', ["<abc>", "<abd>"], ["<ab>"]),  # x is regular
]


@pytest.fixture(scope="module")
def compiler():
    return StructureCompiler(byte_tokenizer())


@pytest.mark.parametrize(("grammar", "right", "wrong"), ROWS, ids=range(len(ROWS)))
def test_a_grammar_has_the_texts_that_llama_cpp_takes(compiler, grammar, right, wrong):
    structure = Grammar(grammar)
    compiler.compile(structure)
    assert [compiler.accepts(structure, text) for text in [*right, *wrong]] == [True] * len(right) + [False] * len(
        wrong
    )


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('main ::= "a"', "no rule 'root'"),
        ("root ::= a", "rule 'root' names 'a', which is no rule"),
        ('root ::= ("a"', "is not closed"),
        ('root ::= "a")', "was not opened"),
        ("root ::= *", "nothing is before"),
        ("root ::= []", "empty set"),
        ("root ::= [z-a]", "ends before it begins"),
        (r'root ::= "\ud800"', "no character"),
        ('root ::= "a', "line 1: cannot read"),
        ('\nroot ::= <think> "a"', "line 2: cannot read '<think>"),
        ('x\nroot ::= "a"', "line 1: cannot read 'x"),
    ],
)
def test_a_mistake_is_named_and_lark_too(grammar, words):
    with pytest.raises(ContractError, match=r"is no GBNF.*Lark") as error:
        Grammar(grammar)
    assert words in str(error.value)


def test_a_long_chain_of_rules_is_read_at_once():
    chain = "".join(f"r{at} ::= r{at + 1}\n" for at in range(15_000)) + 'r15000 ::= "a"\nroot ::= r0\n'
    assert Grammar(chain[: 1 << 18]).lark.count("\n") > 10_000


def test_lark_stays_as_it_is():
    lark = 'start: "::=" | /[a-z] ::= /\n'
    assert Grammar(lark).lark == lark


def test_every_field_of_a_grammar_takes_it():
    for fields in ({"grammar": JSON}, {"guided_grammar": JSON}, {"structured_outputs": {"grammar": JSON}}):
        assert read_structure(BodyFields(fields)) == Grammar(JSON)
