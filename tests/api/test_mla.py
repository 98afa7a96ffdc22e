"""`BatchMLAPagedAttentionWrapper`: every kind of arguments, its buffers, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from paged_kv import decode, mla, page, reference
from paged_kv.errors import ContractError, PageTableError, ShapeError
from support import latent
from support.compare import assert_close, assert_lse_close
from support.kinds import bytes_of
from support.latent import LSE_TOL, REL

pytestmark = pytest.mark.usefixtures("latent_variants")

SCALE = 192**-0.5
HEADS, WIDTHS, SIZE = 16, (64, 8), 5
LENGTHS, NEW_ROWS = (17, 0, 40, 5), (2, 1, 3, 1)
CASE = latent.build(
    LENGTHS, NEW_ROWS, heads=HEADS, widths=WIDTHS, page_size=SIZE, dtype="float32", kv_dtype="float32", joined=True
)
QO_INDPTR = np.concatenate([[0], np.cumsum(NEW_ROWS)]).astype(np.int32)


def tensor(array: np.ndarray) -> torch.Tensor:
    """A copy, so that a test may write to it."""
    return torch.from_numpy(array.copy())


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arrays() -> dict[str, torch.Tensor]:
    """The first four arguments of `run`; the cache's two are slices of one tensor."""
    slots = torch.cat([tensor(CASE.ckv), tensor(CASE.kpe)], dim=-1)
    return {
        "q_nope": tensor(CASE.q_nope),
        "q_pe": tensor(CASE.q_pe),
        "ckv_cache": slots[..., : WIDTHS[0]],
        "kpe_cache": slots[..., WIDTHS[0] :],
    }


def plan_arguments(**changes) -> dict:
    indptr, indices = CASE.csr
    return {
        "qo_indptr": tensor(QO_INDPTR),
        "kv_indptr": tensor(indptr),
        "kv_indices": tensor(indices),
        "kv_len_arr": tensor(CASE.lengths),
        "num_heads": HEADS,
        "head_dim_ckv": WIDTHS[0],
        "head_dim_kpe": WIDTHS[1],
        "page_size": SIZE,
        "causal": True,
        "sm_scale": SCALE,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
    } | changes


def planned(**changes) -> mla.BatchMLAPagedAttentionWrapper:
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.int8))
    wrapper.plan(**plan_arguments(**changes))
    return wrapper


def oracle(causal: bool = True, **options) -> tuple[np.ndarray, np.ndarray]:
    lengths = CASE.row_lengths if causal else CASE.lengths[CASE.row_batch]
    where = (CASE.q_nope, CASE.q_pe, CASE.ckv, CASE.kpe, CASE.lookup_table, CASE.row_batch, lengths)
    return reference.mla_attention(*where, sm_scale=SCALE, **options)


def assert_result(found, expected, base: float = 1.0) -> None:
    assert_close(found[0].numpy(), expected[0], rel=REL["float32"], what="o")
    assert_lse_close(found[1].numpy(), expected[1] * base, tol=LSE_TOL, what="lse")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("base_e", [True, False])
def test_it_is_the_oracle(causal, base_e):
    found = planned(causal=causal).run(**arrays(), return_lse=True, return_lse_base_on_e=base_e)
    assert_result(found, oracle(causal), math.log(2) if base_e else 1.0)


def test_offsets_past_the_last_request_do_not_count():
    indptr, _ = CASE.csr
    wrapper = planned(kv_indptr=torch.cat([tensor(indptr), int32([3, 10**6])]))
    assert_result(wrapper.run(**arrays(), return_lse=True), oracle())


def test_sinks():
    sinks = torch.linspace(-2, 2, HEADS)
    assert_result(planned().run(**arrays(), return_lse=True, sinks=sinks), oracle(sinks=sinks.numpy()))


def test_both_parts_in_one_array():
    given = arrays()
    query = torch.cat([given["q_nope"], given["q_pe"]], dim=-1)
    cache = torch.cat([given["ckv_cache"], given["kpe_cache"]], dim=-1)
    for kv_cache in (cache, cache[:, None]):
        assert_result(planned().run(query=query, kv_cache=kv_cache, return_lse=True), oracle())
    pairs = {"query": (given["q_nope"], given["q_pe"]), "kv_cache": (given["ckv_cache"], given["kpe_cache"])}
    assert_result(planned().run(**pairs, return_lse=True), oracle())


