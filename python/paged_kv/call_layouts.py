"""The layouts of what kernels take: the names of the fields of each struct of numbers, in their order.

The structs are those of `mojo_ops`; nothing else in Python has the order of their fields. A library says what it takes
in the form of `Layout.text` (`mojo_ops/isa/call_layout.mojo`), and `runtime/libraries.py` compares it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

_THREADS = "workers"
"""The last field of a kernel's call, which is added when the call is made: packed operands are without it."""


class Layout:
    """The fields of a struct, each a number of 64 bits or another struct.

    Args:
        fields: Their names in order. One that ends with `*` is the address of one or several structs.
        dtype: "float32" where all fields are that instead.
        structs: The layouts of the fields that are structs, or addresses of some.

    Raises:
        TypeError: a name comes twice, or a struct is none of the fields.
    """

    def __init__(self, fields: str, dtype: str = "", /, **structs: Layout) -> None:
        names = [field.removesuffix("*") for field in fields.split()]
        if len(set(names)) < len(names) or not structs.keys() <= set(names):
            raise TypeError(f"fields: expected each once, and those of {[*structs]}, got {fields}")
        self.text = f"({' '.join(field + _described(field, dtype, structs) for field in fields.split())})"
        """For people, and as a library has it."""
        sizes = [structs[field].size if field in structs else 1 for field in fields.split()]
        self._sizes = dict(zip(names, sizes, strict=True))
        """The numbers of each field."""
        self.size: int = sum(self._sizes.values())
        """The numbers of all fields."""
        self._operands = {name: size for name, size in self._sizes.items() if name != _THREADS}
        self._structs = {name: size for name, size in self._operands.items() if size > 1}
        self._packer = struct.Struct("<" + "".join(f"{8 * n}s" if n > 1 else "q" for n in self._operands.values()))

    def flat(self, /, **values: Any) -> list[Any]:
        """The numbers of all fields but the threads, each by its field's name; of a struct the list of its numbers.

        Raises:
            TypeError: a field is missing, is none, or a struct has other than its numbers.
        """
        self._check(values, 1)
        numbers: list[Any] = []
        for name, size in self._operands.items():
            numbers += values[name] if size > 1 else [values[name]]
        return numbers

    def pack(self, /, **values: Any) -> bytes:
        """As `flat`, in bytes; of a struct its bytes. Raises as `flat`."""
        self._check(values, 8)
        return self._packer.pack(*[values[name] for name in self._operands])

    def _check(self, values: Mapping[str, Any], bytes_each: int) -> None:
        if values.keys() != self._operands.keys():
            differing = sorted(values.keys() ^ self._operands.keys())
            raise TypeError(f"fields: expected {' '.join(self._operands)}, got {' '.join(values)} ({differing} differ)")
        for name, size in self._structs.items():
            if len(values[name]) != size * bytes_each:
                raise TypeError(f"{name}: expected {size} numbers, got {len(values[name]) / bytes_each:g}")

    def parts(self, *parts: str) -> list[struct.Struct]:
        """Packers of the fields in parts, whose numbers are given in order: for calls of a few microseconds.

        Args:
            parts: The names of the fields of each part, which are together all but the threads, in order.

        Raises:
            TypeError: they are not.
        """
        if " ".join(parts) != (expected := " ".join(self._operands)):
            raise TypeError(f"parts: expected {expected}, got {' '.join(parts)}")
        return [self.part(each) for each in parts]

    def part(self, fields: str) -> struct.Struct:
        """A packer of some fields that follow each other. Raises TypeError where they do not."""
        if f" {fields} " not in f" {' '.join(self._operands)} ":
            raise TypeError(f"fields: expected some of {' '.join(self._operands)} in order, got {fields}")
        return struct.Struct(f"<{sum(self._sizes[name] for name in fields.split())}q")

    @property
    def zeros(self) -> bytes:
        """A struct of nothing but zeros: that of operands which are absent."""
        return bytes(8 * self.size)

    def index(self, name: str) -> int:
        """The place of a field among the numbers of all."""
        before = list(self._sizes)[: list(self._sizes).index(name)]
        return sum(self._sizes[each] for each in before)


def named(names: str, values: Iterable[Any]) -> dict[str, Any]:
    """Values by the names of fields, in their order; that of `_` is left out."""
    return {name: value for name, value in zip(names.split(), values, strict=True) if name != "_"}


def _described(field: str, dtype: str, structs: Mapping[str, Layout]) -> str:
    """The text behind a field's name in that of a layout."""
    layout = structs.get(field.removesuffix("*"))
    return layout.text if layout else dtype and f":{dtype}"


