"""Calls of kernels that lie in a library of their own, compiled once for a CPU (`../README.md`).

A library exports one C function, of the address of a struct of 64-bit numbers. It returns 0, or the address of a
message, null-terminated, in memory of C's `malloc`, which the caller frees. It also says what the struct's fields are
(`call_layout.mojo`).
"""

from std.ffi import external_call
from std.memory import unsafe_memcpy

comptime Function = def(Int) thin abi("C") -> Int
comptime Ensure = def() thin abi("C") -> Int32
comptime Release = def(Int32) thin abi("C") -> None
comptime Text = Pointer[UInt8, MutUntrackedOrigin]


def call_library[Call: TrivialRegisterPassable](name: String, call: Call) raises:
    """Calls the library that is known in this process by a name, and raises what it refuses.

    A graph may run in a process that has not loaded it yet: then Python, whose process it is, does so.

    Raises:
        Error: as the kernel; or the library cannot be loaded, for which Python has printed the reason.
    """
    var address = symbol(name)
    if address == 0:
        run_python(String("import paged_kv.runtime.libraries as found; found.load_for_graph('", name, "')"))
        address = symbol(name)
    if address == 0:
        raise Error("the library of kernels ", name, " cannot be loaded")
    # On the heap: the compiler does not see that an address is read, and lets a variable on the stack end before.
    var operands = List[Call](length=1, fill=call)
    var message = Pointer(to=address).unsafe_bitcast[Function]()[](Int(operands.unsafe_ptr()))
    _ = operands^
    if message != 0:
        raise Error(taken(message))


def symbol(name: String) -> Int:
    """The address of what all of the process knows by a name; 0 where it knows none."""
    var text = name.copy()
    return external_call["dlsym", Int](Int(0), text.as_c_string_span().ptr())


def run_python(code: String):
    """Runs a line of Python, where this is its process. MAX holds Python's lock in none of its threads."""
    var ensure = symbol("PyGILState_Ensure")
    var run = symbol("PyRun_SimpleString")
    var release = symbol("PyGILState_Release")
    if ensure == 0 or run == 0 or release == 0:
        return
    var line = code.copy()
    var text = line.as_c_string_span().ptr()
    var state = Pointer(to=ensure).unsafe_bitcast[Ensure]()[]()
    _ = Pointer(to=run).unsafe_bitcast[Function]()[](Pointer(to=text).unsafe_bitcast[Int]()[])
    Pointer(to=release).unsafe_bitcast[Release]()[](state)
    _ = line


def copied(text: String) -> Int:
    """The address of a copy of a text, in C's memory."""
    var length = text.byte_length()
    var copy = external_call["malloc", Text](length + 1)
    unsafe_memcpy(dest=copy, src=text.unsafe_ptr(), count=length)
    copy[unsafe_offset=length] = 0
    return Int(copy)


def taken(message: Int) -> String:
    """The text at an address, whose memory is freed."""
    var at = message
    var text = Pointer(to=at).unsafe_bitcast[Text]()[]
    var found = String(unsafe_from_utf8_ptr=text)
    external_call["free", NoneType](text)
    return found
