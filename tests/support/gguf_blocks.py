"""GGUF's blocks, made by hand where the `gguf` package only reads them, from the formats' definitions.

And activations, rounded as llama.cpp rounds them beside each encoding.
"""

import gguf
import numpy as np

from paged_kv.graphs.encodings import GGUF_ENCODINGS

GRIDS = ("IQ1", "IQ2", "IQ3")
"""Beginnings of the encodings that look their weights up in a grid."""
OWN = {"INT4": (32, 20), "INT8": (32, 36), "NVFP4": (64, 40)}
"""Encodings whose blocks are not GGUF's: elements and bytes of a block."""
KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_K", *GGUF_ENCODINGS)}
SCALES = {
    "Q4_0": {0: 0.05}, "Q8_0": {0: 4e-3}, "IQ4_NL": {0: 4e-3}, "Q4_K": {0: 1e-3, 2: 1e-3}, "Q5_K": {0: 5e-4, 2: 5e-4},
    "Q6_K": {208: 1e-4}, "IQ4_XS": {0: 1e-4}, "INT4": {0: 0.05}, "INT8": {0: 4e-3}, "Q4_1": {0: 0.05, 2: 0.4},
    "Q5_0": {0: 0.02}, "Q5_1": {0: 0.02, 2: 0.3}, "Q2_K": {80: 0.01, 82: 0.01}, "Q3_K": {108: 4e-3},
    "TQ1_0": {52: 0.2}, "TQ2_0": {64: 0.2}, "IQ1_S": {0: 0.02}, "IQ2_XXS": {0: 2e-3}, "IQ2_XS": {0: 2e-3},
    "IQ2_S": {0: 2e-3}, "IQ3_XXS": {0: 1e-3}, "IQ3_S": {0: 1e-3}, "IQ1_M": {}, "Q1_0": {0: 0.2},
}  # fmt: skip
"""The places of a block's float16 numbers, and their sizes in `random_blocks`. MXFP4 has a byte, E8M0, instead,
NVFP4 a float32; IQ1_M has 4 bits each at the top of its last four numbers of 16."""


def quantise(weight, encoding):
    """`weight` `[N, K]` in blocks, uint8 `[N, bytes]`: each element within a step of its group."""
    weight = np.asarray(weight, np.float32)
    if encoding in ("Q4_K", "Q5_K"):
        return _q45_k(weight, int(encoding[1]))
    if encoding == "Q2_K":
        return _q2_k(weight)
    if encoding == "Q3_K":
        return _q3_k(weight)
    if encoding == "Q6_K":
        return _q6_k(weight)
    if encoding in ("IQ4_NL", "IQ4_XS"):
        return _iq4(weight, encoding)
    if encoding.startswith((*GRIDS, "NVFP4", "Q1_0", "Q8_K")):  # nothing here searches a grid: some other weights
        blocks = random_blocks(encoding, *weight.shape, seed=weight.size)
        return blocks.reshape(-1, 40)[:, 4:].reshape(len(blocks), -1) if encoding == "NVFP4" else blocks
    return gguf.quants.quantize(weight, KINDS[encoding])


