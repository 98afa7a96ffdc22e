"""Several checkpoints at once: as programs, or compiled by MAX in one go, as a compile takes 40 s and every further
geometry in it 6 s.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from max.dtype import DType

from paged_kv.arrays.host import to_numpy
from paged_kv.checkpoint.source import open_source
from paged_kv.engine import model as model_module
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.step import StepGraph
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.config import DecoderConfig, with_cache_rotation, with_windows_apart
from paged_kv.kv_formats import KVFormat
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.compile_key import MODELS, CompileKey
from paged_kv.runtime.graph_reading import UnknownGraph
from paged_kv.runtime.session import default_runtime


@dataclass(frozen=True)
class Member:
    """One checkpoint and how it is to run."""

    folder: Path
    """Or its GGUF file."""
    dtype: DType
    page_size: int
    num_pages: int
    kv_format: KVFormat | None = None
    cache_rotation: str | None = None


def load_family(members: dict[str, Member]) -> dict[str, DecoderModel]:
    """Every member as `DecoderModel.from_folder` gives it, except that one artefact holds all that MAX compiles.

    In it, graphs and weights are named after their member, so that they do not meet.
    """
    sources = {name: open_source(member.folder) for name, member in members.items()}
    configs = {
        name: with_windows_apart(with_cache_rotation(source.config, members[name].cache_rotation))
        for name, source in sources.items()
    }
    weights = {name: source.load(members[name].dtype) for name, source in sources.items()}
    graphs = _compiled(
        {name: members[name] for name in members if not is_program(configs[name], members[name])}, configs, weights
    )
    models = {}
    for name, member in members.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_module, "load_graphs", lambda *_, name=name, **__: {decoder.STEP: graphs[name]})
            models[name] = DecoderModel(
                configs[name],
                weights[name],
                dtype=member.dtype,
                num_pages=member.num_pages,
                page_size=member.page_size,
                kv_format=member.kv_format,
            )
    return models


def is_program(config: DecoderConfig, member: Member) -> bool:
    """Return whether its step runs without MAX."""
    try:
        StepGraph.of(config, member.dtype, member.kv_format).kernels()
    except UnknownGraph:
        return False
    return True


def _compiled(members, configs, weights):
    """The steps of some members, in one artefact."""
    if not members:
        return {}

    def build(module, names):
        for name in names:
            member = members[name]
            how = {"name": name, "weight_prefix": f"{name}/", "kv_format": member.kv_format}
            decoder.build_step(configs[name], member.dtype, module, **how)

    return load_graphs(
        default_runtime().session,
        {
            name: CompileKey(f"{name} {configs[name]} {member.dtype} {member.kv_format}", (MODELS,))
            for name, member in members.items()
        },
        build,
        weights={f"{name}/{of}": weight for name in members for of, weight in weights[name].items()},
    )


def poison(model: DecoderModel) -> None:
    """Fills every page and state with NaN: whatever reads a slot that was not written shows."""
    for buffer in model._states:
        to_numpy(buffer)[...] = float("nan")
    for cache in {id(cache): cache for cache in (model._cache(windows=False), model._cache(windows=True))}.values():
        if not cache.device.is_host:
            blocks = torch.from_dlpack(cache)
            blocks.fill_(float("nan") if model.kv_format is None else torch.iinfo(blocks.dtype).max)
            torch.cuda.synchronize()
        elif model.kv_format is None:
            to_numpy(cache)[...] = float("nan")
        else:
            to_numpy(cache).view(np.uint8)[...] = 255  # scales of bits that are all set are NaN too
