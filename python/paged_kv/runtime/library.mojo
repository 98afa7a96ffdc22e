"""Kernels as a shared library of C functions (`mojo_ops/isa/library_call.mojo`).

`libraries.py` makes a program of the head, the kernels that are wanted, each behind a comment with its name, and an
export of each of them for each set of dtypes. So libraries that are built together are one program: what the compiler
does for all of it (reading the standard library and this package) takes most of the time of a library.
"""

from mojo_ops.isa.call_layout import add, add_layout
from mojo_ops.isa.library_call import copied
from mojo_ops.isa.team import run_team, start_team


def at[Call: TrivialRegisterPassable](address: Int) -> Call:
    """The operands at an address."""
    var operands = address
    return Pointer(to=operands).unsafe_bitcast[Pointer[Call, ImmUntrackedOrigin]]()[][]


@export("paged_kv_team_start")
def team_start(threads: Int) abi("C") -> Int:
    """Starts a team of so many threads beside the caller's; its address."""
    return start_team(threads)


@export("paged_kv_team_run")
def team_run(body: Int, shared: Int, threads: UInt32, flags: UInt32, address: Int) abi("C"):
    """A `Team` (`mojo_ops/isa/threads.mojo`)."""
    run_team(body, shared, threads, address)


# Export
@export("NAME")
def NAME(call: Int) abi("C") -> Int:
    try:
        KERNEL(at[STRUCT](call))
    except error:
        return copied(String(error))
    return 0


# Layouts
@export("paged_kv_layouts")
def layouts() abi("C") -> Int:
    """The layout of each kernel's struct, a line each, in memory that the caller frees."""
    var text = String()
    LINES
    return copied(text)


# Kernel attention
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend


def attention[q: DType, cache: DType, o: DType](call: AttentionCall) raises:
    attend[q, o, cache, masked=False, rotates=False](call)


# Kernel attention_rotated
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend


def attention_rotated[q: DType, cache: DType, o: DType](call: AttentionCall) raises:
    attend[q, o, cache, masked=False, rotates=True](call)


# Kernel masked_attention
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend


def masked_attention[q: DType, cache: DType, o: DType](call: AttentionCall) raises:
    attend[q, o, cache, masked=True, rotates=False](call)


# Kernel masked_attention_rotated
from mojo_ops.attention.call import AttentionCall
from mojo_ops.attention.cpu.library import attend


def masked_attention_rotated[q: DType, cache: DType, o: DType](call: AttentionCall) raises:
    attend[q, o, cache, masked=True, rotates=True](call)


# Kernel latent
from mojo_ops.attention.cpu.library import attend_latent
from mojo_ops.attention.latent_call import LatentCall


def latent[q: DType, cache: DType, o: DType](call: LatentCall) raises:
    attend_latent[q, o, cache](call)


# Kernel merge
from mojo_ops.attention.merge_states import MergeCall


def merge[dtype: DType](call: MergeCall) raises:
    call.run[dtype]()


# Kernel append
from mojo_ops.transfer.call import AppendCall


def append[rows: DType, cache: DType](call: AppendCall) raises:
    call.run[rows, cache]()


# Kernel gather
from mojo_ops.transfer.call import GatherCall


def gather[rows: DType, cache: DType](call: GatherCall) raises:
    call.run[rows, cache]()


# Kernel delta_rule
from mojo_ops.recurrent.call import RecurrenceCall


def delta_rule[dtype: DType](call: RecurrenceCall) raises:
    call.run[delta=True]()


# Kernel selective_scan
from mojo_ops.recurrent.call import RecurrenceCall


def selective_scan[dtype: DType](call: RecurrenceCall) raises:
    call.run[delta=False]()


# Kernel linear
from mojo_ops.linear.call import LinearCall


def linear[x: DType, weights: DType](call: LinearCall) raises:
    call.run[x, weights]()


# Kernel experts
from mojo_ops.linear.call import ExpertsCall


def experts[x: DType, weights: DType](call: ExpertsCall) raises:
    call.run[x, weights]()


# Kernel adapter_linear
from mojo_ops.linear.call import AdapterCall


def adapter_linear[x: DType, weights: DType](call: AdapterCall) raises:
    call.run[x, weights]()


