"""Random trees, and what follows from their definition, written without the order that the implementation relies on."""

import numpy as np


def random_parents(rng, count):
    """The parents of `count` rows: chains, bushes and several roots alike."""
    kind = rng.integers(4)
    if kind == 0:  # no branches
        return np.arange(-1, count - 1, dtype=np.int32)
    parents = [int(rng.integers(-1 if kind == 1 else min(i, 1) - 1, i)) for i in range(count)]
    if kind == 3:  # a text that branches late
        parents[: count // 2] = range(-1, count // 2 - 1)
    return np.array(parents, np.int32).reshape(count)


def path_to(parents, row):
    """The rows from the root to `row`, in the order of the text."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def seen_tokens(parents, row, cached, window_left=-1):
    """The slots that a row sees, in the order of the text: cached tokens, ancestors, itself."""
    tokens = [*range(cached), *(cached + i for i in path_to(parents, row))]
    return tokens if window_left < 0 else tokens[-window_left - 1 :]
