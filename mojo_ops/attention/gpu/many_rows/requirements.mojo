"""Which calls the kernel for many rows takes: rules that `../dispatch.mojo` follows and `paged-kv doctor` prints."""

comptime ROWS_OF_A_REQUEST = 2
"""Rows a request, on average, from which on a call has many: how many each one has, the device alone knows."""


def many_rows_refusal(dtype: DType, kv_dtype: DType, head_dim: Int, batch_invariant: Bool) -> String:
    """Why this kernel does not serve a call that `hopper_refusal` does not exclude, however many rows it has.

    Empty where nothing does.
    """
    if kv_dtype != dtype:
        return String("it takes a cache of q's dtype, not ", kv_dtype, " with ", dtype)
    if head_dim > 128:
        return String("it takes head_dim 64 and 128, not ", head_dim)
    if batch_invariant:
        return "the tiles of a row depend on its neighbours, and batch_invariant was asked for"
    return ""


def has_many_rows(rows: Int, requests: Int) -> Bool:
    """Whether it pays that rows of a request share tiles: requests are those of the page table."""
    return rows >= ROWS_OF_A_REQUEST * max(1, requests)
