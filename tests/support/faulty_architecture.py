"""The Llama of `paged_kv.serve`, whose steps break an op's contract for the requests that ask for it.

For `--custom-architectures tests/support:faulty_architecture`. No request can make a page table wrong, because MAX
makes it: so the model itself puts a page id outside the pool into the row of such a request, and the op raises.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from max import tree
from max.nn.kv_cache import KVCacheInputsPerDevice

from paged_kv.engine.demo import byte_tokenizer
from paged_kv.serve import ARCHITECTURES as SOUND

FAULT_CHARACTER = "~"
"""A prompt with it raises in its prefill."""
FAULT_POSITION = 400
"""A request that comes to this position raises there, in its decode if its prompt is shorter."""
NO_PAGE = 1 << 30

FAULT_TOKEN = byte_tokenizer().token_to_id(FAULT_CHARACTER)
LLAMA = next(architecture for architecture in SOUND if architecture.name == "LlamaForCausalLM")


class FaultyModel(LLAMA.pipeline_model):  # type: ignore[name-defined, misc]
    def execute(self, model_inputs: Any) -> Any:
        tokens = model_inputs.tokens.to_numpy()
        offsets = model_inputs.input_row_offsets.to_numpy()
        (cache,) = tree.leaves(model_inputs.kv_cache_inputs, leaf=KVCacheInputsPerDevice)
        lengths, table = cache.cache_lengths.to_numpy(), cache.lookup_table.to_numpy()
        for request, (start, end) in enumerate(pairwise(offsets)):
            first = int(lengths[request])
            reaches = first <= FAULT_POSITION < first + int(end - start)
            if reaches or np.any(tokens[start:end] == FAULT_TOKEN):
                table[request] = NO_PAGE
        return super().execute(model_inputs)


ARCHITECTURES = [replace(LLAMA, pipeline_model=FaultyModel)]
