"""Rows of one KV head in float64: slow, for what float32 leaves infinite or NaN though it need not be.

* Scores or weighted values overflow float32, and the result does not.
* The rows of a block share V: where a slot holds infinity or NaN, the weight 0 of a row that does not see it makes NaN.

A result that is NaN because the row sees NaN stays as it is: what a model computes after its first NaN would otherwise
take minutes.
"""

from std.math import ceil, ldexp, log2
from std.utils.numerics import isfinite, neg_inf

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.codes import is_codes, load_codes, scale_of
from ...isa.convert import narrow
from ..logits import Logits
from ..params import AttentionRows
from ..rope import RotaryEmbedding
from ..softmax import exp2

comptime STEP = 8
"""Elements of head_dim that are computed at once: head_dim is a multiple of 8."""
comptime MINUS_INFINITY_64 = neg_inf[DType.float64]()


@no_inline
def recompute_not_finite[
    dtype: DType, //, latent: Bool = False
](
    rows: AttentionRows[dtype, ...],
    first_row: Int,
    num_rows: Int,
    kv_head: Int,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    rotary: RotaryEmbedding,
):
    """Writes o again, of some rows of one request and the query heads of one KV head, where it or the lse is infinite
    or NaN and the row sees no NaN that explains it; also the lse where that is not finite.

    Parameters:
        dtype: The dtype of the queries.
        latent: Whether a key is a token's V and then its K.

    Args:
        rows: The rows of the call.
        first_row: The first row.
        num_rows: Rows.
        kv_head: The KV head.
        k: The keys.
        v: The values.
        logits: The options of the call.
        rotary: What keys are rotated by.
    """
    var value_dim = v.head_dim()
    var group = rows.num_heads // k.num_heads()
    var request = Int(rows.row_batch[unsafe_offset=first_row])
    var begin = Int.MAX
    var end = 0
    for row in range(first_row, first_row + num_rows):
        var length = rows.length(row)
        if length > 0:
            begin = min(begin, rows.first_token(row, logits))
            end = max(end, length)
    var nans = NanTokens(k, v, request, kv_head, begin, end, latent=latent)
    for row in range(first_row, first_row + num_rows):
        if not rows.sees_any(row, logits):
            continue
        for query in range(kv_head * group, (kv_head + 1) * group):
            var at = row * rows.num_heads + query
            var has_lse = isfinite(rows.lse[unsafe_offset=at])
            var explained: Bool
            if has_lse:
                explained = nans.explain_values(rows, row, query, logits)
            else:
                explained = has_nan(rows.q.unsafe_offset(at * k.head_dim()), k.head_dim())
                explained |= nans.keys.seen_by(rows, row, logits)
                comptime if latent:
                    explained |= has_nan(rows.q_latent.unsafe_offset(at * value_dim), value_dim)
            if not explained:
                attend_in_float64[latent](rows, row, query, k, v, logits, rotary, writes_lse=not has_lse)


@fieldwise_init
struct FirstAndLast(TrivialRegisterPassable):
    """The first and the last token of some."""

    var first: Int
    var last: Int

    def add(mut self, token: Int):
        """Adds a token after those before it."""
        self.first = min(self.first, token)
        self.last = token

    def seen_by(self, rows: AttentionRows, row: Int, logits: Logits) -> Bool:
        """Return whether a row sees the first or the last."""
        return rows.sees(row, self.first, logits) or rows.sees(row, self.last, logits)


struct NanTokens:
    """The tokens of a request that hold NaN in one KV head, as far as the first and the last tell."""

    var keys: FirstAndLast
    """Tokens whose K holds NaN."""
    var values: List[FirstAndLast]
    """`[Dv]`: tokens whose V is NaN there."""

    def __init__(
        out self, k: PagedKVCache, v: type_of(k), request: Int, kv_head: Int, begin: Int, end: Int, *, latent: Bool
    ):
        """Reads the tokens `[begin, end)`. Where `latent`, V is part of the keys."""
        var dim = v.head_dim()
        self.keys = FirstAndLast(Int.MAX, -1)
        self.values = List[FirstAndLast](length=dim, fill=FirstAndLast(Int.MAX, -1))
        for token in range(begin, end):
            var in_key = has_nan(k.block_paged_ptr[1](request, token, kv_head), k.head_dim())
            var value = v.block_paged_ptr[1](request, token, kv_head)
            for d in range(0, dim, STEP):
                var is_nan = nan_lanes(value, d, dim)
                if is_nan.reduce_or():
                    in_key |= latent
                    for i in range(STEP):
                        if is_nan[i]:
                            self.values[d + i].add(token)
            if in_key:
                self.keys.add(token)

    def explain_values(self, rows: AttentionRows, row: Int, query: Int, logits: Logits) -> Bool:
        """Return whether all infinite or NaN elements of a query head's o `[Dv]` come from a NaN that the row sees."""
        var o = rows.o.unsafe_offset((row * rows.num_heads + query) * len(self.values))
        for d in range(len(self.values)):
            if not isfinite(o[unsafe_offset=d].cast[DType.float32]()):
                if not self.values[d].seen_by(rows, row, logits):
                    return False
        return True


