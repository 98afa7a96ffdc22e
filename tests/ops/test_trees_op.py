"""The rows of trees and the moves of tokens, against their definition, and what they refuse."""

from functools import partial

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from paged_kv.arrays.pages import Pages
from paged_kv.graphs import trees
from support import op_graphs
from support.cases import UNUSED_PAGE, CacheCase, build
from support.compare import assert_bits_equal
from support.harness import refused
from support.trees import path_to, random_parents, seen_tokens

CPU = DeviceRef.CPU()
I32, U32 = DType.int32, DType.uint32
WINDOWS = (-1, 0, 3)
LARGEST = 20  # masks of 24 bits
BLOCKS = {
    (4, "NHD"): ["P", "S", "Hk", "D"],
    (5, "HND"): ["P", 2, "Hk", "S", "D"],
    (6, "NHD"): ["P", 2, "layers", "S", "Hk", "D"],
}
FIELDS = ("batch", "slots", "positions", "lengths", "mask", "mask_starts", "mask_firsts")


def rows_of(parents, offsets, lengths, *, window):
    rows = trees.TreeRows.of(parents, offsets, lengths, window_left=window, largest_tree=LARGEST)
    return [getattr(rows, field) for field in FIELDS]


def move_in(requests, sources, targets, table, *blocks, layout, kv_format=None):
    cache = op_graphs.paged_cache(table, blocks, layout, kv_format)
    trees.move_tokens(cache, requests, sources, targets)


for window in WINDOWS:
    types = [TensorType(I32, ["N"], CPU), TensorType(U32, ["offsets"], CPU), TensorType(U32, ["B"], CPU)]
    # Only the registered op compares the numbers of offsets and of requests.
    op_graphs.add(f"tree_rows_{window}", partial(rows_of, window=window), *types, by_max=window == -1)
MOVES = [TensorType(I32, [size], CPU) for size in "abc"]  # of three names, so that only the op can compare them
TABLE = TensorType(U32, ["B", "columns"], CPU)
for (rank, layout), shape in BLOCKS.items():
    blocks = [BufferType(DType.uint16, shape, CPU)] * (2 if rank == 4 else 1)
    op_graphs.add(f"move_{layout}{rank}", partial(move_in, layout=layout), *MOVES, TABLE, *blocks, by_max=rank < 6)
codes = BufferType(DType.uint8, BLOCKS[6, "NHD"], CPU)
op_graphs.add("move_codes", partial(move_in, layout="NHD", kv_format="int4"), *MOVES, TABLE, codes)
views = [*(BufferType(DType.uint16, [size], CPU) for size in "kv"), TensorType(DType.int64, [12], CPU)]
op_graphs.add("move_STRIDED", partial(move_in, layout="STRIDED"), *MOVES, TABLE, *views, by_max=True)


def tree_rows(parents, offsets, cached, window=-1):
    arrays = np.array(parents, np.int32), np.array(offsets, np.uint32), np.array(cached, np.uint32)
    return dict(zip(FIELDS, op_graphs.run(f"tree_rows_{window}", *arrays), strict=True))


def tokens_of_row(rows, r):
    """The tokens that a row's numbers say it sees, as the masked op reads them, window apart."""
    length, first, start = (int(rows[name][r]) for name in ("lengths", "mask_firsts", "mask_starts"))
    if start < 0:
        return list(range(length))
    bits = np.unpackbits(rows["mask"], bitorder="little")
    return [j for j in range(length) if j < first or bits[start + j - first]]


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", range(12))
def test_each_row_has_its_slot_its_position_and_its_mask(seed, window):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 24, rng.integers(0, 6))
    parents = [random_parents(rng, count) for count in counts]
    cached = rng.integers(0, 40, len(counts))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    padding = np.full(rng.integers(0, 3), 12345, np.int32)  # whatever stands there
    rows = tree_rows(np.concatenate([*parents, padding]), offsets, cached, window)
    for b, (of_request, length) in enumerate(zip(parents, cached, strict=True)):
        for i in range(len(of_request)):
            r = offsets[b] + i
            position = length + len(path_to(of_request, i)) - 1
            got = [int(rows[name][r]) for name in ("batch", "slots", "positions", "lengths")]
            assert got == [b, length + i, position, length + i + 1]
            kept = [j for j in tokens_of_row(rows, r) if window < 0 or j >= position - window]
            assert kept == sorted(seen_tokens(of_request, i, length, window))
    assert (rows["batch"][offsets[-1] :] == -1).all()


