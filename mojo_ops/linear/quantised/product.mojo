"""`y_i = x w_i^T` for weights in GGUF's blocks: x rounded once for all, sections of rows of w for the threads.

Experts are products like those of other layers, each with its own rows of x.
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero

from ...cache.pointers import RowPointer, untracked
from ...isa.amx import HAS_AMX_INT8, amx_permitted, tile_release
from ...isa.amx_tiles import AMX_TILE_ROWS
from ...isa.convert import FloatVector, narrow
from ...isa.cpu_tuning import CPU_TUNING
from ...isa.int8_dot import DOT_ROWS, HAS_AVX2
from ...isa.line_counter import LineCounter
from ...isa.memory import CACHE_LINE_BYTES, align_to_line
from ...isa.threads import Workers, run_tasks
from ..experts import Grouping
from .activations import RECORD_BYTES, RoundedRows, round_rows
from .amx import TURN_BYTES, configure_group_tiles
from .byte_rows import ByteRows, GROUPS, SCALE_BYTES
from .encoding import Encoding
from .encodings import BLOCK_ENCODINGS, ENCODINGS
from .multiply import FUSED_ROWS, MOST_ROWS, Sums, has_start, multiply, multiply_blocks, multiply_on_tiles
from .tile import (
    BytePointer,
    Coming,
    MAX_BLOCK_BYTES,
    PART_ELEMENTS,
    RAW_BYTES,
    Raw,
    TILE_BYTES,
    TILE_ELEMENTS,
    Tile,
    VECTOR_BYTES,
    copy_blocks,
)

comptime ROUNDED_ROWS = 512
"""Rows of x that are rounded at once."""
comptime FEW_ROWS = 16
"""Rows of x up to which the memory is the limit: sections of one tile, which prefetch the next section."""
comptime SECTION_TILES = 2
"""Tiles of a section for more rows of x."""


@fieldwise_init
struct QuantisedMember[dtype: DType](TrivialRegisterPassable):
    """The weights of one of several layers of the same x, and its result."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var w: BytePointer
    """`[n, row_bytes]`."""
    var n: Int
    var row_bytes: Int
    var encoding: Int
    """An index of `encodings.mojo`."""

    def rounds_blocks(self) -> Bool:
        """Return whether its x is rounded by blocks of 256."""
        return Bool((BLOCK_ENCODINGS >> self.encoding) & 1)


@fieldwise_init
struct Product[dtype: DType](TrivialRegisterPassable):
    """Weights by the rows of x that meet them."""

    var member: QuantisedMember[Self.dtype]
    var rows: RoundedRows

    def depth(self, of_many: Int) -> Int:
        """Rows of w in a section."""
        return DOT_ROWS if self.rows.m <= FEW_ROWS else of_many

    def sections(self, of_many: Int) -> Int:
        return ceildiv(self.member.n, self.depth(of_many))


def linear_quantised[
    dtype: DType, //, mask: Int
](
    members: Pointer[QuantisedMember[dtype], MutUntrackedOrigin],
    count: Int,
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    m: Int,
    k: Int,
    workers: Workers,
):
    """Computes the `y = x w^T` of `count` members on up to `workers` threads: x `[m, k]`.

    Parameters:
        dtype: The dtype of x and y.
        mask: The bits of the encodings that members may have.
    """
    var most = min(m, ROUNDED_ROWS)
    var records = Records[mask](most, k)
    var order = List[Int](capacity=most)
    for row in range(most):
        order.append(row)
    var products = List[Product[dtype]](capacity=count)
    for first in range(0, m, ROUNDED_ROWS):
        var present = min(ROUNDED_ROWS, m - first)
        var batch = List[Batch](length=1, fill=Batch(0, present))
        var rounded = records.round(
            x.unsafe_offset(first * k), 1, untracked(order.unsafe_ptr()), batch, present, workers
        )
        products.clear()
        for i in range(count):
            var member = members[unsafe_offset=i]
            member.y = member.y.unsafe_offset(first * member.n)
            products.append(Product(member, rounded.of(0, member.rounds_blocks())))
        multiply_products[mask](products, records.columns, workers)
    _ = records^
    _ = order^


