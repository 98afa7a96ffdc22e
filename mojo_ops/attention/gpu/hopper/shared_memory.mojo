"""The shared memory of a Hopper block: where everything lies, and how the copy engine and the tensor cores see it.

Pure arithmetic on byte offsets, so that a CPU can check it (`tests/mojo/test_hopper_shared_memory.mojo`).
"""

from std.sys import size_of

from .tiles import WGMMA_TILE_TOKENS
from .wgmma import (
    ATOM_ELEMENTS,
    CHUNK_BYTES,
    CONSUMER_WARPS,
    CORE_MATRIX_BYTES,
    MatrixOperand,
    SWIZZLE_PERIOD_BYTES,
    SWIZZLE_ROW_BYTES,
    WGMMA_K,
)

comptime SM_BYTES = 228 * 1024
"""Shared memory of an H100 or H200 multiprocessor; each block costs 1 KB more than it requests."""


struct SharedMemoryMap[kv_dtype: DType, head_dim: Int, heads: Int]:
    """Byte offsets from the start, which is a multiple of 1024.

    ```
    0              +----------------------------------------------------------------+
                   | ring      STAGES x one tile of K or V as it is stored          |
    WIDENED_KEYS   +----------------------------------------------------------------+
                   | one tile of K, then one of V, as float16 (float8 caches only)  |
    QUERY          +----------------------------------------------------------------+
                   | query     [head_dim / 8, heads, 8]                             |
    WEIGHTS        +----------------------------------------------------------------+
                   | weights   [BUFFERS, heads / 8, WGMMA_TILE_TOKENS, 8]           |
    EXCHANGE       +----------------------------------------------------------------+
                   | exchange  [CONSUMER_WARPS, heads] float32                      |
    FACTORS        +----------------------------------------------------------------+
                   | factors   [BUFFERS, heads] float32 (float8 caches only)        |
    STATUS         +----------------------------------------------------------------+
                   | status    int32, 4 bytes of padding                            |
    ITEM           +----------------------------------------------------------------+
                   | item      SplitItem, 16 bytes                                  |
    FULL           +----------------------------------------------------------------+
                   | full      [STAGES] mbarriers                                   |
    EMPTY          +----------------------------------------------------------------+
                   | empty     [STAGES] mbarriers                                   |
    BUFFERS_FULL   +----------------------------------------------------------------+
                   | full, then empty: [BUFFERS] mbarriers (float8 caches only)     |
    BYTES          +----------------------------------------------------------------+
    ```

    A tile that the tensor cores read is `[WGMMA_TILE_TOKENS / 8, head_dim / 64, 8, 64]` of 16-bit elements: groups of 8
    tokens, of which a box of the cache is one or more. Rows of 128 bytes are swizzled: chunk c of row r, 16 bytes, lies at
    chunk c XOR (r modulo 8) of the row. The copy engine leaves 16-bit caches in the ring that way. A float8 tile lies
    there as plain `[WGMMA_TILE_TOKENS, head_dim]` and is widened to `WIDENED_KEYS` or `WIDENED_VALUES`. Query and weights
    are whole 8 x 8 core matrices. With a float8 cache the warpgroup of the keys leaves a tile's weights, and the factors
    of the sums before it, in one of two buffers for the warpgroup of the values (`float8_consumers.mojo`).

    Parameters:
        kv_dtype: A 16-bit type, which the query and the weights have too, or a float8: those have float16 then.
        head_dim: A multiple of 64.
        heads: Columns of a wgmma: 8 or 16, at least the query heads of a group.
    """

    comptime WIDENED = size_of[Self.kv_dtype]() == 1
    comptime WARPGROUPS = 2 if Self.WIDENED else 1
    """Warpgroups of consumers: with a float8 cache one for the keys and one for the values."""
    comptime BUFFERS = Self.WARPGROUPS
    """Buffers of weights: with two warpgroups, the one that the other reads, and the one that is written meanwhile."""
    comptime ATOMS = Self.head_dim // ATOM_ELEMENTS
    comptime GROUP_BYTES = Self.ATOMS * SWIZZLE_PERIOD_BYTES
    """Bytes of 8 tokens in a tile that the tensor cores read: the stride of its operands."""
    comptime TILE_BYTES = WGMMA_TILE_TOKENS // 8 * Self.GROUP_BYTES
    """Bytes of a tile that the tensor cores read."""
    comptime STAGE_BYTES = WGMMA_TILE_TOKENS * Self.head_dim * size_of[Self.kv_dtype]()

    comptime BLOCKS_PER_SM = 1 if Self.head_dim > 128 and (Self.WIDENED or Self.heads > 8) else 2
    """While the warpgroup of one block is in its softmax, the other block's keeps the tensor cores busy.

    One where two widened tiles are too large for that, or the registers of 16 heads of 256 too many.
    """
    comptime KV_BYTES = 192 * 1024 // Self.BLOCKS_PER_SM
    """Bytes of the ring and the widened tiles: an SM needs some 100 KB in flight to hide the latency of its memory."""

    comptime WIDENED_KEYS = Self.STAGES * Self.STAGE_BYTES
    comptime WIDENED_VALUES = Self.WIDENED_KEYS + Self.TILE_BYTES
    comptime STAGES = (Self.KV_BYTES - (2 * Self.TILE_BYTES if Self.WIDENED else 0)) // Self.STAGE_BYTES
    comptime QUERY = Self.KV_BYTES
    comptime WEIGHTS = Self.QUERY + Self.heads * Self.head_dim * 2
    comptime WEIGHTS_BYTES = Self.heads * WGMMA_TILE_TOKENS * 2
    comptime EXCHANGE = Self.WEIGHTS + Self.BUFFERS * Self.WEIGHTS_BYTES
    comptime FACTORS = Self.EXCHANGE + CONSUMER_WARPS * Self.heads * size_of[DType.float32]()
    comptime STATUS = Self.FACTORS + (Self.BUFFERS * Self.heads * size_of[DType.float32]() if Self.WIDENED else 0)
    comptime ITEM = Self.STATUS + 8
    comptime FULL = Self.ITEM + 16
    comptime EMPTY = Self.FULL + 8 * Self.STAGES
    comptime BUFFERS_FULL = Self.EMPTY + 8 * Self.STAGES
    comptime BUFFERS_EMPTY = Self.BUFFERS_FULL + 8 * Self.BUFFERS
    comptime BYTES = Self.BUFFERS_FULL + (2 * 8 * Self.BUFFERS if Self.WIDENED else 0)

    @staticmethod
    def check():
        """Fails to compile where the map does not fit."""
        comptime assert Self.head_dim % ATOM_ELEMENTS == 0, "head_dim is a multiple of 64"
        comptime assert Self.heads == 8 or Self.heads == 16, "8 or 16 columns"
        # Below three stages the copies of the next tile could not start before this tile is done.
        comptime assert Self.STAGES >= 3, "a ring of at least three stages"
        comptime assert Self.BYTES <= 227 * 1024, "a block has at most 227 KB of shared memory"
        comptime assert Self.BLOCKS_PER_SM * (Self.BYTES + 1024) <= SM_BYTES, "the blocks of an SM share 228 KB"

    # K and V

    @staticmethod
    @always_inline
    def box_offset(row: Int) -> Int:
        """Return where in a stage a box begins whose first token is the tile's `row`-th, a multiple of 8.

        A multiple of `SWIZZLE_PERIOD_BYTES` where the box is swizzled, of 128 bytes where it is float8.
        """
        return row * Self.head_dim * size_of[Self.kv_dtype]()

    @staticmethod
    @always_inline
    def row_of_chunk(i: Int) -> Int:
        """The row of a swizzled tile's `i`-th 16 bytes: a swizzle permutes inside a row."""
        return i // (Self.GROUP_BYTES // CHUNK_BYTES) * 8 + (i // (SWIZZLE_ROW_BYTES // CHUNK_BYTES)) % 8

    @staticmethod
    @always_inline
    def widened_offset(token: Int, chunk: Int) -> Int:
        """Return where in a widened tile the 8 dims from `8 * chunk` on of a token go: the swizzle in software."""
        comptime chunks = SWIZZLE_ROW_BYTES // CHUNK_BYTES
        return (
            (token // 8) * Self.GROUP_BYTES
            + (chunk // chunks) * SWIZZLE_PERIOD_BYTES
            + (token % 8) * SWIZZLE_ROW_BYTES
            + ((chunk % chunks) ^ (token % 8)) * CHUNK_BYTES
        )

    # Query, weights, exchange

    @staticmethod
    @always_inline
    def query_offset(head: Int, chunk: Int) -> Int:
        """Return where the 8 dims from `8 * chunk` on of a query head lie."""
        return Self.QUERY + (chunk * Self.heads + head) * CHUNK_BYTES

    @staticmethod
    @always_inline
    def weight_offset(token: Int, head: Int, buffer: Int = 0) -> Int:
        """Return where the weight of a tile's token lies for a head."""
        return (
            Self.WEIGHTS
            + buffer * Self.WEIGHTS_BYTES
            + ((head // 8) * WGMMA_TILE_TOKENS + token) * CHUNK_BYTES
            + (head % 8) * 2
        )

    @staticmethod
    @always_inline
    def factor_offset(head: Int, buffer: Int) -> Int:
        """Return where the factor of a head's sums lies."""
        return Self.FACTORS + (buffer * Self.heads + head) * size_of[DType.float32]()

    @staticmethod
    @always_inline
    def exchange_offset(warp: Int, head: Int) -> Int:
        """Return where a warp leaves its share of a reduction over tokens."""
        return Self.EXCHANGE + (warp * Self.heads + head) * size_of[DType.float32]()

    # The operands of S^T = K Q^T (reduced over dims) and O^T = V^T P^T (reduced over tokens); K and V lie at `tile`.

    @staticmethod
    @always_inline
    def key_operand(tile: Int, step: Int) -> MatrixOperand:
        """A of S^T: `[64 tokens, 16 dims from 16 * step on]`, dims adjacent."""
        comptime steps = ATOM_ELEMENTS // WGMMA_K
        # Inside an atom the start advances along the row; the swizzle takes its row bits from the address, so that
        # an offset below 128 bytes leaves them unchanged.
        return MatrixOperand(
            tile + (step // steps) * SWIZZLE_PERIOD_BYTES + (step % steps) * 2 * CHUNK_BYTES, 0, Self.GROUP_BYTES, True
        )

    @staticmethod
    @always_inline
    def query_operand(step: Int) -> MatrixOperand:
        """B of S^T: `[heads, 16 dims from 16 * step on]`, dims adjacent."""
        return MatrixOperand(Self.query_offset(0, 2 * step), Self.heads * CHUNK_BYTES, CORE_MATRIX_BYTES, False)

    @staticmethod
    @always_inline
    def value_operand(tile: Int, atom: Int, step: Int) -> MatrixOperand:
        """A of O^T: `[64 dims of an atom, 16 tokens from 16 * step on]`, dims adjacent."""
        return MatrixOperand(
            tile + atom * SWIZZLE_PERIOD_BYTES + step * WGMMA_K // 8 * Self.GROUP_BYTES,
            SWIZZLE_PERIOD_BYTES,
            Self.GROUP_BYTES,
            True,
        )

    @staticmethod
    @always_inline
    def weight_operand(step: Int, buffer: Int = 0) -> MatrixOperand:
        """B of O^T: `[heads, 16 tokens from 16 * step on]`, heads adjacent."""
        # With 8 heads there is no second group of heads: the stride between groups is then unused.
        comptime between_groups = WGMMA_TILE_TOKENS * CHUNK_BYTES if Self.heads > 8 else CORE_MATRIX_BYTES
        var start = Self.weight_offset(step * WGMMA_K, 0, buffer)
        return MatrixOperand(start, CORE_MATRIX_BYTES, between_groups, False)
