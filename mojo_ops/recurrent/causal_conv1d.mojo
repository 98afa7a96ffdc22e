"""A causal convolution of each channel over the last inputs of its request, which its state keeps."""

from std.math import ceildiv, exp

from ..isa.convert import LANES, widen
from ..isa.memory import FloatPointer
from ..isa.threads import Workers, for_rows
from .step_states import StepStates

comptime TASK_CHANNELS = 256
"""Channels of a task, at most: its window and weights stay in the first-level cache."""
comptime MAX_KERNEL = 16
"""Inputs that a convolution sees, at most."""


@fieldwise_init
struct CausalConv1d[dtype: DType, weight_dtype: DType, silu: Bool](TrivialRegisterPassable):
    """`y[t] = bias + sum_j weight[:, j] * x[t - kernel + 1 + j]` for each channel, in float32, perhaps through SiLU.

    x, y `[rows, channels]`; weight `[channels, kernel]`; bias `[channels]`, if there is one. Inputs before a request's
    first row are those of its state, a window `[kernel - 1, channels]` of the last inputs, the oldest first; windows
    `[slots, layers, kernel - 1, channels]`.
    """

    var y: FloatPointer
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var weight: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    var bias: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    var has_bias: Bool
    var windows: FloatPointer
    var states: StepStates
    var channels: Int
    var kernel: Int
    var layers: Int
    var layer: Int

    @no_inline
    def run(self, workers: Workers):
        """Computes all requests on up to `workers` threads. The table was checked."""
        var parts, requests = ceildiv(self.channels, TASK_CHANNELS), self.states.requests

        # Neighbours are the same channels of different requests: each thread gets a like share of every one.
        def task(begin: Int, end: Int) {var self, var requests}:
            for index in range(begin, end):
                var first = index // requests * TASK_CHANNELS
                self.convolve(index % requests, first, min(TASK_CHANNELS, self.channels - first))

        for_rows(task, requests * parts, TASK_CHANNELS * self.kernel * self.rows_of_each(), workers)

    def rows_of_each(self) -> Int:
        """Rows of a request, on average."""
        return ceildiv(self.states.first_row(self.states.requests), max(1, self.states.requests))

    @always_inline
    def window(self, slot: Int) -> FloatPointer:
        return self.windows.unsafe_offset((slot * self.layers + self.layer) * (self.kernel - 1) * self.channels)

    def convolve(self, request: Int, first: Int, count: Int):
        """Computes `count` channels of a request, from `first` on, and saves their windows."""
        var past = self.kernel - 1
        # The window is read whole before any slot is written, which may be the same one.
        var memory = List[Float32](unsafe_uninit_length=(past + self.kernel) * count)
        var window = rebind[FloatPointer](memory.unsafe_ptr())
        var weights = window.unsafe_offset(past * count)
        var source = self.states.source(request)
        for j in range(past):
            if source >= 0:
                var row = self.window(source).unsafe_offset(j * self.channels + first)
                copy_floats(window.unsafe_offset(j * count), row, count)
            else:
                for c in range(count):
                    window.unsafe_offset(j * count + c)[] = 0
        self.transpose(weights, first, count)
        var begin, rows = self.states.first_row(request), self.states.num_rows(request)
        var whole = count // LANES * LANES
        for row in range(rows):
            for c in range(0, whole, LANES):
                self.part[LANES](window, weights, begin, row, first, c, count)
            for c in range(whole, count):
                self.part[1](window, weights, begin, row, first, c, count)
        for save in range(self.states.first_save(request), self.states.end_save(request)):
            var seen = self.states.save_count(save)
            for j in range(past):
                var to = self.window(self.states.save_slot(save)).unsafe_offset(j * self.channels + first)
                var row = seen - past + j
                if row < 0:
                    copy_floats(to, window.unsafe_offset((past + row) * count), count)
                else:
                    copy_floats(to, self.x.unsafe_offset((begin + row) * self.channels + first), count)
        _ = memory^

    @always_inline
    def transpose(self, to: FloatPointer, first: Int, count: Int):
        """The weights of some channels as `[kernel, count]`."""
        var at = self.weight.unsafe_offset(first * self.kernel)
        var whole = count // LANES * LANES if self.kernel == 4 else 0
        for c in range(0, whole, LANES):
            var halves = widen[4 * LANES](at.unsafe_offset(4 * c)).deinterleave()
            var even, odd = halves[0].deinterleave(), halves[1].deinterleave()
            to.unsafe_store(c, even[0])
            to.unsafe_store(count + c, odd[0])
            to.unsafe_store(2 * count + c, even[1])
            to.unsafe_store(3 * count + c, odd[1])
        for c in range(whole, count):
            for j in range(self.kernel):
                to.unsafe_offset(j * count + c)[] = widen[1](at.unsafe_offset(c * self.kernel + j))[0]

    @always_inline
    def part[
        width: Int
    ](self, window: FloatPointer, weights: FloatPointer, begin: Int, row: Int, first: Int, c: Int, count: Int,):
        """Computes `width` channels of a row."""
        var sum = SIMD[DType.float32, width](0)
        if self.has_bias:
            sum = widen[width](self.bias.unsafe_offset(first + c))
        for j in range(self.kernel):
            var at = row - self.kernel + 1 + j
            var input: SIMD[DType.float32, width]
            if at < 0:
                input = window.unsafe_offset((self.kernel - 1 + at) * count + c).unsafe_load[width=width]()
            else:
                input = widen[width](self.x.unsafe_offset((begin + at) * self.channels + first + c))
            sum = weights.unsafe_offset(j * count + c).unsafe_load[width=width]().fma(input, sum)
        comptime if Self.silu:
            sum = sum / (1 + exp(-sum))
        self.y.unsafe_store((begin + row) * self.channels + first + c, sum)


@always_inline
def copy_floats[dtype: DType, //](to: FloatPointer, source: Pointer[Scalar[dtype], MutUntrackedOrigin], count: Int):
    """Copies numbers as float32."""
    var whole = count // LANES * LANES
    for c in range(0, whole, LANES):
        to.unsafe_store(c, widen[LANES](source.unsafe_offset(c)))
    for c in range(whole, count):
        to.unsafe_offset(c)[] = widen[1](source.unsafe_offset(c))[0]