def linear_quantised_experts[
    dtype: DType, //, mask: Int
](
    members: Pointer[QuantisedMember[dtype], MutUntrackedOrigin],
    count: Int,
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    experts: RowPointer,
    rows: Int,
    m: Int,
    expert_count: Int,
    k: Int,
    workers: Workers,
):
    """Computes every member's `y[r] = x[r // (rows / m)] w[experts[r]]^T`; 0 where the expert is -1.

    The sections of all experts with rows are one list for the threads: each expert's blocks are read once for up to
    `ROUNDED_ROWS` of its rows, and others not at all.

    Parameters:
        dtype: The dtype of x and y.
        mask: The bits of the encodings that members may have.

    Args:
        members: The members of each y `[rows, n]`, w `[expert_count, n, row_bytes]`.
        count: The number of the members.
        x: `[m, k]`.
        experts: `[rows]`, checked.
        rows: Rows of y.
        m: Rows of x, a divisor of `rows`.
        expert_count: Experts.
        k: Columns of x.
        workers: Threads; the result does not depend on them.
    """
    if rows == 0:
        return
    var grouping = Grouping(experts, rows, expert_count)
    var order = untracked(grouping.order.unsafe_ptr())
    var used = grouping.starts[expert_count]
    var batches = List[Batch]()
    var chosen = List[Int]()
    for expert in range(expert_count):
        for first in range(grouping.starts[expert], grouping.starts[expert + 1], ROUNDED_ROWS):
            batches.append(Batch(first, min(ROUNDED_ROWS, grouping.starts[expert + 1] - first)))
            chosen.append(expert)
    if used > 0:
        var records = Records[mask](used, k)
        var rounded = records.round(x, rows // m, order, batches, used, workers)
        var products = List[Product[dtype]](capacity=count * len(batches))
        for i in range(len(batches)):
            for index in range(count):
                var member = members[unsafe_offset=index]
                member.w = member.w.unsafe_offset(chosen[i] * member.n * member.row_bytes)
                products.append(Product(member, rounded.of(i, member.rounds_blocks())))
        multiply_products[mask](products, records.columns, workers)
        _ = records^
    for i in range(count):
        ref member = members[unsafe_offset=i]
        for at in range(used, rows):
            unsafe_memset_zero(member.y.unsafe_offset(order[unsafe_offset=at] * member.n), member.n)
    _ = grouping^


@fieldwise_init
struct Batch(TrivialRegisterPassable):
    """Rows `[first, first + m)` of some order."""

    var first: Int
    var m: Int


struct Rounded(Movable):
    """Batches of rounded rows, for the encodings of 32 elements a scale of x and for those of 256."""

    var rows: List[RoundedRows]
    var rows_of_blocks: List[RoundedRows]

    def __init__(out self):
        self.rows = List[RoundedRows]()
        self.rows_of_blocks = List[RoundedRows]()

    def of(self, batch: Int, blocks: Bool) -> RoundedRows:
        return self.rows_of_blocks[batch] if blocks else self.rows[batch]


struct Records[mask: Int](Movable):
    """Memory for rounded rows, as the encodings of `mask` want them: Q8_0, Q8_K or both."""

    var memory: List[UInt8]
    var columns: Int
    """Tiles along K."""
    var k: Int
    var bytes: Int
    """Bytes of each kind."""

    comptime SMALL = Self.mask & ~BLOCK_ENCODINGS != 0
    comptime BLOCKS = Self.mask & BLOCK_ENCODINGS != 0

    def __init__(out self, rows: Int, k: Int):
        self.columns = ceildiv(k, TILE_ELEMENTS)
        self.k = k
        self.bytes = (self.columns * rows + FUSED_ROWS) * RECORD_BYTES
        self.memory = List[UInt8](capacity=(Int(Self.SMALL) + Int(Self.BLOCKS)) * self.bytes + CACHE_LINE_BYTES)

    def round[
        dtype: DType, //
    ](
        mut self,
        x: Pointer[Scalar[dtype], MutUntrackedOrigin],
        share: Int,
        order: Pointer[Int, MutUntrackedOrigin],
        batches: List[Batch],
        rows: Int,
        workers: Workers,
    ) -> Rounded:
        """Rounds `rows` rows of all batches of `order`; the arguments are those of `round_rows`."""
        var rounded = Rounded()
        var start = align_to_line(untracked(self.memory.unsafe_ptr()))
        comptime if Self.SMALL:
            rounded.rows = self.placed(start, order, batches)
            round_rows[False](x, share, self.k, untracked(rounded.rows.unsafe_ptr()), rows, workers)
            start = start.unsafe_offset(self.bytes)
        comptime if Self.BLOCKS:
            rounded.rows_of_blocks = self.placed(start, order, batches)
            round_rows[True](x, share, self.k, untracked(rounded.rows_of_blocks.unsafe_ptr()), rows, workers)
        return rounded^

    def placed(
        self, start: BytePointer, order: Pointer[Int, MutUntrackedOrigin], batches: List[Batch]
    ) -> List[RoundedRows]:
        """The batches, one after another from `start` on."""
        var found = List[RoundedRows](capacity=len(batches))
        var at = start
        for batch in batches:
            found.append(RoundedRows(order.unsafe_offset(batch.first), batch.m, at))
            at = at.unsafe_offset(batch.m * self.columns * RECORD_BYTES)
        return found^


def multiply_products[dtype: DType, //, mask: Int](products: List[Product[dtype]], columns: Int, workers: Workers):
    """Computes every product. The next idle thread takes the next section of rows of w of any of them."""
    var n = 0
    var most = 0
    for product in products:
        n += product.member.n
        most = max(most, product.rows.m)
    var depth = DOT_ROWS
    if most > FEW_ROWS:
        depth *= SECTION_TILES
        while depth > DOT_ROWS and depth * workers.count * 4 > n:
            depth //= 2
    var sections = 0
    for product in products:
        sections += product.sections(depth)
    var amx = HAS_AMX_INT8 and most >= AMX_TILE_ROWS and amx_permitted()
    ProductList[dtype, mask](
        untracked(products.unsafe_ptr().unsafe_mut_cast[True]()), len(products), sections, depth, most, columns, amx
    ).run(workers)


@fieldwise_init
struct Section[dtype: DType](TrivialRegisterPassable):
    """Rows of w of one product, and what a thread needs to multiply them."""

    var member: QuantisedMember[Self.dtype]
    var rows: RoundedRows
    var begin: Int
    """The first row of w."""
    var end: Int
    var columns: Int
    """Tiles along K."""
    var memory: BytePointer
    """The thread's: `Section.bytes`."""
    var coming: Coming
    """The next section, to be prefetched."""
    var amx: Bool
    """True if this thread's tile registers have the shapes of `multiply_group`."""

    comptime COPY = RAW_BYTES
    comptime TILES = Self.COPY + DOT_ROWS * MAX_BLOCK_BYTES

    @staticmethod
    def bytes(tiles: Int, m: Int) -> Int:
        """Return the bytes of a thread's memory."""
        return Self.TILES + tiles * (TILE_BYTES + max(m, FUSED_ROWS) * VECTOR_BYTES)

    @no_inline
    def multiply[E: Encoding](self):
        """Computes columns `[begin, end)` of y."""
        comptime assert 2 * TURN_BYTES <= RAW_BYTES, "AMX's sums lie where raw blocks did"
        var tiles = ceildiv(self.end - self.begin, DOT_ROWS)
        var m = self.rows.m
        var sums = self.memory.unsafe_offset(Self.TILES + tiles * TILE_BYTES).unsafe_bitcast[Float32]()
        var vectors = sums.unsafe_bitcast[FloatVector]()
        for i in range(tiles * max(m, FUSED_ROWS)):
            vectors[unsafe_offset=i] = 0
        comptime if E.BYTES_AT >= 0 and HAS_AVX2:
            if tiles == 1 and m == 1:
                self.byte_rows[E](0).take_scales[E](self.groups[E](0), self.scales(0))
                for column in range(self.columns):
                    if column + 1 < self.columns:
                        self.byte_rows[E](column + 1).take_scales[E](
                            self.groups[E](column + 1), self.scales(column + 1)
                        )
                    self.byte_rows[E](column).multiply[E](
                        self.groups[E](column),
                        self.scales(column),
                        self.rows.records.unsafe_offset(column * RECORD_BYTES),
                        vectors,
                        self.coming_tile[E](0, column, 1),
                    )
                self.store(tiles, vectors)
                return
        comptime for rows in [1, 2, 4, 8]:
            comptime if E.FUSED and rows <= FUSED_ROWS:
                if tiles == 1 and m <= rows:
                    for column in range(self.columns):
                        var coming = self.coming_tile[E](0, column, 1)
                        var x = self.rows.records.unsafe_offset(column * m * RECORD_BYTES)
                        comptime if E.BLOCK_ELEMENTS == 32:
                            if self.ends_in_parts[E](column):
                                self.multiply_parts[E, rows](column, x, vectors, coming)
                                continue
                        var raw = self.transposed[E](0, column, coming)
                        multiply_blocks[E, rows, TILE_ELEMENTS](raw, x, 0, vectors, coming)
                    self.store(tiles, vectors)
                    return
        for column in range(self.columns):
            for i in range(tiles):
                var tile = self.tile(i)
                E.unpack[TILE_ELEMENTS](self.transposed[E](i, column, self.coming_tile[E](i, column, tiles)), tile)
            var x = self.rows.records.unsafe_offset(column * m * RECORD_BYTES)
            var first = m // AMX_TILE_ROWS * AMX_TILE_ROWS if self.amx else 0
            for row in range(first, m, MOST_ROWS):
                for i in range(tiles):
                    multiply[E](
                        self.tile(i),
                        x.unsafe_offset(row * RECORD_BYTES),
                        min(MOST_ROWS, m - row),
                        vectors.unsafe_offset(i * m + row),
                        self.coming_tile[E](i, column, tiles),
                    )
            comptime if HAS_AMX_INT8:
                comptime if has_start[E]():
                    for i in range(tiles if first > 0 else 0):
                        self.tile(i).take_offset[E.OFFSET]()
                for row in range(0, first, AMX_TILE_ROWS):
                    for i in range(tiles):
                        multiply_on_tiles[E](
                            self.tile(i),
                            x.unsafe_offset(row * RECORD_BYTES),
                            vectors.unsafe_offset(i * m + row),
                            self.coming_tile[E](i, column, tiles),
                            self.memory,
                        )
        self.store(tiles, vectors)

    @always_inline
    def ends_in_parts[E: Encoding](self, column: Int) -> Bool:
        """Return whether K ends within this tile, in whole parts of it, and all 16 rows are there."""
        var left = self.member.row_bytes - column * E.BYTES
        return left < E.BYTES and left % part_bytes[E]() == 0 and self.end - self.begin == DOT_ROWS

    @always_inline
    def multiply_parts[E: Encoding, rows: Int](self, column: Int, x: BytePointer, sums: Sums, coming: Coming):
        """Adds the products of the last tile's parts, by themselves: a whole tile would be zeros for the most part."""
        comptime bytes = part_bytes[E]()
        var raw = Raw(self.memory.unsafe_bitcast[UInt32]())
        var at = column * E.BYTES
        for part in range((self.member.row_bytes - at) // bytes):
            var ahead = coming.after(part * bytes)
            var first = self.member.w.unsafe_offset(self.begin * self.member.row_bytes + at + part * bytes)
            raw.transpose[bytes](first, self.member.row_bytes, ahead)
            multiply_blocks[E, rows, PART_ELEMENTS](raw, x, part, sums, ahead)

    @always_inline
    def groups[E: Encoding](self, column: Int) -> Int:
        """Return the blocks of a row in a tile of Q8_0's kind."""
        return min(GROUPS, (self.member.row_bytes - column * E.BYTES) // (E.BYTES // GROUPS))

    @always_inline
    def byte_rows[E: Encoding](self, column: Int) -> ByteRows:
        return self.blocks[E](0, column, self.groups[E](column) * (E.BYTES // GROUPS))

    @always_inline
    def coming_tile[E: Encoding](self, index: Int, column: Int, tiles: Int) -> Coming:
        """Return what to prefetch beside a tile."""
        comptime ahead = CPU_TUNING.blocks_ahead
        comptime if ahead == 0:
            return Coming(self.coming.first.unsafe_offset((column * tiles + index) * DOT_ROWS * E.BYTES), 0)
        var row = DOT_ROWS * index
        if column + ahead < self.columns:
            var at = (self.begin + row) * self.member.row_bytes + (column + ahead) * E.BYTES
            return Coming(self.member.w.unsafe_offset(at), self.member.row_bytes)
        var at = row * self.coming.pitch + (column + ahead - self.columns) * E.BYTES
        return Coming(self.coming.first.unsafe_offset(at), self.coming.pitch)

    @always_inline
    def scales(self, column: Int) -> BytePointer:
        """The memory of the scales of a tile that is none; those of the next tile are taken a tile before their use,
        when all have been stored.
        """
        return self.memory.unsafe_offset(column % 2 * SCALE_BYTES)

    @always_inline
    def tile(self, index: Int) -> Tile:
        return Tile(self.memory.unsafe_offset(Self.TILES + index * TILE_BYTES))

    @always_inline
    def transposed[E: Encoding](self, index: Int, column: Int, coming: Coming) -> Raw:
        var raw = Raw(self.memory.unsafe_bitcast[UInt32]())
        var blocks = self.blocks[E](index, column, E.BYTES)
        raw.transpose[E.BYTES](blocks.first, blocks.pitch, coming)
        return raw

    @always_inline
    def blocks[E: Encoding](self, index: Int, column: Int, bytes: Int) -> ByteRows:
        """The blocks of tile `index` of the section's rows and of the 256 elements from `256 column` on; where rows are
        missing, or some of the `bytes` that are read of a row, a copy that ends with zeros.
        """
        var row = self.begin + DOT_ROWS * index
        var rows = self.end - row
        var first = self.member.w.unsafe_offset(row * self.member.row_bytes + column * E.BYTES)
        var left = self.member.row_bytes - column * E.BYTES
        if rows >= DOT_ROWS and left >= bytes:
            return ByteRows(first, self.member.row_bytes)
        var copy = self.memory.unsafe_offset(Self.COPY)
        copy_blocks(first, self.member.row_bytes, min(rows, DOT_ROWS), min(left, E.BYTES), copy, E.BYTES)
        return ByteRows(copy, E.BYTES)

    def store(self, tiles: Int, sums: Sums):
        """Writes the sums `[tiles, m]` to y."""
        var m = self.rows.m
        for i in range(tiles):
            var column = self.begin + DOT_ROWS * i
            for row in range(m):
                var target = self.member.y.unsafe_offset(self.rows.order[unsafe_offset=row] * self.member.n + column)
                var values = narrow[Self.dtype](sums[unsafe_offset=i * m + row])
                if self.end - column >= DOT_ROWS:
                    target.unsafe_store(values)
                else:
                    for c in range(self.end - column):
                        target[unsafe_offset=c] = values[c]


def part_bytes[E: Encoding]() -> Int:
    return E.BYTES * PART_ELEMENTS // TILE_ELEMENTS


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """The place of a section: a product, and the number of this one's first section."""

    var product: Int
    var start: Int


@fieldwise_init
struct ProductList[dtype: DType, mask: Int](TrivialRegisterPassable):
    """Products whose sections the threads share."""

    var products: Pointer[Product[Self.dtype], MutUntrackedOrigin]
    var count: Int
    var sections: Int
    """The sections of all of them."""
    var depth: Int
    """Rows of w in a section that more than `FEW_ROWS` rows of x meet."""
    var most: Int
    """Rows of x of any product."""
    var columns: Int
    """Tiles along K."""
    var amx: Bool
    """True if threads are to use AMX."""

    def run(self, workers: Workers):
        var counter = LineCounter()
        var taken = counter.at()

        def task(index: Int) {var self, var taken}:
            var bytes = Section[Self.dtype].bytes(self.depth // DOT_ROWS, self.most)
            var memory = List[UInt8](capacity=bytes + CACHE_LINE_BYTES)
            var own = align_to_line(untracked(memory.unsafe_ptr()))
            comptime if HAS_AMX_INT8:
                if self.amx:
                    configure_group_tiles()
            var section = Int(taken[].fetch_add(1))
            var here = self.place(section, Place(0, 0))
            while section < self.sections:
                # Taken early, so that it can be prefetched.
                var next = Int(taken[].fetch_add(1))
                var after = self.place(next, here)
                self.multiply(section, here, next, after, own)
                section = next
                here = after
            comptime if HAS_AMX_INT8:
                if self.amx:
                    tile_release()
            _ = memory^

        run_tasks(task, max(1, min(self.sections, workers.count)), workers)
        _ = counter^

    @always_inline
    def place(self, section: Int, before: Place) -> Place:
        """The place of a section, given that of an earlier one."""
        var at = before
        while at.product < self.count:
            var next = at.start + self.products[unsafe_offset=at.product].sections(self.depth)
            if section < next:
                break
            at = Place(at.product + 1, next)
        return at

    @always_inline
    def multiply(self, section: Int, here: Place, next: Int, after: Place, memory: BytePointer):
        """Computes a section while the next one is prefetched."""
        ref product = self.products[unsafe_offset=here.product]
        var depth = product.depth(self.depth)
        var begin = (section - here.start) * depth
        var member = product.member
        var coming = Coming(member.w.unsafe_offset(begin * member.row_bytes), member.row_bytes)
        if after.product < self.count:
            ref other = self.products[unsafe_offset=after.product]
            var row = (next - after.start) * other.depth(self.depth)
            coming = Coming(other.member.w.unsafe_offset(row * other.member.row_bytes), other.member.row_bytes)
        var own = Section[Self.dtype](
            member,
            product.rows,
            begin,
            min(member.n, begin + depth),
            self.columns,
            memory,
            coming,
            self.amx,
        )
        comptime for i in range(ENCODINGS.length):
            self.start[ENCODINGS[i]](own)

    @always_inline
    def start[E: Encoding](self, section: Section[Self.dtype]):
        """Multiplies a section whose weights are in this encoding; others are no part of the mask's code."""
        comptime if (Self.mask >> E.INDEX) & 1:
            if section.member.encoding == E.INDEX:
                section.multiply[E]()
