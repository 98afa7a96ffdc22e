"""Calls of latent attention as numbers: what an op hands to a library of kernels, and a program that calls one."""

from extensibility import InputTensor, OutputTensor
from std.sys import size_of

from ..cache.checks import check_equal
from ..cache.operands import CacheMemory, KVCachePair
from ..cache.pointers import constant_at, memory_at
from ..isa.call_layout import AddressOf
from ..isa.threads import Workers
from .checks import check_dim, check_width
from .logits import Logits, ScoreOptions
from .params import AttentionRows
from .row_masks import NoMasks


@fieldwise_init
struct LatentOptions(TrivialRegisterPassable):
    """The options of a call, as `LatentOptions.numbers` makes them (`../../python/paged_kv/options.py`)."""

    var scale: Float32
    """Multiplies q_pe . kpe."""
    var latent_scale: Float32
    """Multiplies q_nope . ckv beside it."""
    var v_scale: Float32
    var deterministic: Float32
    """Not 0: a row has the same bits whichever rows are in its call."""


@fieldwise_init
struct LatentCall(TrivialRegisterPassable):
    """O `[R, H, Dckv]` and lse `[R, H]`: the operands of `paged_kv_mla_attention` (`../latent_ops.mojo`)."""

    var o: Int
    var lse: Int
    var q_nope: Int
    var q_pe: Int
    var num_rows: Int
    var num_heads: Int
    var nope_dim: Int
    """The width of q_nope."""
    var pe_dim: Int
    """The width of q_pe."""
    var row_batch: Int
    var row_lengths: Int
    var sinks: Int
    var num_sinks: Int
    var options: AddressOf[LatentOptions]
    var cache: CacheMemory
    """Kpe as K, ckv as V."""
    var workers: Workers

    @staticmethod
    def of(
        o: OutputTensor[rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q_nope: InputTensor[rank=3, ...],
        q_pe: InputTensor[rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        options: InputTensor[dtype=DType.float32, rank=1, ...],
        cache: CacheMemory,
        workers: Workers,
    ) raises -> Self:
        """From the operands of the op; refuses lengths and shapes that do not fit each other."""
        check_equal("options: its length", options.dim_size(0), size_of[LatentOptions]() // size_of[Float32]())
        check_equal("q_nope: its number of rows", q_nope.dim_size(0), q_pe.dim_size(0))
        check_equal("q_nope: its number of heads", q_nope.dim_size(1), q_pe.dim_size(1))
        check_equal("row_batch: its length", row_batch.dim_size(0), q_pe.dim_size(0))
        check_equal("row_lengths: its length", row_lengths.dim_size(0), q_pe.dim_size(0))
        return Self(
            Int(o.unsafe_ptr()),
            Int(lse.unsafe_ptr()),
            Int(q_nope.unsafe_ptr()),
            Int(q_pe.unsafe_ptr()),
            q_pe.dim_size(0),
            q_pe.dim_size(1),
            q_nope.dim_size(2),
            q_pe.dim_size(2),
            Int(row_batch.unsafe_ptr()),
            Int(row_lengths.unsafe_ptr()),
            Int(sinks.unsafe_ptr()),
            sinks.dim_size(0),
            Int(options.unsafe_ptr()),
            cache,
            workers,
        )

    def logits(self) raises -> Logits:
        """Return how scores are scaled, with the sinks; refuse a scale that is not a number."""
        var none = constant_at[DType.float32](self.sinks)
        var options = self.options[]
        var logits = Logits(
            # Without a rotary part the latent one is all there is to scale.
            ScoreOptions(options.scale * (options.latent_scale if self.pe_dim == 0 else 1)),
            window_left=-1,
            alibi_slopes=none,
            has_alibi=False,
            sinks=none,
            has_sinks=self.num_sinks > 0,
        )
        logits.check()
        return logits

    def rows[dtype: DType, o_dtype: DType](self, out rows: AttentionRows[dtype, o_dtype]) raises:
        """The rows; refuses options that do not fit."""
        var options = self.options[]
        rows = {
            memory_at[dtype](self.q_pe),
            memory_at[o_dtype](self.o),
            memory_at[DType.float32](self.lse),
            constant_at[DType.int32](self.row_batch),
            constant_at[DType.int32](self.row_lengths),
            self.num_rows,
            self.num_heads,
            v_scale = options.v_scale,
            rope_theta = 0,
            rope_scale = 1,
            masks = NoMasks(),
            q_latent = memory_at[dtype](self.q_nope),
            latent_scale = options.latent_scale if self.pe_dim > 0 else 1,
        }
        if self.num_sinks > 0:
            check_equal("sinks: its length", self.num_sinks, self.num_heads)
        rows.check()

    def check_cache(self, pair: KVCachePair) raises:
        """Refuses widths of q and the cache that do not fit each other."""
        check_equal("ckv_cache: its KV heads", pair.k.num_heads(), 1)
        check_width("q_nope", self.nope_dim, "the width of ckv_cache", pair.v.head_dim())
        check_width("q_pe", self.pe_dim, "the width of kpe_cache", pair.k.head_dim())
        check_dim("the width of ckv_cache", pair.v.head_dim())
        if pair.k.head_dim() != 0:
            check_dim("the width of kpe_cache", pair.k.head_dim())