@pytest.mark.slow
def test_a_text_without_branches_needs_no_mask():
    """So a prompt may be longer than the largest tree."""
    rows = tree_rows(range(-1, 299), [0, 300], [7])
    assert (rows["mask_starts"] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parents", "offsets", "cached", "words"),
    [
        ([-1, 0, 2, 0], [0, 3, 4], [3, 0], ["parents", "row 2", "request 0", 2]),
        ([-1, 0, 0, 0], [0, 3, 4], [3, 0], ["parents", "row 3", "request 1", 0]),
        ([-1, 0, -2, -1], [0, 3, 4], [3, 0], ["parents", "row 2", -2]),
        ([-1, *[0] * 24], [0, 25], [3], ["parents", "row 24", "request 0", "24 rows"]),
        ([-1, 0, 0, -1], [0, 3, 5], [3, 0], ["row_offsets", 5, 4]),
        ([-1, 0, 0, -1], [1, 3, 4], [3, 0], ["row_offsets", 1]),
        ([-1, 0, 0, -1], [0, 4], [3, 0], ["row_offsets", 2, 3]),
    ],
)
def test_rows_that_are_refused(parents, offsets, cached, words):
    with refused(*words):
        tree_rows(parents, offsets, cached)


def move(storage, cache, moves):
    rank, layout = storage
    arrays = [cache.k_blocks] if rank > 4 else [cache.k_blocks, cache.v_blocks]
    bits = [array.view(np.uint16) for array in arrays]
    op_graphs.run(f"move_{layout}{rank}", *columns_of(moves), cache.lookup_table, *bits)


def columns_of(moves):
    """Requests, sources and targets."""
    return np.array(moves, np.int32).reshape(-1, 3).T.copy()


def case_of(storage, **sizes):
    rank, layout = storage
    lengths = {"lengths": (23, 0, 9, 16), "page_size": 5, "head_dim": 24, "dtype": "bfloat16"}
    return CacheCase(**(lengths | sizes), rank=rank, layout=layout, seed=rank)


def random_moves(rng, cache):
    """Some tokens of each request move to the front of those past some position; the moves of requests are mixed."""
    of_request = []
    for b, length in enumerate(cache.case.lengths):
        first = int(rng.integers(0, length + 1))
        kept = [i for i in range(first, length) if rng.random() < 0.5]
        of_request.append([(b, source, first + m) for m, source in enumerate(kept)])
    moves = [(-1, 10**6, -7)]
    while any(of_request):
        moves.append(of_request[rng.choice([b for b, left in enumerate(of_request) if left])].pop(0))
    return moves