@always_inline
def numbers[dtype: DType, //](head: Pointer[Scalar[dtype], _], d: Int, head_dim: Int) -> SIMD[DType.float32, STEP]:
    """The `STEP` elements from `d` on of a stored head."""
    comptime if is_codes(dtype):
        return load_codes[STEP](head, d) * scale_of(head, head_dim)
    else:
        return head.unsafe_load[width=STEP](d).cast[DType.float32]()


@always_inline
def nan_lanes[dtype: DType, //](head: Pointer[Scalar[dtype], _], d: Int, head_dim: Int) -> SIMD[DType.bool, STEP]:
    """Return which of the `STEP` elements from `d` on of a stored head are NaN."""
    var x = numbers(head, d, head_dim)
    return ~x.eq(x)  # not `x.ne(x)`, which MAX compiles to a comparison that is false of NaN


@always_inline
def has_nan[dtype: DType, //](source: Pointer[Scalar[dtype], _], count: Int) -> Bool:
    """Return whether one of `count` elements is NaN, a multiple of `STEP`."""
    var found = SIMD[DType.bool, STEP](fill=False)
    for d in range(0, count, STEP):
        found |= nan_lanes(source, d, count)
    return found.reduce_or()


@no_inline
def attend_in_float64[
    dtype: DType, //, latent: Bool = False
](
    rows: AttentionRows[dtype, ...],
    row: Int,
    query: Int,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    rotary: RotaryEmbedding,
    *,
    writes_lse: Bool,
):
    """Writes o `[Dv]`, and the lse where it is asked for, of query head `query` of a row that sees a token.

    Nothing but the tokens that the row sees is read. Weights have the precision of float32 and the range of float64.
    """
    var dim = k.head_dim()
    var value_dim = v.head_dim()
    var kv_head = query // (rows.num_heads // k.num_heads())
    var request = Int(rows.row_batch[unsafe_offset=row])
    var token_offset = rows.masks.offset(request)
    var at = row * rows.num_heads + query
    var memory = List[Float64](length=2 * dim + 3 * value_dim, fill=0)
    var q = memory.unsafe_ptr()  # [D]
    var token = q.unsafe_offset(dim)  # [D]: a token's K
    var q_latent = token.unsafe_offset(dim)  # [Dv]
    var value = q_latent.unsafe_offset(value_dim)  # [Dv]: a token's V
    var acc = value.unsafe_offset(value_dim)  # [Dv]: weighted values, relative to `greatest`
    comptime if latent:
        widen_head(rows.q_latent.unsafe_offset(at * value_dim), q_latent, value_dim)
    widen_head(rows.q.unsafe_offset(at * dim), q, dim)
    rotary.rotate(q, rows.position(row))

    var greatest = MINUS_INFINITY_64
    var total = Float64(0)
    for j in range(rows.first_token(row, logits), rows.length(row)):
        if not rows.sees(row, j, logits):
            continue
        widen_head(k.block_paged_ptr[1](request, j, kv_head), token, dim)
        rotary.rotate(token, token_offset + j)
        var dot = dot_product(q, token, dim)
        comptime if latent:
            widen_head(v.block_paged_ptr[1](request, j, kv_head), value, value_dim)
            dot += dot_product(q_latent, value, value_dim) * Float64(rows.latent_scale)
        var score = logits.score_in_float64(dot, query, token_offset + j)
        if score == MINUS_INFINITY_64:
            continue
        if not score <= greatest:  # NaN counts as greater, and stays
            rescale(acc, power_of_two(greatest - score), value_dim)
            total *= power_of_two(greatest - score)
            greatest = score
        var weight = power_of_two(score - greatest)
        total += weight
        comptime if not latent:
            widen_head(v.block_paged_ptr[1](request, j, kv_head), value, value_dim)
        for d in range(0, value_dim, STEP):
            var sums = acc.unsafe_load[width=STEP](d)
            acc.unsafe_store(d, value.unsafe_load[width=STEP](d).fma(SIMD[DType.float64, STEP](weight), sums))

    if logits.has_sinks:
        var sink = logits.sink_in_float64(query)
        if sink > greatest:
            rescale(acc, power_of_two(greatest - sink), value_dim)
            total *= power_of_two(greatest - sink)
            greatest = sink
        if sink != MINUS_INFINITY_64:
            total += power_of_two(sink - greatest)
    for d in range(0, value_dim, STEP):
        var mean = acc.unsafe_load[width=STEP](d) / (1 if total == 0 else total)
        var out = (mean * Float64(rows.v_scale)).cast[DType.float32]()
        rows.o.unsafe_store(at * value_dim + d, narrow[rows.o_dtype](out))
    if writes_lse:
        rows.lse[unsafe_offset=at] = (greatest + log2(total)).cast[DType.float32]()
    _ = memory^


comptime Doubles = Pointer[mut=True, Float64, _]
comptime DoublesRead = Pointer[mut=False, Float64, _]


@always_inline
def widen_head[dtype: DType, //](source: Pointer[Scalar[dtype], _], target: Doubles, count: Int):
    """Converts `count` stored elements to float64."""
    for d in range(0, count, STEP):
        target.unsafe_store(d, numbers(source, d, count).cast[DType.float64]())


@always_inline
def dot_product(a: DoublesRead, b: DoublesRead, count: Int) -> Float64:
    var products = SIMD[DType.float64, STEP](0)
    for d in range(0, count, STEP):
        products = a.unsafe_load[width=STEP](d).fma(b.unsafe_load[width=STEP](d), products)
    return products.reduce_add()


@always_inline
def rescale(target: Doubles, factor: Float64, count: Int):
    for d in range(0, count, STEP):
        target.unsafe_store(d, target.unsafe_load[width=STEP](d) * factor)


@always_inline
def power_of_two(x: Float64) -> Float64:
    """The 2^x for x <= 0 to 2^-22, NaN for NaN, 0 below the normal numbers of float64."""
    if not x > -1021:
        return 0 if x == x else x
    var exponent = ceil(x)
    return ldexp(Float64(exp2(Float32(x - exponent))), Int32(exponent))
