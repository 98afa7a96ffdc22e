"""Every public call with valid arguments: what the tables of tests/api change, one argument at a time."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import paged_kv
import paged_kv.torch as operators_of_torch
from paged_kv import cascade, decode, mla, page, prefill, rope, sampling
from paged_kv.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from support import latent
from support.prefilling import load_variants as load_prefill


def load_variants() -> None:
    """Compiles what the calls execute."""
    load_prefill()
    latent.load_variants()


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


HEADS, SIZES = (4, 2, 8), (4, 2, 8, 4)
TABLE, BOTH = (i32(0, 1, 3), i32(2, 0, 1), i32(3, 2)), {"q_data_type": "float32", "kv_data_type": "float32"}
ROWS, CACHE = i32(0, 2, 5), f32(4, 2, 4, 2, 8)
"""Two requests, of 3 and 6 tokens, with 2 and 3 query rows."""
Q, Q_ONE = f32(5, 4, 8), f32(2, 4, 8)
CSR = {"kv_indices": TABLE[1], "kv_indptr": TABLE[0], "kv_last_page_len": TABLE[2]}
NEW = {"batch_indices": i32(0, 0, 1, 1, 1), "positions": i32(1, 2, 3, 4, 5)} | CSR
DENSE = {"page_table": np.array([[2, -1], [0, 1]], np.int32), "last_page_len": i32(3, 2), "page_size": 4}
MLA = (ROWS, TABLE[0], TABLE[1], i32(3, 6), 4, 8, 8, 4, True, 0.3)
MLA_RUN = (f32(5, 4, 8), f32(5, 4, 8), f32(4, 4, 8), f32(4, 4, 8))
MLA_ONE, OF_MLA_ONE = (4, 8, 4, 0.3), {"data_type": "float32", "q_data_type": "float32"}
MLA_ONE_RUN = (f32(2, 4, 8), f32(2, 4, 8), *MLA_RUN[2:])


@dataclass(frozen=True, eq=False)
class Call:
    """A function and valid arguments of it; `make` gives what it is called on, planned where it has to be."""

    name: str
    make: Callable[[], Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    runs: Callable[[Any], Any] | None = None
    """A run of the wrapper that a `plan` planned."""

    def parameters(self) -> list[str]:
        found = inspect.signature(self.make()).parameters.values()
        names = [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        return names or list(self.named)  # of a function with overloads

    def arguments(self) -> dict[str, Any]:
        """The valid arguments by name; arrays are copies, and so are lists of them."""
        given = inspect.signature(self.make()).bind(*self.args, **self.named).arguments
        for name in ("options", "kwargs"):
            given |= given.pop(name, {})
        return {name: copy.deepcopy(one) if isinstance(one, np.ndarray | list) else one for name, one in given.items()}

    def __call__(self, **changes: Any) -> None:
        given = self.arguments()
        self.make()(*given.pop("args", ()), **given | changes)


def wrapped(
    kind: Callable[..., Any],
    arrays: tuple[Any, ...],
    *,
    plan: dict[str, Any],
    run: tuple[Any, ...],
    first: tuple[Any, ...] = (None,),
    names: tuple[str, str] = ("plan", "run"),
    buffers: dict[str, Any] | None = None,
) -> list[Call]:
    """The constructor of a wrapper, which takes `first`, its `plan` and its `run`; with `buffers`, in these."""
    begin, forward = names

    def made() -> Any:
        if buffers is None:
            return kind(*first)
        own = copy.deepcopy(buffers)
        wrapper = kind(*first, use_cuda_graph=True, **own)
        wrapper.users_buffers = [array for one in own.values() for array in (one if isinstance(one, list) else [one])]
        return wrapper

    def planned() -> Any:
        wrapper = made()
        getattr(wrapper, begin)(*arrays, **plan)
        return wrapper

    name = kind.__name__ + (" in buffers" if buffers else "")
    given = (first, {"use_cuda_graph": True, **buffers}) if buffers else (first, {})
    return [
        Call(name, lambda: kind, *given),
        Call(f"{name}.{begin}", lambda: getattr(made(), begin), arrays, plan, lambda one: getattr(one, forward)(*run)),
        Call(f"{name}.{forward}", lambda: getattr(planned(), forward), run, {}),
    ]


def calls() -> list[Call]:
    dense = (Q_ONE, CACHE, None, np.array([[2, -1], [0, 1]], np.int32), i32(3, 6), 6)
    levels = ([i32(0, 5), ROWS], [i32(0, 1), TABLE[0]], [i32(3), TABLE[1]], [i32(4), TABLE[2]])
    state = (f32(3, 2, 8), f32(3, 2))
    rotary = (Q, Q[:, :2], None, None, f32(6, 8), i32(1, 2, 3, 4, 5))
    pages8 = np.zeros((4, 4, 2, 8), "float8_e4m3fn")
    draws = {"deterministic": True, "check_nan": False, "seed": 1, "offset": 0, "return_valid": True}
    functions: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (decode.single_decode_with_kv_cache, (f32(4, 8), f32(3, 2, 8), f32(3, 2, 8)), {}),
        (decode.trtllm_batch_decode_with_kv_cache, dense, {"kv_layout": "NHD"}),
        (prefill.trtllm_batch_context_with_kv_cache,
         (Q, CACHE, *dense[2:5], 3, 6, 0.3, 1.0, 2, ROWS, i32(0, 3, 9)), {"kv_layout": "NHD"}),
        (prefill.single_prefill_with_kv_cache, (f32(2, 4, 8), f32(3, 2, 8), f32(3, 2, 8)), {}),
        (cascade.merge_state, state + state, {}),
        (cascade.merge_state_in_place, state + state, {}),
        (cascade.merge_states, (f32(3, 2, 2, 8), f32(3, 2, 2)), {}),
        (page.reshape_and_cache_flash, (Q[:, :2], Q[:, 2:], CACHE[:, 0], CACHE[:, 1], i32(9, 10, -1, 3, 4)), {}),
        (rope.apply_rope, (Q, Q[:, :2], ROWS, i32(1, 3)), {**vars(rope.Rotation())}),
        (rope.apply_llama31_rope_pos_ids_inplace, (Q, Q[:, :2], i32(1, 2, 3, 4, 5)), {**vars(rope.Llama31Rotation())}),
        (rope.apply_rope_with_cos_sin_cache, (i32(1, 2, 3, 4, 5), Q.reshape(5, 32), Q[:, :2], 8, f32(6, 4)), {}),
        (rope.rope_quantize_fp8, rotary, {}),
        (rope.rope_quantize_fp8_append_paged_kv_cache, (*rotary[:4], Q[:, :2], *rotary[4:], (pages8, pages8.copy())),
         {name: NEW[name] for name in ("kv_indices", "kv_indptr", "batch_indices", "positions")} | {"page_size": 4}),
        (sampling.softmax, (Q[0], 0.5), {}),
        (sampling.top_k_renorm_probs, (Q[0] ** 2, 3), {}),
        (sampling.top_k_mask_logits, (Q[0], 2), {}),
        (sampling.top_k_top_p_sampling_from_probs, (Q[0] ** 2, 3, 0.5), draws),
        (sampling.min_p_sampling_from_probs, (Q[0] ** 2, 0.5), draws),
        (sampling.chain_speculative_sampling, (Q[:2, :2] ** 2, np.array([[2, 1], [0, 7]]), Q[:2, :3] ** 2),
         {"seed": 1}),
        (paged_kv.packbits, (np.ones(9, bool),), {}),
        (paged_kv.segment_packbits, (np.ones(5, bool), ROWS), {}),
        (page.get_seq_lens, (), {"kv_indptr": TABLE[0], "kv_last_page_len": TABLE[2], "page_size": 4}),
        (page.get_batch_indices_positions, (), {"append_indptr": ROWS, "seq_lens": i32(3, 6), "nnz": 5}),
        (paged_kv.init_paged_kv_cache, (), {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 8,
                                            "batch_size": 2, "max_blocks_per_seq": 2, "dtype": "float32"}),
        (paged_kv.PagedKVCacheManager, (4, 4, 2, 8), {}),
        (paged_kv.PagePool, (4, 4), {}),
        (decode.fast_decode_plan, (decode.BatchDecodeWithPagedKVCacheWrapper(None), *TABLE, *SIZES), {}),
    ]  # fmt: skip
    found = [Call(function.__name__, lambda function=function: function, *given) for function, *given in functions]
    found += [Call(name, lambda name=name: getattr(page, name.split()[0]), (), given) for name, given in appends()]
    paged = {"plan": BOTH, "run": (Q, CACHE)}
    found += wrapped(decode.BatchDecodeWithPagedKVCacheWrapper, (*TABLE, *SIZES), plan=BOTH, run=(Q_ONE, CACHE))
    found += wrapped(
        decode.BatchDecodeWithPagedKVCacheWrapper, (*TABLE, *SIZES), **paged | {"run": (Q_ONE, CACHE)},
        names=("begin_forward", "forward"),
    )  # fmt: skip
    found += wrapped(prefill.BatchPrefillWithPagedKVCacheWrapper, (ROWS, *TABLE, *SIZES), **paged)
    found += wrapped(
        prefill.BatchPrefillWithPagedKVCacheWrapper, (ROWS, *TABLE, *SIZES), **paged, names=("plan", "forward")
    )
    found += wrapped(BatchAttentionWithAttentionSinkWrapper, (ROWS, *TABLE, *SIZES), **paged)
    found += wrapped(
        prefill.BatchPrefillWithRaggedKVCacheWrapper, (ROWS, i32(0, 3, 9), *HEADS), plan=BOTH,
        run=(Q, f32(9, 2, 8), f32(9, 2, 8)),
    )  # fmt: skip
    found += wrapped(BatchAttention, (ROWS, *TABLE[:2], i32(3, 6), 4, 2, 8, 8, 4), plan=BOTH, run=(Q, CACHE), first=())
    found += wrapped(mla.BatchMLAPagedAttentionWrapper, MLA, plan=BOTH, run=MLA_RUN)
    found += wrapped(decode.BatchDecodeMlaWithPagedKVCacheWrapper, (*TABLE, *MLA_ONE), plan=OF_MLA_ONE, run=MLA_ONE_RUN)
    found += wrapped(
        cascade.MultiLevelCascadeAttentionWrapper, (*levels, *SIZES), plan=BOTH, run=(Q, CACHE), first=(2, None)
    )
    names = ("begin_forward", "forward")
    shared = (f32(7, 2, 8), f32(7, 2, 8), CACHE)
    found += wrapped(
        cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper, (*TABLE, *SIZES), plan={"data_type": "float32"},
        run=(Q_ONE, *shared), names=names,
    )  # fmt: skip
    found += wrapped(
        cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper, (ROWS, *TABLE, *SIZES), plan={}, run=(Q, *shared),
        names=names,
    )  # fmt: skip
    return found


def appends() -> list[tuple[str, dict[str, Any]]]:
    """Each signature of the two functions that append."""
    both, layout = dict.fromkeys(("append_key", "append_value"), f32(5, 2, 8)), {"kv_layout": "NHD"}
    latent_rows, latent_caches = (f32(5, 8), f32(5, 4)), (f32(4, 4, 8), f32(4, 4, 4))
    return [
        ("append_paged_kv_cache", both | NEW | {"paged_kv_cache": CACHE} | layout),
        ("append_paged_kv_cache of last tokens", both | CSR | {"append_indptr": ROWS, "kv_data": CACHE} | layout),
        ("append_paged_kv_cache by dense table", dict.fromkeys("kv", f32(2, 2, 8)) | DENSE | {"kv_cache": CACHE}
                                                 | layout),
        ("append_paged_mla_kv_cache", dict(zip(("append_ckv", "append_kpe"), latent_rows, strict=True)) | NEW
                                      | dict(zip(("ckv_cache", "kpe_cache"), latent_caches, strict=True))),
        ("append_paged_mla_kv_cache by dense table", {"k": f32(2, 2, 5), "v": f32(2, 2, 3)} | DENSE
                                                     | {"mla_kv_cache": f32(4, 4, 2, 8)}),
    ]  # fmt: skip


CALLS = calls()


def operators() -> list[Call]:
    """The torch operators, whose tensors are torch's."""
    k_cache, v_cache, q, new = (
        torch.from_numpy(array) for array in (CACHE[:, 0].copy(), CACHE[:, 1].copy(), Q, Q[:, :2])
    )
    table, requests = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32), torch.tensor([0, 0, 1, 1, 1])
    lengths, offsets = torch.tensor([3, 6]), torch.from_numpy(ROWS)
    return [
        Call(
            "paged_attention", lambda: operators_of_torch.paged_attention,
            (q, k_cache, v_cache, table, lengths, offsets), {},
        ),
        Call(
            "append_paged_kv", lambda: operators_of_torch.append_paged_kv,
            (new, new, k_cache, v_cache, table, requests, torch.tensor([0, 1, 3, 4, 5])), {},
        ),
        Call("gather_paged_kv", lambda: operators_of_torch.gather_paged_kv, (k_cache, v_cache, table, lengths, 9), {}),
        Call("linear", lambda: operators_of_torch.linear, (q[:, 0], new[:, 0]), {}),
    ]  # fmt: skip


