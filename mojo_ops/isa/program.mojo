"""A program: calls of kernels in a list, which one function makes one after the other."""

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

    def run(self) raises:
        """Makes the calls up to the first that refuses its operands, and raises what it says."""
        var functions, operands = self.functions, self.operands
        var function = Pointer(to=functions).unsafe_bitcast[Pointer[Function, ImmUntrackedOrigin]]()[]
        var operand = Pointer(to=operands).unsafe_bitcast[Pointer[Int, ImmUntrackedOrigin]]()[]
        for i in range(self.count):
            var message = function[unsafe_offset=i](operand[unsafe_offset=i])
            if message != 0:
                var stopped = self.stopped
                Pointer(to=stopped).unsafe_bitcast[Pointer[Int, MutUntrackedOrigin]]()[][] = i
                raise Error(taken(message))
