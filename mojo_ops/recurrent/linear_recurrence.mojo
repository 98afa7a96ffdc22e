"""A matrix state for each head, which forgets, learns from k and v, and is read at q: Gated DeltaNet and Mamba-2.

For each row, with the decay d and the rate b of its head: `S = d S`; `u = b (v - S^T k)` (the delta rule) or `u = b v`;
`S = S + k u^T`; `o = S^T q`. S is `[key_dim, value_dim]`, float32.

Columns of S do not depend on each other once k and q are known. So a task has one block of 16 columns, which stays in
the first-level cache while it walks all rows of a request, and passes over it once a row: each pass adds what the row
before left to add, and takes the products of the result with k and q,

    S = d' S + k' u'^T;  m = S^T k;  w = S^T q;  u = b (v - d m);  o = d w + (q k) u

which are three multiplications and additions an element and one product. Chunks of rows as products of matrices (the WY
form, as GPUs have it) take as many, so there is no other form for prompts. Norms of q and k are factors of these sums.
"""

from std.math import ceildiv, exp, log1p, sqrt

from ..isa.convert import FloatVector, LANES
from ..isa.memory import FloatPointer
from ..isa.threads import Workers, for_rows
from .step_states import StepStates

comptime NORM_EPS = Float32(1e-6)
"""The epsilon of the norm of q and k, as the families have it."""
comptime SCALARS = 5
"""Numbers of each row and head: decay, rate, q's factor, k's factor, and the product of both."""
comptime DECAY, RATE, OF_Q, OF_K, Q_BY_K = 0, 1, 2, 3, 4


@fieldwise_init
struct Heads(TrivialRegisterPassable):
    """The places of the parts of a row of inputs: `heads` values, and the queries and keys of `key_heads`."""

    var heads: Int
    var key_heads: Int
    var key_dim: Int
    var value_dim: Int
    var q: Int
    """The place of the first query in a row; likewise of the first key and value."""
    var k: Int
    var v: Int
    var width: Int
    """Elements of a row."""
    var tiled: Bool
    """Head h has key head `h % key_heads`; else `h // (heads / key_heads)`."""

    @always_inline
    def key_head(self, head: Int) -> Int:
        return head % self.key_heads if self.tiled else head // (self.heads // self.key_heads)

    @always_inline
    def blocks(self) -> Int:
        """Blocks of columns of a head."""
        return (self.value_dim + LANES - 1) // LANES


