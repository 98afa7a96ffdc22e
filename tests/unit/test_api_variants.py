"""What the API may ask a runtime for is what is compiled ahead: nothing less, and nothing more."""

from itertools import product

import numpy as np
import pytest

from paged_kv.arrays.dtypes import DTYPES as NUMPY_DTYPES
from paged_kv.arrays.host import HostArrays
from paged_kv.calls import kv_copy, merge_states
from paged_kv.calls.latent import LatentPlan
from paged_kv.calls.plan import AttentionPlan
from paged_kv.errors import ContractTypeError
from paged_kv.graphs.ops import CODES
from paged_kv.options import AttentionOptions
from paged_kv.runtime.graph_family import API_FAMILIES, API_VARIANTS

DEVICE = HostArrays()

DTYPE_TRIPLES = list(product(NUMPY_DTYPES.values(), NUMPY_DTYPES.values(), [None, *NUMPY_DTYPES.values()]))
"""Of q, of the cache, of the output."""


def of_op(*names):
    return {variant for variant in API_VARIANTS if variant.op in names}


def planned(make):
    """The variants of all plans that are not refused."""
    variants = set()
    for q, kv, o in DTYPE_TRIPLES:
        try:
            variants |= make(q, kv, o)
        except ContractTypeError:
            continue
    return variants


def test_attention_asks_for_the_list():
    """And, over caches of codes, for variants that are compiled when they are first asked for."""

    def variants(q, kv, o):
        plan = AttentionPlan(8, 2, 64, 16, q, kv, "NONE", AttentionOptions(), o)
        return {plan.variant("attention"), plan.variant("masked_attention")}

    asked = planned(variants)
    of_codes = {variant for variant in asked if variant.kv_dtype in CODES}
    assert asked - of_codes == of_op("attention", "masked_attention")
    assert len(of_codes) == 2 * 3 * 3  # ops, queries, outputs of int8; int4 is no dtype of NumPy


def test_latent_attention_asks_for_the_list():
    def variants(q, kv, o):
        return {LatentPlan(8, 64, 0, 16, 0.1, q, kv, o).variant()}

    assert planned(variants) == of_op("mla_attention")


class Recorder:
    """A runtime that writes down what it is asked for, and refuses to run it."""

    def __init__(self):
        self.asked = set()

    def load(self, wanted):
        self.asked |= set(wanted)

    def execute(self, variant, *_):
        self.asked.add(variant)
        raise InterruptedError


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    for module in (kv_copy, merge_states):
        monkeypatch.setattr(module, "runtime_on", lambda _: recorder)
    return recorder


def test_copies_ask_for_the_list(recorder):
    for dtype in NUMPY_DTYPES.values():
        kv_copy.prepare(DEVICE, dtype)
    assert recorder.asked == of_op("append", "gather")
    recorder.asked.clear()
    for dtype in NUMPY_DTYPES.values():
        pages = np.zeros((2, 4, 1, 8), dtype)
        rows, slots = np.ones((3, 1, 8), dtype), np.arange(3, dtype=np.int32)
        with pytest.raises(InterruptedError):
            kv_copy.write_rows(DEVICE, rows, rows, pages, pages.copy(), np.zeros(3, np.int32), slots)
        with pytest.raises(InterruptedError):
            kv_copy.read_rows(DEVICE, pages, pages, np.zeros((1, 1), np.uint32), np.array([3], np.int32))
    assert recorder.asked == of_op("append", "gather")


def test_merges_ask_for_the_list(recorder):
    for dtype in NUMPY_DTYPES.values():
        try:
            v, s = np.ones((2, 3, 1, 8), dtype), np.zeros((2, 3, 1), np.float32)
            state = merge_states.checked_state(DEVICE, v, s, ("v", "s"), 4)
        except ContractTypeError:
            continue
        with pytest.raises(InterruptedError):
            merge_states.merge(DEVICE, *state)
    assert recorder.asked == of_op("merge")


def test_every_variant_is_in_one_file():
    members = [variant for family in API_FAMILIES.values() for variant in family]
    assert len(members) == len(API_VARIANTS) == len({variant.name for variant in members}) == 90
    assert all(family.isidentifier() for family in API_FAMILIES)
