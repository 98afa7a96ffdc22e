"""A program: calls of kernels in a list, which one function makes one after the other."""

from std.time import perf_counter_ns

from .library_call import Function, taken


@fieldwise_init
struct ProgramCall(TrivialRegisterPassable):
    """`count` calls of functions of libraries."""

    var functions: Int
    """The address of `count` addresses of functions."""
    var operands: Int
    """The address of `count` addresses of their structs."""
    var count: Int
    var stopped: Int
    """The address of the number of the call that refused its operands."""
    var begins: Int
    """The address of `count + 1` numbers: when each call begins and the last one ends, in nanoseconds; 0 where no times
    are noted."""

    def run(self) raises:
        """Makes the calls up to the first that refuses its operands, and raises what it says."""
        var functions, operands = self.functions, self.operands
        var function = Pointer(to=functions).unsafe_bitcast[Pointer[Function, ImmUntrackedOrigin]]()[]
        var operand = Pointer(to=operands).unsafe_bitcast[Pointer[Int, ImmUntrackedOrigin]]()[]
        for i in range(self.count):
            self.note_time(i)
            var message = function[unsafe_offset=i](operand[unsafe_offset=i])
            if message != 0:
                var stopped = self.stopped
                Pointer(to=stopped).unsafe_bitcast[Pointer[Int, MutUntrackedOrigin]]()[][] = i
                raise Error(taken(message))
        self.note_time(self.count)

    @always_inline
    def note_time(self, i: Int):
        var begins = self.begins
        if begins != 0:
            var at = Pointer(to=begins).unsafe_bitcast[Pointer[Int, MutUntrackedOrigin]]()[]
            at[unsafe_offset=i] = Int(perf_counter_ns())
