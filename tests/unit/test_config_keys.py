"""Every key of every family's config.json, changed: where transformers' logits change, ours do or it is refused."""

from collections import Counter

import numpy as np
import pytest
import torch

from paged_kv.errors import CheckpointError
from support.families import CASES, LATENT_CASES
from unit.config_keys import Case

NAMES = sorted({*CASES, *LATENT_CASES} - {"lite"})  # "v2" has the switches of "lite"
VALUES = 2
"""Values that are tried for each key, beside none and null; all of them with `--every-value`."""
EXPLAINED = {
    # transformers' own number of all published models, of which no part of latent attention makes use.
    ("v3", "num_key_value_heads, dropped"),
    ("glm4_moe_lite", "num_key_value_heads, dropped"),
}


def walk(name, every=False):
    """The keys of a case that are computed otherwise than transformers does, and those that change our step alone.

    Args:
        every: Try every value, and run transformers' model where our step changes as well.
    """
    case, wrong, alone, tried = Case(name), [], [], Counter()
    for key, values in case.changes():
        try:
            geometry = case.geometry_of(values)
        except CheckpointError:
            continue
        if (name, key) in EXPLAINED or (not every and tried[key] == VALUES) or not (config := case.config_of(values)):
            continue
        tried[key] += 1
        at, is_same = f"{key}: {values.get(key.split(', ')[0].split('.')[0])!r}", geometry == case.geometry
        normal = case.normal_geometry(config)
        if normal != geometry and case.run(config) is not None:
            wrong.append(f"{at}: {'' if isinstance(normal, str) else 'another model than '}{normal}")
        elif (is_same or every) and case.is_read(config) and (result := case.run(config)) is not None:
            logits, shapes = result
            changes = shapes != case.result[1] or not np.allclose(logits, case.result[0], rtol=1e-5, atol=1e-5)
            if changes and is_same and shapes == case.result[1]:  # other tensors are refused when they are loaded
                wrong.append(f"{at}: transformers' logits change, ours do not")
            if not changes and not is_same:
                alone.append(at)
    return wrong, alone


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: threads would wait for each other ten times as long as they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_changes_the_logits_of_transformers_changes_ours_or_is_refused(name, request):
    wrong, _ = walk(name, request.config.getoption("--every-value"))
    assert not wrong
