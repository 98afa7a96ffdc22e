"""The model that MAX Serve runs: MAX's Llama pipeline around this package's graph, weights and artefacts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from max import tree
from max.engine import InferenceSession, Model
from max.graph import Module
from max.nn import Module as Layer
from max.nn.kv_cache import KVCacheInputsPerDevice
from max.nn.kv_cache.cache_params import PACKED_PAGE_STRIDE
from max.pipelines.architectures.llama3.batch_processor import Llama3BatchProcessor
from max.pipelines.architectures.llama3.model import LlamaModelBase
from max.pipelines.lib import ModelInputs, ModelOutputs
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec, compile_graphs
from max.pipelines.lib.interfaces.batch_processor import ragged_kv_symbolic_input_tree

from paged_kv.errors import ContractError
from paged_kv.graphs.ops import kernels
from paged_kv.runtime.compile_key import MODELS, CompileKey, Sources, toolchain
from paged_kv.runtime.first_execution import execute
from paged_kv.runtime.graph_family import GraphFamily
from paged_kv.serve.compiled_graphs import CompiledGraphs
from paged_kv.serve.config import ServedConfig
from paged_kv.serve.graph import ServedStep

_BUILT_BY = (MODELS, "serve/graph.py")
"""The files that build the step."""


class ServedModel(LlamaModelBase):
    """Any family of `paged_kv.graphs.models`, on one device or shared by several GPUs.

    From MAX's class come batching, execution and log-probabilities; weights are memory-mapped and bound without a
    copy where they have the dtype that is asked for, and the compiled step is kept among this package's artefacts.
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
        """The step, compiled or read from disk, with its weights bound."""
        config = self.arch_config_as(ServedConfig)
        if self.pipeline_config.runtime.precompiled_mefs or self.pipeline_config.runtime.export_mefs:
            return self._load_kept_graphs(session, config)
        step, name, types = self._step(config)

        def build(module: Module, _: Sequence[str]) -> None:
            step.trace(*types, name=name, module=module, custom_extensions=[kernels()])

        keys = {name: CompileKey(name, _BUILT_BY)}
        family = GraphFamily(keys, build, self._load_state_dict)
        model = CompiledGraphs.in_force().load_step(session, family)
        self._wire_batch_processor(model, config)
        return {GraphRole.DECODER: model}

    def _load_kept_graphs(self, session: InferenceSession, config: ServedConfig) -> dict[str, Model]:
        """The step, where the user keeps the artefacts: MAX reads and writes them."""
        self._load_state_dict()
        specs = self.graph_specs(config)
        self.compiled_artifacts = compile_graphs(session, specs)
        artifact, weights = self.compiled_artifacts.artifact(GraphRole.DECODER), specs[GraphRole.DECODER].weights
        # Not by name: MAX's own cache gives a graph that equals an older one the older one's name.
        (model,) = session.init_all(artifact, weights_registry=weights).values()
        self._wire_batch_processor(model, config)
        return {GraphRole.DECODER: model}

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """The step, for MAX to compile. Its name changes with all that it depends on, the kernels included.

        A file of `--export-mefs` is found by this name: one of another version is not taken.
        """
        step, name, types = self._step(model_config)
        name = f"paged_kv_{CompileKey(name, _BUILT_BY).digest(Sources.installed(), toolchain())}"
        # MAX asks nothing of it but `trace`.
        spec = GraphSpec(cast(Layer, step), name, types, weights=self.state_dict, custom_extensions=[kernels()])
        return {GraphRole.DECODER: spec}

    def _step(self, config: ServedConfig) -> tuple[ServedStep, str, Sequence[Any]]:
        """The step, the name of its graph, which says all that the graph depends on, and its input types."""
        step = ServedStep(config.decoder, config.dtype, self.kv_params, self.device_refs, self.return_logits)
        inputs = ragged_kv_symbolic_input_tree(
            kv_params=self.kv_params,
            device_refs=self.device_refs,
            include_signal_buffers=len(self.device_refs) > 1,
        )
        types = self._bind_graph_inputs(inputs)
        facts = f"{config.decoder} {config.dtype} {self.return_logits} {[str(kind) for kind in types]}"
        return step, f"paged_kv_{hashlib.sha256(facts.encode()).hexdigest()[:32]}", types

    def _create_model_config(self, state_dict: dict[str, Any]) -> ServedConfig:
        del state_dict
        return self.arch_config_as(ServedConfig)

    def _load_state_dict(self) -> dict[str, Any]:
        """The weights, kept where MAX's own way to compile looks for them."""
        self.state_dict = self._weights()
        return self.state_dict

    def _weights(self) -> dict[str, Any]:
        config = self.arch_config_as(ServedConfig)
        return dict(config.source.load(config.dtype))
