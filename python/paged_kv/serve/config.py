"""A model as MAX Serve's planning sees it: its cache, its longest sequence, its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParamInterface
from max.pipelines.kv_cache import cache_dtype_for_encoding
from max.pipelines.lib import MAXModelConfig, PipelineConfig
from max.pipelines.lib.config.model_config import _select_quantization_encoding
from max.pipelines.lib.interfaces.arch_config import ArchConfigWithKVCache, ArchConfigWithStoredKVParams
from max.pipelines.modeling.config_enums import SupportedEncoding, supported_encoding_dtype

from paged_kv.checkpoint.config import config_of
from paged_kv.checkpoint.gguf import open_gguf
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.config import DecoderConfig


@dataclass(kw_only=True)
class ServedConfig(ArchConfigWithStoredKVParams, ArchConfigWithKVCache):
    """MAX's protocol of an architecture's configuration, around a `DecoderConfig`."""

    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "bfloat16"
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {"float32", "bfloat16", "q4_0", "q4_k", "q6_k"}

    decoder: DecoderConfig
    dtype: DType
    """Of weights and activations; of activations alone, and float32, where weights are quantised."""
    max_seq_len: int
    kv_params: KVCacheParamInterface
    devices: list[DeviceRef]
    quantization_encoding: SupportedEncoding | None = None

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
        file = gguf_file(model)
        if file is None:
            decoder = config_of(described.to_dict(), f"{model.model_path}/config.json")
        else:
            decoder = open_gguf(file).config
        return cls(
            decoder=decoder,
            dtype=decoder.computed_in(supported_encoding_dtype(encoding)),
            max_seq_len=max_seq_len,
            kv_params=kv_params,
            devices=devices,
            quantization_encoding=encoding,
        )


def gguf_file(model: MAXModelConfig) -> Path | None:
    """The GGUF file that the weights come from, None where they are safetensors.

    Raises:
        CheckpointError: there are several.
    """
    files = [file for file in model.resolved_weight_paths() if file.suffix == ".gguf"]
    if len(files) > 1:
        raise CheckpointError(f"{model.model_path}: {len(files)} GGUF files: name one with --weight-path")
    return files[0] if files else None
