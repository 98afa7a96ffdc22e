"""The families that MAX Serve registers, and bfloat16 on the CPU."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.llama3.batch_processor import Llama3BatchProcessor
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling import config_enums
from max.pipelines.modeling.types import PipelineTask

from paged_kv.graphs.models import FAMILIES
from paged_kv.max_serve.config import ServedConfig
from paged_kv.max_serve.model import ServedPipeline
from paged_kv.max_serve.tokenizer import ServedTokenizer


def _architecture(name: str) -> SupportedArchitecture:
    return SupportedArchitecture(
        name=name,
        example_repo_ids=[],
        task=PipelineTask.TEXT_GENERATION,
        default_encoding=ServedConfig.DEFAULT_ENCODING,
        supported_encodings=ServedConfig.SUPPORTED_ENCODINGS,
        default_weights_format=WeightsFormat.safetensors,
        pipeline_model=ServedPipeline,
        config=ServedConfig,
        batching=Llama3BatchProcessor,
        tokenizer=ServedTokenizer,
        context_type=TextContext,
        memory_planner=PagedMemoryPlanner,
        multi_gpu_supported=True,
        supports_overlap_scheduler=False,
    )


def _allow_bfloat16_on_the_cpu() -> None:
    """MAX refuses it by this table alone: its own CPU kernels are slow there, ours are not."""
    devices = config_enums._SUPPORTED_DEVICES
    if "cpu" not in devices["bfloat16"]:
        devices["bfloat16"] = ("cpu", *devices["bfloat16"])


# MAX's server imports this module before it looks at a device or an encoding.
_allow_bfloat16_on_the_cpu()

ARCHITECTURES = [_architecture(name) for name, family in FAMILIES.items() if not family.engine_only]
