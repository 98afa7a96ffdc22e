"""The shared memory of a Hopper block: where everything lies, and how the copy engine and the tensor cores see it.

Pure arithmetic on byte offsets, so that a CPU can check it (`tests/mojo/test_smem.mojo`).
The facts about swizzles, descriptors and fragments are those of the PTX manual (wgmma, "matrix descriptor").
"""

from std.sys import size_of

comptime TILE = 64
"""Tokens in a tile: the rows of one wgmma."""
comptime ROW = 128
"""Bytes of a tile's row: one token's share of a swizzle atom."""
comptime ATOM = ROW // 2
"""16-bit elements in a row."""
comptime SWIZZLE_PERIOD = 8 * ROW
"""Bytes after which the 128-byte swizzle repeats: rows of a tile are only ever moved in groups of 8."""
comptime CHUNK = 16
"""Bytes that a swizzle moves as one, and a row of a core matrix."""
comptime CORE_MATRIX = 8 * CHUNK
"""Bytes of an 8 x 8 matrix of 16-bit elements, the unit of an operand that is not swizzled."""
comptime WGMMA_K = 16
"""16-bit elements that one wgmma reduces over."""
comptime CONSUMER_WARPS = 4
comptime CONSUMERS = 32 * CONSUMER_WARPS
"""Threads of the one warpgroup that computes."""

comptime SM_BYTES = 228 * 1024
"""Shared memory of an H100 or H200 multiprocessor; each block costs 1 KB more than it asks for."""


