"""GGUF's blocks, made by hand where the `gguf` package only reads them: Q4_K and Q6_K, from the format's definition."""

import gguf
import numpy as np

KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0")}


def quantise(weight, encoding):
    """`weight` `[N, K]` in blocks, uint8 `[N, bytes]`: each element within a step of its group."""
    weight = np.asarray(weight, np.float32)
    if encoding == "Q4_K":
        return _q4_k(weight)
    if encoding == "Q6_K":
        return _q6_k(weight)
    return gguf.quants.quantize(weight, KINDS[encoding])


def dequantise(blocks, encoding):
    """`[N, K]` float32, by the `gguf` package."""
    return gguf.quants.dequantize(blocks, KINDS[encoding])


def random_blocks(encoding, rows, elements, seed=0):
    """Blocks whose every bit is random, but for scales that are small: elements of all values a format can hold."""
    random = np.random.default_rng(seed)
    blocks, block_bytes = gguf.GGML_QUANT_SIZES[KINDS[encoding]]
    data = random.integers(0, 256, (rows, elements // blocks, block_bytes), np.uint8)

    def scale(at, largest):
        values = random.uniform(-largest, largest, (*data.shape[:2], 1)).astype(np.float16)
        data[:, :, at : at + 2] = values.view(np.uint8)

    for at, largest in {"Q4_0": [(0, 0.05)], "Q4_K": [(0, 1e-3), (2, 1e-3)], "Q6_K": [(208, 1e-4)]}[encoding]:
        scale(at, largest)
    return data.reshape(rows, -1)


def _halves(values):
    """float16 scales `[..., 1]` as their bytes `[..., 2]`."""
    return np.ascontiguousarray(values, np.float16).view(np.uint8)


def _steps(values, step):
    return np.round(np.divide(values, step, out=np.zeros_like(values), where=step != 0))


def _q4_k(weight):
    groups = weight.reshape(len(weight), -1, 8, 32)  # [N, blocks, 8 groups, 32]
    least = np.maximum(-groups.min(-1), 0)
    steps = (groups.max(-1) + least) / 15
    d, dmin = (values.max(-1, keepdims=True) / 63 for values in (steps, least))
    d, dmin = d.astype(np.float16).astype(np.float32), dmin.astype(np.float16).astype(np.float32)
    scales, mins = (np.clip(_steps(v, np.broadcast_to(s, v.shape)), 0, 63) for v, s in ((steps, d), (least, dmin)))
    step = (d * scales)[..., None]
    quants = _steps(groups + (dmin * mins)[..., None], np.broadcast_to(step, groups.shape)).clip(0, 15).astype(np.uint8)
    scales, mins = scales.astype(np.uint8), mins.astype(np.uint8)
    packed = np.concatenate(
        [
            scales[..., :4] | (scales[..., 4:] >> 4) << 6,
            mins[..., :4] | (mins[..., 4:] >> 4) << 6,
            (scales[..., 4:] & 15) | (mins[..., 4:] & 15) << 4,
        ],
        axis=-1,
    )
    pairs = quants[..., 0::2, :] | quants[..., 1::2, :] << 4  # two groups share 32 bytes
    parts = [_halves(d), _halves(dmin), packed, pairs.reshape(*packed.shape[:2], 128)]
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