# Kernel quantised_linear
from mojo_ops.linear.call import LinearCall


def quantised_linear[dtype: DType, mask: Int](call: LinearCall) raises:
    call.run_quantised[dtype, mask]()


# Kernel quantised_experts
from mojo_ops.linear.call import ExpertsCall


def quantised_experts[dtype: DType, mask: Int](call: ExpertsCall) raises:
    call.run_quantised[dtype, mask]()


# Kernel take_rows
from mojo_ops.layers.call import TakeRowsCall


def take_rows[dtype: DType](call: TakeRowsCall) raises:
    call.run()


# Kernel take_columns
from mojo_ops.layers.call import TakeColumnsCall


def take_columns[dtype: DType](call: TakeColumnsCall) raises:
    call.run()


# Kernel rms_norm
from mojo_ops.layers.call import RmsNormCall


def rms_norm[dtype: DType](call: RmsNormCall) raises:
    call.run[dtype]()


# Kernel rotate
from mojo_ops.layers.call import RotateCall


def rotate[dtype: DType](call: RotateCall) raises:
    call.run[dtype]()


# Kernel hadamard
from mojo_ops.layers.call import HadamardCall


def hadamard[dtype: DType](call: HadamardCall) raises:
    call.run[dtype]()


# Kernel rotary_tables
from mojo_ops.layers.call import RotaryTablesCall


def rotary_tables[dtype: DType](call: RotaryTablesCall) raises:
    call.run()


# Kernel add_scaled
from mojo_ops.layers.call import AddScaledCall


def add_scaled[dtype: DType](call: AddScaledCall) raises:
    call.run[dtype]()


# Kernel gate_units
from mojo_ops.layers.call import GateUnitsCall


def gate_units[dtype: DType](call: GateUnitsCall) raises:
    call.run[dtype]()


# Kernel convert
from mojo_ops.layers.call import ConvertCall


def convert[dtype: DType](call: ConvertCall) raises:
    call.run()


# Kernel step_rows
from mojo_ops.layers.call import StepRowsCall


def step_rows[dtype: DType](call: StepRowsCall) raises:
    call.run()


# Kernel ragged_rows
from mojo_ops.transfer.call import RaggedRowsCall


def ragged_rows[dtype: DType](call: RaggedRowsCall) raises:
    call.run()


# Kernel unary
from mojo_ops.layers.call import UnaryCall


def unary[dtype: DType](call: UnaryCall) raises:
    call.run[dtype]()


# Kernel binary
from mojo_ops.layers.call import BinaryCall


def binary[dtype: DType](call: BinaryCall) raises:
    call.run[dtype]()


# Kernel program
from mojo_ops.isa.program import ProgramCall


def program[dtype: DType](call: ProgramCall) raises:
    call.run()


# Kernel quantised_rows
from mojo_ops.linear.call import QuantisedRowsCall


def quantised_rows[dtype: DType, mask: Int](call: QuantisedRowsCall) raises:
    call.run[mask]()


# Kernel mean
from mojo_ops.layers.call import MeanCall


def mean[dtype: DType](call: MeanCall) raises:
    call.run()


# Kernel choose_experts
from mojo_ops.layers.call import ChooseExpertsCall


def choose_experts[dtype: DType](call: ChooseExpertsCall) raises:
    call.run()


# Kernel gate_halves
from mojo_ops.layers.call import GateHalvesCall


def gate_halves[dtype: DType](call: GateHalvesCall) raises:
    call.run[dtype]()


# Kernel weighted_sum
from mojo_ops.layers.call import WeightedSumCall


def weighted_sum[dtype: DType](call: WeightedSumCall) raises:
    call.run[dtype]()


# Kernel causal_conv1d
from mojo_ops.recurrent.call import CausalConv1dCall


def causal_conv1d[dtype: DType](call: CausalConv1dCall) raises:
    call.run[dtype]()


# Kernel layer_recurrence
from mojo_ops.recurrent.call import LayerRecurrenceCall


def layer_recurrence[dtype: DType](call: LayerRecurrenceCall) raises:
    call.run()


# Kernel gated_norm
from mojo_ops.recurrent.call import GatedNormCall


def gated_norm[dtype: DType](call: GatedNormCall) raises:
    call.run[dtype]()