struct SharedMemory[kv_dtype: DType, head_dim: Int, heads: Int]:
    """Byte offsets from the start, which is a multiple of 1024.

    ```
    0          +--------------------------------------------------------------------+
               | ring      SLOTS x one tile of K or V as it is stored               |
    KEYS       +--------------------------------------------------------------------+
               | keys, values    one tile of each, widened (float8 only)            |
    QUERY      +--------------------------------------------------------------------+
               | query     [head_dim / 8, heads, 8]                                 |
    WEIGHTS    +--------------------------------------------------------------------+
               | weights   [heads / 8, TILE, 8]                                     |
    EXCHANGE   +--------------------------------------------------------------------+
               | exchange  [CONSUMER_WARPS, heads] float32                          |
    STATUS     +--------------------------------------------------------------------+
               | status    int32, 4 bytes of padding                                |
    FULL       +--------------------------------------------------------------------+
               | full      [SLOTS] mbarriers                                        |
    EMPTY      +--------------------------------------------------------------------+
               | empty     [SLOTS] mbarriers                                        |
    BYTES      +--------------------------------------------------------------------+
    ```

    A tile that the tensor cores read is `[head_dim / 64, TILE, 64]` of 16-bit elements. Its rows of 128 bytes are
    swizzled: chunk c of row r, 16 bytes, lies at place c XOR (r modulo 8). The copy engine leaves 16-bit caches in the
    ring that way. A float8 tile lies there as plain `[TILE, head_dim]` and is widened to `keys` or `values`.
    Query and weights are whole 8 x 8 core matrices.

    Parameters:
        kv_dtype: A 16-bit type, which the query and the weights have too, or a float8: those have float16 then.
        head_dim: A multiple of 64.
        heads: Columns of a wgmma: 8 or 16, at least the query heads of a group.
    """

    comptime WIDENED = size_of[Self.kv_dtype]() == 1
    comptime ATOMS = Self.head_dim // ATOM
    comptime ATOM_BYTES = TILE * ROW
    comptime TILE_BYTES = Self.ATOMS * Self.ATOM_BYTES
    """Of a tile that the tensor cores read."""
    comptime SLOT_BYTES = TILE * Self.head_dim * size_of[Self.kv_dtype]()

    comptime BLOCKS_PER_SM = 1 if Self.head_dim > 128 and (Self.WIDENED or Self.heads > 8) else 2
    """While the warpgroup of one block is in its softmax, the other block's keeps the tensor cores busy.

    One where two widened tiles are too large for that, or the registers of 16 heads of 256 too many.
    """
    comptime TILES_BYTES = 192 * 1024 // Self.BLOCKS_PER_SM
    """What K and V take up: some 100 KB of an SM must be under way to hide the latency of its memory."""

    comptime KEYS = Self.SLOTS * Self.SLOT_BYTES
    comptime VALUES = Self.KEYS + Self.TILE_BYTES
    comptime SLOTS = (Self.TILES_BYTES - (2 * Self.TILE_BYTES if Self.WIDENED else 0)) // Self.SLOT_BYTES
    comptime QUERY = Self.TILES_BYTES
    comptime WEIGHTS = Self.QUERY + Self.heads * Self.head_dim * 2
    comptime EXCHANGE = Self.WEIGHTS + Self.heads * TILE * 2
    comptime STATUS = Self.EXCHANGE + CONSUMER_WARPS * Self.heads * size_of[DType.float32]()
    comptime FULL = Self.STATUS + 8
    comptime EMPTY = Self.FULL + 8 * Self.SLOTS
    comptime BYTES = Self.EMPTY + 8 * Self.SLOTS

    @staticmethod
    def check():
        """Fails to compile where the map does not fit."""
        comptime assert Self.head_dim % ATOM == 0, "head_dim is a multiple of 64"
        comptime assert Self.heads == 8 or Self.heads == 16, "8 or 16 columns"
        # Below three slots the copies of the next tile could not start before this tile is done.
        comptime assert Self.SLOTS >= 3, "a ring of at least three slots"
        comptime assert Self.BYTES <= 227 * 1024, "a block has at most 227 KB of shared memory"
        comptime assert Self.BLOCKS_PER_SM * (Self.BYTES + 1024) <= SM_BYTES, "the blocks of an SM share 228 KB"

    # K and V

    @staticmethod
    @always_inline
    def box(row: Int, copy: Int) -> Int:
        """Where in a slot the `copy`-th part of a box begins whose first token is the tile's `row`-th.

        Swizzled parts are one atom wide and begin at multiples of `SWIZZLE_PERIOD`; of a float8 box there is one part.
        """
        comptime if Self.WIDENED:
            return row * Self.head_dim
        else:
            return copy * Self.ATOM_BYTES + row * ROW

    @staticmethod
    @always_inline
    def row_of_chunk(i: Int) -> Int:
        """The row of a swizzled tile's `i`-th 16 bytes: a swizzle keeps to its row."""
        return (i // (ROW // CHUNK)) % TILE

    @staticmethod
    @always_inline
    def widened(token: Int, chunk: Int) -> Int:
        """Where in `keys` or `values` the 8 dims from `8 * chunk` on of a token go: the swizzle, done by hand."""
        comptime chunks = ROW // CHUNK
        return (chunk // chunks) * Self.ATOM_BYTES + token * ROW + ((chunk % chunks) ^ (token % 8)) * CHUNK

    # Query, weights, exchange

    @staticmethod
    @always_inline
    def query(head: Int, chunk: Int) -> Int:
        """Where the 8 dims from `8 * chunk` on of a query head lie."""
        return Self.QUERY + (chunk * Self.heads + head) * CHUNK

    @staticmethod
    @always_inline
    def weights(token: Int, head: Int) -> Int:
        """Where the weight of a tile's token lies for a head."""
        return Self.WEIGHTS + ((head // 8) * TILE + token) * CHUNK + (head % 8) * 2

    @staticmethod
    @always_inline
    def exchange(warp: Int, head: Int) -> Int:
        """Where a warp leaves its share of a reduction over tokens."""
        return Self.EXCHANGE + (warp * Self.heads + head) * size_of[DType.float32]()

    # The operands of S^T = K Q^T (reduced over dims) and O^T = V^T P^T (reduced over tokens); K and V lie at `tile`.

    @staticmethod
    @always_inline
    def key_operand(tile: Int, step: Int) -> Operand:
        """A of S^T: `[64 tokens, 16 dims from 16 * step on]`, dims adjacent."""
        comptime steps = ATOM // WGMMA_K
        # Inside an atom the start moves along the row; the swizzle takes its row bits from the address, so that
        # an offset below 128 bytes leaves them alone.
        return Operand(tile + (step // steps) * Self.ATOM_BYTES + (step % steps) * 2 * CHUNK, 0, SWIZZLE_PERIOD, True)

    @staticmethod
    @always_inline
    def query_operand(step: Int) -> Operand:
        """B of S^T: `[heads, 16 dims from 16 * step on]`, dims adjacent."""
        return Operand(Self.query(0, 2 * step), Self.heads * CHUNK, CORE_MATRIX, False)

    @staticmethod
    @always_inline
    def value_operand(tile: Int, atom: Int, step: Int) -> Operand:
        """A of O^T: `[64 dims of an atom, 16 tokens from 16 * step on]`, dims adjacent."""
        return Operand(tile + atom * Self.ATOM_BYTES + step * WGMMA_K * ROW, Self.ATOM_BYTES, SWIZZLE_PERIOD, True)

    @staticmethod
    @always_inline
    def weight_operand(step: Int) -> Operand:
        """B of O^T: `[heads, 16 tokens from 16 * step on]`, heads adjacent."""
        # With 8 heads there is no second group of heads: the stride between groups is then of no account.
        comptime between_groups = TILE * CHUNK if Self.heads > 8 else CORE_MATRIX
        return Operand(Self.weights(step * WGMMA_K, 0), CORE_MATRIX, between_groups, False)


@fieldwise_init
struct Operand(TrivialRegisterPassable):
    """A matrix in shared memory as a wgmma reads it; all in bytes.

    | | leading | stride |
    |---|---|---|
    | swizzled, reduced dimension adjacent | unused | from 8 rows to the next 8 |
    | swizzled, other dimension adjacent | from 64 elements of it to the next 64 | from 8 of the reduced to the next 8 |
    | core matrices, reduced dimension adjacent | from 8 of the reduced to the next 8 | from 8 rows to the next 8 |
    | core matrices, other dimension adjacent | from 8 of the reduced to the next 8 | from 8 of the other to the next 8 |
    """

    var start: Int
    var leading: Int
    var stride: Int
    var swizzled: Bool

    @always_inline
    def descriptor(self, base: UInt32) -> Int64:
        """The 64 bits that a wgmma takes, for a map that starts at `base`."""
        # Addresses are below 2^18; all are multiples of 16.
        var address = Int64((base + UInt32(self.start)) >> 4)
        var mode = 1 if self.swizzled else 0  # 1: 128 bytes
        return address | Int64((self.leading >> 4) << 16 | (self.stride >> 4) << 32 | mode << 62)


# A wgmma's result [64, columns]: element `i` of a thread's registers.


@always_inline
def fragment_row(thread: Int, i: Int) -> Int:
    """The row of element `i` of a warpgroup's thread: two rows a thread, 8 apart."""
    return (thread // 32) * 16 + (thread % 32) // 4 + ((i // 2) % 2) * 8


@always_inline
def fragment_column(thread: Int, i: Int) -> Int:
    """The column of element `i`: two adjacent ones of every 8."""
    return (i // 4) * 8 + (thread % 4) * 2 + i % 2


# Tiles and boxes


@fieldwise_init
struct Box(TrivialRegisterPassable):
    """Slots of one page that are copied at once: a power of two, so that run-time divisions by it are shifts."""

    var bits: Int32
    """The base-2 logarithm of the slots: 3 to 6."""

    @staticmethod
    def of_page(page_size: Int) -> Self:
        """The greatest power of two that divides the page, at most a tile.

        Below 8 slots (`LEAST_BOX_BITS`) boxes would not line up with the period of the swizzle.
        """
        var bits = 0
        while (2 << bits) <= TILE and page_size % (2 << bits) == 0:
            bits += 1
        return Self(Int32(bits))

    @always_inline
    def slots(self) -> Int32:
        return Int32(1) << self.bits


comptime LEAST_BOX_BITS: Int32 = 3


@fieldwise_init
struct Tiles(TrivialRegisterPassable):
    """The tiles of one work item, which the copying warp and the computing warps walk alike."""

    var first: Int32
    """The token of the first tile's row 0, at or below `begin`: a multiple of a box, so that no box crosses a page."""
    var begin: Int32
    var end: Int32
    """Tokens `[begin, end)` count; a tile's other rows may hold anything."""
    var count: Int32

    @staticmethod
    @always_inline
    def of(begin: Int32, end: Int32, box: Box) -> Self:
        var first = (begin >> box.bits) << box.bits
        return Self(first, begin, end, (end - first + TILE - 1) // TILE if end > begin else 0)

    @always_inline
    def token(self, tile: Int32) -> Int32:
        """The token of a tile's row 0."""
        return self.first + tile * TILE

    @always_inline
    def wanted(self, tile: Int32) -> Rows:
        """The rows of a tile whose tokens count."""
        var token = self.token(tile)
        return Rows(max(Int32(0), self.begin - token), min(Int32(TILE), self.end - token))


@fieldwise_init
struct Rows(TrivialRegisterPassable):
    """Rows `[begin, end)` of a tile; at least one."""

    var begin: Int32
    var end: Int32

    @always_inline
    def boxes(self, box: Box) -> Int32:
        """How many of the tile's boxes hold them: the first box always does."""
        return (self.end + box.slots() - 1) >> box.bits

    @always_inline
    def all(self) -> Bool:
        return self.begin == 0 and self.end == TILE
