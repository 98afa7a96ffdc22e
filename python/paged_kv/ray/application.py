"""The Ray Serve application: `serve run paged_kv.ray:app model=demo`, or a config file (examples/ray_serve)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from ray import exceptions, serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from paged_kv.checkpoint.source import open_source
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.ray.backend import Replicas, Ways
from paged_kv.ray.prefixes import SLACK
from paged_kv.ray.replica import Model, Replica, settings_of
from paged_kv.ray.router import LoadRouter, PrefixRouter, RoundRobinRouter
from paged_kv.serve.application import application
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.launch import served_model
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.middleware import Middleware
from paged_kv.serve.settings import Settings

LOST = (
    exceptions.RayActorError,
    exceptions.ObjectLostError,
    exceptions.NodeDiedError,
    exceptions.WorkerCrashedError,
    ReplicaUnavailableError,
)
"""Errors that Ray raises where the process of a replica, or its machine, is gone."""

POOL_SECONDS = 5.0
"""The timeout of a status of all replicas' pages."""
ROUTERS = {"prefix": PrefixRouter, "round_robin": RoundRobinRouter, "load": LoadRouter}


def check_fields(autoscaling: dict[str, Any]) -> dict[str, Any]:
    for name in autoscaling:  # Ray ignores those that it does not know
        if name not in AutoscalingConfig.model_fields:
            raise ValueError(f"expected fields of Ray Serve's autoscaling_config, got {name}")
    return autoscaling


class Arguments(BaseModel):
    """Arguments of `app`. All but the model may be left out; `serve run` gives them as texts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    """A folder in Hugging Face format or a GGUF file, at the same path on every machine; or a hub's name, which each
    machine fetches; "demo" is in the package."""
    name: str | None = None
    """The model as clients ask for it; `model` where None."""
    dtype: Literal["float32", "bfloat16"] | None = None
    num_pages: PositiveInt = 512
    page_size: PositiveInt = 16
    cache_dtype: KVFormat | None = None
    cache_rotation: CacheRotation | None = None
    deterministic: bool = False
    speculate: str | None = None
    """"lookup", or a smaller checkpoint at the same path on every machine."""
    kv_disk: Path | None = None
    """A folder of each machine, which its replicas share."""
    kv_disk_gb: PositiveFloat = 10
    compiled: Path | None = None
    max_running: PositiveInt = 256
    max_step_tokens: PositiveInt = 2048
    max_gap: PositiveFloat = 0.25
    cpus: PositiveInt = 1
    """CPUs of each replica, as Ray counts them: 2 are a core where it runs two threads."""
    replicas: PositiveInt = 1
    autoscaling: Annotated[dict[str, Any], AfterValidator(check_fields)] | None = None
    """Ray Serve's `autoscaling_config`, in place of `replicas`."""
    ingresses: PositiveInt = 1
    max_ongoing: PositiveInt = 64
    """Requests that a replica computes or keeps in its engine's queue."""
    max_queued: PositiveInt = 128
    """Requests that wait in an ingress until a replica takes them; the next one gets 429."""
    start_attempts: PositiveInt = 3
    """Failed starts of engines, with no success, until the deployment is DEPLOY_FAILED; at most 3 a replica."""
    retries: NonNegativeInt = 2
    """How often a request is computed again after its replica died or failed."""
    stall_seconds: PositiveFloat = 120
    """Seconds that a client waits without news of its replica. A step of half as long restarts the replica."""
    drain_seconds: PositiveFloat = 120
    """Seconds for which requests may go on when a replica or the application is stopped."""
    router: Literal["prefix", "round_robin", "load"] = "prefix"
    slack: int = SLACK
    allowed_hosts: tuple[str, ...] = ()
    """Names of this server, beside those of loopback."""
    allowed_origins: tuple[str, ...] = ()
    """Pages of other servers that may read answers, as `https://app.example`."""
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    api_key_file: Path | None = None
    """Read by each ingress; or the variable PAGED_KV_API_KEY is set; else no key is asked for."""
    metrics: bool = False
    """True if `/metrics` is served, by each ingress for itself."""
    max_body_bytes: PositiveInt | None = None
    chat_template: Path | None = None
    """A file in place of the checkpoint's template."""
    generation_config: Literal["model", "none"] = "model"
    strict: bool = False
    """True if requests with unknown parts are refused."""

    @property
    def each(self) -> Model:
        """The model that every replica loads."""
        return Model(**{each.name: getattr(self, each.name) for each in fields(Model)})

    @property
    def settings(self) -> Settings:
        """The settings that an ingress shares with `paged-kv serve`."""
        return settings_of(
            self,
            model=self.each.folder,
            name=self.name or self.model,
            pages=self.num_pages,
            allow_unauthenticated=True,
        )


