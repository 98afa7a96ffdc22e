"""What people are told about kernels is what the kernels' own choice is."""

import pytest

from paged_kv.runtime.kernel_choice import PAIRS, Call, choose, explain, hopper_refusal
from support.mojo_programs import run_program


def test_hoppers_choice_is_explained_as_it_is_made():
    result = run_program("print_hopper_refusals.mojo")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(PAIRS) * 6 * 4 * 10
    taken = 0
    for line in lines:
        q_dtype, kv_dtype, head_dim, group, page_size, found = line.split(maxsplit=5)
        told = hopper_refusal(Call(q_dtype, kv_dtype, int(head_dim), int(group), int(page_size)))
        assert found.removeprefix("it ") == (told or "-"), line
        taken += found == "-"
    assert taken == 6 * 3 * 3 * 5  # dtype pairs, head_dims, groups and page sizes that the Hopper kernel serves


@pytest.mark.parametrize(
    ("architecture", "call", "kernel", "word"),
    [
        (None, Call("float32", "float32", 8, 1, 1), "decode_tiles", "without rotary"),
        (None, Call("float32", "float32", 8, 1, 1, rotary=True), "decode_cpu", "rotated"),
        ("sm_90a", Call("bfloat16", "bfloat16", 128, 4, 16), "decode_hopper", "holds"),
        ("sm_90a", Call("bfloat16", "bfloat16", 128, 4, 5), "decode_gpu", "page_size 5"),
        ("sm_90a", Call("bfloat16", "bfloat16", 80, 4, 16), "decode_gpu", "head_dim 64, 128 and 256, not 80"),
        ("sm_90a", Call("bfloat16", "bfloat16", 128, 4, 16, rotary=True), "decode_gpu", "rotates them"),
        ("sm_100a", Call("bfloat16", "bfloat16", 128, 4, 16), "decode_gpu", "sm_100a is not sm_90a"),
        ("gfx942", Call("float16", "float16", 128, 4, 16), "decode_gpu", "gfx942"),
    ],
)
def test_choices(architecture, call, kernel, word):
    choice = choose(call, architecture)
    assert choice.kernel == kernel
    assert word in choice.why


def test_explain_has_a_line_for_every_pair():
    lines = explain("sm_90a", 128, 4, 16)
    assert len(lines) == len(PAIRS) + 1
    for (q_dtype, kv_dtype), line in zip(PAIRS, lines, strict=False):
        assert line.split()[:3] == [q_dtype, "over", kv_dtype]
        assert ("decode_hopper: " in line) == (q_dtype != "float32")
