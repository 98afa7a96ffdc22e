"""Comparisons that say where two results first differ. NaN and infinities must be at the same indices."""

import ml_dtypes
import numpy as np


def assert_close(actual: np.ndarray, expected: np.ndarray, *, rel: float | np.ndarray, what: str) -> None:
    """Compares row by row, a row being the last axis (one head's `[D]`); `rel` is a number, or one a row.

    The error's norm must stay within `rel` of the expected row's norm, and no single element may be off by more than
    `2 * rel` of the row's largest: a norm alone would let one wrong element hide among many right ones. A row of zeros
    must come out as zeros. Rows below the least normal number of the dtype count as that large: its steps are no finer.
    """
    a, e = _same_placement(actual, expected, what)
    error = np.abs(a - e)
    tiny = float(max(np.finfo(np.float32).tiny, ml_dtypes.finfo(actual.dtype).smallest_normal))
    rel = np.asarray(rel)[..., None]
    row_bound = rel * np.maximum(np.linalg.norm(e, axis=-1, keepdims=True), tiny)
    element_bound = 2 * rel * np.maximum(np.abs(e).max(axis=-1, keepdims=True, initial=0.0), tiny)
    bad_rows = np.linalg.norm(error, axis=-1, keepdims=True) > row_bound
    # Where a row fails only as a whole, its worst element is the one to show.
    worst = error == error.max(axis=-1, keepdims=True, initial=0.0)
    bad = (error > element_bound) | (bad_rows & worst)
    _raise_first(bad, actual, expected, f"{what}: error above {rel.max(initial=0.0):g} of its row")


def assert_lse_close(actual: np.ndarray, expected: np.ndarray, *, tol: float, what: str) -> None:
    """Compares base-2 log-sum-exps: `tol` is absolute up to 1 in magnitude, relative above; -inf must match exactly."""
    a, e = _same_placement(actual, expected, what)
    _raise_first(np.abs(a - e) > tol * np.maximum(np.abs(e), 1.0), actual, expected, f"{what}: lse error above {tol:g}")


def assert_bits_equal(actual: np.ndarray, expected: np.ndarray, *, what: str) -> None:
    """Compares shape, dtype and every bit: -0 is not 0, and two NaNs are equal only with the same payload."""
    _same_shape(actual, expected, what)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: dtype {actual.dtype}, expected {expected.dtype}")
    unsigned = f"u{actual.dtype.itemsize}"
    a, e = (np.ascontiguousarray(x).view(unsigned).reshape(x.shape) for x in (actual, expected))
    _raise_first(a != e, actual, expected, f"{what}: bits differ")


def _same_placement(actual: np.ndarray, expected: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays as float64 with 0 where they agree to be NaN or infinite."""
    _same_shape(actual, expected, what)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    _raise_first(np.isnan(a) != np.isnan(e), actual, expected, f"{what}: NaN out of place")
    infinite = np.isinf(a) | np.isinf(e)
    _raise_first(infinite & (a != e), actual, expected, f"{what}: infinity out of place")
    finite = np.isfinite(e)
    return np.where(finite, a, 0.0), np.where(finite, e, 0.0)


def _same_shape(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Fails unless the shapes are equal: nothing may broadcast."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape}, expected {expected.shape}")


def _raise_first(bad: np.ndarray, actual: np.ndarray, expected: np.ndarray, message: str) -> None:
    """Fails with the index and both values of the first bad element, if there is one."""
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{message}, {int(bad.sum())} of {bad.size} elements;"
            f" first at {index}: actual {actual[index]!s}, expected {expected[index]!s}"
        )
