"""What the served model asks of MAX's pages before it reads them."""

from types import SimpleNamespace

import numpy as np
import pytest

from support import serving

serving.require()

from max.driver import Buffer  # noqa: E402
from max.nn.kv_cache import KVCacheInputsPerDevice  # noqa: E402

from paged_kv.errors import ContractError  # noqa: E402
from paged_kv.serve.model import ServedModel  # noqa: E402


def test_pages_with_gaps_are_refused():
    """MAX's pool leaves gaps where caches of several page sizes share it; a family here has one."""

    def numbers(*values):
        return Buffer.from_numpy(np.array(values, np.int64))

    pages = KVCacheInputsPerDevice(
        kv_blocks=numbers(0),
        cache_lengths=numbers(0),
        lookup_table=numbers(0),
        max_prompt_length=numbers(0),
        max_cache_length=numbers(0),
        page_stride=numbers(640),
    )
    model = object.__new__(ServedModel)
    with pytest.raises(ContractError, match="kv_blocks: pages lie 640 elements apart"):
        model.execute(SimpleNamespace(kv_cache_inputs=pages))
