"""Models by the names of a hub: `org/name`, and `org/name:Q4_K_M` for one of a repository's GGUF files.

`huggingface_hub` downloads, caches and resumes; this module decides which files make a model. A model that the cache
has whole is used without asking the network; `hf download org/name` fetches newer files. `HF_ENDPOINT`,
`HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean to every other program.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from paged_kv.arguments import printable
from paged_kv.checkpoint.config import checkpoint_path, load_config
from paged_kv.checkpoint.tokenizer_file import TOKENIZER, read_tokenizer
from paged_kv.checkpoint.weights import INDEX_FILE, SINGLE_FILE, shards_of
from paged_kv.errors import CheckpointError

DEFAULT_TAG = "Q4_K_M"
"""The GGUF file of a name without a tag, where a repository has several."""
_CONFIG = "config.json"
_SMALL = (_CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "chat_template.jinja", INDEX_FILE)
"""The files that a model has besides its weights."""
_OF_EMBEDDINGS = (
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("[0-9]_*/config.json", "[0-9]_Dense/model.safetensors"),
)
"""Patterns of the files that say how a model embeds texts."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_TAG = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


def located(path: Path | str) -> Path:
    """The folder or file of a model: `path` itself if it is there, or if it is no name of a hub; else the hub's model,
    downloaded where the cache does not have it.

    Raises:
        ContractTypeError, CheckpointError: as `checkpoint_path`; or there is no such model on the hub, it is none that
            this package runs, there is no room for it, or the hub cannot be asked.
    """
    path = checkpoint_path(path)
    name = path.as_posix()
    if path.exists() or not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        return path
    return _cached(name) or _downloaded(name)


def _cached(name: str) -> Path | None:
    """The model in the hub's cache, None where a file is missing. The layout is the one `huggingface_hub` documents."""
    from huggingface_hub import constants

    repository, _, tag = name.partition(":")
    stored = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = stored / "snapshots" / (stored / "refs" / "main").read_text()
    except OSError:
        return None
    names = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    try:
        weights = _weights(name, names, tag, snapshot)
    except CheckpointError:
        return None
    whole = set(weights) <= set(names) and (weights[0].endswith(".gguf") or {_CONFIG, TOKENIZER} <= set(names))
    return _model(snapshot, weights) if whole else None


def _downloaded(name: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    repository, _, tag = name.partition(":")
    try:
        siblings = HfApi().model_info(repository, files_metadata=True).siblings or ()
        sizes = {file.rfilename: file.size or 0 for file in siblings}
        small = [file for file in sizes if any(fnmatch(file, each) for each in (*_SMALL, *_OF_EMBEDDINGS))]
        snapshot = Path(constants.HF_HUB_CACHE)
        if small:
            snapshot = Path(snapshot_download(repository, allow_patterns=small))
        weights = _weights(name, list(sizes), tag, snapshot)
        missing = [file for file in weights if file not in sizes]
        if missing:
            raise CheckpointError(f"{name}: the hub's repository lacks {missing[0]}, which is a part of the model")
        if not weights[0].endswith(".gguf"):
            load_config(snapshot)  # a model that is not run is refused before its weights are fetched
            read_tokenizer(snapshot / TOKENIZER)
        _check_room(name, sum(sizes[file] for file in weights if not (snapshot / file).is_file()))
        snapshot = Path(snapshot_download(repository, allow_patterns=[*small, *weights]))
    except CheckpointError:
        raise
    except Exception as error:  # which ones there are changes with the HTTP client of each version
        raise CheckpointError(_reason(name, error)) from error
    return _model(snapshot, weights)


def _weights(name: str, files: Sequence[str], tag: str, snapshot: Path) -> list[str]:
    """Return the files of a model's weights; `snapshot` has the index of its shards, where there is one."""
    if not tag and SINGLE_FILE in files:
        return [SINGLE_FILE]
    if not tag and INDEX_FILE in files:
        return shards_of(snapshot / INDEX_FILE)
    by_stem = _gguf_models(files)
    if tag:
        stems = [stem for stem in by_stem if re.search(rf"(?:^|[-._]){re.escape(tag)}$", stem, re.IGNORECASE)]
    else:
        stems = list(by_stem) if len(by_stem) == 1 else [stem for stem in by_stem if _tag(stem) == DEFAULT_TAG]
    stems = [stem for stem in stems if len(stem) == min(map(len, stems))]  # `Q4_K_M` before `UD-Q4_K_M`
    if len(stems) == 1:
        return by_stem[stems[0]]
    if not by_stem:
        kinds = f"no GGUF file, which :{tag} asks for" if tag else "neither safetensors of a model nor a GGUF file"
        raise CheckpointError(f"{name}: the hub's repository has {kinds}")
    tags = ", ".join(sorted({_tag(stem) or stem for stem in by_stem}))
    which = f"{'no' if not stems else len(stems)} GGUF file{'s' * bool(stems)} {tag or DEFAULT_TAG}"
    raise CheckpointError(f"{name}: the hub's repository has {which}; name one of {tags} behind a colon")


def _gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF model, all its parts, by the name without folder, part and suffix."""
    models = dict[str, list[str]]()
    for file in files:
        folder, _, base = file.rpartition("/")
        if not base.lower().endswith(".gguf") or base.lower().startswith(("mmproj", "imatrix")):
            continue
        stem = base[: -len(".gguf")]
        part = _PART.search(stem)
        if part is None:
            models[stem] = [file]
            continue
        whole = stem[: part.start()]
        parts = (f"{whole}-{number:05}-of-{part[2]}{base[len(stem) :]}" for number in range(1, int(part[2]) + 1))
        models[whole] = [f"{folder}/{each}" if folder else each for each in parts]
    return models


def _tag(stem: str) -> str:
    match = _TAG.search(stem)
    return match[1].upper() if match else ""


def _model(snapshot: Path, weights: Sequence[str]) -> Path:
    """The path that `open_source` opens."""
    return snapshot / weights[0] if weights[0].endswith(".gguf") else snapshot


def _check_room(name: str, size: int) -> None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CheckpointError(f"{name}: takes {size / 1e9:.1f} GB, and {folder} has room for {free / 1e9:.1f} GB")


def _reason(name: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    repository, hub = name.partition(":")[0], constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"{name}: its owners decide who gets it; ask at {hub}/{repository}, then log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name}: no such folder or file, and no such model at {hub}, unless it is private: `hf auth login`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{name}: no such folder or file, not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    message = printable((str(error).strip().splitlines() or [""])[0])
    return f"{name}: no such folder or file, and it cannot be had from {hub}: {type(error).__name__}: {message}"
