"""What MAX Serve does not document is there, and docs/notes/new-max.md has all that is overridden or called."""

import inspect
import re

import pytest

from support import serving

serving.require()

from paged_kv.serve import ahead, compiled_graphs, config, forms, graph, model, pipeline, tokenizer, tools  # noqa: E402
from support.max_seams import SERVER, find, seams, takes  # noqa: E402

SEAMS = [seam for title in SERVER for seam in seams(title)]
OURS = [
    value
    for module in (ahead, compiled_graphs, config, forms, graph, model, pipeline, tokenizer, tools)
    for value in vars(module).values()
    if inspect.isclass(value) and value.__module__ == module.__name__
]
DATA = {"model_config_cls", "batch_processor_cls", "CALL_BEGIN", "CALL_END"}
"""Attributes that MAX's class asks its subclasses for."""


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_it_is_there_and_takes_what_it_is_given(seam):
    signature = takes(find(seam.name))
    missing = [parameter for parameter in seam.parameters if not re.search(rf"\b{parameter}\b", signature)]
    assert not missing, f"{seam.name}{signature}"


def overridden(owner: type) -> set[str]:
    """What a class of ours defines and a class of MAX below it has too."""
    below = [base for base in owner.__mro__ if base.__module__.startswith("max.")]
    names = {name for name in vars(owner) if not name.startswith(("__", "_abc_", "_is_protocol"))}
    return {name for name in names for base in below if name in vars(base)}


@pytest.mark.parametrize("owner", OURS, ids=lambda owner: owner.__name__)
def test_every_method_of_max_that_is_overridden_is_in_the_table(owner):
    named = {seam.name.rpartition(".")[2] for seam in SEAMS}
    assert overridden(owner) - DATA <= named


def test_something_is_overridden():
    assert {name for owner in OURS for name in overridden(owner)} >= {"execute", "new_context", "_load_state_dict"}
