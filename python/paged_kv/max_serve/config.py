"""A model as MAX Serve's planning sees it: its cache, its longest sequence, its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParamInterface
from max.pipelines.kv_cache import cache_dtype_for_encoding
from max.pipelines.lib import MAXModelConfig, PipelineConfig
from max.pipelines.lib.config.model_config import _select_quantization_encoding
from max.pipelines.lib.interfaces.arch_config import ArchConfigWithKVCache, ArchConfigWithStoredKVParams
from max.pipelines.modeling.config_enums import SupportedEncoding, supported_encoding_dtype

from paged_kv.checkpoint.config import config_of
from paged_kv.checkpoint.source import Source, gguf_source, source_of
from paged_kv.checkpoint.weights import open_files
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.fields import Fields


@dataclass(kw_only=True)
class ServedConfig(ArchConfigWithStoredKVParams, ArchConfigWithKVCache):
    """MAX's protocol of an architecture's configuration, around a `DecoderConfig`."""

    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "bfloat16"
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {"float32", "bfloat16", "q4_0", "q4_k", "q6_k"}

    source: Source
    dtype: DType
    """The dtype of activations, and of weights that are not in blocks; float32 where weights are a GGUF file's
    blocks.
    """
    max_seq_len: int
    kv_params: KVCacheParamInterface
    devices: list[DeviceRef]
    quantization_encoding: SupportedEncoding | None = None

    @property
    def decoder(self) -> DecoderConfig:
        """The model that the step computes."""
        return self.source.config

    @classmethod
    def initialize(
        cls, pipeline_config: PipelineConfig, model_config: MAXModelConfig | None = None, *, max_seq_len: int
    ) -> Self:
        """Reads the model's configuration, as transformers has loaded it.

        Raises:
            CheckpointError: the model is not one that this package runs; the message names key and value.
        """
        model = model_config or pipeline_config.model
        described = model.huggingface_config
        if described is None:
            raise CheckpointError(f"{model.model_path}: no config.json")
        encoding = _select_quantization_encoding(model, cls.DEFAULT_ENCODING)
        devices = [DeviceRef(spec.device_type, spec.id) for spec in model.device_specs]
        kv_params = cls.construct_kv_params(
            huggingface_config=described,
            pipeline_config=pipeline_config,
            devices=devices,
            kv_cache_config=model.kv_cache,
            cache_dtype=cache_dtype_for_encoding(encoding, model.kv_cache.kv_cache_format),
        )
        source = _source(model, described.to_dict()).on(devices[0])
        return cls(
            source=source,
            dtype=source.config.computed_in(supported_encoding_dtype(encoding)),
            max_seq_len=max_seq_len,
            kv_params=kv_params,
            devices=devices,
            quantization_encoding=encoding,
        )


def _source(model: MAXModelConfig, described: dict[str, Any]) -> Source:
    """The model whose weights' files MAX has found, and its config.json as transformers has loaded it.

    Raises:
        CheckpointError: they are neither safetensors files nor one GGUF file, or no model that this package runs.
    """
    files = model.resolved_weight_paths()
    if len(files) == 1 and files[0].suffix == ".gguf":
        return gguf_source(files[0])
    if not files or any(file.suffix != ".safetensors" for file in files):
        several = ": name one with --weight-path" if any(file.suffix == ".gguf" for file in files) else ""
        raise CheckpointError(f"{model.model_path}: weights: expected safetensors files or one GGUF file{several}")
    fields = Fields(Path(f"{model.model_path}/config.json"), described)
    config = config_of(described, fields.file)
    if not config.causal:
        raise fields.error("use_bidirectional_attention", "expected false of a model that generates")
    return source_of(config, fields, open_files(files))
