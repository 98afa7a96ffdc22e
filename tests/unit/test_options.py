"""The limits and numbers that every room shares."""

import numpy as np
import pytest

from paged_kv import options, reference
from paged_kv.errors import ShapeError


@pytest.mark.parametrize("num_heads", range(1, 130))
def test_alibi_slopes_are_the_oracles_rounded_once(num_heads):
    slopes = options.alibi_slopes(num_heads)
    assert slopes.dtype == np.float32
    assert slopes.tolist() == reference.alibi_slopes(num_heads).astype(np.float32).tolist()


@pytest.mark.parametrize("head_dim", [8, 64, 72, 512])
def test_a_head_dim_that_the_kernels_take(head_dim):
    assert options.is_head_dim(head_dim)
    options.check_head_dim("head_dim", head_dim)


@pytest.mark.parametrize("head_dim", [-8, 0, 4, 12, 511, 520])
def test_a_head_dim_that_they_do_not_take(head_dim):
    assert not options.is_head_dim(head_dim)
    with pytest.raises(ShapeError, match=f"^q: head_dim must be a multiple of 8 from 8 to 512, not {head_dim}$"):
        options.check_head_dim("q: head_dim", head_dim)


def test_every_dtype_of_q_is_one_of_a_cache():
    assert (*options.Q_DTYPES, *options.FLOAT8_DTYPES) == options.KV_DTYPES
