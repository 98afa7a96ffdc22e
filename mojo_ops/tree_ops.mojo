"""The ops for trees of candidate tokens among the registered ops; `ops.mojo` says what operands over pages are."""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level

from .cache.checks import check_equal
from .cache.operands import KVCachePair, row_pointer
from .cache.pointers import untracked, untracked_immutable
from .transfer.checks import check_offsets
from .transfer.gpu.move_tokens import move_tokens_on_gpu
from .transfer.gpu.tree_rows import tree_rows_on_gpu
from .transfer.move_tokens import TokenMoves, move_tokens
from .transfer.tree_rows import TreeRows, fill_tree_rows


@extensibility.register("paged_kv_tree_rows")
struct TreeRowsOfStep:
    """Request, slot, position and mask of each of `N` rows, those of a request a tree or several.

    parents `[N]` int32: the row's parent among the rows of its request, -1 for the last cached token. row_offsets
    `[B + 1]` and cache_lengths `[B]` as in `paged_kv_ragged_rows`. mask `[N, bytes]`; the other results are `[N]`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        batch_indices: OutputTensor[dtype=DType.int32, rank=1, ...],
        slots: OutputTensor[dtype=DType.int32, rank=1, ...],
        positions: OutputTensor[dtype=DType.int32, rank=1, ...],
        mask: OutputTensor[dtype=DType.uint8, rank=2, ...],
        mask_starts: OutputTensor[dtype=DType.int64, rank=1, ...],
        mask_firsts: OutputTensor[dtype=DType.int32, rank=1, ...],
        parents: InputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=DType.uint32, rank=1, ...],
        window_left: Int32,
        ctx: DeviceContext,
    ) raises:
        var batch = cache_lengths.dim_size(0)
        var num_rows = parents.dim_size(0)
        check_equal("row_offsets: its length", row_offsets.dim_size(0), batch + 1)
        var offsets = untracked_immutable(row_offsets.unsafe_ptr())
        var lengths = untracked_immutable(cache_lengths.unsafe_ptr())
        var rows = TreeRows(
            untracked(batch_indices.unsafe_ptr()),
            untracked(slots.unsafe_ptr()),
            untracked(positions.unsafe_ptr()),
            untracked(mask_firsts.unsafe_ptr()),
            untracked(mask_starts.unsafe_ptr()),
            untracked(mask.unsafe_ptr()),
            Int64(num_rows),
            Int64(mask.dim_size(1)),
        )
        comptime if is_gpu[target]():
            tree_rows_on_gpu(ctx, rows, row_pointer(parents), offsets, lengths, batch, Int(window_left))
        else:
            check_offsets(offsets, batch, num_rows)
            fill_tree_rows(rows, row_pointer(parents), offsets, lengths, batch, Int(window_left))


@extensibility.register("paged_kv_move_tokens")
struct MoveTokens:
    """Token `sources[i]` of request `batch_indices[i]` becomes its token `targets[i]`, in place (all `[N]` int32).

    In an array of all layers (rank 6) every layer is changed; a move of batch index -1 is skipped.
    """

    @staticmethod
    def execute[
        dtype: DType, rank: Int, //, target: StaticString, kv_layout: StaticString
    ](
        batch_indices: InputTensor[dtype=DType.int32, rank=1, ...],
        sources: InputTensor[dtype=DType.int32, rank=1, ...],
        targets: InputTensor[dtype=DType.int32, rank=1, ...],
        k_blocks: MutableInputTensor[dtype=dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var pair = KVCachePair[dtype].of[kv_layout](k_blocks, v_blocks, lookup_table, view)
        var count = batch_indices.dim_size(0)
        check_equal("sources: its length", sources.dim_size(0), count)
        check_equal("targets: its length", targets.dim_size(0), count)
        var layers = k_blocks.dim_size(2) if rank == 6 else 1
        var layer_stride = pair.k.slots() * pair.k.num_heads() * pair.k.head_dim()
        var moves = TokenMoves(row_pointer(batch_indices), row_pointer(sources), row_pointer(targets), count)
        comptime if is_gpu[target]():
            pair.table.check_shape()
            move_tokens_on_gpu(ctx, pair.k, pair.v, layers, layer_stride, moves)
        else:
            moves.check(pair.table)
            move_tokens(pair.k, pair.v, layers, layer_stride, moves, parallelism_level(None))
