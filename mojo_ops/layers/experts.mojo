"""A mixture of experts beside its products: which experts each row chooses, their gated units, the sum over them."""

from std.math import exp

from ..isa.convert import FloatVector, LANES, narrow, widen
from ..isa.threads import Workers, for_rows
from .elementwise import SILU, activated
from .rms_norm import rounded

comptime CLAMPED: StaticString = "clamped"
comptime FloatPointer = Pointer[Float32, MutUntrackedOrigin]


@fieldwise_init
struct ExpertChoice(TrivialRegisterPassable):
    """The experts of each row of `logits [rows, count]`, and their weights, both `[rows, chosen]`, in float32.

    Scores are the softmax, or the sigmoids, of a row. Experts are chosen by the greatest scores plus `bias [count]`, in
    descending order, of equal ones the lowest index first; from the `chosen_groups` groups whose greatest score, of
    sigmoids the sum of their two greatest, is greatest. Weights are scores without the bias, divided by their sum where
    they `sum_to_one`, times `scale`. NaN is chosen last, and an index is always one of `count`.

    Where `jitter` is not 0, weights are those of `weigh_near` (SparseMixer, arXiv:2409.12136).
    """

    var weights: FloatPointer
    var experts: Pointer[Int32, MutUntrackedOrigin]
    var logits: FloatPointer
    var bias: FloatPointer
    var rows: Int
    var count: Int
    var chosen: Int
    var groups: Int
    var chosen_groups: Int
    var has_bias: Bool
    var sigmoid: Bool
    var sum_to_one: Bool
    var scale: Float32
    var jitter: Float32

    @no_inline
    def run(self, workers: Workers):
        """Chooses for all rows on up to `workers` threads. The sizes were checked."""

        def task(begin: Int, end: Int) {var self}:
            var scores = List[Float32](length=self.count, fill=0)
            var by = List[Float32](length=self.count, fill=0)
            var open = List[Bool](length=self.count, fill=True)
            var of_groups = List[Float32](length=self.groups, fill=0)
            var open_groups = List[Bool](length=self.groups, fill=True)
            for row in range(begin, end):
                self.score(row, scores)
                for e in range(self.count):
                    by[e] = scores[e] + (self.bias[unsafe_offset=e] if self.has_bias else 0)
                    open[e] = self.groups == 1
                if self.groups > 1:
                    self.open_greatest_groups(by, open, of_groups, open_groups)
                self.choose(row, scores, by, open)
                if self.jitter != 0:
                    self.weigh_near(row)

        for_rows(task, self.rows, 64 * self.count, workers)

    def score(self, row: Int, mut scores: List[Float32]):
        """Fills in the scores of a row."""
        var logits = self.logits.unsafe_offset(row * self.count)
        if self.sigmoid:
            for e in range(self.count):
                scores[e] = 1 / (1 + exp(-logits[unsafe_offset=e]))
            return
        var greatest = logits[unsafe_offset=0]
        for e in range(1, self.count):
            greatest = max(greatest, logits[unsafe_offset=e])
        var total = Float32(0)
        for e in range(self.count):
            scores[e] = exp(logits[unsafe_offset=e] - greatest)
            total += scores[e]
        for e in range(self.count):
            scores[e] = scores[e] / total

    def open_greatest_groups(
        self,
        by: List[Float32],
        mut open: List[Bool],
        mut of_groups: List[Float32],
        mut open_groups: List[Bool],
    ):
        """Opens the experts of the groups to choose from."""
        var size = self.count // self.groups
        for group in range(self.groups):
            var first = group * size
            for e in range(first, first + size):
                open[e] = True
            var best = greatest_of(by, open, first, first + size)
            of_groups[group] = by[best]
            if self.sigmoid:
                open[best] = False
                of_groups[group] += by[greatest_of(by, open, first, first + size)]
            for e in range(first, first + size):
                open[e] = False
            open_groups[group] = True
        for _ in range(self.chosen_groups):
            var group = greatest_of(of_groups, open_groups, 0, self.groups)
            open_groups[group] = False
            for e in range(group * size, (group + 1) * size):
                open[e] = True

    def choose(self, row: Int, scores: List[Float32], by: List[Float32], mut open: List[Bool]):
        """Writes the experts of a row and their weights."""
        var weights = self.weights.unsafe_offset(row * self.chosen)
        var total = Float32(0)
        for at in range(self.chosen):
            var best = greatest_of(by, open, 0, self.count)
            open[best] = False
            self.experts.unsafe_offset(row * self.chosen + at)[] = Int32(best)
            weights[unsafe_offset=at] = scores[best]
            total += scores[best]
        var factor = self.scale / total if self.sum_to_one else self.scale
        for at in range(self.chosen):
            weights[unsafe_offset=at] = weights[unsafe_offset=at] * factor

    def weigh_near(self, row: Int):
        """Writes as each weight the expert's share of a softmax over those not chosen before it whose logits x are near
        its own m: `(m - x) / max(|x|, m) <= 2 jitter`.
        """
        var logits = self.logits.unsafe_offset(row * self.count)
        var experts = self.experts.unsafe_offset(row * self.chosen)
        for at in range(self.chosen):
            var m = logits[unsafe_offset=Int(experts[unsafe_offset=at])]
            var total = Float32(0)
            for e in range(self.count):
                var x = logits[unsafe_offset=e]
                var is_far = (m - x) / max(abs(x), m) > 2 * self.jitter
                for earlier in range(at):
                    is_far = is_far or Int(experts[unsafe_offset=earlier]) == e
                if not is_far:
                    total += exp(x - m)
            self.weights.unsafe_offset(row * self.chosen + at)[] = self.scale / total


