"""One attention call as GPU kernels take it: rows, options, and the last step of a result."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import exp2, log2
from std.utils.numerics import nan

from ...cache.page_table import PageTable
from ...cache.pointers import RowPointer
from ..logits import HeadPointer, Logits, ScoreOptions
from ..params import AttentionRows
from ..row_masks import RowMasks
from ..softmax import LOG2E, MINUS_INFINITY
from .row_masks import GpuNoMasks, RowMask, GpuRowMasks
from .split_kv import RowTokens, SPLIT_TILE_TOKENS


@fieldwise_init
struct GpuAttentionParams[dtype: DType, o_dtype: DType = dtype, Masks: GpuRowMasks = GpuNoMasks](
    DevicePassable, TrivialRegisterPassable
):
    """`AttentionRows` and `Logits` with fixed-width fields: made on the host, passed to kernels by value.

    Every pointer is device memory. The angles of rotary keys are apart, in `RotaryFrequencies`.

    Parameters:
        dtype: The dtype of q.
        o_dtype: The dtype of o.
        Masks: Which tokens a row sees, and where they stand.
    """

    comptime device_type: AnyType = Self

    var q: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[R, Hq, D]`."""
    var o: Pointer[Scalar[Self.o_dtype], MutUntrackedOrigin]
    """`[R, Hq, Dv]`; `Dv` is D, or the width of V that the masks have."""
    var lse: Pointer[Float32, MutUntrackedOrigin]
    """`[R, Hq]`, base 2."""
    var row_batch: RowPointer
    """`[R]`: the row's request; -1 for a row of padding."""
    var row_lengths: RowPointer
    """`[R]`: the tokens a row may see."""
    var alibi_slopes: HeadPointer
    var sinks: HeadPointer
    var num_rows: Int32
    var num_heads: Int32
    """Query heads, a multiple of the cache's KV heads."""
    var head_dim: Int32
    var batch: Int32
    """Requests in the page table."""
    var capacity: Int32
    """The most tokens that a row of the page table can hold."""
    var window_left: Int32
    var scores: ScoreOptions
    var v_scale: Float32
    var has_alibi: Int32
    var has_sinks: Int32
    var masks: Self.Masks

    @staticmethod
    def of[
        HostMasks: RowMasks, //
    ](
        rows: AttentionRows[Self.dtype, Self.o_dtype, HostMasks],
        logits: Logits,
        table: PageTable,
        head_dim: Int,
        masks: Self.Masks,
    ) raises -> Self:
        """The same call with its numbers in 32 bits.

        Raises:
            Where a number has more than 31 bits.
        """
        # A window that no row is longer than is no window.
        var window_left = min(logits.window_left, Int(Int32.MAX))
        for number in [rows.num_rows, rows.num_heads, table.batch, table.max_pages]:
            if number > Int(Int32.MAX):
                raise Error("a size of ", number, " is too large for a GPU kernel")
        # Lengths are int32: no row is longer than 2^31 - 1 tokens, however large the table is.
        var capacity = min(table.max_pages * table.page_size, Int(Int32.MAX) - SPLIT_TILE_TOKENS)
        return Self(
            rows.q,
            rows.o,
            rows.lse,
            rows.row_batch,
            rows.row_lengths,
            logits.alibi_slopes,
            logits.sinks,
            Int32(rows.num_rows),
            Int32(rows.num_heads),
            Int32(head_dim),
            Int32(table.batch),
            Int32(capacity),
            Int32(window_left),
            logits.scores,
            rows.v_scale,
            Int32(logits.has_alibi),
            Int32(logits.has_sinks),
            masks,
        )

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return String("GpuAttentionParams[", Self.dtype, ", ", Self.o_dtype, "]")

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()

    @always_inline
    def tokens(self, row: Int32) -> RowTokens:
        """The tokens that a row attends to, a mask left out."""
        return self.masks.tokens(
            row,
            self.row_batch[unsafe_offset=Int(row)],
            self.row_lengths[unsafe_offset=Int(row)],
            self.batch,
            self.capacity,
            self.window_left,
        )

    @always_inline
    def request(self, row: Int32) -> Int32:
        """The request of a row that has tokens: inside the page table."""
        return self.row_batch[unsafe_offset=Int(row)]

    @always_inline
    def position(self, row: Int32) -> Int32:
        """The position of the token of a row that has tokens."""
        return self.masks.position(row, self.request(row), self.row_lengths[unsafe_offset=Int(row)])

    @always_inline
    def value_dim(self) -> Int32:
        """Elements of a head of V and of o."""
        return self.masks.value_dim(self.head_dim)

    @always_inline
    def slope(self, head: Int32) -> Float32:
        """The ALiBi slope of a query head; 0 where there are none."""
        return self.alibi_slopes[unsafe_offset=Int(head)] if self.has_alibi != 0 else 0

    @always_inline
    def score(self, dot: Float32, slope: Float32, position: Int32) -> Float32:
        """The base-2 score of the token at a position, as `Logits.score`."""
        return self.scores.base_2(Float32(position).fma(slope, dot * self.scores.scale))

    @always_inline
    def finish(self, row: Int32, head: Int32, greatest: Float32, total: Float32, writes_lse: Bool) -> Float32:
        """Adds the sink of a query head, writes the lse, and returns what the weighted values are multiplied by.

        `greatest` and `total` are the state of all the row's tokens, without a sink; the weighted values are relative
        to `greatest`. A row without tokens, whose `total` is 0, takes no sink: its factor is 0 and its lse -inf.
        Where `total` is NaN, so are the results. Of the threads that share a row and a head, one has
        `writes_lse`.
        """
        var highest = greatest
        var sum = total
        var factor = self.v_scale
        if self.has_sinks != 0 and total != 0:
            var sink = self.sinks[unsafe_offset=Int(head)] * LOG2E
            highest = max(greatest, sink)
            var rescale = exp2(greatest - highest)
            sum = sum * rescale + exp2(sink - highest)
            factor *= rescale
        if writes_lse:
            self.lse.unsafe_store(
                Int(row) * Int(self.num_heads) + Int(head), highest + log2(sum) if sum != 0 else MINUS_INFINITY
            )
        return factor / sum if sum != 0 else 0

    @always_inline
    def element(self, row: Int32, head: Int32, dim: Int32) -> Int:
        """Elements from the start of q to `[row, head, dim]`."""
        return (Int(row) * Int(self.num_heads) + Int(head)) * Int(self.head_dim) + Int(dim)

    @always_inline
    def o_element(self, row: Int32, head: Int32, dim: Int32) -> Int:
        """Elements from the start of o to `[row, head, dim]`."""
        return (Int(row) * Int(self.num_heads) + Int(head)) * Int(self.value_dim()) + Int(dim)


def rows_of[
    dtype: DType, o_dtype: DType, //
](params: GpuAttentionParams[dtype, o_dtype], first: Int, count: Int) -> GpuAttentionParams[dtype, o_dtype]:
    """The call of some of a call's rows: `[first, first + count)`."""
    var part = params
    var heads = first * Int(params.num_heads)
    part.q = params.q.unsafe_offset(heads * Int(params.head_dim))
    part.o = params.o.unsafe_offset(heads * Int(params.value_dim()))
    part.lse = params.lse.unsafe_offset(heads)
    part.row_batch = params.row_batch.unsafe_offset(first)
    part.row_lengths = params.row_lengths.unsafe_offset(first)
    part.num_rows = Int32(count)
    return part


comptime NOT_A_NUMBER = nan[DType.float32]()
