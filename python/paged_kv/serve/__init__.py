"""The server of `paged-kv serve`."""
