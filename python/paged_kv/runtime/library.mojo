"""Kernels as a shared library of C functions (`mojo_ops/isa/library_call.mojo`).

    mojo build --emit object -D PAGED_KV_LIBRARY -D KINDS=,attention,append, -D A=bfloat16 -D B=int8 -D C=bfloat16 ...

KINDS are the kernels, A, B and C their dtypes (q or the rows, the cache or the weights, o), MASK the encodings of
weights in blocks. `libraries.py` builds it, and gives each function the name by which it is called.
"""

from std.sys.defines import get_defined_dtype, get_defined_int, get_defined_string

from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend, attend_latent
from mojo_ops.attention.latent_call import LatentCall
from mojo_ops.attention.merge_states import MergeCall
from mojo_ops.isa.library_call import message_of
from mojo_ops.isa.team import run_team, start_team
from mojo_ops.linear.call import ExpertsCall, LinearCall
from mojo_ops.transfer.call import AppendCall, GatherCall

comptime KINDS = get_defined_string["KINDS"]()
comptime A = get_defined_dtype["A", DType.float32]()
comptime B = get_defined_dtype["B", DType.float32]()
comptime C = get_defined_dtype["C", DType.float32]()
comptime MASK = get_defined_int["MASK", 0]()


def at[Call: TrivialRegisterPassable](address: Int) -> Call:
    """The operands at an address."""
    var given = address
    return Pointer(to=given).unsafe_bitcast[Pointer[Call, ImmUntrackedOrigin]]()[][]


@export("paged_kv_team_start")
def team_start(threads: Int) abi("C") -> Int:
    """Starts a team of so many threads beside the caller's; its address."""
    return start_team(threads)


@export("paged_kv_team_run")
def team_run(body: Int, shared: Int, threads: UInt32, flags: UInt32, address: Int) abi("C"):
    """A `Team` (`mojo_ops/isa/threads.mojo`)."""
    run_team(body, shared, threads, address)


@export("paged_kv_attention")
def attention(call: Int) abi("C") -> Int:
    comptime if ",attention," in KINDS:
        try:
            attend[A, C, B, masked=False, rotates=False](at[AttentionCall](call))
        except error:
            return message_of(error)
    return 0


@export("paged_kv_attention_rotated")
def attention_rotated(call: Int) abi("C") -> Int:
    comptime if ",attention_rotated," in KINDS:
        try:
            attend[A, C, B, masked=False, rotates=True](at[AttentionCall](call))
        except error:
            return message_of(error)
    return 0


@export("paged_kv_masked_attention")
def masked_attention(call: Int) abi("C") -> Int:
    comptime if ",masked_attention," in KINDS:
        try:
            attend[A, C, B, masked=True, rotates=False](at[AttentionCall](call))
        except error:
            return message_of(error)
    return 0


@export("paged_kv_masked_attention_rotated")
def masked_attention_rotated(call: Int) abi("C") -> Int:
    comptime if ",masked_attention_rotated," in KINDS:
        try:
            attend[A, C, B, masked=True, rotates=True](at[AttentionCall](call))
        except error:
            return message_of(error)
    return 0


@export("paged_kv_latent")
def latent(call: Int) abi("C") -> Int:
    comptime if ",latent," in KINDS:
        try:
            attend_latent[A, C, B](at[LatentCall](call))
        except error:
            return message_of(error)
    return 0


@export("paged_kv_merge")
def merge(call: Int) abi("C") -> Int:
    comptime if ",merge," in KINDS:
        at[MergeCall](call).run[A]()
    return 0


@export("paged_kv_append")
def append(call: Int) abi("C") -> Int:
    comptime if ",append," in KINDS:
        try:
            at[AppendCall](call).run[A, B]()
        except error:
            return message_of(error)
    return 0


@export("paged_kv_gather")
def gather(call: Int) abi("C") -> Int:
    comptime if ",gather," in KINDS:
        try:
            at[GatherCall](call).run[A, B]()
        except error:
            return message_of(error)
    return 0


@export("paged_kv_linear")
def linear(call: Int) abi("C") -> Int:
    comptime if ",linear," in KINDS:
        at[LinearCall](call).run[A, B]()
    return 0


@export("paged_kv_experts")
def experts(call: Int) abi("C") -> Int:
    comptime if ",experts," in KINDS:
        try:
            at[ExpertsCall](call).run[A, B]()
        except error:
            return message_of(error)
    return 0


@export("paged_kv_quantised_linear")
def quantised_linear(call: Int) abi("C") -> Int:
    comptime if ",quantised_linear," in KINDS:
        at[LinearCall](call).run_quantised[A, MASK]()
    return 0


@export("paged_kv_quantised_experts")
def quantised_experts(call: Int) abi("C") -> Int:
    comptime if ",quantised_experts," in KINDS:
        try:
            at[ExpertsCall](call).run_quantised[A, MASK]()
        except error:
            return message_of(error)
    return 0