def dequantise(blocks, encoding):
    """`[N, K]` float32, by the `gguf` package where it knows the encoding."""
    if encoding in OWN:
        return _of_own(blocks, encoding)
    if encoding == "Q1_0":  # a bit for each sign, after the magnitude
        parts = blocks.reshape(-1, 18)
        signs = np.unpackbits(parts[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        return (parts[:, :2].copy().view(np.float16).astype(np.float32) * signs).reshape(len(blocks), -1)
    return gguf.quants.dequantize(blocks, KINDS[encoding])


def random_blocks(encoding, rows, elements, seed=0):
    """Blocks whose every bit is random, but for scales that are small: elements of all values a format can hold."""
    random = np.random.default_rng(seed)
    blocks, block_bytes = size_of(encoding)
    data = random.integers(0, 256, (rows, elements // blocks, block_bytes), np.uint8)

    if encoding == "MXFP4":
        data[:, :, 0] = random.integers(116, 122, data.shape[:2])
    if encoding == "NVFP4":
        data[:, :, :4] = random.uniform(-1e-3, 1e-3, (rows, elements // blocks, 1)).astype(np.float32).view(np.uint8)
        data[:, :, 4:8] -= (data[:, :, 4:8] & 127) == 127  # NaN
    for at, largest in SCALES.get(encoding, {}).items():
        values = random.uniform(-largest, largest, (*data.shape[:2], 1)).astype(np.float16)
        data[:, :, at : at + 2] = values.view(np.uint8)
    if encoding == "IQ1_M":
        set_quarters(data.reshape(-1, block_bytes), random.uniform(-0.02, 0.02, data.shape[0] * data.shape[1]))
    return data.reshape(rows, -1)


def set_quarters(blocks, values):
    """Overwrites the scales of blocks of IQ1_M `[N, bytes]` in place."""
    halves = np.asarray(values, np.float16).view(np.uint16)[:, None]
    numbers = blocks[:, -8:].copy().view(np.uint16)
    blocks[:, -8:] = (numbers & 0xFFF | (halves >> np.arange(0, 16, 4, dtype=np.uint16)) << 12).view(np.uint8)


def set_scales(blocks, encoding, values):
    """Overwrites the scales of the first blocks of `blocks` `[N, bytes]`, in place, by float16 numbers, or by powers of
    two as large.
    """
    size = size_of(encoding)[1]
    flat = blocks.reshape(-1, size)[: len(values)]
    if encoding == "MXFP4":
        flat[:, 0] = np.frexp(np.abs(values[: len(flat)], dtype=np.float32))[1] + 127
        return
    if encoding == "NVFP4":
        flat[:, :4] = values[: len(flat), None].astype(np.float32).view(np.uint8)
        return
    if encoding == "IQ1_M":
        set_quarters(flat, values[: len(flat)])
    for at in SCALES[encoding]:
        flat[:, at : at + 2] = _halves(values[: len(flat), None])


def round_activations(x, encoding):
    """`x` `[M, K]` as it is multiplied by weights of an encoding, float64.

    Beside the encodings of 256 elements these share a float32 scale (Q8_K), beside the others 32 a float16 one (Q8_0).
    """
    size = 256 if size_of(encoding)[0] == 256 else 32
    groups = np.asarray(x, np.float32).reshape(len(x), -1, size)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = np.float32(127) / largest
        scale = (largest / np.float32(127)).astype(np.float16) if size == 32 else np.float32(1) / factor
        scale = np.where(np.isfinite(factor), scale.astype(np.float32), 0)
        quants = np.rint(np.where(np.isfinite(factor), groups * factor, 0))
    return (quants.astype(np.float64) * scale).reshape(x.shape)


def size_of(encoding):
    """Elements and bytes of a block."""
    return OWN[encoding] if encoding in OWN else gguf.GGML_QUANT_SIZES[KINDS[encoding]]


def _of_own(blocks, encoding):
    parts = blocks.reshape(-1, OWN[encoding][1])
    if encoding == "NVFP4":
        return _nvfp4(parts).reshape(len(blocks), -1)
    scales = parts[:, :2].copy().view(np.float16).astype(np.float32)
    if encoding == "INT4":
        codes, zeros = np.concatenate([parts[:, 4:] & 15, parts[:, 4:] >> 4], axis=1), parts[:, 2:3]
    else:
        codes, zeros = parts[:, 4:].view(np.int8), parts[:, 2:3].view(np.int8)
    values = scales * (codes.astype(np.float32) - zeros.astype(np.float32))
    return values.reshape(len(blocks), -1)


def _nvfp4(parts):
    """Blocks `[N, 40]` as values `[N, 4, 16]`; 127 is taken for the number that it would be without NaN."""
    codes = np.arange(128)
    e4m3 = np.where(codes < 8, codes / 512, np.ldexp(1 + codes % 8 / 8, codes // 8 - 7)).astype(np.float32)
    scales = parts[:, :4].copy().view(np.float32) * e4m3[parts[:, 4:8] & 127]
    pairs = parts[:, 8:].reshape(-1, 4, 8)
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
    return scales[..., None] / 2 * halves[np.concatenate([pairs & 15, pairs >> 4], -1)]


def _halves(values):
    """float16 scales `[..., 1]` as their bytes `[..., 2]`."""
    return np.ascontiguousarray(values, np.float16).view(np.uint8)


def _steps(values, step):
    return np.round(np.divide(values, step, out=np.zeros_like(values), where=step != 0))


def _with_mins(groups, bits, most):
    """`groups` `[N, blocks, groups, elements]` as d, dmin, scales and minimums up to `most`, and weights of `bits`."""
    least = np.maximum(-groups.min(-1), 0)
    steps = (groups.max(-1) + least) / (2**bits - 1)
    d, dmin = (values.max(-1, keepdims=True) / most for values in (steps, least))
    d, dmin = d.astype(np.float16).astype(np.float32), dmin.astype(np.float16).astype(np.float32)
    scales, mins = (np.clip(_steps(v, np.broadcast_to(s, v.shape)), 0, most) for v, s in ((steps, d), (least, dmin)))
    step = (d * scales)[..., None]
    quants = _steps(groups + (dmin * mins)[..., None], np.broadcast_to(step, groups.shape))
    return d, dmin, *(part.astype(np.uint8) for part in (scales, mins, quants.clip(0, 2**bits - 1)))


def _q2_k(weight):
    d, dmin, scales, mins, quants = _with_mins(weight.reshape(len(weight), -1, 16, 16), 2, 15)
    parts = [scales | mins << 4, _of_runs(quants), _halves(d), _halves(dmin)]
    return np.concatenate(parts, axis=-1).reshape(len(weight), -1)


def _q3_k(weight):
    groups = weight.reshape(len(weight), -1, 16, 16)
    steps = np.abs(groups).max(-1) / 3
    d = (steps.max(-1, keepdims=True) / 31).astype(np.float16).astype(np.float32)
    scales = _steps(steps, np.broadcast_to(d, steps.shape)).clip(0, 31)
    step = np.broadcast_to((d * scales)[..., None], groups.shape)
    quants = (_steps(groups, step).clip(-4, 3) + 4).astype(np.uint8)
    third = quants.reshape(*quants.shape[:2], 8, 32) >> 2  # bit r of byte i belongs to element i of run r
    high = sum(third[..., run, :] << run for run in range(8))
    scales = scales.astype(np.uint8) + 32
    lower = scales[..., :8] & 15 | (scales[..., 8:] & 15) << 4
    upper = sum(scales[..., 4 * four : 4 * four + 4] >> 4 << 2 * four for four in range(4))
    parts = [high, _of_runs(quants & 3), lower, upper, _halves(d)]
    return np.concatenate(parts, axis=-1).reshape(len(weight), -1)


def _of_runs(twos):
    """Elements of 2 bits `[N, blocks, 16, 16]` as bytes: four runs of 32 of each half of 128 elements share 32."""
    runs = twos.reshape(*twos.shape[:2], 2, 4, 32)
    return sum(runs[..., run, :] << 2 * run for run in range(4)).reshape(*twos.shape[:2], 64)


def _q45_k(weight, bits):
    d, dmin, scales, mins, quants = _with_mins(weight.reshape(len(weight), -1, 8, 32), bits, 63)
    packed = np.concatenate(
        [
            scales[..., :4] | (scales[..., 4:] >> 4) << 6,
            mins[..., :4] | (mins[..., 4:] >> 4) << 6,
            (scales[..., 4:] & 15) | (mins[..., 4:] & 15) << 4,
        ],
        axis=-1,
    )
    low = quants & 15
    pairs = low[..., 0::2, :] | low[..., 1::2, :] << 4  # two groups share 32 bytes
    parts = [_halves(d), _halves(dmin), packed]
    if bits == 5:  # bit g of byte i belongs to element i of group g
        parts.append(sum((quants[..., group, :] >> 4) << group for group in range(8)))
    parts.append(pairs.reshape(*packed.shape[:2], 128))
    return np.concatenate(parts, axis=-1).reshape(len(weight), -1)


def _q6_k(weight):
    groups = weight.reshape(len(weight), -1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    d = (steps.max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = _steps(steps, np.broadcast_to(d, steps.shape)).clip(-127, 127)
    step = np.broadcast_to((d * scales)[..., None], groups.shape)
    quants = (_steps(groups, step).clip(-32, 31) + 32).astype(np.uint8)
    four = quants.reshape(*quants.shape[:2], 2, 4, 32)  # halves of 128 elements: four runs of 32
    low = np.concatenate([four[..., :2, :] & 15 | (four[..., 2:, :] & 15) << 4], axis=-2)
    high = sum(four[..., run, :] >> 4 << 2 * run for run in range(4))
    shape = quants.shape[:2]
    parts = [low.reshape(*shape, 128), high.reshape(*shape, 64), scales.astype(np.int8).view(np.uint8), _halves(d)]
    return np.concatenate(parts, axis=-1).reshape(len(weight), -1)


def _iq4(weight, encoding):
    table = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    groups = weight.reshape(len(weight), -1, 32)
    steps = np.abs(groups).max(-1, keepdims=True) / 113
    if encoding == "IQ4_NL":
        d = steps.astype(np.float16)
        step, head = d.astype(np.float32), _halves(d)
    else:
        eight = steps.reshape(len(weight), -1, 8)
        d = (eight.max(-1, keepdims=True) / 31).astype(np.float16)
        scales = _steps(eight, np.broadcast_to(d.astype(np.float32), eight.shape)).clip(0, 31)
        step = (d.astype(np.float32) * scales).reshape(steps.shape)
        scales = scales.astype(np.uint8) + 32
        upper = sum((scales[..., i].astype(np.uint16) >> 4) << 2 * i for i in range(8))[..., None]
        lower = scales[..., 0::2] & 15 | (scales[..., 1::2] & 15) << 4
        head = np.concatenate([_halves(d), np.ascontiguousarray(upper).view(np.uint8), lower], axis=-1)
    values = np.divide(groups, step, out=np.zeros_like(groups), where=step != 0)
    quants = np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)
    pairs = quants[..., :16] | quants[..., 16:] << 4
    return np.concatenate([head, pairs.reshape(*head.shape[:2], -1)], axis=-1).reshape(len(weight), -1)