def test_a_dense_page_table():
    csr = {name: plan_arguments()[name] for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
    dense = {
        "cum_seq_lens_q": tensor(QO_INDPTR),
        "block_tables": torch.from_numpy(CASE.lookup_table.view(np.int32)),
        "seq_lens": tensor(CASE.lengths),
    }
    for given in (
        dense,
        {"metadata": mla.MLAPlanMetadata.dense(**dense)},
        {"metadata": mla.MLAPlanMetadata.csr(**csr)},
        {"metadata": mla.MLAPlanMetadata.dual(**csr, **dense)},
    ):
        wrapper = planned(**dict.fromkeys(csr), **given)
        assert_result(wrapper.run(**arrays(), return_lse=True), oracle())
    other = mla.MLAPlanMetadata.dual(**csr, **dense | {"seq_lens": int32([17, 0, 39, 5])})
    with pytest.raises(
        PageTableError, match="block_tables: expected the requests of kv_indptr and kv_indices, got others"
    ):
        planned(**dict.fromkeys(csr), metadata=other)
    with pytest.raises(ContractError, match="metadata: expected None with index arrays"):
        planned(metadata=other)


def test_everything_at_once():
    """The call of FlashInfer's backend "cutlass": a row a request, no plan."""
    wrapper = mla.BatchMLAPagedAttentionWrapper(None, backend="cutlass")
    given = arrays() | {name: arrays()[name][:4] for name in ("q_nope", "q_pe")}
    table = torch.from_numpy(np.where(CASE.lookup_table == 0xFFFFFFFF, 0, CASE.lookup_table).astype(np.int32))
    found = wrapper.run(**given, kv_len=tensor(CASE.lengths), page_table=table, return_lse=True)
    rows = (CASE.q_nope[:4], CASE.q_pe[:4], CASE.ckv, CASE.kpe, CASE.lookup_table, np.arange(4), CASE.lengths)
    assert_result(found, reference.mla_attention(*rows, sm_scale=SCALE))


def test_the_requests_live_in_buffers():
    _, indices = CASE.csr
    buffers = {
        "qo_indptr": torch.zeros(5, dtype=torch.int32),
        "kv_indptr": torch.zeros(5, dtype=torch.int32),
        "kv_indices": torch.zeros(len(indices) + 3, dtype=torch.int32),
        "kv_len_arr": torch.zeros(4, dtype=torch.int32),
    }
    wrapper = mla.BatchMLAPagedAttentionWrapper(None, use_cuda_graph=True, **buffers)
    with pytest.raises(ContractError, match="nothing is planned"):
        wrapper.run(**arrays())
    wrapper.plan(**plan_arguments(causal=False))
    assert buffers["kv_indices"][: len(indices)].tolist() == indices.tolist()
    assert_result(wrapper.run(**arrays(), return_lse=True), oracle(causal=False))
    buffers["kv_len_arr"][0] = 0  # the request has no token now
    o = wrapper.run(**arrays())
    assert not o[:2].any()
    assert o[3:].any()
    buffers["kv_len_arr"][0] = 99
    with pytest.raises(PageTableError, match="request 0 has 99 tokens"):
        wrapper.run(**arrays())
    one = {"qo_indptr": [0, 1], "kv_indptr": [0, 1], "kv_indices": [0], "kv_len_arr": [1]}
    with pytest.raises(ShapeError, match="kv_len_arr: a batch of 1"):
        wrapper.plan(**plan_arguments(**{name: int32(values) for name, values in one.items()}))


def test_a_cache_of_float8():
    sizes = {"heads": HEADS, "widths": WIDTHS, "page_size": SIZE}
    case = latent.build(LENGTHS, NEW_ROWS, **sizes, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    wrapper = planned(q_data_type="bfloat16", kv_data_type="float8_e4m3fn")
    views = (case.q_nope, case.q_pe, case.ckv, case.kpe)
    for scales in ({}, {"ckv_scale": 1.0}, {"kpe_scale": 1.0}, {"ckv_scale": 1.0, "kpe_scale": -1.0}):
        with pytest.raises(ContractError, match="_scale"):
            wrapper.run(*views, **scales)
    o = wrapper.run(*views, ckv_scale=0.5, kpe_scale=3.0)
    expected, _ = reference.mla_attention(
        *views, case.lookup_table, case.row_batch, case.row_lengths, sm_scale=SCALE, ckv_scale=0.5, kpe_scale=3.0
    )
    assert_close(np.asarray(o), expected, rel=latent.REL_FLOAT8, what="o")


def test_appended_tokens_are_seen():
    """`page.append_paged_mla_kv_cache` and the wrapper agree on where tokens lie."""
    indptr, indices = CASE.csr
    given = arrays()
    cache = {name: torch.full_like(given[name], torch.nan) for name in ("ckv_cache", "kpe_cache")}
    batch = np.repeat(np.arange(4), CASE.lengths).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in CASE.lengths]).astype(np.int32)
    at = CASE.lookup_table[batch, positions // SIZE], positions % SIZE
    last = np.where(CASE.lengths > 0, (CASE.lengths - 1) % SIZE + 1, 0).astype(np.int32)
    rows = (tensor(CASE.ckv[at]), tensor(CASE.kpe[at]), tensor(batch), tensor(positions))
    page.append_paged_mla_kv_cache(*rows, *cache.values(), tensor(indices), tensor(indptr), tensor(last))
    assert_result(planned().run(**given | cache, return_lse=True), oracle())


@pytest.mark.parametrize("in_buffers", [False, True])
def test_the_older_decode_wrapper_gives_the_same(in_buffers):
    """Its page table is decode's; its scales multiply the scores and o."""
    sizes = {"heads": HEADS, "widths": WIDTHS, "page_size": SIZE, "dtype": "float32", "kv_dtype": "float32"}
    case = latent.build(LENGTHS, (1, 1, 1, 1), **sizes)
    last = np.where(case.lengths > 0, (case.lengths - 1) % SIZE + 1, 0)
    buffers = [np.zeros(n, np.int32) for n in (5, 20, 4)] if in_buffers else []
    older = decode.BatchDecodeMlaWithPagedKVCacheWrapper(None, in_buffers, False, *buffers)
    older.plan(*case.csr, last, HEADS, WIDTHS[0], SIZE, SCALE, data_type="float32")
    newer = mla.BatchMLAPagedAttentionWrapper(None)
    newer.plan(np.arange(5), *case.csr, case.lengths, HEADS, *WIDTHS, SIZE, False, SCALE, "float32", "float32")
    arrays = case.q_nope, case.q_pe, case.ckv, case.kpe
    assert bytes_of(older.run_return_lse(*arrays)) == bytes_of(newer.run(*arrays, return_lse=True))
    o, lse = older.run(*arrays, q_scale=3.0, k_scale=0.5, v_scale=2.0, return_lse=True)
    rows = case.lookup_table, case.row_batch, case.lengths
    expected = reference.mla_attention(*arrays, *rows, sm_scale=SCALE * 1.5)
    assert_result((tensor(o), tensor(lse)), (expected[0] * 2, expected[1]))
