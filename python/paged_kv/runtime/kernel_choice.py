"""Which kernel answers a call of attention, and why: what `paged-kv doctor --explain` prints.

The kernels' own choice is made in `ops.mojo` and `attention/gpu/dispatch.mojo`; this says the same in words.
"""

from __future__ import annotations

from dataclasses import dataclass

PAIRS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
    ("float16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("float32", "float8_e4m3fn"),
    ("float32", "float8_e5m2"),
)
"""Of q and of the cache: every pair that the API takes."""

HOPPER = "sm_90a"
HOPPER_HEAD_DIMS = (64, 128, 256)
HOPPER_GROUP = 16
HOPPER_SLOTS = 8


@dataclass(frozen=True)
class Call:
    """What of a call decides about its kernel."""

    q_dtype: str
    kv_dtype: str
    head_dim: int
    group: int
    """Query heads a KV head."""
    page_size: int
    rotary: bool = False
    """Whether keys are rotated on the fly (ROPE_LLAMA)."""


@dataclass(frozen=True)
class Choice:
    """A kernel, by the name of its file in `mojo_ops`, or None where the call is refused; and the reason."""

    kernel: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.kernel or 'refused'}: {self.why}"


def choose(call: Call, architecture: str | None) -> Choice:
    """The kernel for a call on a GPU of this architecture ("sm_90a", "gfx942"), or on the CPU (None)."""
    if architecture is None:
        if call.rotary:
            return Choice("decode_cpu", "keys are rotated one by one as they are read")
        return Choice("decode_tiles", "every call without rotary keys")
    if call.rotary:
        return Choice("decode_gpu", "decode_hopper takes keys as they are stored, this one rotates them")
    if architecture.removeprefix("cuda:") != HOPPER:
        return Choice("decode_gpu", f"{architecture} is not {HOPPER}, Hopper's architecture")
    refusal = hopper_refusal(call)
    return (
        Choice("decode_gpu", f"decode_hopper {refusal}")
        if refusal
        else Choice("decode_hopper", "all it asks for holds")
    )


def hopper_refusal(call: Call) -> str:
    """Why the Hopper kernel does not serve a call, as `hopper_refusal` in `decode_hopper.mojo`; empty where it does.

    That one also looks at the storage: its address and its strides have to be multiples of 16 bytes.
    """
    wide = call.q_dtype in ("bfloat16", "float16")
    if not wide or (call.kv_dtype != call.q_dtype and not call.kv_dtype.startswith("float8")):
        return f"takes bfloat16 or float16 with a cache of the same or float8, not {call.q_dtype} with {call.kv_dtype}"
    if call.head_dim not in HOPPER_HEAD_DIMS:
        return f"takes head_dim 64, 128 and 256, not {call.head_dim}"
    if call.group > HOPPER_GROUP:
        return f"takes up to {HOPPER_GROUP} query heads a KV head, not {call.group}"
    if call.page_size % HOPPER_SLOTS:
        return f"copies {HOPPER_SLOTS} slots of a page and more at once; page_size {call.page_size} is no multiple of 8"
    return ""


def explain(architecture: str | None, head_dim: int, group: int, page_size: int) -> list[str]:
    """A line for each pair of dtypes: the kernel and the reason."""
    lines = []
    for q_dtype, kv_dtype in PAIRS:
        choice = choose(Call(q_dtype, kv_dtype, head_dim, group, page_size), architecture)
        lines.append(f"{q_dtype:<9} over {kv_dtype:<14} {choice}")
    rotary = choose(Call("float32", "float32", head_dim, group, page_size, rotary=True), architecture)
    lines.append(f"{'rotary keys, any dtypes':<29} {rotary}")
    return lines
