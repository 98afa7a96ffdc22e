"""The consumers of a float8 cache: one warpgroup has the keys, the other the values, each widens its own tiles.

    keys      tile t:  widen K, multiply, weigh; wait for an empty buffer: weights, and the factors of the sums before
    values    tile t:  widen V meanwhile; wait for a full buffer: rescale the sums, multiply

`Ring` says which phase of which barrier each side waits for. After the last tile the keys' warpgroup leaves what the
result needs of it in the same way: each head's maximum, then the sum of its weights.
"""

from max.gpu.memory import fence_async_view_proxy
from max.gpu.sync import named_barrier

from ..scheduler import PartialOutputs
from .consumer import CONSUMER_BARRIER, Consumer
from .tile_operands import widen_tile
from .tiles import ItemTiles
from .wgmma import CONSUMER_THREADS

comptime VALUES_BARRIER: Int32 = 2
"""The barrier of the values' warpgroup; `CONSUMER_BARRIER` is the keys'."""


@always_inline
def attend_keys[
    dtype: DType, o_dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int, //
](mut consumer: Consumer[dtype, o_dtype, kv_dtype, head_dim, heads], tiles: ItemTiles):
    """By the keys' warpgroup: the weights of every tile, then the state of every head."""
    comptime Map = consumer.Map
    var shared = consumer.shared
    consumer.load_query()
    for tile in range(tiles.count):
        var valid = tiles.valid_rows(tile)
        # The last products with this tile's place are complete: the barrier in `reduce_over_tile` lies in between.
        with shared.ring().consume(2 * tile) as stage:
            widen_tile[is_value=False](shared, consumer.thread, stage, Map.WIDENED_KEYS, valid)
        # Written by ordinary stores, read by the tensor cores: fence, then the barrier.
        fence_async_view_proxy()
        named_barrier[Int32(CONSUMER_THREADS)](CONSUMER_BARRIER)
        consumer.multiply_keys(Map.WIDENED_KEYS)
        var factors = consumer.weigh(tiles.token(tile), valid)
        with shared.buffers().write(tile) as buffer:
            consumer.store_weights(buffer)
            store_factors(consumer, buffer, factors)
    # All have read `exchange`.
    named_barrier[Int32(CONSUMER_THREADS)](CONSUMER_BARRIER)
    var totals = consumer.total.copy()
    consumer.reduce_over_tile[greatest=False](totals)
    with shared.buffers().write(tiles.count) as buffer:
        store_factors(consumer, buffer, consumer.greatest)
    with shared.buffers().write(tiles.count + 1) as buffer:
        store_factors(consumer, buffer, totals)


@always_inline
def attend_values[
    dtype: DType, o_dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int, //
](mut consumer: Consumer[dtype, o_dtype, kv_dtype, head_dim, heads], tiles: ItemTiles, partials: PartialOutputs,):
    """By the values' warpgroup: the sums of all tiles, and the result."""
    comptime Map = consumer.Map
    var shared = consumer.shared
    for tile in range(tiles.count):
        with shared.ring().consume(2 * tile + 1) as stage:
            widen_tile[is_value=True](shared, consumer.thread, stage, Map.WIDENED_VALUES, tiles.valid_rows(tile))
        fence_async_view_proxy()
        named_barrier[Int32(CONSUMER_THREADS)](VALUES_BARRIER)
        with shared.buffers().consume(tile) as buffer:
            var factors = load_factors(consumer, buffer)
            comptime for c in range(consumer.COLUMNS):
                consumer.rescale[c](factors[c])
            consumer.multiply_values(Map.WIDENED_VALUES, buffer)
        # A warp's products read what all four have widened: the next tile goes there once all are complete.
        named_barrier[Int32(CONSUMER_THREADS)](VALUES_BARRIER)
    with shared.buffers().consume(tiles.count) as buffer:
        consumer.greatest = load_factors(consumer, buffer)
    with shared.buffers().consume(tiles.count + 1) as buffer:
        consumer.write_result(partials, load_factors(consumer, buffer))


@always_inline
def store_factors[
    dtype: DType, o_dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int, //
](
    consumer: Consumer[dtype, o_dtype, kv_dtype, head_dim, heads],
    buffer: Int,
    factors: Array[Float32, consumer.COLUMNS],
):
    """A number of every head; all threads that hold a column have the same, and the first four hold all columns."""
    if consumer.thread < 4:
        comptime for c in range(consumer.COLUMNS):
            var at = consumer.Map.factor_offset(Int(consumer.head(c)), buffer)
            consumer.shared.at[Float32](at)[] = factors[c]


@always_inline
def load_factors[
    dtype: DType, o_dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int, //
](consumer: Consumer[dtype, o_dtype, kv_dtype, head_dim, heads], buffer: Int) -> Array[Float32, consumer.COLUMNS]:
    """The numbers of this thread's columns."""
    var factors = Array[Float32, consumer.COLUMNS](fill=0)
    comptime for c in range(consumer.COLUMNS):
        factors[c] = consumer.shared.at[Float32](consumer.Map.factor_offset(Int(consumer.head(c)), buffer))[]
    return factors^
