"""The ops on the first GPU, with the oracle's own signatures: `harness.py` for tests/gpu and benchmarks."""

from functools import cache

import numpy as np
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import Model

from benchmarks import gpu_graphs
from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.graphs import ops
from paged_kv.reference import cache_views
from paged_kv.runtime.launches import ATTENTION, Launch, launched
from paged_kv.runtime.session import Runtime, runtime_on
from paged_kv.runtime.variants import Variant
from support.gpu_rules import attention_kernel, block_threads
from support.harness import BITS, NONE


@cache
def runtime() -> Runtime:
    return runtime_on(0)


@cache
def device() -> Accelerator:
    return Accelerator(0)


def upload(array: np.ndarray) -> Buffer:
    return to_buffer(np.ascontiguousarray(array)).to(device())


def download(buffer: Buffer) -> np.ndarray:
    return to_numpy(buffer.to(runtime().session.devices[0])).copy()


class Storage:
    """A cache's arrays on the GPU, as the strided operands that every op takes."""

    def __init__(self, k_blocks: np.ndarray, v_blocks: np.ndarray, layout: str, layer: int, bits: bool) -> None:
        self._arrays = [k_blocks] if k_blocks is v_blocks else [k_blocks, v_blocks]
        kind = np.dtype(f"u{k_blocks.itemsize}") if bits else k_blocks.dtype
        self._buffers = [upload(array.reshape(-1).view(kind)) for array in self._arrays]
        numbers: list[int] = []
        views = cache_views(k_blocks, v_blocks, layout, layer)
        for view, array in zip(views, (k_blocks, v_blocks), strict=True):
            start = (view.ctypes.data - array.ctypes.data) // array.itemsize if view.size else 0
            strides = [stride // array.itemsize for stride in view.strides[:3]]
            numbers += [start, *strides]
        self.view = to_buffer(np.array([*views[0].shape, *numbers, views[1].shape[3]], np.int64))

    @property
    def blocks(self) -> tuple[Buffer, Buffer]:
        first, last = self._buffers[0], self._buffers[-1]
        return first, last.view(last.dtype, last.shape)

    def write_back(self) -> None:
        """Copies the GPU's bytes into the arrays they came from."""
        for array, buffer in zip(self._arrays, self._buffers, strict=True):
            array[...] = download(buffer).view(array.dtype).reshape(array.shape)


def attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    alibi_slopes: np.ndarray = NONE,
    sinks: np.ndarray = NONE,
    batch_invariant: bool = False,
    gpu_kernel: ops.GpuKernel = "best",
) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.attention`."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    storage = Storage(k_blocks, v_blocks, layout, layer, bits=False)
    numbers = np.array([scale * q_scale * k_scale, logits_soft_cap, v_scale, 0, 1], np.float32)
    inputs = [
        *map(upload, (q, row_batch, row_lengths)),
        *storage.blocks,
        upload(lookup_table),
        storage.view,
        upload(alibi_slopes.astype(np.float32)),
        upload(sinks.astype(np.float32)),
        to_buffer(np.array(window_left, np.int32)),
        to_buffer(numbers),
    ]
    dtypes = q.dtype.name, k_blocks.dtype.name
    model = attention_model(*dtypes, batch_invariant, gpu_kernel)
    with launched() as launches:
        results = model.execute(*inputs)
    keys, _ = cache_views(k_blocks, v_blocks, layout, layer)
    page_size, kv_heads, head_dim = keys.shape[1:]
    if len(q) and q.shape[1]:
        sizes = (head_dim, q.shape[1] // kv_heads, page_size)
        share = 0 if batch_invariant else len(q) / max(1, len(lookup_table))
        best = attention_kernel(device().architecture_name, *dtypes, *sizes, gpu_kernel, share)
        check_launches(launches, best if len(keys) else "gpu/generic", dtypes[1])
    o, lse = map(download, results)
    return o, lse


def check_launches(launches: list[Launch], kernel: str, kv_dtype: str) -> None:
    """Asserts that the one attention kernel among these is the one that is expected, on one stream with the others."""
    found = [launch for launch in launches if launch.kernel in ATTENTION]
    block = (block_threads(kernel, float8=kv_dtype.startswith("float8")), 1, 1)
    assert [(launch.kernel, launch.block) for launch in found] == [(kernel, block)], launches
    assert len({launch.stream for launch in launches}) == 1, launches


def masked_attention(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    *,
    row_positions: np.ndarray,
    token_offsets: np.ndarray,
    mask: np.ndarray,
    mask_starts: np.ndarray,
    mask_firsts: np.ndarray,
    o_dtype: str,
    rope_theta: float = 0.0,
    window_left: int = -1,
) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.masked_attention`, over arrays of rank 4 in NHD."""
    variant = Variant("masked_attention", DType[q.dtype.name], DType[k_blocks.dtype.name], DType[o_dtype])
    storage = Storage(k_blocks, v_blocks, "NHD", 0, bits=False)
    row_masks = (row_positions, token_offsets, mask, mask_starts, mask_firsts, np.zeros(v_blocks.shape[-1], np.int8))
    with launched() as launches:
        results = runtime().execute(
            variant,
            *map(upload, (q, row_batch, row_lengths, *row_masks)),
            *storage.blocks,
            upload(lookup_table),
            storage.view,
            *map(upload, (NONE, NONE)),
            to_buffer(np.array(window_left, np.int32)),
            to_buffer(np.array([q.shape[-1] ** -0.5, 0, 1, rope_theta, 1], np.float32)),
        )
    check_launches(launches, "gpu/generic", k_blocks.dtype.name)
    o, lse = map(download, results)
    return o, lse


def mla_attention(
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    ckv: np.ndarray,
    kpe: np.ndarray,
    lookup_table: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    *,
    sm_scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """As `reference_mla.mla_attention`."""
    kind = DType[ckv.dtype.name]
    storage = Storage(kpe[:, :, None], ckv[:, :, None], "NHD", 0, bits=False)
    with launched() as launches:
        results = runtime().execute(
            Variant("mla_attention", DType[q_nope.dtype.name], kind),
            *map(upload, (q_nope, q_pe, row_batch, row_lengths)),
            *storage.blocks,
            upload(lookup_table),
            storage.view,
            upload(NONE),
            to_buffer(np.array([sm_scale, 1, 1], np.float32)),
        )
    check_launches(launches, "gpu/latent", ckv.dtype.name)
    o, lse = map(download, results)
    return o, lse


@cache
def attention_model(q_dtype: str, kv_dtype: str, batch_invariant: bool, gpu_kernel: ops.GpuKernel) -> Model:
    """The graph of one variant; its inputs are those of `Variant.build`."""
    options = {"batch_invariant": batch_invariant, "gpu_kernel": gpu_kernel}
    return gpu_graphs.attention(runtime(), DType[q_dtype], DType[kv_dtype], **options).load(runtime())


def append(
    k_new: np.ndarray,
    v_new: np.ndarray,
    batch_indices: np.ndarray,
    positions: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
) -> None:
    """As `reference.append`."""
    storage = Storage(k_blocks, v_blocks, layout, layer, bits=True)
    kind = BITS[k_blocks.itemsize]
    rows = [upload(rows.view(f"u{rows.itemsize}")) for rows in (k_new, v_new)]
    indices = map(upload, (batch_indices, positions))
    variant = Variant("append", kind, kind)
    runtime().execute(variant, *rows, *indices, *storage.blocks, upload(lookup_table), storage.view)
    storage.write_back()


def gather(
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    lookup_table: np.ndarray,
    lengths: np.ndarray,
    *,
    layout: str = "NHD",
    layer: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `reference.gather`."""
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    storage = Storage(k_blocks, v_blocks, layout, layer, bits=True)
    kind = BITS[k_blocks.itemsize]
    keys, _ = cache_views(k_blocks, v_blocks, layout, layer)
    like = np.zeros((int(indptr[-1]), *keys.shape[2:]), np.int8)
    variant = Variant("gather", kind, kind)
    inputs = (upload(indptr), upload(like), *storage.blocks, upload(lookup_table), storage.view)
    k, v = (download(rows).view(k_blocks.dtype) for rows in runtime().execute(variant, *inputs))
    return k, v, indptr
