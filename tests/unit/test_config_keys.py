"""Every key of each family's config.json, changed: where transformers' logits change, ours do or it is refused."""

import numpy as np
import pytest

from paged_kv.errors import CheckpointError
from support.config_keys import Case
from support.families import CASES, LATENT_CASES

NAMES = sorted({*CASES, *LATENT_CASES} - {"lite"})  # "v2" has the switches of "lite"


def walk(name, every=False):
    """The keys of a case that are computed otherwise than transformers does, and those that change our step alone.

    Args:
        every: Run transformers' model for keys that change our step as well.
    """
    case, wrong, alone = Case(name), [], []
    for key, values in case.changes():
        try:
            geometry = case.geometry_of(values)
        except CheckpointError:
            continue
        config = case.config_of(values)
        if config is None:
            continue
        at = f"{key}: {case.values.get(key)!r} -> {values.get(key, 'dropped')!r}"
        try:
            normal = case.geometry_of(config.to_dict() | {"architectures": values["architectures"]}), ""
        except CheckpointError as error:
            normal = None, f"refused: {error}"
        is_same = geometry == case.geometry
        if normal[0] != geometry and case.run(config) is not None:
            wrong.append(f"{at}: not as transformers saves it, {normal[1] or config.to_dict().get(key)}")
        elif (every or is_same) and case.is_read(config) and (result := case.run(config)) is not None:
            logits, shapes = result
            is_other = shapes != case.result[1]
            changed = is_other or not np.allclose(logits, case.result[0], rtol=1e-5, atol=1e-5)
            if changed and is_same and not is_other:  # other tensors are refused when they are loaded
                wrong.append(f"{at}: transformers' logits change, ours do not")
            if not changed and not is_same:
                alone.append(at)
        elif every and not is_same and not case.is_read(config):
            alone.append(at)
    return wrong, alone


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_changes_the_logits_of_transformers_changes_ours_or_is_refused(name):
    wrong, _ = walk(name)
    assert not wrong
