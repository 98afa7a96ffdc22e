"""The op of latent attention against the float64 oracle, and against uncompressed attention in float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv import reference
from support import latent
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.harness import refused
from support.latent import LSE_TOL, PAIRS, REL, REL_FLOAT8, LatentCase
from support.properties import examples

SCALE = 192**-0.5
WIDTHS = ((512, 64), (512, 0), (64, 8), (40, 24), (8, 128), (256, 512))


def assert_is_oracle(case: LatentCase, **options) -> None:
    o, lse = latent.mla_attention(case, **options)
    names = ("q_nope", "q_pe", "ckv", "kpe", "lookup_table", "row_batch", "row_lengths")
    expected_o, expected_lse = reference.mla_attention(*(getattr(case, name) for name in names), **options)
    rel = REL_FLOAT8 if case.ckv.dtype.itemsize == 1 else REL[case.q_nope.dtype.name]
    assert_close(o, expected_o, rel=rel, what="o")
    assert_lse_close(lse, expected_lse, tol=LSE_TOL, what="lse")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[dict, dict]:
    lengths = tuple(draw(st.lists(st.sampled_from((0, 1, 15, 16, 17, 63, 64, 65, 130, 300)), min_size=1, max_size=3)))
    new_rows = tuple(min(length, draw(st.integers(1, 4))) if length else draw(st.integers(0, 1)) for length in lengths)
    arguments = {
        "lengths": lengths,
        "new_rows": new_rows,
        "heads": draw(st.sampled_from((1, 5, 16, 24, 128))),
        "widths": draw(st.sampled_from(WIDTHS)),
        "page_size": draw(st.sampled_from((1, 5, 16, 64))),
        "joined": draw(st.booleans()),
        "padding": draw(st.integers(0, 2)),
    }
    scales = draw(st.sampled_from(((1.0, 1.0), (2.0, 0.5), (0.3, 0.7))))
    return arguments, {"ckv_scale": scales[0], "kpe_scale": scales[1], "has_sinks": draw(st.booleans())}


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_it_is_the_oracle(dtype, kv_dtype):
    @settings(max_examples=examples(60))
    @given(drawn())
    def check(setting):
        arguments, options = setting
        sinks = np.linspace(-3, 1, arguments["heads"]) if options.pop("has_sinks") else None
        case = latent.build(**arguments, dtype=dtype, kv_dtype=kv_dtype)
        assert_is_oracle(case, sm_scale=SCALE, sinks=sinks, **options)

    check()


def test_long_requests_are_split():
    arguments = {"heads": 16, "widths": (64, 32), "page_size": 16, "dtype": "float32", "kv_dtype": "float32"}
    assert_is_oracle(latent.build((3000, 700), (3, 1), **arguments), sm_scale=SCALE)


def test_it_is_attention_before_compression():
    """Heads of K and V that are made from the latent vectors, in float64: the up-projections move to q and o."""
    rng = np.random.default_rng(3)
    heads, nope, widths = 8, 32, (64, 16)
    arguments = {"heads": heads, "widths": widths, "page_size": 5, "dtype": "float32", "kv_dtype": "float32"}
    case = latent.build((37, 80), (1, 3), **arguments)
    up_k, up_v = rng.standard_normal((2, heads, widths[0], nope)) / 8
    q = rng.standard_normal((len(case.row_batch), heads, nope))
    case = replace(case, q_nope=np.einsum("rhn,hcn->rhc", q, up_k).astype(np.float32))
    o, lse = latent.mla_attention(case, sm_scale=SCALE)
    for row, (b, length) in enumerate(zip(case.row_batch, case.row_lengths, strict=True)):
        j = np.arange(length)
        at = case.lookup_table[b, j // 5], j % 5
        ckv, kpe = case.ckv[at].astype(np.float64), case.kpe[at].astype(np.float64)
        keys, values = np.einsum("jc,hcn->hjn", ckv, up_k), np.einsum("jc,hcn->hjn", ckv, up_v)
        x = (np.einsum("hn,hjn->hj", q[row], keys) + case.q_pe[row].astype(np.float64) @ kpe.T) * SCALE
        p = np.exp(x - x.max(axis=1, keepdims=True))
        expected = np.einsum("hj,hjn->hn", p / p.sum(axis=1, keepdims=True), values)
        found = np.einsum("hc,hcn->hn", o[row].astype(np.float64), up_v)
        assert_close(found, expected, rel=1e-5, what=f"row {row}")
        assert_lse_close(lse[row], np.log2(np.exp(x).sum(axis=1)), tol=LSE_TOL, what=f"row {row}")


def test_dot_products_past_float32_are_computed_again():
    arguments = {"heads": 4, "widths": (16, 8), "page_size": 16, "dtype": "float32", "kv_dtype": "float32"}
    case = latent.build((40,), (2,), **arguments)
    large = np.float32(1e20)
    assert_is_oracle(replace(case, q_nope=case.q_nope * large, ckv=case.ckv * large), sm_scale=1e-38 * 2)


def test_what_a_row_does_not_see_changes_nothing():
    arguments = {"heads": 16, "widths": (64, 8), "page_size": 16, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    case = latent.build((50,), (3,), **arguments)
    o, lse = latent.mla_attention(case, sm_scale=SCALE)
    last = case.lookup_table[0, 49 // 16], 49 % 16
    case.ckv[last] = case.kpe[last] = np.inf
    other_o, other_lse = latent.mla_attention(case, sm_scale=SCALE)
    assert_close(other_o[:2], o[:2], rel=1e-2, what="o")
    assert_lse_close(other_lse[:2], lse[:2], tol=LSE_TOL, what="lse")
    assert not np.isfinite(other_o[2].astype(np.float32)).any()


def test_a_permutation_of_pages_changes_no_bit():
    arguments = {"heads": 16, "widths": (64, 8), "page_size": 16, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    case = latent.build((130, 77), (1, 2), **arguments)
    order = np.random.default_rng(1).permutation(len(case.ckv))
    table = case.lookup_table.copy()
    used = table != 0xFFFFFFFF
    table[used] = np.argsort(order)[table[used]]
    moved = replace(case, ckv=case.ckv[order], kpe=case.kpe[order], lookup_table=table)
    for one, other in zip(
        latent.mla_attention(case, sm_scale=SCALE), latent.mla_attention(moved, sm_scale=SCALE), strict=True
    ):
        assert_bits_equal(other, one, what="after the permutation")


BASE = latent.build((20, 9), (1, 1), heads=4, widths=(16, 8), page_size=16, dtype="float32", kv_dtype="float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_nope": BASE.q_nope[..., :8]}, ("q_nope", 8, 16)),
        ({"q_pe": np.repeat(BASE.q_pe, 2, axis=-1)}, ("q_pe", 16, 8)),
        ({"q_nope": BASE.q_nope[:1]}, ("q_nope", 1, 2)),
        ({"q_nope": BASE.q_nope[:, :2]}, ("q_nope", 2, 4)),
        ({"row_batch": np.array([0, 2], np.int32)}, ("row_batch", 2)),
        ({"row_batch": np.array([0, -2], np.int32)}, ("row_batch", -2)),
        ({"row_lengths": np.array([20, -1], np.int32)}, ("row_lengths", 1)),
        ({"row_lengths": np.array([33, 9], np.int32)}, ("row_lengths", 0, 33)),
        ({"row_lengths": np.array([20], np.int32)}, ("row_lengths", 1)),
        ({"lookup_table": BASE.lookup_table + np.uint32(1000)}, ("lookup_table",)),
    ],
)
def test_refusals(changes, words):
    case = replace(BASE, **{name: np.ascontiguousarray(array) for name, array in changes.items()})
    with refused(*words):
        latent.mla_attention(case, sm_scale=SCALE)