class NamedReplica(Replica):
    """A replica that has Ray's name for it."""

    def __init__(self, arguments: Arguments) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(arguments.each, name, arguments.stall_seconds)


@serve.ingress()
class Ingress:
    """The deployment in front: one process, which computes nothing."""

    def __init__(self, arguments: Arguments, replicas: DeploymentHandle) -> None:
        self._arguments, self._replicas = arguments, replicas
        self._generate = replicas.options(method_name="generate", stream=True)
        self._asking = ThreadPoolExecutor(1, "paged-kv-status")

    def __serve_build_asgi_app__(self) -> Any:
        arguments, settings = self._arguments, self._arguments.settings
        full, down = (BackPressureError,), (DeploymentUnavailableError,)
        backend = Replicas(
            Ways(self._start, self._running, self._pools, LOST, full, down, arguments.retries, arguments.stall_seconds)
        )
        model = served_model(settings, open_source(settings.model), arguments.num_pages * arguments.page_size)
        served = application(model, backend, Metrics(settings.name, backend), strict=settings.strict)
        return Middleware(served, settings.rules(model.most_tokens))

    async def _start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        # In a context of its own: Ray takes jobs of one HTTP request for one and the same, and loses all but one.
        response = Context().run(self._generate.remote, job)
        try:
            async for batch in response:
                yield batch
        finally:
            response.cancel()  # nothing where it has ended

    async def _running(self) -> int:
        """Replicas that Ray's controller finds healthy; it asks each every second."""
        status = await asyncio.get_running_loop().run_in_executor(self._asking, serve.status)
        deployment = status.applications[self._replicas.app_name].deployments[self._replicas.deployment_name]
        return int(deployment.replica_states.get("RUNNING", 0))

    async def _pools(self) -> dict[str, dict[str, Any]]:
        asked = self._replicas.broadcast("pool")
        answers = await asked.results_async(timeout_s=POOL_SECONDS, return_exceptions=True)
        return dict(answer for answer in answers if not isinstance(answer, BaseException))


def app(arguments: Mapping[str, Any] | Arguments) -> serve.Application:
    """The application for `serve.run` and `serve run`.

    Raises:
        pydantic.ValidationError: an argument is unknown or has a wrong value; it names them.
        ContractError: a value is none that a server can have.
    """
    checked = arguments if isinstance(arguments, Arguments) else Arguments.model_validate(dict(arguments))
    checked.settings.check()
    kwargs: dict[str, Any] = {}
    if checked.router == "prefix":
        kwargs = {"page_size": checked.page_size, "num_pages": checked.num_pages, "slack": checked.slack}
    amount: dict[str, Any] = {"num_replicas": checked.replicas}
    if checked.autoscaling is not None:
        amount = {"autoscaling_config": checked.autoscaling}
    replica = serve.deployment(
        NamedReplica,
        name="Replica",
        ray_actor_options={"num_cpus": checked.cpus},
        max_ongoing_requests=checked.max_ongoing,
        max_queued_requests=checked.max_queued,
        graceful_shutdown_timeout_s=checked.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,
        max_constructor_retry_count=checked.start_attempts,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTERS[checked.router], request_router_kwargs=kwargs
        ),
        **amount,
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=checked.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=checked.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,
        max_constructor_retry_count=checked.start_attempts,
    )
    return ingress.bind(checked, replica.bind(checked))
