"""The model that MAX Serve runs: MAX's Llama pipeline around this package's graph and weights."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, cast

from max import tree
from max.engine import InferenceSession, Model
from max.nn import Module as Layer
from max.nn.kv_cache import KVCacheInputsPerDevice
from max.nn.kv_cache.cache_params import PACKED_PAGE_STRIDE
from max.pipelines.architectures.llama3.batch_processor import Llama3BatchProcessor
from max.pipelines.architectures.llama3.model import LlamaModelBase
from max.pipelines.lib import ModelInputs, ModelOutputs
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec, compile_graphs
from max.pipelines.lib.interfaces.batch_processor import ragged_kv_symbolic_input_tree

from paged_kv.arrays.host import to_buffer
from paged_kv.errors import ContractError
from paged_kv.graphs.ops import kernels
from paged_kv.max_serve.config import ServedConfig
from paged_kv.max_serve.graph import ServedStep
from paged_kv.runtime.compile_key import MODELS, CompileKey, Sources, toolchain
from paged_kv.runtime.cpu_target import apply_cpu_target
from paged_kv.runtime.first_execution import execute
from paged_kv.runtime.kernel_library import kernel_library

_BUILT_BY = (MODELS, "max_serve/graph.py")
"""The files that build the step."""

# MAX's server and its process for the model both import this module, before they compile anything.
apply_cpu_target()


class ServedPipeline(LlamaModelBase):
    """Any family of `paged_kv.graphs.models` with pages of K and V, on one device or shared by several GPUs.

    From MAX's class come batches, execution and log-probabilities; weights are memory-mapped, and bound without a copy
    where they have the dtype that is asked for.
    """

    model_config_cls: ClassVar[type[Any]] = ServedConfig
    batch_processor_cls: ClassVar[type[Llama3BatchProcessor]] = Llama3BatchProcessor
    norm_method = "rms_norm"

    _pages_are_packed = False

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """One step.

        Raises:
            ContractError: MAX's pool keeps its pages with gaps, which the graph does not look for.
        """
        if not self._pages_are_packed:  # the pool does not change: once is enough
            for kv in tree.leaves(model_inputs.kv_cache_inputs, leaf=KVCacheInputsPerDevice):
                stride = int(kv.page_stride.to_numpy()[0])
                if stride != PACKED_PAGE_STRIDE:
                    raise ContractError(f"kv_blocks: pages lie {stride} elements apart in MAX's pool, with gaps")
            self._pages_are_packed = True
        return execute(super().execute, model_inputs)

    def load_graphs(self, session: InferenceSession) -> dict[str, Model]:
        """The step, compiled by MAX or found in its cache, with its weights bound."""
        config = self._create_model_config(self._load_state_dict())
        self.compiled_artifacts = compile_graphs(session, self.graph_specs(config))
        artifact = self.compiled_artifacts.artifact(GraphRole.DECODER)
        # Not by name: MAX's own cache gives a graph that equals an older one the older one's name.
        (model,) = session.init_all(artifact, weights_registry=self.state_dict).values()
        self._wire_batch_processor(model, config)
        return {GraphRole.DECODER: model}

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """The step, for MAX to compile. Its name changes with all that it depends on, the kernels included.

        A file of `--export-mefs` is found by this name: one of another version is not taken.
        """
        config: ServedConfig = model_config
        step = ServedStep(config.decoder, config.dtype, self.kv_params, self.device_refs, self.return_logits)
        inputs = ragged_kv_symbolic_input_tree(
            kv_params=self.kv_params,
            device_refs=self.device_refs,
            include_signal_buffers=len(self.device_refs) > 1,
        )
        types = self._bind_graph_inputs(inputs)
        facts = f"{config.decoder} {config.dtype} {self.return_logits} {[str(kind) for kind in types]}"
        key = CompileKey(hashlib.sha256(facts.encode()).hexdigest(), _BUILT_BY)
        name = f"paged_kv_{key.digest(Sources.installed(), toolchain())}"
        library = kernel_library(kernels())  # once: MAX would compile the sources for each graph
        # MAX asks nothing of it but `trace`.
        spec = GraphSpec(cast(Layer, step), name, types, weights=self.state_dict, custom_extensions=[library])
        return {GraphRole.DECODER: spec}

    def _create_model_config(self, state_dict: dict[str, Any]) -> ServedConfig:
        del state_dict
        return self.arch_config_as(ServedConfig)

    def _load_state_dict(self) -> dict[str, Any]:
        """The weights, kept where MAX's own way to compile looks for them."""
        config = self.arch_config_as(ServedConfig)
        self.state_dict = {name: to_buffer(array) for name, array in config.source.load(config.dtype).items()}
        return self.state_dict