def greatest_of(values: List[Float32], open: List[Bool], first: Int, end: Int) -> Int:
    """The first of the greatest values that are open; NaN is less than any number. One at least is open."""
    var best = -1
    for at in range(first, end):
        if open[at] and (best < 0 or values[at] > values[best] or values[best] != values[best]):
            best = at
    return best


@fieldwise_init
struct GatedHalves[dtype: DType, activation: StaticString](TrivialRegisterPassable):
    """`y [rows, columns]` from the halves gate and up of each row of `x [rows, 2 columns]`.

    SiLU: `silu(gate) up`, the activation rounded to `dtype` and then the product. CLAMPED (GPT-OSS):
    `(up + 1) gate sigmoid(alpha gate)`, gate at most `limit`, up within `-limit` and it, rounded once.
    """

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var rows: Int
    var columns: Int
    var alpha: Float32
    var limit: Float32

    @no_inline
    def run(self, workers: Workers):
        """Computes all rows on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            var whole = self.columns // LANES * LANES
            for row in range(begin, end):
                for d in range(0, whole, LANES):
                    self.part[LANES](row, d)
                for d in range(whole, self.columns):
                    self.part[1](row, d)

        for_rows(task, self.rows, self.columns, workers)

    @always_inline
    def part[width: Int](self, row: Int, d: Int):
        """Computes `width` elements of a row."""
        var at = 2 * row * self.columns + d
        var gate = widen[width](self.x.unsafe_offset(at))
        var up = widen[width](self.x.unsafe_offset(at + self.columns))
        var units: type_of(gate)
        comptime if Self.activation == CLAMPED:
            gate = gate.gt(self.limit).select(self.limit, gate)  # NaN stays
            up = up.gt(self.limit).select(self.limit, up)
            up = up.lt(-self.limit).select(-self.limit, up)
            units = (up + 1) * gate / (1 + exp(-self.alpha * gate))
        else:
            units = rounded[Self.dtype](activated[SILU](gate)) * up
        self.y.unsafe_store(row * self.columns + d, narrow[Self.dtype](units))


@fieldwise_init
struct WeightedSum[dtype: DType](TrivialRegisterPassable):
    """`y [rows, columns]`: the sum of `count` rows of `x [rows, count, columns]` by `weights [rows, count]`, in float32,
    one after the other, rounded once."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var weights: FloatPointer
    var rows: Int
    var count: Int
    var columns: Int

    @no_inline
    def run(self, workers: Workers):
        """Computes all rows on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            var whole = self.columns // LANES * LANES
            for row in range(begin, end):
                for d in range(0, whole, LANES):
                    self.part[LANES](row, d)
                for d in range(whole, self.columns):
                    self.part[1](row, d)

        for_rows(task, self.rows, self.count * self.columns, workers)

    @always_inline
    def part[width: Int](self, row: Int, d: Int):
        """Computes `width` elements of a row."""
        var total = SIMD[DType.float32, width](0)
        for c in range(self.count):
            var at = row * self.count + c
            total += widen[width](self.x.unsafe_offset(at * self.columns + d)) * self.weights[unsafe_offset=at]
        self.y.unsafe_store(row * self.columns + d, narrow[Self.dtype](total))
