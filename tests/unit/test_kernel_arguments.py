"""Arguments of NVIDIA's kernels: the documentation prints the table, whose names are those of the calls."""

import inspect
from pathlib import Path

import pytest

import paged_kv
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.flashinfer import decode
from paged_kv.flashinfer.kernel_arguments import REFUSED, WITHOUT_EFFECT, markdown, refuse_unsupported

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming-from-flashinfer.md"


def arguments() -> set[str]:
    """The names of all arguments of FlashInfer's functions, and of its classes' public methods."""
    found: set[str] = set()
    for name in paged_kv.__all__:
        value = getattr(paged_kv, name)
        if not value.__module__.startswith("paged_kv.flashinfer."):
            continue
        members = (
            [value] if inspect.isfunction(value) else [value.__init__, value.plan] if hasattr(value, "plan") else []
        )
        members += [value.run] if hasattr(value, "run") else []
        found.update(*(inspect.signature(member).parameters for member in members))
    return found


def test_the_documentation_prints_the_table():
    text = DOCUMENT.read_text()
    begin, end = "<!-- kernel_arguments: begin -->\n", "\n<!-- kernel_arguments: end -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == markdown()


def test_every_name_is_an_argument():
    known = arguments() | set(inspect.signature(decode.trtllm_batch_decode_with_kv_cache).parameters)
    known |= {"int_workspace_buffer"}  # of reset_workspace_buffer
    assert set(WITHOUT_EFFECT) | set(REFUSED) <= known


@pytest.mark.parametrize("name", REFUSED)
def test_the_one_value_is_accepted_and_others_are_not(name):
    neutral, why = REFUSED[name]
    refuse_unsupported(**{name: neutral})
    for other in (3, object(), True, "x"):
        if type(other) is type(neutral) and other == neutral:
            continue
        with pytest.raises((ContractError, ContractTypeError), match=name) as refused:
            refuse_unsupported(**{name: other})
        assert isinstance(refused.value, ContractTypeError) or why in str(refused.value)
