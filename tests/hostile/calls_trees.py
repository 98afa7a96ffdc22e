"""Trees of candidate tokens, and what they must do."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostile import model
from hostile.memory import Memory
from hostile.model import Expected, require
from hostile.parts import State, index_arrays, offsets, plain
from hostile.transforms import Arguments, Rng
from paged_kv.trees import accepted_rows, tree_mask, tree_positions


class Trees:
    """`tree_mask`, `tree_positions` and `accepted_rows`."""

    name = "trees"

    def arguments(self, rng: Rng, memory: Memory) -> Arguments:
        counts = rng.integers(0, 6, int(rng.integers(0, 4)))
        parents = [int(rng.integers(-1, i)) for n in counts for i in range(n)]
        given = index_arrays(
            memory, parents=parents, qo_indptr=offsets(counts), cache_lengths=rng.integers(0, 9, len(counts))
        )
        given["parents"].is_index = False  # -1 is one of them
        tree = [-1, *(int(rng.integers(0, i)) for i in range(1, 6))]
        given |= plain(window_left=int(rng.choice([-1, 0, 2, 100])), tree=tree)
        return given | plain(tokens=rng.integers(0, 3, 6).tolist(), sampled=rng.integers(0, 3, 6).tolist())

    def steps(self) -> list[tuple[Any, Any]]:
        return [(self.mask, self.masked), (self.positions, self.placed), (self.accept, self.accepted)]

    def mask(self, given: dict[str, Any], _: State) -> list[Any]:
        return [
            tree_mask(*(given[n] for n in ("parents", "qo_indptr", "cache_lengths")), window_left=given["window_left"])
        ]

    def positions(self, given: dict[str, Any], _: State) -> list[Any]:
        return [tree_positions(*(given[n] for n in ("parents", "qo_indptr", "cache_lengths")))]

    def accept(self, given: dict[str, Any], _: State) -> list[Any]:
        return [np.array(accepted_rows(given["tree"], given["tokens"], given["sampled"]))]

    def trees(self, given: Arguments) -> list[tuple[int, list[list[int]]]]:
        """Cached tokens of each request, and for each row the rows from the root to it."""
        parents, qo, cached = (model.indices(given[name]) for name in ("parents", "qo_indptr", "cache_lengths"))
        counts = model.row_counts(qo, len(cached))
        require(qo[-1] == len(parents) and (cached >= 0).all(), "rows")
        found, begin = [], 0
        for count, length in zip(counts, cached.tolist(), strict=True):
            paths: list[list[int]] = []
            for i, parent in enumerate(parents[begin : begin + count].tolist()):
                require(-1 <= parent < i, "parent")
                paths.append([*(paths[parent] if parent >= 0 else []), i])
            found.append((length, paths))
            begin += count
        return found

    def masked(self, given: Arguments, _: State) -> list[Expected]:
        window, bits = model.count(given["window_left"].value, -1), [np.zeros(0, bool)]
        for length, paths in self.trees(given):
            require(len(paths) * (length + len(paths)) < 2**31, "size")
            for path in paths:
                first = 0 if window < 0 else max(0, length + len(path) - window - 1)
                row = np.zeros(length + len(paths), bool)
                row[first:length] = True
                row[[length + i for i in path[max(0, first - length) :]]] = True
                bits.append(row)
        return [Expected(np.concatenate(bits), np.dtype(bool))]

    def placed(self, given: Arguments, _: State) -> list[Expected]:
        found = [length + len(path) - 1 for length, paths in self.trees(given) for path in paths]
        return [Expected(np.array(found, np.int64), np.dtype(np.int32))]

    def accepted(self, given: Arguments, _: State) -> list[Expected]:
        lists = []
        for name in ("tree", "tokens", "sampled"):
            value = given[name].value
            require(isinstance(value, list | tuple | np.ndarray | memoryview), "no sequence")
            lists.append([model.count(entry, -(2**62)) for entry in value])
        tree, tokens, sampled = lists
        require(len(tree) == len(tokens) == len(sampled) > 0 and tree[0] == -1, "lengths")
        require(all(0 <= parent < i for i, parent in enumerate(tree) if i), "parents")
        rows = [0]
        for i in range(1, len(tree)):
            if tree[i] == rows[-1] and tokens[i] == sampled[tree[i]]:
                rows.append(i)
        return [Expected(np.array(rows), np.dtype(np.int64))]
