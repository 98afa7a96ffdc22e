"""The calls' right results, in NumPy and float64, from the arguments as they were given; `Invalid` where there is none.

Written from the documentation, with nothing of the package but formulas of its oracle: an answer that it gives for
arguments that are `Invalid` is wrong, whatever it is.
Letters in shapes: B requests, N new tokens, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostile.memory import DTYPES, Argument, overlaps_itself, share, values
from paged_kv import reference

LIMIT = 1e15
"""Merged rows with numbers past this are not compared: parts of them cancel."""
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 2e-2, "float8_e5m2": 2e-2}


CODES = (np.dtype(np.int8), np.dtype(np.uint8))
"""The formats of caches of int8 and int4 codes."""


class Invalid(Exception):
    """The arguments break the contract: the call has to refuse them."""


def require(condition: Any, why: str) -> None:
    if not condition:
        raise Invalid(why)


@dataclass
class Expected:
    """One result: values in float64 or integers; NaN where nothing can be said of an element."""

    values: np.ndarray
    dtype: np.dtype[Any]
    tolerance: np.ndarray | float = 0.0
    """By row, which is the last axis: an error's norm relative to the row's. Of a lse absolute, or relative above 1."""
    is_lse: bool = False


def array(argument: Argument, *shape: int | None, dtypes: Any = None) -> np.ndarray:
    """The view of an argument that has to be an array of this rank and, where given, these sizes and dtypes."""
    view = argument.view
    require(view is not None, "no array")
    require(not shape or view.ndim == len(shape), "rank")
    require(all(want is None or want == have for want, have in zip(shape, view.shape, strict=False)), "shape")
    require(dtypes is None or view.dtype in [DTYPES[name] for name in dtypes], "dtype")
    return view


def elements_of(side: np.ndarray) -> int:
    """The elements of a stored head; of int8 and uint8 codes and a scale of 4 bytes, 2 codes a byte in uint8."""
    size = side.shape[-1]
    if side.dtype not in CODES:
        return size
    found, least = ((size - 4) * 2, 16) if side.dtype == np.uint8 else (size - 4, 8)
    require(found >= least and found % 8 == 0, "no codes")
    return found


def numbers_of(side: np.ndarray) -> np.ndarray:
    """Return what the stored heads stand for."""
    if side.dtype not in CODES:
        return side
    elements_of(side)
    with np.errstate(all="ignore"):
        return reference.widened(np.ascontiguousarray(side)).astype(np.float32)


def stored(rows: np.ndarray, side: np.ndarray) -> np.ndarray:
    """New rows as a cache stores them: floats of its codes' number of elements become codes."""
    if rows.dtype == side.dtype:
        require(rows.shape[1:] == side.shape[2:], "rows")
        return rows
    floats = rows.dtype.name in ("float32", "float16", "bfloat16")
    require(side.dtype in CODES and floats and rows.shape[-1] != side.shape[-1], "dtypes")
    require(rows.shape[1:] == (*side.shape[2:-1], elements_of(side)), "rows")
    return reference.quantised(rows, "int4" if side.dtype == np.uint8 else "int8")


def rows_of(arguments: list[Argument], sides: list[np.ndarray]) -> list[np.ndarray]:
    """New K and V as their cache stores them."""
    rows = [array(argument, None, None, None) for argument in arguments]
    require(len(rows[0]) == len(rows[1]) and len(rows[0]) < 10**6, "rows")
    require(sides[0].dtype == sides[1].dtype and rows[0].dtype == rows[1].dtype, "k and v")
    require(sides[0].dtype in DTYPES.values(), "dtypes")
    return [stored(row, side) for row, side in zip(rows, sides, strict=True)]


def indices(argument: Argument, *shape: int | None) -> np.ndarray:
    view = array(argument, *(shape or (None,)))
    require(view.dtype.kind in "iu", "no integers")
    require(view.size <= 10**6, "no table is so large")
    require(view.dtype != np.uint64 or view.max(initial=0) < 2**63, "no such index")
    return view.astype(np.int64)


