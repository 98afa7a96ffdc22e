"""What a batch decode wrapper is made of and plans; `batch_decode.py` has its runs."""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_layout
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.host import as_indices
from paged_kv.arrays.types import DTypeLike, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.buffers import PageTableBuffers
from paged_kv.calls.dense_tables import check_said_again
from paged_kv.calls.kernel_arguments import check_backend, refuse_given
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.plan import AttentionPlan, attention_options, dtypes_of
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.rows import Rows, check_new_tokens
from paged_kv.errors import ContractError, ShapeError

_WORKSPACE_BYTES = 16


class DecodePlanner:
    """The part of `BatchDecodeWithPagedKVCacheWrapper` that fixes what its runs share."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: SupportsDLPack | None = None,
        paged_kv_indices_buffer: SupportsDLPack | None = None,
        paged_kv_last_page_len_buffer: SupportsDLPack | None = None,
        backend: str = "auto",
        jit_args: None = None,
    ) -> None:
        del float_workspace_buffer
        check_layout(kv_layout)
        check_backend(backend)
        refuse_given(jit_args=jit_args)
        self._kv_layout = kv_layout
        self._use_tensor_cores = use_tensor_cores
        self._fixed_q_len: int | None = None
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        fixed = PageTableBuffers(*buffers) if flag("use_cuda_graph", use_cuda_graph) else None
        self._last_plan = LastPlan(Rows.of_decode, fixed)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the page table lives in the user's buffers and the batch is fixed."""
        return self._last_plan.buffers is not None

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given; without effect."""
        return self._use_tensor_cores

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, without effect: the CPU needs no workspace. The plan stays."""

    def workspace_size(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Bytes of float and of integer workspace that suffice for `plan` with these arguments.

        The wrapper uses none: it is one aligned unit of each.
        """
        del args, options
        return _WORKSPACE_BYTES, _WORKSPACE_BYTES

    def plan(
        self,
        indptr: SupportsDLPack,
        indices: SupportsDLPack,
        last_page_len: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        o_data_type: DTypeLike | None = None,
        data_type: DTypeLike | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: SupportsDLPack | None = None,
        seq_lens: SupportsDLPack | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share. The arrays are copied; they may be the
        user's buffers of `use_cuda_graph` themselves.

        Give the page table as arrays on the host, for a cache on a GPU too: it is checked, and its tables are made,
        there; a run copies them to the device once and reads nothing back. Arrays on a GPU are refused here, since
        reading them would wait for the device: `indptr.cpu()` says that the wait is meant.

        Args:
            indptr: `[B + 1]`, from 0: request b owns `indices[indptr[b]:indptr[b + 1]]`. Any integer dtype.
            indices: `[indptr[B]]` page ids.
            last_page_len: `[B]`: tokens in each request's last page, from 1 to page_size; of a request without pages,
                0 or anything else up to page_size.
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated keys are rotated on the fly) or "ALIBI".
            window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
            logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
            q_data_type: Of q: float32, float16 or bfloat16, as a name or a torch, NumPy or MAX dtype; or float8_e4m3fn
                or float8_e5m2, which is widened, exactly, to the dtype of the cache, or to bfloat16.
            kv_data_type: Of the cache: that of q, or either float8; any of the five under float8 queries. None is
                `q_data_type`.
            o_data_type: Of o: any of the five; None is `q_data_type`. It is rounded once, from float32.
            data_type: Deprecated: the dtype of the cache where `kv_data_type` is None, and that of q unless it is
                float8.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            rope_scale: Divides the rotary frequencies; None is 1. The fastest, `max(1, 1 / rope_theta) / rope_scale`,
                is at most 1000 radians a token.
            rope_theta: Base of the rotary embedding; None is 1e4.
            non_blocking, fixed_split_size, disable_split_kv: Accepted, without effect.
            block_tables: `[B, n]` page ids, in their first entries those of `indices`. They and `seq_lens` may be left
                out: they say again what the page table says.
            seq_lens: `[B]` tokens of each request.
            q_len_per_req: Query tokens of each request, its last ones: row i of n sees `L - n + i + 1` tokens. Requests
                without tokens have rows that see nothing. It is fixed, as the batch is, where the page table lives in
                the user's buffers.
            window_right: 0: no query sees tokens after its own.

        Raises:
            PageTableError: the page table is inconsistent, or a request has fewer tokens than query rows. A page id
                that is not one of the cache's is found by `run`.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`); or, where the page table
                lives in the user's buffers, another batch size or q_len_per_req, or more indices than fit.

        Options are float32: 0, or from 1.2e-38 to 3.4e38 in magnitude; so is the product of sm_scale and a run's
        q_scale and k_scale. Nothing changes, the former plan included, if an error is raised.
        """
        del non_blocking, fixed_split_size, disable_split_kv
        if integer("window_right", window_right, -LARGEST_INDEX, LARGEST_INDEX):
            raise ContractError(f"window_right must be 0, not {window_right}: no query sees tokens after its own")
        q_dtype, kv_dtype = dtypes_of(q_data_type, kv_data_type, data_type)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            o_dtype=None if o_data_type is None else dtype_of(o_data_type, "o_data_type"),
            q_len_per_req=q_len_per_req,
        )
        for name, array in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            devices.require_host(array, name, "plan takes the page table on the host")
        table = PageTable.of(indptr, indices, last_page_len, page_size)
        check_said_again(table, block_tables, seq_lens)
        check_new_tokens(table.lengths, plan.q_len_per_req)
        fixed = self._fixed_q_len
        if fixed not in (None, plan.q_len_per_req):
            raise ShapeError(
                f"q_len_per_req: {plan.q_len_per_req}, the first plan has frozen it at {fixed}, with the batch"
            )
        self._last_plan.replace(Attention(plan), table)
        if self.is_cuda_graph_enabled:
            self._fixed_q_len = plan.q_len_per_req

    begin_forward = plan


def fast_decode_plan(
    self: DecodePlanner,
    indptr: SupportsDLPack,
    indices: SupportsDLPack,
    last_page_len: SupportsDLPack,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DTypeLike | None = None,
    kv_data_type: DTypeLike | None = None,
    data_type: DTypeLike | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: SupportsDLPack | None = None,
) -> None:
    """The wrapper's `plan`, under the name of FlashInfer's faster one: this `plan` copies nothing that it could spare.

    Args:
        self: The wrapper, which may have this function in place of its `plan`.
        q_data_type: None is `data_type`, and float16 where that is None too.
        global_override_indptr_cpu: `[B + 1]` or longer: instead of `indptr`, which may then lie on a GPU.

    The other arguments and what is raised: as of `plan`.
    """
    if q_data_type is None:
        q_data_type = "float16" if data_type is None else data_type
    if global_override_indptr_cpu is not None:
        offsets = as_indices(global_override_indptr_cpu, "global_override_indptr_cpu")
        indptr = offsets[: len(as_indices(last_page_len, "last_page_len")) + 1]
    DecodePlanner.plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        None,
        data_type,
        sm_scale,
        rope_scale,
        rope_theta,
        non_blocking,
        None,
        None,
        fixed_split_size,
        disable_split_kv,
        q_len_per_req,
    )
