"""Settings of `paged-kv serve`, and the access rules that follow from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paged_kv.arguments import integer, printable
from paged_kv.checkpoint.embedding_files import Task
from paged_kv.errors import ContractError
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.serve.access_rules import LOOPBACK, Access, AccessRules, host_name
from paged_kv.serve.address import is_loopback
from paged_kv.serve.origins import Origins, read_origin

API_KEY = "PAGED_KV_API_KEY"
MIN_BODY_BYTES = 1 << 18
BODY_BYTES_PER_TOKEN = 16
"""Bytes of a request's body for each token: text has some 4, a token's id in JSON up to 8, a character as \\uXXXX 6."""
_LONGEST_KEY = 1024


@dataclass(frozen=True)
class Settings:
    """The settings of the command line; None is left to the server."""

    model: Path
    """A folder in Hugging Face format or a GGUF file."""
    name: str
    """The name by which clients ask for the model."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    task: Task | None = None
    """The model's use; None: what its files say."""
    dtype: str | None = None
    """"float32" or "bfloat16"."""
    cache_dtype: KVFormat | None = None
    cache_rotation: CacheRotation | None = None
    page_size: int = 16
    pages: int | None = None
    memory_gb: float | None = None
    """The cache's memory, in 10^9 bytes."""
    max_length: int | None = None
    max_running: int = 64
    max_queue: int = 256
    max_step_tokens: int = 512
    max_gap: float | None = 0.25
    kv_disk: Path | None = None
    kv_disk_gb: float = 10.0
    speculate: str | None = None
    """"lookup", "mtp", a smaller checkpoint, or an EAGLE-3 head."""
    lora: tuple[str, ...] = ()
    """LoRA adapters that are loaded at the start: `NAME=PATH`."""
    lora_loading: bool = False
    """True if operators may load and unload adapters."""
    chat_template: Path | None = None
    generation_config: Literal["model", "none"] = "model"
    """The source of sampling fields that a request leaves out: the model's generation_config.json, or nowhere."""
    strict: bool = False
    """True: requests with unknown parts are refused; else these are ignored, and named to the client."""
    drain_seconds: float = 30.0
    stall_seconds: float = 120.0
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """Pages of other servers that may read answers, as `https://app.example`."""
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    metrics: bool = False
    profile: bool = False
    """True if operators may ask where the time of steps goes."""
    max_body_bytes: int | None = None
    """None: `MIN_BODY_BYTES`, or more where the longest request needs more."""
    max_connections: int = 256

    def check(self) -> None:
        """Refuses numbers that no server can have. Raises ContractError."""
        for name in ("page_size", "pages", "max_length", "max_running", "max_step_tokens", "max_connections"):
            self._integer(name, 1)
        self._integer("max_queue", 0)
        self._integer("max_body_bytes", 1)
        for name in ("memory_gb", "max_gap", "kv_disk_gb", "drain_seconds", "stall_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ContractError(f"{_flag(name)}: expected a number above 0 and below 10^9, got {value}")
        if self.pages is not None and self.memory_gb is not None:
            raise ContractError("--pages, --memory-gb: expected one of them, got both")
        if self.profile and self.speculate is not None:
            raise ContractError("--profile: not supported with --speculate, whose steps are of other kinds")
        if self.profile and (self.lora or self.lora_loading):
            raise ContractError("--profile: not supported with --lora, whose steps are of other kinds")
        names = [self.name, *self.aliases, *(name for name, _ in self.adapters())]
        if len(set(names)) < len({self.name, *self.aliases}) + len(self.lora):
            raise ContractError(
                f"--lora: expected names that differ from one another and from the model's, got {names}"
            )

    def adapters(self) -> list[tuple[str, Path]]:
        """The adapters of `--lora`. Raises ContractError where one is no `NAME=PATH`."""
        pairs = [each.partition("=") for each in self.lora]
        for each, (name, _, path) in zip(self.lora, pairs, strict=True):
            if not name or not path:
                raise ContractError(f"--lora: expected NAME=PATH, got {printable(each)}")
        return [(name, Path(path)) for name, _, path in pairs]

    def rules(self, max_length: int) -> AccessRules:
        """Return who may ask this server, and how much at once.

        Args:
            max_length: Tokens of the longest request.

        Raises:
            ContractError: the key cannot be used, or there is none and other machines reach the server.
        """
        key = self._key()
        if key is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ContractError(
                f"--host {self.host} lets other machines in: set {API_KEY} or --api-key-file,"
                " or --allow-unauthenticated where all of them may use the server"
            )
        hosts = {host_name(f"[{name}]" if name.count(":") > 1 else name) for name in self.allowed_hosts}
        size = self.max_body_bytes or max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_length)
        origins = Origins(frozenset(map(read_origin, self.allowed_origins)), frozenset(hosts))
        options: tuple[tuple[Access, bool], ...] = (
            ("metrics", self.metrics),
            ("profile", self.profile),
            ("adapters", self.lora_loading),
        )
        access = AccessRules.access | {name for name, is_set in options if is_set}
        return AccessRules(key, LOOPBACK | hosts | {self.host.lower()}, access, size, self.max_connections, origins)

    def _key(self) -> str | None:
        """The key that clients must send.

        Raises:
            ContractError: it cannot be read, or cannot stand in a header.
        """
        sources = {"--api-key": self.api_key, "--api-key-file": self.api_key_file, API_KEY: os.environ.get(API_KEY)}
        keys = {name: value for name, value in sources.items() if value is not None}
        if len(keys) > 1:
            raise ContractError(f"the API key: expected one of {' and '.join(keys)}, got {len(keys)}")
        key = next(iter(keys.values()), None)
        if isinstance(key, Path):
            if not key.is_file():
                raise ContractError(f"--api-key-file {key}: no such file")
            with key.open("rb") as opened:
                key = opened.read(_LONGEST_KEY + 2).decode("latin-1").strip()
        if key is not None and not (1 <= len(key) <= _LONGEST_KEY and all("!" <= letter <= "~" for letter in key)):
            raise ContractError(f"the API key: expected 1 to {_LONGEST_KEY} visible ASCII characters without a space")
        return key

    def _integer(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if value is not None:
            integer(_flag(name), value, minimum, 2**31 - 1)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