WORKERS = Layout("count team state")
STRIDES = Layout("start page slot head")
CACHE = Layout(
    "k k_size v v_size pages page_size kv_heads k_dim k_strides v_strides v_dim entries batch max_pages",
    k_strides=STRIDES,
    v_strides=STRIDES,
)
CACHE_STORAGE, CACHE_VIEW, CACHE_TABLE = CACHE.parts(
    "k k_size v v_size", "pages page_size kv_heads k_dim k_strides v_strides v_dim", "entries batch max_pages"
)
"""Its storage, the view that an op over strided pages takes, and its page table."""
MASKS = Layout(
    "row_positions num_positions token_offsets num_offsets mask mask_bytes mask_starts num_starts mask_firsts"
    " num_firsts"
)
SOFTMAX_OPTIONS = Layout("scale soft_cap v_scale rope_theta rope_scale deterministic", "float32")
LATENT_OPTIONS = Layout("scale latent_scale v_scale deterministic", "float32")
TOKEN_ROWS = Layout("k v count k_heads k_dim v_heads v_dim")
STATES = Layout("row_offsets sources save_offsets save_counts save_slots requests saves slots")
MEMBER = Layout("y w n row_bytes encoding")


def _call(fields: str, **structs: Layout) -> Layout:
    return Layout(f"{fields} {_THREADS}", workers=WORKERS, **structs)


ATTENTION = _call(
    "o lse q num_rows num_heads head_dim value_dim row_batch row_lengths masks slopes num_slopes sinks num_sinks"
    " window_left options* cache",
    masks=MASKS,
    options=SOFTMAX_OPTIONS,
    cache=CACHE,
)
LATENT = _call(
    "o lse q_nope q_pe num_rows num_heads nope_dim pe_dim row_batch row_lengths sinks num_sinks options* cache",
    options=LATENT_OPTIONS,
    cache=CACHE,
)
MERGE = _call("merged_v merged_s v s num_rows num_states num_heads head_dim")
APPEND = _call("rows batch_indices positions cache", rows=TOKEN_ROWS, cache=CACHE)
GATHER = _call("rows indptr cache", rows=TOKEN_ROWS, cache=CACHE)
LINEAR = _call("members* count x m k", members=MEMBER)
EXPERTS = _call("members* count x experts rows m num_experts k", members=MEMBER)
ADAPTERS = _call("result y x a b adapters m n k rank count")
RECURRENCE = _call(
    "o x decays rates skip matrices offsets sources save_offsets counts slots requests rows heads key_heads key_dim"
    " value_dim width normed numbers"
)
PROGRAM = Layout("functions operands count stopped begins")

CALLS: Mapping[str, Layout] = {
    "attention": ATTENTION,
    "attention_rotated": ATTENTION,
    "masked_attention": ATTENTION,
    "masked_attention_rotated": ATTENTION,
    "latent": LATENT,
    "merge": MERGE,
    "append": APPEND,
    "gather": GATHER,
    "linear": LINEAR,
    "experts": EXPERTS,
    "adapter_linear": ADAPTERS,
    "quantised_linear": LINEAR,
    "quantised_experts": EXPERTS,
    "quantised_rows": _call("y w rows count k row_bytes available encoding"),
    "delta_rule": RECURRENCE,
    "selective_scan": RECURRENCE,
    "program": PROGRAM,
    "take_rows": _call("y x rows count row_bytes available"),
    "take_columns": _call("y x rows groups group first each"),
    "rms_norm": _call("y x weight rows columns numbers rounds_once wide_weight"),
    "rotate": _call("y x cos sin rows heads head_dim half pairs"),
    "hadamard": _call("y x rows heads head_dim"),
    "rotary_tables": _call("cos sin positions frequencies rows half numbers"),
    "add_scaled": _call("sum x y count numbers"),
    "gate_units": _call("y gate up rows columns gate_columns activation"),
    "convert": _call("y x count source target"),
    "step_rows": _call("lengths last positions rows row_offsets batch"),
    "ragged_rows": _call("batch_indices positions rows row_offsets cache_lengths batch"),
    "unary": _call("y x count function"),
    "binary": _call("y x x_row x_column z z_row z_column rows columns function"),
    "mean": _call("y x rows columns"),
    "choose_experts": _call(
        "weights experts logits bias rows count chosen groups chosen_groups has_bias sigmoid sum_to_one numbers"
    ),
    "gate_halves": _call("y x rows columns numbers clamped"),
    "weighted_sum": _call("y x weights rows count columns"),
    "causal_conv1d": _call(
        "y x weight bias has_bias windows rows channels kernel layers layer silu wide_weight states", states=STATES
    ),
    "layer_recurrence": _call(
        "o x a b rates bias skip matrices rows heads key_dim width sizes numbers layers layer delta states",
        states=STATES,
    ),
    "gated_norm": _call("y x z weight rows columns weight_rows numbers gate_first wide_weight"),
}
"""The struct of each kernel, by its name in `runtime/library.mojo`."""
