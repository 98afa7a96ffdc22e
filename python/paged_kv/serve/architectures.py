"""What MAX Serve registers: the families of `paged_kv.graphs.models` whose pages it has, and bfloat16 on the CPU."""

from __future__ import annotations

from typing import Any, cast

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.llama3.batch_processor import Llama3BatchProcessor
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling import config_enums
from max.pipelines.modeling.types import PipelineTask

from paged_kv.graphs.models import ENGINE_ONLY, FAMILIES
from paged_kv.runtime.cpu_target import apply_cpu_target
from paged_kv.serve.config import ServedConfig
from paged_kv.serve.model import ServedModel
from paged_kv.serve.pipeline import ServedPipeline
from paged_kv.serve.tokenizer import ServedTokenizer
from paged_kv.serve.tools import parser_of


def _architecture(name: str) -> SupportedArchitecture:
    return SupportedArchitecture(
        name=name,
        example_repo_ids=[],
        task=PipelineTask.TEXT_GENERATION,
        default_encoding=ServedConfig.DEFAULT_ENCODING,
        supported_encodings=ServedConfig.SUPPORTED_ENCODINGS,
        default_weights_format=WeightsFormat.safetensors,
        pipeline_model=ServedModel,
        config=ServedConfig,
        batching=Llama3BatchProcessor,
        pipeline_cls=ServedPipeline,
        tokenizer=ServedTokenizer,
        tool_parser=cast(Any, parser_of),  # None is for none
        context_type=TextContext,
        memory_planner=PagedMemoryPlanner,
        multi_gpu_supported=True,
        supports_overlap_scheduler=False,  # it is another pipeline class
    )


def _allow_bfloat16_on_the_cpu() -> None:
    """MAX refuses it by this table alone: its own CPU kernels are slow there, ours are not."""
    devices = config_enums._SUPPORTED_DEVICES
    if "cpu" not in devices["bfloat16"]:
        devices["bfloat16"] = ("cpu", *devices["bfloat16"])


# MAX's server imports this module before it looks at a device or an encoding; its process for the model does not.
_allow_bfloat16_on_the_cpu()
apply_cpu_target()

ARCHITECTURES = [_architecture(name) for name in FAMILIES if name not in ENGINE_ONLY]
