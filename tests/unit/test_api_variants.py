"""What the API may ask a runtime for is what is compiled ahead: nothing less, and nothing more."""

from itertools import product

import numpy as np
import pytest

from paged_kv.arrays.dtypes import CACHE_DTYPES
from paged_kv.arrays.dtypes import DTYPES as NUMPY_DTYPES
from paged_kv.arrays.host import HostArrays
from paged_kv.calls import kv_copy, merge_states
from paged_kv.calls.latent import LatentPlan
from paged_kv.calls.plan import AttentionPlan
from paged_kv.errors import ContractTypeError
from paged_kv.graphs.ops import CODES
from paged_kv.options import FORMATS, Q_DTYPES, AttentionOptions
from paged_kv.runtime.graph_family import API_FAMILIES, API_VARIANTS

DEVICE = HostArrays()

DTYPE_TRIPLES = list(product(NUMPY_DTYPES.values(), CACHE_DTYPES.values(), [None, *NUMPY_DTYPES.values()]))
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
    """And, over caches of codes, for outputs of another dtype than q's, which are compiled when first asked for."""

    def variants(q, kv, o):
        plan = AttentionPlan(8, 2, 64, 16, q, kv, "NONE", AttentionOptions(), o)
        return {plan.variant("attention"), plan.variant("masked_attention")}

    asked = planned(variants)
    others = {variant for variant in asked if variant.kv_dtype in CODES and variant.o_dtype}
    assert asked - others == of_op("attention", "masked_attention")
    assert len(others) == 2 * 3 * 2 * 2  # ops, queries, other outputs, codes


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
    over_codes = [(NUMPY_DTYPES[rows], NUMPY_DTYPES[memory]) for rows in Q_DTYPES for memory in FORMATS]
    for dtypes in [(dtype, dtype) for dtype in NUMPY_DTYPES.values()] + over_codes:
        kv_copy.prepare(DEVICE, *dtypes)
    of_codes = {variant for variant in of_op("gather") if variant.dtype != variant.kv_dtype}
    assert recorder.asked == of_op("append", "gather") - of_codes
    recorder.asked.clear()
    for rows, memory in over_codes:
        pages, new = np.zeros((2, 4, 1, 20), memory), np.ones((3, 1, 32 if memory == np.uint8 else 16), rows)
        with pytest.raises(InterruptedError):
            kv_copy.write_rows(
                DEVICE, new, new, pages, pages.copy(), np.zeros(3, np.int32), np.arange(3, dtype="int32")
            )
        table, lengths = np.zeros((1, 1), np.uint32), np.array([3], np.int32)
        with pytest.raises(InterruptedError):
            kv_copy.read_rows(DEVICE, pages, pages, table, lengths, FORMATS[memory.name])
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
    assert len(members) == len(API_VARIANTS) == len({variant.name for variant in members}) == 110
    assert all(family.isidentifier() for family in API_FAMILIES)