def count(value: Any, least: int = 0) -> int:
    require(not isinstance(value, bool | np.bool_), "bool")
    try:
        number = operator.index(value)
    except Exception:
        raise Invalid("no integer") from None
    require(least <= number < 2**31, "range")
    return number


def number(value: Any, default: float, least: float = -math.inf) -> float:
    """A float option that float32 can hold."""
    if value is None:
        return default
    require(isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool), "no number")
    require(least <= value <= 3.4e38 and value >= -3.4e38, "range")
    return float(value)


def scale_of(value: Any) -> float:
    """A scale of q, k or v: a number, or a float array of one element."""
    if isinstance(value, np.ndarray) or (hasattr(value, "__dlpack__") and not isinstance(value, type)):
        try:
            view = values(value)
        except Exception:
            raise Invalid("no array") from None
        require(view.size == 1 and "float" in view.dtype.name, "no number")
        value = float(view.reshape(()))
    return number(value, 1.0)


def truth(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:
        raise Invalid("no truth value") from None


@dataclass
class Options:
    """The options of attention."""

    mode: str = "NONE"
    window: int = -1
    cap: float = 0.0
    scale: float | None = None
    theta: float = 1e4
    rope_scale: float = 1.0

    @staticmethod
    def of(arguments: dict[str, Argument]) -> Options:
        given = {name: argument.value for name, argument in arguments.items()}
        mode, window = given.get("pos_encoding_mode", "NONE"), given.get("window_left", -1)
        require(isinstance(mode, str) and mode in ("NONE", "ROPE_LLAMA", "ALIBI"), "mode")
        require(not isinstance(window, bool), "bool")
        try:
            left = operator.index(window)
        except Exception:
            raise Invalid("no integer") from None
        require(-1 <= left < 2**31, "window")
        positive = 5e-324
        return Options(
            mode,
            left,
            number(given.get("logits_soft_cap"), 0.0, 0.0),
            None if given.get("sm_scale") is None else number(given["sm_scale"], 1.0),
            number(given.get("rope_theta"), 1e4, positive),
            number(given.get("rope_scale"), 1.0, positive),
        )


@dataclass
class Table:
    """Pages of each request, and its tokens."""

    pages: list[np.ndarray]
    lengths: list[int]

    @staticmethod
    def csr(indptr: np.ndarray, ids: np.ndarray | None, last: np.ndarray, size: int) -> Table:
        require(len(indptr) == len(last) + 1 and indptr[0] == 0 and (np.diff(indptr) >= 0).all(), "indptr")
        require(ids is None or indptr[-1] <= len(ids), "indices")
        pages, lengths = [], []
        for b, fill in enumerate(last.tolist()):
            used = int(indptr[b + 1] - indptr[b])
            require((1 if used else 0) <= fill <= size, "last_page_len")
            pages.append(np.zeros(0, int) if ids is None else ids[indptr[b] : indptr[b + 1]])
            lengths.append((used - 1) * size + fill if used else 0)
            require(used * size < 2**31, "length")
        return Table(pages, lengths)

    @staticmethod
    def dense(table: np.ndarray, last: np.ndarray, size: int) -> Table:
        require(len(table) == len(last), "B")
        pages, lengths = [], []
        for row, fill in zip(np.where(table == 0xFFFFFFFF, -1, table), last.tolist(), strict=True):
            used = int((row == -1).argmax()) if (row == -1).any() else len(row)
            require((row[used:] == -1).all(), "a page after -1")
            require(0 <= fill <= size and used * size < 2**31, "last_page_len")
            pages.append(row[:used])
            lengths.append((used - 1) * size + fill if used else 0)
        return Table(pages, lengths)

    def check(self, num_pages: int) -> None:
        for row in self.pages:
            require(((row >= 0) & (row < num_pages)).all(), "page id")


def written(*written: np.ndarray, others: tuple[np.ndarray, ...] = ()) -> None:
    """Written memory has to be writable, and no two places of it may be one; nor may it be one of `others`."""
    for i, view in enumerate(written):
        require(view.flags.writeable, "read-only")
        require(view.size <= 10**7 and not overlaps_itself(view), "written twice")
        for other in (*written[i + 1 :], *others):
            require(not share(view, other), "overlap")


@dataclass
class RowMask:
    """Return what a query row sees of its request's tokens."""

    request: int
    position: int
    """Return where the row stands, token j being at j; negative before the first."""
    mask: np.ndarray | None = None
    """`[L]` bool; None: all."""

    def tokens(self, length: int, window: int) -> np.ndarray:
        seen = np.ones(length, bool) if self.mask is None else self.mask
        return np.flatnonzero(seen & ((window < 0) | (np.arange(length) >= self.position - window)))


def last_rows(counts: list[int], lengths: list[int], causal: bool, masks: np.ndarray | None = None) -> list[RowMask]:
    """The rows of requests whose last tokens they are; `masks` are `[count, length]` of each request, flattened."""
    found, begin = [], 0
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for i in range(count):
            row = RowMask(b, length - count + i)
            if masks is not None:
                row.mask = masks[begin + i * length : begin + (i + 1) * length]
            elif causal:
                row.mask = np.arange(length) <= row.position
            found.append(row)
        begin += count * length
    return found


def row_counts(offsets: np.ndarray, batch: int) -> list[int]:
    """The rows of each request."""
    require(len(offsets) == batch + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all(), "offsets of rows")
    require(offsets[-1] <= 2**25, "rows")
    return [int(count) for count in np.diff(offsets)]


def attention(
    q: np.ndarray,
    keys: list[np.ndarray],
    vals: list[np.ndarray],
    options: Options,
    scales: tuple[Any, Any, Any],
    sinks: np.ndarray | None = None,
    row_masks: list[RowMask] | None = None,
    value_dim: int | None = None,
) -> tuple[Expected, Expected]:
    """O `[R, Hq, Dv]` and the base-2 lse `[R, Hq]`; keys `[L, Hk, D]` and values `[L, Hk, Dv]` of each request.

    `row_masks` says what each row sees; None: there is one a request, its last token. Dv is `value_dim`; None: D.
    """
    q_scale, k_scale, v_scale = (scale_of(scale) for scale in scales)
    rows, heads, dim = q.shape
    if row_masks is None:
        row_masks = [RowMask(b, len(k) - 1) for b, k in enumerate(keys)]
    require(
        abs((options.scale or 1) * q_scale) <= 3.4e38 and abs((options.scale or 1) * q_scale * k_scale) <= 3.4e38, ""
    )
    scale = (dim**-0.5 if options.scale is None else options.scale) * q_scale * k_scale
    width = dim if value_dim is None else value_dim
    o, lse = np.zeros((rows, heads, width)), np.full((rows, heads), -math.inf)
    o_error, lse_error = np.zeros((rows, heads)), np.zeros((rows, heads))
    slopes = reference.alibi_slopes(heads) if options.mode == "ALIBI" else np.zeros(heads)
    for b, row in enumerate(row_masks):
        j = row.tokens(len(keys[row.request]), options.window)
        if not len(j):
            continue
        query, k, v = (x.astype(np.float64) for x in (q[b], keys[row.request][j], vals[row.request][j]))
        group = heads // k.shape[1]
        for h in range(heads):
            kk, vv, qq = k[:, h // group], v[:, h // group], query[h]
            if options.mode == "ROPE_LLAMA":
                kk, qq = rope(kk, j, options), rope(qq[None], np.array([row.position]), options)[0]
            with np.errstate(all="ignore"):
                x = scale * (kk @ qq) + slopes[h] * j
                size = np.abs(scale) * (np.abs(kk) @ np.abs(qq)) + slopes[h] * j
                if options.cap > 0:
                    x = options.cap * np.tanh(x / options.cap)
                sink = -math.inf if sinks is None else float(sinks[h])
                top = max(x.max(), sink)
                p = np.exp(x - top)
                total = p.sum() + math.exp(sink - top) if sink > -math.inf else p.sum()
                o[b, h] = (p / total) @ vv * v_scale
                lse[b, h] = (top + np.log(total)) / math.log(2)
            error = certainty(x, 4e-7 * size, top, sink)
            finite = all(np.isfinite(a).all() for a in (size, kk, qq, vv, o[b, h], lse[b, h]))
            reach = np.abs(vv * v_scale).max()  # of a sum whose parts cancel, what is left is not compared
            if not finite or not error < 0.02 or reach > 3e38 or (q.dtype == np.float16 and reach > 6e4):
                o[b, h], lse[b, h] = math.nan, math.nan
            else:
                spread = 1e-6 * reach + least(q.dtype) * math.sqrt(width)
                o_error[b, h] = 4 * error + spread / max(np.linalg.norm(o[b, h]), 1e-38)
                lse_error[b, h] = 2 * error
    kv = vals[0].dtype.name if vals else "float32"
    base = max(TOLERANCE[q.dtype.name], TOLERANCE.get(kv, 0))
    return (
        Expected(o, q.dtype, base + o_error),
        Expected(lse, np.dtype(np.float32), 1e-5 + lse_error, is_lse=True),
    )


def certainty(x: np.ndarray, error: np.ndarray, top: float, sink: float) -> float:
    """By how much the scores that count may be off: 0 where one token has all the weight, whatever its own error."""
    with np.errstate(all="ignore"):
        counts = x + 2 * error >= max(top - 2 * error.max(initial=0), sink) - 100
    return 0.0 if counts.sum() + (sink > -math.inf) == 1 else float(error[counts].max(initial=0))


def least(dtype: np.dtype[Any]) -> float:
    """Return the error of an element of any size: numbers below 1.2e-38 count as 0; float16 has steps of 6e-8."""
    return 2e-7 if dtype == np.float16 else 3e-38


def rope(x: np.ndarray, positions: np.ndarray, options: Options) -> np.ndarray:
    """Half-split rotation of `[T, D]`."""
    with np.errstate(all="ignore"):
        return reference.rope(x[:, None], positions, options.theta, options.rope_scale)[:, 0]


def merge(v: np.ndarray, s: np.ndarray) -> tuple[Expected, Expected]:
    """States `v [S, n, H, D]` and `s [S, n, H]` merged along n."""
    with np.errstate(all="ignore"):
        top = s.max(1, initial=-math.inf).astype(np.float64)
        weight = np.exp2(s.astype(np.float64) - np.where(np.isneginf(top), 0, top)[:, None])
        total = weight.sum(1)
        seen = weight > 0
        parts = np.where(seen[..., None], weight[..., None] * np.where(seen[..., None], v, 0).astype(np.float64), 0)
        o = parts.sum(1) / np.where(total > 0, total, 1)[..., None]
        lse = np.where(total > 0, top + np.log2(total), -math.inf)
        wild = ~((np.isfinite(s) | np.isneginf(s)).all(1) & (np.abs(np.where(np.isneginf(s), 0, s)) < LIMIT).all(1))
        reach = np.abs(np.where(seen[..., None], v, 0).astype(np.float64)).max((1, 3), initial=0)
        wild |= ~(reach < (6e4 if v.dtype == np.float16 else LIMIT))
    o[wild], lse[wild] = math.nan, math.nan
    spread = 1e-6 * reach + least(v.dtype) * math.sqrt(v.shape[3])  # parts may cancel each other
    cancelled = spread / np.maximum(np.linalg.norm(o, axis=-1), 1e-38)
    return (
        Expected(o, v.dtype, TOLERANCE[v.dtype.name] + cancelled),
        Expected(lse, np.dtype(np.float32), 1e-5, is_lse=True),
    )
