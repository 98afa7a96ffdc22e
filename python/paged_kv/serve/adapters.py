"""vLLM's routes that load and unload LoRA adapters of a server that runs."""

from __future__ import annotations

from typing import Any

from paged_kv.serve.fields import BodyFields
from paged_kv.serve.served_model import AdapterStore, ServedModel, UnknownModel


def load_adapter(body: BodyFields, model: ServedModel) -> dict[str, Any]:
    """Loads the adapter at `lora_path` under `lora_name`, by which requests then ask for it as their model.

    Raises:
        FieldError, ContractError, CheckpointError: a field is missing, the name is taken, or there is no such adapter.
    """
    name, path = str(body.text("lora_name")), str(body.text("lora_path"))
    body.end()
    if name in model.names:
        raise body.error("lora_name", f"expected a name that the model does not have, got {name!r}")
    _store(model).load_adapter(name, path)
    return {"loaded": name}


def unload_adapter(body: BodyFields, model: ServedModel) -> dict[str, Any]:
    """Forgets the adapter `lora_name`; requests under way go on. Raises UnknownModel where there is none."""
    name = str(body.text("lora_name"))
    body.ignore(("lora_int_id",))
    body.end()
    store = _store(model)
    if name not in store.adapters:
        raise UnknownModel("lora_name", f"expected one of {', '.join(store.adapters) or 'none'}, got {name!r}")
    store.unload_adapter(name)
    return {"unloaded": name}


def _store(model: ServedModel) -> AdapterStore:
    assert model.store is not None
    return model.store