def expected_after(cache, moves):
    """The arrays after the moves, all of them read before any is written."""
    arrays = [cache.k_blocks.copy(), cache.v_blocks.copy()] if cache.case.rank == 4 else [cache.k_blocks.copy()]
    size, heads = cache.case.page_size, slice(None)

    def at(request, token, side):
        page, slot = cache.lookup_table[request, token // size], token % size
        return {
            (4, "NHD"): (page, slot),
            (5, "HND"): (page, side, heads, slot),
            (6, "NHD"): (page, side, heads, slot),
        }[cache.case.rank, cache.case.layout]

    for side in (0, 1):
        before, after = (cache.k_blocks, cache.v_blocks)[side], arrays[side if cache.case.rank == 4 else 0]
        for request, source, target in moves:
            if request >= 0:
                after[at(request, target, side)] = before[at(request, source, side)]
    return arrays


@pytest.mark.slow
@pytest.mark.parametrize("storage", BLOCKS, ids=lambda storage: f"{storage[1]}{storage[0]}")
@pytest.mark.parametrize("seed", range(4))
def test_moves_in_every_layout_and_layer(storage, seed):
    rng = np.random.default_rng(seed)
    cache = build(case_of(storage, page_size=(1, 5, 16, 64)[seed]))
    for blocks in {id(b): b for b in (cache.k_blocks, cache.v_blocks)}.values():  # other layers hold tokens as well
        bits = blocks.view(np.uint16)
        bits[...] = rng.integers(0, 2**16, bits.shape, np.uint16)
    moves = random_moves(rng, cache)
    expected = expected_after(cache, moves)
    move(storage, cache, moves)
    for array, e in zip((cache.k_blocks, cache.v_blocks), expected, strict=False):
        assert_bits_equal(array, e, what=f"{storage} {moves}")


def test_many_bytes_are_moved_by_several_threads():
    storage = (6, "NHD")
    cache = build(case_of(storage, lengths=(200,), head_dim=512, num_kv_heads=4, num_q_heads=4))
    moves = [(0, source, source // 2) for source in range(0, 200, 2)]
    expected = expected_after(cache, moves)
    move(storage, cache, moves)
    assert_bits_equal(cache.k_blocks, expected[0], what="the array of all layers")


def test_codes_move_with_their_scales():
    """As the bytes of a slot in all layers, 12 of them a head of 16 elements."""
    before = np.random.default_rng(0).integers(0, 256, (9, 2, 3, 5, 2, 12), np.uint8)
    after, table = before.copy(), np.array([[7, 2, 4]], np.uint32)
    moves = np.array([[0, 0], [6, 11], [4, 8]], np.int32)  # requests, sources, targets
    op_graphs.run("move_codes", *moves, table, after)
    for source, target in moves[1:].T:
        before[table[0, target // 5], :, :, target % 5] = before[table[0, source // 5], :, :, source % 5]
    assert_bits_equal(after, before, what="pages")


@pytest.mark.slow
def test_moves_in_a_view_leave_what_lies_between():
    cache = build(case_of((4, "NHD")))
    whole = np.random.default_rng(0).integers(0, 2**16, (2, *cache.k_blocks.shape[:3], 40), np.uint16)
    expected = whole.copy()
    moves = [(0, 11, 9), (0, 20, 10), (3, 15, 15)]
    for request, source, target in moves:
        pages = [(cache.lookup_table[request, token // 5], token % 5) for token in (source, target)]
        for side in (0, 1):
            expected[side][pages[1]][:, 3:27] = whole[side][pages[0]][:, 3:27]
    view = Pages(whole[0, ..., 3:27], whole[1, ..., 3:27]).operands()[2]
    k, v = (side.reshape(-1)[3:] for side in whole)
    op_graphs.run("move_STRIDED", *columns_of(moves), cache.lookup_table, k, v, view)
    assert_bits_equal(whole, expected, what="the array behind the view")


@pytest.mark.slow
@pytest.mark.parametrize("storage", [(4, "NHD"), (6, "NHD")], ids=str)
@pytest.mark.parametrize(
    ("moves", "words"),
    [
        ([(0, 5, 4), (4, 3, 2)], ["batch_indices", "move 1", "request 4"]),
        ([(-2, 5, 4)], ["batch_indices", "move 0", "request -2"]),
        ([(0, 5, 4), (2, 3, -1)], ["targets", "move 1", "request 2", -1]),
        ([(0, 5, 6)], ["targets", "move 0", "request 0", "token 5", "token 6"]),
        ([(0, 5, 4), (2, 3, 3), (0, 5, 5)], ["sources", "move 2", "request 0", "ascend"]),
        ([(0, 5, 4), (0, 6, 4)], ["sources", "move 1", "request 0", "ascend"]),
        ([(2, 5, 4), (0, 30, 4)], ["sources", "move 1", "request 0", 30, "6 pages"]),
        ([(2, 5, 4), (2, 12, 6)], ["lookup_table", "request 2", "page slot 2", UNUSED_PAGE]),
    ],
)
def test_moves_that_are_refused(storage, moves, words):
    cache = build(case_of(storage))
    with refused(*words, unchanged=(cache.k_blocks, cache.v_blocks)):
        move(storage, cache, moves)


@pytest.mark.slow
def test_two_requests_may_not_meet_in_a_slot():
    cache = build(case_of((5, "HND")))
    cache.lookup_table[2, 0] = cache.lookup_table[0, 1]
    with refused("targets", "move 1", "request 2", "request 0", unchanged=(cache.k_blocks,)):
        move((5, "HND"), cache, [(0, 7, 6), (2, 3, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2])
def test_moves_of_several_lengths_are_refused(cut):
    cache = build(case_of((5, "HND")))
    numbers = [np.array(column, np.int32) for column in ([0, 0], [5, 6], [4, 5])]
    numbers[cut] = numbers[cut][:1]
    with refused(("sources", "targets")[cut - 1], 1, 2, unchanged=(cache.k_blocks,)):
        op_graphs.run("move_HND5", *numbers, cache.lookup_table, cache.k_blocks.view(np.uint16))
