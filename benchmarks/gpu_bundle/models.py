"""The models whose steps the bundle has: the demo's, and a Llama of 1.1 G parameters with random weights."""

from __future__ import annotations

from max.dtype import DType

from paged_kv.bench.case_kinds import StepCase
from paged_kv.bench.problems import llama_config
from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.step import DEMO_DTYPE, StepGraph
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.rope import Rope

LLAMA = StepCase("llama", "a Llama of 1.1 G parameters", context=0)


def demo_step() -> StepGraph:
    """That of `paged-kv demo --device gpu`."""
    return StepGraph.of(load_config(FOLDER), DEMO_DTYPE)


def llama_decoder() -> DecoderConfig:
    """The configuration of `LLAMA`."""
    sizes = llama_config(LLAMA)
    rope = Rope(LLAMA.head_dim, sizes.pop("rope_theta"))
    return DecoderConfig(**sizes, rope=rope, bos_token_id=None, eos_token_ids=())


def llama_step() -> StepGraph:
    """That of `LLAMA`, in bfloat16."""
    return StepGraph.of(llama_decoder(), DType[LLAMA.dtype])
