"""The recipe's test: a decode call of the installed package is right. It compiles its kernel."""

from importlib.metadata import version

import numpy as np

import paged_kv
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper

assert paged_kv.__version__ == version("paged-kv"), (paged_kv.__version__, version("paged-kv"))

wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
indptr, pages, last_page_len = (np.array(values, np.int32) for values in ([0, 2], [2, 0], [3]))
wrapper.plan(indptr, pages, last_page_len, 2, 1, 64, 4, q_data_type="float32")
kv_cache = np.full((3, 2, 4, 1, 64), np.nan, np.float32)
kv_cache[2, 0], kv_cache[2, 1], kv_cache[0, 0, :3], kv_cache[0, 1, :3] = 1, 5, 1, 12  # 4 tokens, and 3
o = wrapper.run(np.ones((1, 2, 64), np.float32), kv_cache)
assert np.allclose(o, 8), o
print("paged-kv", paged_kv.__version__, "attends")
