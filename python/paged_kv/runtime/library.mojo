"""Kernels as a shared library of C functions (`mojo_ops/isa/library_call.mojo`), each behind a comment with its name.

    mojo build --emit object -D PAGED_KV_LIBRARY -D A=bfloat16 -D B=int8 -D C=bfloat16 ...

A, B and C are their dtypes (q or the rows, the cache or the weights, o), MASK the encodings of weights in blocks.
`libraries.py` builds those kernels that a library has, as what is not called takes the compiler time too, and gives
each function the name by which it is called.
"""

from std.sys.defines import get_defined_dtype, get_defined_int

from mojo_ops.isa.team import run_team, start_team

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


# Kernel attention
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend
from mojo_ops.isa.library_call import message_of


@export("paged_kv_attention")
def attention(call: Int) abi("C") -> Int:
    try:
        attend[A, C, B, masked=False, rotates=False](at[AttentionCall](call))
    except error:
        return message_of(error)
    return 0


# Kernel attention_rotated
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend
from mojo_ops.isa.library_call import message_of


@export("paged_kv_attention_rotated")
def attention_rotated(call: Int) abi("C") -> Int:
    try:
        attend[A, C, B, masked=False, rotates=True](at[AttentionCall](call))
    except error:
        return message_of(error)
    return 0


# Kernel masked_attention
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend
from mojo_ops.isa.library_call import message_of


@export("paged_kv_masked_attention")
def masked_attention(call: Int) abi("C") -> Int:
    try:
        attend[A, C, B, masked=True, rotates=False](at[AttentionCall](call))
    except error:
        return message_of(error)
    return 0


# Kernel masked_attention_rotated
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend
from mojo_ops.isa.library_call import message_of


@export("paged_kv_masked_attention_rotated")
def masked_attention_rotated(call: Int) abi("C") -> Int:
    try:
        attend[A, C, B, masked=True, rotates=True](at[AttentionCall](call))
    except error:
        return message_of(error)
    return 0


# Kernel latent
from mojo_ops.attention.cpu.library import attend_latent
from mojo_ops.attention.latent_call import LatentCall
from mojo_ops.isa.library_call import message_of


@export("paged_kv_latent")
def latent(call: Int) abi("C") -> Int:
    try:
        attend_latent[A, C, B](at[LatentCall](call))
    except error:
        return message_of(error)
    return 0


# Kernel merge
from mojo_ops.attention.merge_states import MergeCall


@export("paged_kv_merge")
def merge(call: Int) abi("C") -> Int:
    at[MergeCall](call).run[A]()
    return 0


# Kernel append
from mojo_ops.isa.library_call import message_of
from mojo_ops.transfer.call import AppendCall


@export("paged_kv_append")
def append(call: Int) abi("C") -> Int:
    try:
        at[AppendCall](call).run[A, B]()
    except error:
        return message_of(error)
    return 0


# Kernel move_tokens
from mojo_ops.isa.library_call import message_of
from mojo_ops.transfer.call import MoveTokensCall


@export("paged_kv_move_tokens")
def move_tokens(call: Int) abi("C") -> Int:
    try:
        at[MoveTokensCall](call).run[B]()
    except error:
        return message_of(error)
    return 0


# Kernel gather
from mojo_ops.isa.library_call import message_of
from mojo_ops.transfer.call import GatherCall


@export("paged_kv_gather")
def gather(call: Int) abi("C") -> Int:
    try:
        at[GatherCall](call).run[A, B]()
    except error:
        return message_of(error)
    return 0


# Kernel delta_rule
from mojo_ops.recurrent.call import RecurrenceCall


@export("paged_kv_delta_rule")
def delta_rule(call: Int) abi("C") -> Int:
    at[RecurrenceCall](call).run[delta=True]()
    return 0


# Kernel selective_scan
from mojo_ops.recurrent.call import RecurrenceCall


@export("paged_kv_selective_scan")
def selective_scan(call: Int) abi("C") -> Int:
    at[RecurrenceCall](call).run[delta=False]()
    return 0


# Kernel linear
from mojo_ops.linear.call import LinearCall


@export("paged_kv_linear")
def linear(call: Int) abi("C") -> Int:
    at[LinearCall](call).run[A, B]()
    return 0


# Kernel experts
from mojo_ops.isa.library_call import message_of
from mojo_ops.linear.call import ExpertsCall


@export("paged_kv_experts")
def experts(call: Int) abi("C") -> Int:
    try:
        at[ExpertsCall](call).run[A, B]()
    except error:
        return message_of(error)
    return 0


# Kernel quantised_linear
from mojo_ops.linear.call import LinearCall


@export("paged_kv_quantised_linear")
def quantised_linear(call: Int) abi("C") -> Int:
    at[LinearCall](call).run_quantised[A, MASK]()
    return 0


# Kernel quantised_experts
from mojo_ops.isa.library_call import message_of
from mojo_ops.linear.call import ExpertsCall


@export("paged_kv_quantised_experts")
def quantised_experts(call: Int) abi("C") -> Int:
    try:
        at[ExpertsCall](call).run_quantised[A, MASK]()
    except error:
        return message_of(error)
    return 0


# Kernel take_rows
from mojo_ops.isa.library_call import message_of
from mojo_ops.layers.call import TakeRowsCall


@export("paged_kv_take_rows")
def take_rows(call: Int) abi("C") -> Int:
    try:
        at[TakeRowsCall](call).run()
    except error:
        return message_of(error)
    return 0


# Kernel take_columns
from mojo_ops.layers.call import TakeColumnsCall


@export("paged_kv_take_columns")
def take_columns(call: Int) abi("C") -> Int:
    at[TakeColumnsCall](call).run()
    return 0


# Kernel rms_norm
from mojo_ops.layers.call import RmsNormCall


