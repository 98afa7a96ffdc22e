"""The registered ops that move tokens: each one validates, then dispatches to a kernel.

On a GPU, `view`, `window_left` and `options` lie on the host, everything else on the device. There only shapes and
options are refused here; `attention/gpu/README.md` says what becomes of bad requests, lengths and pages.

Operands that every op over pages shares:
    k_blocks, v_blocks: the storage of K and V, changed in place; the same array twice where it holds both.
    lookup_table: `[B, max_pages]` uint32.
    view: int64, how the storage is read. `[layer]` where the parameter `kv_layout` is
        "NHD" or "HND" (only rank 6 has layers). Where it is "STRIDED", the storage is flat memory, and view is
        `[pages, page_size, kv_heads, head_dim]`, then `[start, page, slot, head]` strides of K, then of V; then V's
        head_dim, where it differs from K's.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level

from .cache.checks import check_equal
from .cache.operands import CacheMemory, KVCachePair, row_pointer
from .cache.pointers import untracked, untracked_immutable
from .isa.codes import is_codes
from .isa.library_call import call_library
from .isa.threads import workers_of_max
from .transfer.call import AppendCall, GatherCall, TokenRows
from .transfer.checks import check_offsets
from .transfer.copy_pages import check_page_pairs, copy_strided_pages, copy_whole_pages
from .transfer.gpu.append import append_on_gpu
from .transfer.gpu.copy_pages import copy_pages_on_gpu, whole_pages
from .transfer.gpu.gather import gather_on_gpu
from .transfer.gpu.ragged_rows import ragged_rows_on_gpu
from .transfer.ragged_rows import fill_ragged_rows


@extensibility.register("paged_kv_append")
struct Append:
    """Writes K and V of `N` tokens into their pages, in place; a row of batch index -1 is skipped.

    k, v `[N, Hk, D]` in the cache's dtype, which are copied, or float32, bfloat16 or float16 over a cache of
    codes, which are quantised (`isa/codes.mojo`); batch_indices, positions `[N]` int32.
    """

    @staticmethod
    def execute[
        dtype: DType, kv_dtype: DType, rank: Int, //, target: StaticString, kv_layout: StaticString
    ](
        k: InputTensor[dtype=dtype, rank=3, ...],
        v: InputTensor[dtype=dtype, rank=3, ...],
        batch_indices: InputTensor[dtype=DType.int32, rank=1, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        k_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime quantises = dtype != kv_dtype
        comptime assert not quantises or (
            dtype.is_floating_point() and is_codes(kv_dtype)
        ), "k and v have the cache's dtype, or a float dtype over codes"
        check_equal("v: its number of tokens", v.dim_size(0), k.dim_size(0))
        check_equal("batch_indices: its length", batch_indices.dim_size(0), k.dim_size(0))
        check_equal("positions: its length", positions.dim_size(0), k.dim_size(0))
        var call = AppendCall(
            TokenRows(
                Int(k.unsafe_ptr()),
                Int(v.unsafe_ptr()),
                k.dim_size(0),
                k.dim_size(1),
                k.dim_size(2),
                v.dim_size(1),
                v.dim_size(2),
            ),
            Int(batch_indices.unsafe_ptr()),
            Int(positions.unsafe_ptr()),
            CacheMemory.of[kv_layout](k_blocks, v_blocks, lookup_table, view),
            workers_of_max(),
        )
        comptime if is_gpu[target]():
            var pair = KVCachePair[kv_dtype, codes=quantises].of_memory(call.cache)
            call.rows.check(pair)
            pair.table.check_shape()
            append_on_gpu(
                ctx,
                pair.k,
                pair.v,
                untracked(k.unsafe_ptr()),
                untracked(v.unsafe_ptr()),
                row_pointer(batch_indices),
                row_pointer(positions),
                k.dim_size(0),
            )
        else:
            call_library(String("paged_kv_append_", dtype, "_", kv_dtype), call)


@extensibility.register("paged_kv_gather")
struct Gather:
    """Copies the tokens of every request out of their pages.

    indptr `[B + 1]` int32: request b's tokens go to rows `[indptr[b], indptr[b + 1])` of k and v `[N, Hk, D]`, which
    have the cache's dtype, or float32, bfloat16 or float16 over a cache of codes.
    """

    @staticmethod
    def execute[
        dtype: DType, kv_dtype: DType, rank: Int, //, target: StaticString, kv_layout: StaticString
    ](
        k: OutputTensor[dtype=dtype, rank=3, ...],
        v: OutputTensor[dtype=dtype, rank=3, ...],
        indptr: InputTensor[dtype=DType.int32, rank=1, ...],
        k_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime widens = dtype != kv_dtype
        comptime assert not widens or (
            dtype.is_floating_point() and is_codes(kv_dtype)
        ), "k and v have the cache's dtype, or a float dtype over codes"
        check_equal("v: its number of tokens", v.dim_size(0), k.dim_size(0))
        var call = GatherCall(
            TokenRows(
                Int(k.unsafe_ptr()),
                Int(v.unsafe_ptr()),
                k.dim_size(0),
                k.dim_size(1),
                k.dim_size(2),
                v.dim_size(1),
                v.dim_size(2),
            ),
            Int(indptr.unsafe_ptr()),
            CacheMemory.of[kv_layout](k_blocks, v_blocks, lookup_table, view),
            workers_of_max(),
        )
        check_equal("indptr: its length", indptr.dim_size(0), call.cache.batch + 1)
        comptime if is_gpu[target]():
            var pair = KVCachePair[kv_dtype, codes=widens].of_memory(call.cache)
            call.rows.check(pair)
            pair.table.check_shape()
            gather_on_gpu(
                ctx,
                pair.k,
                pair.v,
                untracked(k.unsafe_ptr()),
                untracked(v.unsafe_ptr()),
                row_pointer(indptr),
                k.dim_size(0),
            )
        else:
            call_library(String("paged_kv_gather_", dtype, "_", kv_dtype), call)


@extensibility.register("paged_kv_copy_pages")
struct CopyPages:
    """Copies pages inside the pool, in place: page `sources[i]` to page `targets[i]` (both `[N]` int32).

    Of an array of all layers (rank 6) every layer is copied, of a strided view its elements alone.
    """

    @staticmethod
    def execute[
        dtype: DType, rank: Int, //, target: StaticString, kv_layout: StaticString
    ](
        sources: InputTensor[dtype=DType.int32, rank=1, ...],
        targets: InputTensor[dtype=DType.int32, rank=1, ...],
        k_blocks: MutableInputTensor[dtype=dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var pair = KVCachePair[dtype].of[kv_layout](k_blocks, v_blocks, lookup_table, view)
        var count = sources.dim_size(0)
        var pages = pair.table.num_pages
        check_equal("targets: its length", targets.dim_size(0), count)
        comptime if not is_gpu[target]():
            check_page_pairs(row_pointer(sources), row_pointer(targets), count, pages)
        if count == 0 or pages == 0:
            return
        # A page of a contiguous array is copied whole, with every layer of rank 6.
        var elements = k_blocks.size() // pages
        var k_storage = untracked(k_blocks.unsafe_ptr())
        var v_storage = untracked(v_blocks.unsafe_ptr())
        comptime if is_gpu[target]():
            var k = pair.k
            var v = pair.v
            comptime if kv_layout != "STRIDED":
                var slot_elements = pair.k.num_heads() * pair.k.head_dim()
                k = whole_pages(k_storage, pages, elements, slot_elements, pair.table.entries)
                v = whole_pages(v_storage, pages, elements, slot_elements, pair.table.entries)
            copy_pages_on_gpu(ctx, k, v, 2 if rank <= 4 else 1, row_pointer(sources), row_pointer(targets), count)
        elif kv_layout == "STRIDED":
            copy_strided_pages(pair.k, row_pointer(sources), row_pointer(targets), count, parallelism_level(None))
            copy_strided_pages(pair.v, row_pointer(sources), row_pointer(targets), count, parallelism_level(None))
        else:
            copy_whole_pages(
                k_storage, elements, row_pointer(sources), row_pointer(targets), count, parallelism_level(None)
            )
            comptime if rank == 4:
                copy_whole_pages(
                    v_storage, elements, row_pointer(sources), row_pointer(targets), count, parallelism_level(None)
                )


@extensibility.register("paged_kv_ragged_rows")
struct RaggedRows:
    """Request and position of each of `N` rows, from `row_offsets` `[B + 1]` and `cache_lengths` `[B]` (uint32)."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        batch_indices: OutputTensor[dtype=DType.int32, rank=1, ...],
        positions: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var batch = cache_lengths.dim_size(0)
        var num_rows = batch_indices.dim_size(0)
        check_equal("row_offsets: its length", row_offsets.dim_size(0), batch + 1)
        var offsets = untracked_immutable(row_offsets.unsafe_ptr())
        var lengths = untracked_immutable(cache_lengths.unsafe_ptr())
        var requests = untracked(batch_indices.unsafe_ptr())
        var tokens = untracked(positions.unsafe_ptr())
        comptime if is_gpu[target]():
            ragged_rows_on_gpu(ctx, requests, tokens, num_rows, offsets, lengths, batch)
        else:
            check_offsets(offsets, batch, num_rows)
            fill_ragged_rows(requests, tokens, num_rows, offsets, lengths, batch)
