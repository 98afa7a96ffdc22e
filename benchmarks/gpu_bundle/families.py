"""Small models of several kinds and caches of codes on a device against transformers or the CPU.

`python -m benchmarks.gpu_bundle.families FOLDER` writes the models and the results that are expected of them, with the
tests' own cases (`support.families`), where there is transformers; `families` is a check of `checks.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType

from benchmarks.gpu_bundle.models import demo_step
from benchmarks.gpu_bundle.run import emit
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.step import StepGraph
from paged_kv.graphs.models.config import with_separate_windows
from paged_kv.kv_formats import KVFormat
from paged_kv.runtime.cache_folder import cache_path
from paged_kv.runtime.session import runtime_on

FAMILIES = ("gemma2", "cohere2", "phi3")
"""Cases of the tests: caps and windows; LayerNorm and layers without rotation; fused weights and LongRoPE. A model of
latents is none of them: its products by head are those of experts, which run on the CPU alone."""
CODES: tuple[KVFormat, ...] = ("int8", "int4")
TOLERANCE = 2e-4
"""The largest difference of float32 logits, as a part of their largest: a GPU sums in another order."""


def make_models(folder: Path) -> None:
    """Write the checkpoints of `FAMILIES`, each in a folder of its name."""
    cases: Any = import_module("support.families")
    for name in FAMILIES:
        family, switches = cases.CASES[name]
        cases.make_checkpoint(folder / name, family=family, **cases.BASE | switches)


def save(folder: Path) -> None:
    """Writes the models, with the tokens and logits that are expected: transformers', and the CPU's over codes."""
    cases: Any = import_module("support.families")
    make_models(folder)
    for name in FAMILIES:
        texts, _ = cases.run(DecoderModel.from_folder(folder / name, dtype=DType.float32, num_pages=cases.PAGES[1]))
        np.savez(folder / name / "expected", *texts, logits=cases.reference(folder / name, texts))
    for codes in CODES:
        model = DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=cases.PAGES[1], kv_format=codes)
        texts, logits = cases.run(model)
        (folder / codes).mkdir()
        np.savez(folder / codes / "expected", *texts, logits=logits)


def step_graphs() -> dict[str, StepGraph]:
    """The steps by the names of `FAMILIES` and `CODES`."""
    steps = {
        name: StepGraph.of(with_separate_windows(open_source(models_path() / name).config), DType.float32)
        for name in FAMILIES
    }
    demo = demo_step()
    return steps | {codes: StepGraph(demo.geometry, demo.dtype, codes) for codes in CODES}


def families(device: str) -> str:
    cases: Any = import_module("support.families")
    wrong = []
    for name in (*FAMILIES, *CODES):
        expected = np.load(models_path() / name / "expected.npz")
        folder, codes = (FOLDER, name) if name in CODES else (models_path() / name, None)
        try:
            model = _model(device, folder, cases.PAGES[1], codes)
            texts, logits = cases.run(model)
        except Exception as error:  # the others run all the same
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        same = sum(text == expected[f"arr_{i}"].tolist() for i, text in enumerate(texts))
        off = float(np.abs(np.array(logits) - expected["logits"]).max() / np.abs(expected["logits"]).max())
        emit(check="family", family=name, same_texts=same, texts=len(texts), off=off)
        if same < len(texts) or not off <= TOLERANCE:
            wrong.append(f"{name}: {same} of {len(texts)} texts, logits off by {off:.1e}")
    if wrong:
        raise AssertionError("; ".join(wrong))
    return f"{len(FAMILIES)} families and {len(CODES)} caches of codes are right"


def _model(device: str, folder: Path, pages: int, codes: Any) -> DecoderModel:
    runtime = runtime_on(0 if device == "gpu" else None)
    return DecoderModel.from_folder(folder, dtype=DType.float32, num_pages=pages, runtime=runtime, kv_format=codes)


def models_path() -> Path:
    """The folder of the bundle's models, in the cache folder."""
    return cache_path() / "models"


if __name__ == "__main__":
    save(Path(sys.argv[1]))