@fieldwise_init
struct LinearRecurrence[delta: Bool, given: Bool = False](TrivialRegisterPassable):
    """The recurrence of all rows of a step: inputs `x [rows, width]`, gates `a` and `b` `[rows, heads]`, `rates`, `bias`
    and `skip` `[heads]`, o `[rows, heads * value_dim]`, all float32.

    Of Gated DeltaNet (`delta`): `d = exp(-exp(rates) softplus(a + bias))`, the rate is `sigmoid(b)`, and q and k are
    divided by their lengths. Of Mamba-2: `t = softplus(a + bias)` within `least` and `most`, `d = exp(-exp(rates) t)`,
    the rate is t, and o has `skip v` added to it. q is multiplied by `q_scale`. Where they are `given`, a is the decay
    and b the rate, and q and k are divided by their lengths where that is asked for.
    matrices: `[slots, layers, heads, blocks, key_dim, 16]`; columns past value_dim are 0.
    """

    var o: FloatPointer
    var x: FloatPointer
    var a: FloatPointer
    var b: FloatPointer
    var rates: FloatPointer
    var bias: FloatPointer
    var skip: FloatPointer
    var matrices: FloatPointer
    var states: StepStates
    var at: Heads
    var rows: Int
    var layers: Int
    var layer: Int
    var q_scale: Float32
    var least: Float32
    var most: Float32
    var normed: Bool

    @no_inline
    def run(self, workers: Workers):
        """Computes all requests on up to `workers` threads. The table was checked."""
        var scalars = List[Float32](unsafe_uninit_length=self.rows * self.at.heads * SCALARS)
        var numbers = rebind[FloatPointer](scalars.unsafe_ptr())

        def of_rows(begin: Int, end: Int) {var self, var numbers}:
            for row in range(begin, end):
                for head in range(self.at.heads):
                    self.fill_scalars(numbers.unsafe_offset((row * self.at.heads + head) * SCALARS), row, head)

        for_rows(of_rows, self.rows, 4 * self.at.heads * self.at.key_dim, workers)
        var blocks, requests = self.at.blocks(), self.states.requests

        # Neighbours are the same block of different requests: each thread gets a like share of every one.
        def of_blocks(begin: Int, end: Int) {var self, var numbers, var blocks, var requests}:
            for index in range(begin, end):
                var block = index // requests
                self.walk(index % requests, block // blocks, block % blocks, numbers)

        var elements = self.at.key_dim * LANES * ceildiv(self.rows, max(1, requests))
        for_rows(of_blocks, requests * self.at.heads * blocks, elements, workers)
        _ = scalars^

    def fill_scalars(self, to: FloatPointer, row: Int, head: Int):
        """Computes the numbers of a row and head."""
        var inputs = self.x.unsafe_offset(row * self.at.width)
        var key_head = self.at.key_head(head)
        var q = inputs.unsafe_offset(self.at.q + key_head * self.at.key_dim)
        var k = inputs.unsafe_offset(self.at.k + key_head * self.at.key_dim)
        var qk = dot(q, k, self.at.key_dim)
        var of_q, of_k = self.q_scale, Float32(1)
        var gate = row * self.at.heads + head
        if self.normed:
            of_q /= sqrt(dot(q, q, self.at.key_dim) + NORM_EPS)
            of_k /= sqrt(dot(k, k, self.at.key_dim) + NORM_EPS)
        to.unsafe_offset(OF_Q)[] = of_q
        to.unsafe_offset(OF_K)[] = of_k
        to.unsafe_offset(Q_BY_K)[] = qk * of_q * of_k
        comptime if Self.given:
            to.unsafe_offset(DECAY)[] = self.a[unsafe_offset=gate]
            to.unsafe_offset(RATE)[] = self.b[unsafe_offset=gate]
            return
        var step = softplus(self.a[unsafe_offset=gate] + self.bias[unsafe_offset=head])
        var rate: Float32
        comptime if Self.delta:
            rate = 1 / (1 + exp(-self.b[unsafe_offset=gate]))
        else:
            step = min(max(step, self.least), self.most)
            rate = step
        to.unsafe_offset(DECAY)[] = exp(-exp(self.rates[unsafe_offset=head]) * step)
        to.unsafe_offset(RATE)[] = rate

    @always_inline
    def block(self, slot: Int, head: Int, index: Int) -> FloatPointer:
        """A block of columns of a state `[key_dim, 16]`."""
        var of_layer = (slot * self.layers + self.layer) * self.at.heads + head
        return self.matrices.unsafe_offset((of_layer * self.at.blocks() + index) * self.at.key_dim * LANES)

    def walk(self, request: Int, head: Int, index: Int, scalars: FloatPointer):
        """Computes a block of columns of a head for all rows of a request, and saves it."""
        var begin, rows = self.states.first_row(request), self.states.num_rows(request)
        var source = self.states.source(request)
        var save = self.states.first_save(request)
        # Between saves the block lies where the next one wants it.
        var s = self.block(self.states.save_slot(save), head, index)
        var from_ = self.block(source, head, index) if source >= 0 else s
        var is_zero = source < 0
        var decay = Float32(1)
        var u = FloatVector(0)
        var k = self.x  # of the row before; not read where there is none
        for row in range(rows):
            var inputs = self.x.unsafe_offset((begin + row) * self.at.width)
            var numbers = scalars.unsafe_offset(((begin + row) * self.at.heads + head) * SCALARS)
            var key_head = self.at.key_head(head)
            var next_k = inputs.unsafe_offset(self.at.k + key_head * self.at.key_dim)
            var q = inputs.unsafe_offset(self.at.q + key_head * self.at.key_dim)
            var m, w = FloatVector(0), FloatVector(0)
            if row == 0:
                if not is_zero:
                    m, w = self.read(from_, next_k, q)
            elif row == 1 and is_zero:
                m, w = self.begin(s, k, u, next_k, q)
            else:
                m, w = self.advance(s, from_, decay, k, u, next_k, q)
                from_ = s
            k, decay = next_k, numbers[unsafe_offset=DECAY]
            var of_k = numbers[unsafe_offset=OF_K]
            var v = self.value(inputs, head, index)
            comptime if Self.delta:
                u = numbers[unsafe_offset=RATE] * (v - (decay * of_k) * m)
            else:
                u = numbers[unsafe_offset=RATE] * v
            var o = (decay * numbers[unsafe_offset=OF_Q]) * w + numbers[unsafe_offset=Q_BY_K] * u
            comptime if not Self.delta:
                o = self.skip[unsafe_offset=head] * v + o
            self.store(o, begin + row, head, index)
            u = u * of_k
            if row + 1 == self.states.save_count(save):
                # What is pending goes into the slot, and nothing is pending then.
                var to = self.block(self.states.save_slot(save), head, index)
                if is_zero and row == 0:
                    self.outer(to, k, u)
                else:
                    self.update(to, from_, decay, k, u)
                decay, u, from_ = Float32(1), FloatVector(0), to
                is_zero = False
                save += 1
                if row + 1 < rows:
                    s = self.block(self.states.save_slot(save), head, index)

    @always_inline
    def value(self, inputs: FloatPointer, head: Int, index: Int) -> FloatVector:
        """16 columns of a row's value, zeros past its end."""
        var at = inputs.unsafe_offset(self.at.v + head * self.at.value_dim + index * LANES)
        var left = self.at.value_dim - index * LANES
        if left >= LANES:
            return at.unsafe_load[width=LANES]()
        var v = FloatVector(0)
        for c in range(left):
            v[c] = at[unsafe_offset=c]
        return v

    @always_inline
    def store(self, o: FloatVector, row: Int, head: Int, index: Int):
        """Stores 16 columns of a row's output, or those that there are."""
        var at = self.o.unsafe_offset((row * self.at.heads + head) * self.at.value_dim + index * LANES)
        var left = self.at.value_dim - index * LANES
        if left >= LANES:
            at.unsafe_store(0, o)
        else:
            for c in range(left):
                at.unsafe_offset(c)[] = o[c]

    @always_inline
    def read(self, s: FloatPointer, k: FloatPointer, q: FloatPointer) -> Tuple[FloatVector, FloatVector]:
        """The products of a block with k and q."""
        var sums = BlockSums[Self.delta]()
        for r in range(0, self.at.key_dim & ~1, 2):
            sums.add[0](s.unsafe_load[width=LANES](r * LANES), k, q, r)
            sums.add[1](s.unsafe_load[width=LANES](r * LANES + LANES), k, q, r + 1)
        if self.at.key_dim & 1 != 0:
            var last = self.at.key_dim - 1
            sums.add[0](s.unsafe_load[width=LANES](last * LANES), k, q, last)
        return sums.totals()

    @always_inline
    def begin(
        self, s: FloatPointer, k: FloatPointer, u: FloatVector, next_k: FloatPointer, q: FloatPointer
    ) -> Tuple[FloatVector, FloatVector]:
        """A block that was zero: what the first row adds, and its products with k and q of the next."""
        self.outer(s, k, u)
        return self.read(s, next_k, q)

    @always_inline
    def advance(
        self,
        s: FloatPointer,
        from_: FloatPointer,
        decay: Float32,
        k: FloatPointer,
        u: FloatVector,
        next_k: FloatPointer,
        q: FloatPointer,
    ) -> Tuple[FloatVector, FloatVector]:
        """Adds what a row left to add, and takes the products with k and q of the next."""
        var sums = BlockSums[Self.delta]()
        for r in range(0, self.at.key_dim & ~1, 2):
            var one = u.fma(k[unsafe_offset=r], from_.unsafe_load[width=LANES](r * LANES) * decay)
            var two = u.fma(k[unsafe_offset=r + 1], from_.unsafe_load[width=LANES](r * LANES + LANES) * decay)
            s.unsafe_store(r * LANES, one)
            s.unsafe_store(r * LANES + LANES, two)
            sums.add[0](one, next_k, q, r)
            sums.add[1](two, next_k, q, r + 1)
        if self.at.key_dim & 1 != 0:
            var last = self.at.key_dim - 1
            var one = u.fma(k[unsafe_offset=last], from_.unsafe_load[width=LANES](last * LANES) * decay)
            s.unsafe_store(last * LANES, one)
            sums.add[0](one, next_k, q, last)
        return sums.totals()

    @always_inline
    def update(self, to: FloatPointer, from_: FloatPointer, decay: Float32, k: FloatPointer, u: FloatVector):
        """Adds what a row left to add."""
        for r in range(self.at.key_dim):
            var each = u.fma(k[unsafe_offset=r], from_.unsafe_load[width=LANES](r * LANES) * decay)
            to.unsafe_store(r * LANES, each)

    @always_inline
    def outer(self, to: FloatPointer, k: FloatPointer, u: FloatVector):
        """The block after a first row."""
        for r in range(self.at.key_dim):
            to.unsafe_store(r * LANES, k[unsafe_offset=r] * u)


struct BlockSums[delta: Bool](TrivialRegisterPassable):
    """The products of a block's rows with k and q, even and odd rows apart: always in this order, so that a text's
    results do not depend on the steps that it comes in."""

    var m: FloatVector
    var m_odd: FloatVector
    var w: FloatVector
    var w_odd: FloatVector

    @always_inline
    def __init__(out self):
        self.m, self.m_odd, self.w, self.w_odd = FloatVector(0), FloatVector(0), FloatVector(0), FloatVector(0)

    @always_inline
    def add[odd: Int](mut self, row: FloatVector, k: FloatPointer, q: FloatPointer, r: Int):
        """Adds row r of a block."""
        comptime if odd == 0:
            comptime if Self.delta:
                self.m = row.fma(k[unsafe_offset=r], self.m)
            self.w = row.fma(q[unsafe_offset=r], self.w)
        else:
            comptime if Self.delta:
                self.m_odd = row.fma(k[unsafe_offset=r], self.m_odd)
            self.w_odd = row.fma(q[unsafe_offset=r], self.w_odd)

    @always_inline
    def totals(self) -> Tuple[FloatVector, FloatVector]:
        """The products with k (of use for the delta rule alone) and with q."""
        return self.m + self.m_odd, self.w + self.w_odd


def dot(x: FloatPointer, y: FloatPointer, count: Int) -> Float32:
    """The product of two vectors."""
    var sums = FloatVector(0)
    var whole = count // LANES * LANES
    for d in range(0, whole, LANES):
        sums = x.unsafe_load[width=LANES](d).fma(y.unsafe_load[width=LANES](d), sums)
    var total = sums.reduce_add()
    for d in range(whole, count):
        total += x[unsafe_offset=d] * y[unsafe_offset=d]
    return total


def softplus(x: Float32) -> Float32:
    """`log(1 + exp(x))`; x itself where that is the same in float32, and NaN stays."""
    if x > 20:
        return x
    return log1p(exp(x))
