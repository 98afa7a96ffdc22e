"""The limits and numbers that every module shares."""

import re

import numpy as np
import pytest

from paged_kv import options, reference
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.options import AttentionOptions

LEAST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
SIGNED = ("sm_scale", "q_scale", "k_scale", "v_scale")
POSITIVE = ("logits_soft_cap", "rope_theta", "rope_scale")


@pytest.mark.parametrize("num_heads", range(1, 130))
def test_alibi_slopes_are_the_oracles_rounded_once(num_heads):
    slopes = options.alibi_slopes(num_heads)
    assert slopes.dtype == np.float32
    assert slopes.tolist() == reference.alibi_slopes(num_heads).astype(np.float32).tolist()


@pytest.mark.parametrize("head_dim", [8, 64, 72, 512, -8, 0, 4, 12, 511, 520])
def test_head_dims_that_the_kernels_take(head_dim):
    if head_dim in (8, 64, 72, 512):
        assert options.is_head_dim(head_dim)
        options.check_head_dim("head_dim", head_dim)
        return
    assert not options.is_head_dim(head_dim)
    with pytest.raises(ShapeError, match=f"^q: head_dim: expected a multiple of 8 from 8 to 512, got {head_dim}$"):
        options.check_head_dim("q: head_dim", head_dim)


def test_every_dtype_of_q_is_one_of_a_cache():
    assert (*options.Q_DTYPES, *options.FLOAT8_DTYPES) == options.KV_DTYPES


NOT_FLOAT32 = (
    *((1e39, "1e+39"), (1e308, "1e+308"), (10**39, "1e+39"), (10**400, "a number past 1e300")),
    *((np.float64(3.5e38), "3.5e+38"), (1e-46, "1e-46"), (1e-39, "1e-39"), (5e-324, "4.94066e-324")),
)
NOT_FINITE = (np.inf, -np.inf, np.nan, np.float32(np.inf), np.float16(np.nan), np.longdouble("inf"))


@pytest.mark.parametrize("name", SIGNED + POSITIVE)
def test_a_number_that_float32_has_not(name):
    range_ = re.escape("expected 0 or from 1.2e-38 to 3.4e+38 in magnitude (float32), got ")
    for value, shown in NOT_FLOAT32:
        with pytest.raises(ContractError, match=f"^{name}: {range_}{re.escape(shown)}$"):
            AttentionOptions(**{name: value})
        if name in SIGNED:
            with pytest.raises(ContractError, match=name):
                AttentionOptions(**{name: -value})
    for value in NOT_FINITE:
        with pytest.raises(ContractError, match=f"^{name}: expected a finite number, got -?(inf|nan)$"):
            AttentionOptions(**{name: value})
    if name not in ("sm_scale", "rope_theta"):
        with pytest.raises(ContractTypeError, match=f"^{name}: expected a number, got NoneType$"):
            AttentionOptions(**{name: None})
    with pytest.raises(ContractTypeError, match=r"^window_left: expected a number, got NoneType$"):
        AttentionOptions(window_left=None)


@pytest.mark.parametrize("name", SIGNED + POSITIVE)
def test_numbers_at_the_ends_of_float32(name):
    ends = [LARGEST, np.float32(LARGEST), 2**127] + [LEAST, np.float32(LEAST)] * (name != "rope_scale")
    for value in ends if name != "rope_theta" else ends[:3]:
        numbers = AttentionOptions(**{"sm_scale": 1.0, name: value}).numbers(64)
        assert np.isfinite(numbers).all()
        assert (numbers != 0).sum() == 3 + (name in ("logits_soft_cap", "rope_theta"))


@pytest.mark.parametrize("scales", [(1e30, 1e30, 1.0), (1e-30, 1e-30, 1.0), (1e-30, -1e-5, 1e-5), (3e38, 1.0, 3e38)])
def test_a_product_of_scales_that_float32_has_not(scales):
    chosen = AttentionOptions(**dict(zip(("sm_scale", "q_scale", "k_scale"), scales, strict=True)))
    with pytest.raises(ContractError, match=r"^sm_scale \* q_scale \* k_scale: expected 0 or from 1.2e-38 to 3.4e\+38"):
        chosen.numbers(64)


def test_the_widest_window():
    assert AttentionOptions(window_left=2**31 - 1).window_left == 2**31 - 1
    with pytest.raises(ContractError, match=r"window_left: expected at least -1 \(-1 = off\) and below 2\^31"):
        AttentionOptions(window_left=2**31)


def test_products_of_scales_that_float32_has():
    assert AttentionOptions(1e30, q_scale=1e-30, k_scale=-2.0).numbers(64)[0] == -2
    assert AttentionOptions(1e30, q_scale=1e30, k_scale=0.0).numbers(64)[0] == 0
    assert AttentionOptions(q_scale=2.0).numbers(64)[0] == 0.25


@pytest.mark.parametrize(
    ("theta", "scale", "is_refused"),
    [
        *((1e-3, 1.0, False), (0.99e-3, 1.0, True), (1e4, 1e-3, False), (1e4, 0.99e-3, True)),
        *((0.1, 0.01, False), (0.1, 0.0099, True), (1e-30, 1e28, False), (None, 1e-4, True)),
    ],
)
def test_the_fastest_rotation(theta, scale, is_refused):
    if not is_refused:
        AttentionOptions(rope_theta=theta, rope_scale=scale)
        return
    with pytest.raises(ContractError, match=rf"^rope_theta {theta} and rope_scale {scale} rotate by .* at most 1000$"):
        AttentionOptions(rope_theta=theta, rope_scale=scale)
