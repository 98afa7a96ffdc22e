"""Linux's system calls. A program may declare a function of C once, so all of them have six arguments."""

from std.ffi import external_call


def system_call(
    number: Int, first: Int, second: Int, third: Int = 0, fourth: Int = 0, fifth: Int = 0, sixth: Int = 0
) -> Int:
    """Calls Linux and returns what it answers; -1 where it refuses."""
    return external_call["syscall", Int](number, first, second, third, fourth, fifth, sixth)
