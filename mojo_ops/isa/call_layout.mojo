"""The layout of a call's struct as text: a library says what it takes (`../../python/paged_kv/call_layouts.py`)."""

from std.builtin.rebind import downcast
from std.reflection import reflect


trait Located:
    """The address of a struct, or of several."""

    comptime Target: AnyType


struct AddressOf[T: TrivialRegisterPassable](Located, TrivialRegisterPassable):
    """The address of one or several structs."""

    comptime Target = Self.T

    var address: Int

    @implicit
    def __init__(out self, address: Int):
        self.address = address

    @always_inline
    def __getitem__(self, index: Int = 0) -> Self.T:
        var at = self.address
        return Pointer(to=at).unsafe_bitcast[Pointer[Self.T, ImmUntrackedOrigin]]()[][unsafe_offset=index]


def add_layout[T: AnyType](mut text: String):
    """Adds the names of a struct's fields in parentheses, in order: after each that is a struct its own, `*` before
    those of an address, and the dtype of a number that is not one of 64 bits.
    """
    comptime struct_type = reflect[T]
    comptime name = struct_type.name()
    comptime if name == "SIMD[DType.int, 1]":
        pass
    elif name == "SIMD[DType.float32, 1]":
        add(text, ":float32")
    elif conforms_to(T, Located):
        add(text, "*")
        add_layout[downcast[T, Located].Target](text)
    else:
        comptime names = struct_type.field_names()
        comptime types = struct_type.field_types()
        comptime for i in range(struct_type.field_count()):
            comptime field = names[i]
            comptime separator: StaticString = " " if i > 0 else "("
            add(text, separator)
            add(text, field)
            add_layout[types[i]](text)
        add(text, ")")


@no_inline
def add(mut text: String, part: StaticString):
    """Appends a part, by a call: the code of many layouts is short then, and compiled soon."""
    text += part