@export("paged_kv_rms_norm")
def rms_norm(call: Int) abi("C") -> Int:
    at[RmsNormCall](call).run[A]()
    return 0


# Kernel rotate
from mojo_ops.layers.call import RotateCall


@export("paged_kv_rotate")
def rotate(call: Int) abi("C") -> Int:
    at[RotateCall](call).run[A]()
    return 0


# Kernel hadamard
from mojo_ops.isa.library_call import message_of
from mojo_ops.layers.call import HadamardCall


@export("paged_kv_hadamard")
def hadamard(call: Int) abi("C") -> Int:
    try:
        at[HadamardCall](call).run[A]()
    except error:
        return message_of(error)
    return 0


# Kernel rotary_tables
from mojo_ops.layers.call import RotaryTablesCall


@export("paged_kv_rotary_tables")
def rotary_tables(call: Int) abi("C") -> Int:
    at[RotaryTablesCall](call).run()
    return 0


# Kernel add_scaled
from mojo_ops.layers.call import AddScaledCall


@export("paged_kv_add_scaled")
def add_scaled(call: Int) abi("C") -> Int:
    at[AddScaledCall](call).run[A]()
    return 0


# Kernel gate_units
from mojo_ops.isa.library_call import message_of
from mojo_ops.layers.call import GateUnitsCall


@export("paged_kv_gate_units")
def gate_units(call: Int) abi("C") -> Int:
    try:
        at[GateUnitsCall](call).run[A]()
    except error:
        return message_of(error)
    return 0


# Kernel convert
from mojo_ops.isa.library_call import message_of
from mojo_ops.layers.call import ConvertCall


@export("paged_kv_convert")
def convert(call: Int) abi("C") -> Int:
    try:
        at[ConvertCall](call).run()
    except error:
        return message_of(error)
    return 0


# Kernel step_rows
from mojo_ops.layers.call import StepRowsCall


@export("paged_kv_step_rows")
def step_rows(call: Int) abi("C") -> Int:
    at[StepRowsCall](call).run()
    return 0


# Kernel ragged_rows
from mojo_ops.isa.library_call import message_of
from mojo_ops.transfer.call import RaggedRowsCall


@export("paged_kv_ragged_rows")
def ragged_rows(call: Int) abi("C") -> Int:
    try:
        at[RaggedRowsCall](call).run()
    except error:
        return message_of(error)
    return 0


# Kernel tree_rows
from mojo_ops.isa.library_call import message_of
from mojo_ops.transfer.call import TreeRowsCall


@export("paged_kv_tree_rows")
def tree_rows(call: Int) abi("C") -> Int:
    try:
        at[TreeRowsCall](call).run()
    except error:
        return message_of(error)
    return 0


# Kernel unary
from mojo_ops.isa.library_call import message_of
from mojo_ops.layers.call import UnaryCall


@export("paged_kv_unary")
def unary(call: Int) abi("C") -> Int:
    try:
        at[UnaryCall](call).run[A]()
    except error:
        return message_of(error)
    return 0


# Kernel binary
from mojo_ops.isa.library_call import message_of
from mojo_ops.layers.call import BinaryCall


@export("paged_kv_binary")
def binary(call: Int) abi("C") -> Int:
    try:
        at[BinaryCall](call).run[A]()
    except error:
        return message_of(error)
    return 0


# Kernel program
from mojo_ops.isa.program import ProgramCall


@export("paged_kv_program")
def program(call: Int) abi("C") -> Int:
    return at[ProgramCall](call).run()


# Kernel quantised_rows
from mojo_ops.isa.library_call import message_of
from mojo_ops.linear.call import QuantisedRowsCall


@export("paged_kv_quantised_rows")
def quantised_rows(call: Int) abi("C") -> Int:
    try:
        at[QuantisedRowsCall](call).run[MASK]()
    except error:
        return message_of(error)
    return 0


# Kernel mean
from mojo_ops.layers.call import MeanCall


@export("paged_kv_mean")
def mean(call: Int) abi("C") -> Int:
    at[MeanCall](call).run()
    return 0


# Kernel choose_experts
from mojo_ops.layers.call import ChooseExpertsCall


@export("paged_kv_choose_experts")
def choose_experts(call: Int) abi("C") -> Int:
    at[ChooseExpertsCall](call).run()
    return 0


# Kernel gate_halves
from mojo_ops.layers.call import GateHalvesCall


@export("paged_kv_gate_halves")
def gate_halves(call: Int) abi("C") -> Int:
    at[GateHalvesCall](call).run[A]()
    return 0


# Kernel weighted_sum
from mojo_ops.layers.call import WeightedSumCall


@export("paged_kv_weighted_sum")
def weighted_sum(call: Int) abi("C") -> Int:
    at[WeightedSumCall](call).run[A]()
    return 0


# Kernel causal_conv1d
from mojo_ops.isa.library_call import message_of
from mojo_ops.recurrent.call import CausalConv1dCall


@export("paged_kv_causal_conv1d")
def causal_conv1d(call: Int) abi("C") -> Int:
    try:
        at[CausalConv1dCall](call).run[A]()
    except error:
        return message_of(error)
    return 0


# Kernel layer_recurrence
from mojo_ops.isa.library_call import message_of
from mojo_ops.recurrent.call import LayerRecurrenceCall


@export("paged_kv_layer_recurrence")
def layer_recurrence(call: Int) abi("C") -> Int:
    try:
        at[LayerRecurrenceCall](call).run()
    except error:
        return message_of(error)
    return 0


# Kernel gated_norm
from mojo_ops.recurrent.call import GatedNormCall


@export("paged_kv_gated_norm")
def gated_norm(call: Int) abi("C") -> Int:
    at[GatedNormCall](call).run[A]()
    return 0