OPERATORS = operators()


def zeros(names: str, *sizes: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(size, np.int32) for name, size in zip(names.split(), sizes, strict=True)}


def in_buffers() -> list[Call]:
    """The wrappers that keep what is planned in arrays of the user's."""
    masks = {"custom_mask_buf": np.zeros(9, np.uint8), "mask_indptr_buf": np.zeros(3, np.int64)}
    paged = "qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf"
    found = wrapped(
        decode.BatchDecodeWithPagedKVCacheWrapper, (*TABLE, *SIZES), plan=BOTH, run=(Q_ONE, CACHE),
        buffers=zeros("paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer", 3, 3, 2),
    )  # fmt: skip
    found += wrapped(
        prefill.BatchPrefillWithPagedKVCacheWrapper, (ROWS, *TABLE, *SIZES), plan=BOTH, run=(Q, CACHE),
        buffers=zeros(paged, 3, 3, 3, 2) | masks,
    )  # fmt: skip
    found += wrapped(
        prefill.BatchPrefillWithRaggedKVCacheWrapper, (ROWS, i32(0, 3, 9), *HEADS), plan=BOTH,
        run=(Q, f32(9, 2, 8), f32(9, 2, 8)), buffers=zeros("qo_indptr_buf kv_indptr_buf", 3, 3) | masks,
    )  # fmt: skip
    found += wrapped(
        mla.BatchMLAPagedAttentionWrapper, MLA, plan=BOTH, run=MLA_RUN,
        buffers=zeros("qo_indptr kv_indptr kv_indices kv_len_arr", 3, 3, 3, 2),
    )  # fmt: skip
    found += wrapped(
        decode.BatchDecodeMlaWithPagedKVCacheWrapper, (*TABLE, *MLA_ONE), plan=OF_MLA_ONE, run=MLA_ONE_RUN,
        buffers=zeros("paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer", 3, 3, 2),
    )  # fmt: skip
    names = "qo_indptr_buf_arr paged_kv_indptr_buf_arr paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr".split()
    levels = [[i32(0, 5), ROWS], [i32(0, 1), TABLE[0]], [i32(3), TABLE[1]], [i32(4), TABLE[2]]]
    found += wrapped(
        cascade.MultiLevelCascadeAttentionWrapper, (*levels, *SIZES), plan=BOTH, run=(Q, CACHE), first=(2, None),
        buffers={name: [0 * array for array in arrays] for name, arrays in zip(names, levels, strict=True)},
    )  # fmt: skip
    return found


IN_BUFFERS = in_buffers()
