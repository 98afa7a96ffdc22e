"""The layouts of kernels' operands: values land at the names of their fields, and no other set of names is taken."""

import struct

import pytest

from paged_kv.call_layouts import MASKS, WORKERS, Layout, named

PAIR = Layout("first second")
CALL = Layout("x pair items* y workers", pair=PAIR, items=PAIR, workers=WORKERS)


def test_values_land_at_their_names():
    assert CALL.flat(y=5, items=4, pair=[2, 3], x=1) == [1, 2, 3, 4, 5]
    assert CALL.pack(y=5, items=4, pair=PAIR.pack(second=3, first=2), x=1) == struct.pack("<5q", 1, 2, 3, 4, 5)
    start, rest = CALL.parts("x pair", "items y")
    assert start.pack(1, 2, 3) + rest.pack(4, 5) == struct.pack("<5q", 1, 2, 3, 4, 5)
    assert CALL.part("items y").size == 16
    assert (CALL.size, CALL.index("items"), CALL.index("workers")) == (8, 3, 5)
    assert CALL.text == "(x pair(first second) items*(first second) y workers(count team state))"
    assert Layout("a b", "float32").text == "(a:float32 b:float32)"
    assert named("a _ b", (1, 2, 3)) == {"a": 1, "b": 3}
    assert MASKS.zeros == bytes(8 * MASKS.size)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: PAIR.flat(first=1), r"expected first second, got first \(\['second'\] differ\)"),
        (lambda: PAIR.pack(first=1, second=2, third=3), r"\['third'\] differ"),
        (lambda: CALL.pack(x=1, pair=bytes(8), items=0, y=0), "pair: expected 2 numbers, got 1"),
        (lambda: CALL.flat(x=1, pair=[1, 2, 3], items=0, y=0), "pair: expected 2 numbers, got 3"),
        (lambda: CALL.parts("x pair", "y items"), "parts: expected x pair items y, got x pair y items"),
        (lambda: CALL.parts("x", "pair"), "parts: expected"),
        (lambda: CALL.part("pair y"), "fields: expected some of"),
        (lambda: Layout("x y x"), "fields: expected each once"),
        (lambda: Layout("x", y=PAIR), "fields: expected each once"),
    ],
)
def test_other_names_are_refused(wrong, message):
    with pytest.raises(TypeError, match=message):
        wrong()
