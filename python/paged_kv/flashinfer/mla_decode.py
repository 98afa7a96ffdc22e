"""Latent attention of one query token a request: FlashInfer's older wrapper of its `decode` module, over that of `mla`.

Letters in shapes: B requests, H query heads; Dckv and Dkpe are the widths of a token's latent vector and rotary part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import ArrayT, DTypeLike, SupportsDLPack
from paged_kv.calls.buffers import FixedBuffers
from paged_kv.calls.latent import LatentArrays, LatentAttention, LatentPlan
from paged_kv.calls.plan import check_pair
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.results import Results
from paged_kv.calls.rows import DecodeBatch, Rows
from paged_kv.calls.scalars import checked_number
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError
from paged_kv.flashinfer.kernel_arguments import refuse_unsupported
from paged_kv.flashinfer.wrapper import TABLE_BUFFERS, PlannedWrapper
from paged_kv.options import check_head_dim, check_number


class BatchDecodeMlaWithPagedKVCacheWrapper(PlannedWrapper[LatentAttention, DecodeBatch, Rows]):
    """`mla.BatchMLAPagedAttentionWrapper` for one row a request, with the page table of the decode wrapper.

    Args:
        float_workspace_buffer, use_tensor_cores: Accepted, without effect.
        use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: As in
            `BatchDecodeWithPagedKVCacheWrapper`; so is what is raised.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: SupportsDLPack | None = None,
        paged_kv_indices_buffer: SupportsDLPack | None = None,
        paged_kv_last_page_len_buffer: SupportsDLPack | None = None,
    ) -> None:
        del float_workspace_buffer
        self.use_tensor_cores = use_tensor_cores
        arrays = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        fixed: FixedBuffers[DecodeBatch, Rows] | None = None
        if flag("use_cuda_graph", use_cuda_graph):
            fixed = FixedBuffers([TABLE_BUFFERS], arrays, "the page table lives")
        super().__init__("NHD", LastPlan(fixed))

    def plan(
        self,
        indptr: SupportsDLPack,
        indices: SupportsDLPack,
        last_page_len: SupportsDLPack,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: DTypeLike = "float16",
        q_data_type: DTypeLike | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share.

        Args:
            indptr, indices, last_page_len, page_size: The page table, as in the decode wrapper's `plan`.
            num_qo_heads: H.
            head_dim_compressed_kv: Dckv, a multiple of 8 up to 512.
            sm_scale: Multiplies q . k: `1 / sqrt(D)` of the heads before compression.
            window_left, logits_soft_cap: Must be -1, and None or 0: the latent kernels have neither.
            data_type, q_data_type: The dtypes of the cache and of the queries; None is the cache's.
            rope_scale, rope_theta: Must be None or 1, and None or 1e4: q_pe and kpe are rotated before.

        Raises:
            PageTableError, ContractTypeError, ShapeError, ContractError: as `mla`'s and the decode wrapper's `plan`; or
                an argument above has another value than it must have.
        """
        refuse_unsupported(window_left=window_left)
        for name, value, neutral in (
            ("logits_soft_cap", logits_soft_cap, 0),
            ("rope_scale", rope_scale, 1),
            ("rope_theta", rope_theta, 1e4),
        ):
            if value is not None and checked_number(value, name) != neutral:
                raise ContractError(f"{name}: expected None or {neutral}, got {value}: latent attention has none")
        heads = integer("num_qo_heads", num_qo_heads, 1, 2**16)
        width = integer("head_dim_compressed_kv", head_dim_compressed_kv, 1, LARGEST_INDEX)
        check_head_dim("head_dim_compressed_kv", width)
        kv_dtype = dtype_of(data_type, "data_type")
        q_dtype = kv_dtype if q_data_type is None else dtype_of(q_data_type, "q_data_type")
        check_pair("data_type", q_dtype, kv_dtype)
        plan = LatentPlan(heads, width, 0, page_size, sm_scale, q_dtype, kv_dtype)
        table = Table.csr(indptr, indices, last_page_len, plan.page_size)
        self._last_plan.replace(LatentAttention(plan), DecodeBatch(table, 1))

    def run(
        self,
        q_nope: ArrayT,
        q_pe: SupportsDLPack,
        paged_ckv_cache: SupportsDLPack,
        paged_kpe_cache: SupportsDLPack,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> Any:
        """Attention of the planned requests' query tokens over all their tokens.

        Args:
            q_nope, q_pe: `[B, H, Dckv]` and `[B, H, Dkpe]` of the planned dtype; Dkpe a multiple of 8 up to 512, or 0.
            paged_ckv_cache, paged_kpe_cache: `[pages, page_size, Dckv]` and `[pages, page_size, Dkpe]` of the planned
                dtype, as in `mla`'s `run`.
            q_scale, k_scale, v_scale: Multiply the scores, the scores and o; None is 1. `v_scale` is positive.
            out, lse, return_lse: As in `mla`'s `run`.
            enable_pdl: Accepted, without effect.

        Returns:
            o `[B, H, Dckv]` in the dtype of the queries, or o and the base-2 lse `[B, H]` float32. A request without
            tokens has o = 0 and lse = -inf.

        Raises: as `mla`'s `run`.
        """
        del enable_pdl
        attention, rows = self._last_plan.of_call("run")
        plan, scales = attention.plan, {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        of_q, of_k, of_v = (1.0 if value is None else checked_number(value, name) for name, value in scales.items())
        if of_v <= 0:
            raise ContractError(f"v_scale: expected a positive number, got {of_v}")
        scale = plan.sm_scale * of_q * of_k / of_v  # one scale of the cache multiplies scores and o
        check_number(f"sm_scale * q_scale * k_scale / v_scale = {plan.sm_scale} * {of_q} * {of_k} / {of_v}", scale)
        shape = devices.device_of(q_pe=q_pe).view(q_pe, "q_pe").shape
        if width := shape[-1] if len(shape) else 0:
            check_head_dim("q_pe: head_dim", width)
        plan = replace(plan, head_dim_kpe=width, sm_scale=scale)
        return LatentAttention(plan).run(
            LatentArrays(q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, cache_names=_CACHES),
            rows,
            (of_v, of_v),
            Results(return_lse, out, lse),
            buffers=self._last_plan.buffers,
        )

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        """`run` with `return_lse=True`."""
        return self.run(*args, **options | {"return_lse": True})


_CACHES = ("paged_ckv_cache", "paged_kpe_cache")
