"""Ray Serve's request routers: `PrefixRouter` for `Prefixes`, and two that know no prefixes. They run in each ingress.

All keep one rule, which `Router` has: a request that failed on replicas goes to others as long as there are any.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged_kv.ray.prefixes import SLACK, Prefixes, blocks_of
from paged_kv.serve.backend import Job


class Router(RequestRouter):
    """The replicas that a request may go to. In which order they are asked, a subclass says."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which the request is offered to them. Where all are full, Ray asks again."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all are full
        job = _job(pending_request)
        if job is None:  # a question about a replica, whichever it is
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in job.avoid]
        return self._rank(job, others or candidate_replicas, pending_request)

    @abstractmethod
    def _rank(self, job: Job, replicas: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        """The replicas, at least one, in order of preference; of a list of several Ray takes one with few requests."""


class RoundRobinRouter(Router):
    """One after the other. Ray's own gives the turn of one request to another one, which may have to avoid it."""

    def initialize_state(self) -> None:
        """Called by Ray."""
        self._turn = random.randrange(1 << 31)  # ingresses do not go in step

    def _rank(self, job: Job, replicas: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:  # noqa: ARG002
        first = self._turn % len(replicas)
        self._turn += 1
        return [[replica] for replica in replicas[first:] + replicas[:first]]


class LoadRouter(Router):
    """Two at random, of which the one with fewer requests takes it."""

    def _rank(self, job: Job, replicas: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:  # noqa: ARG002
        return [random.sample(replicas, min(2, len(replicas)))]


class PrefixRouter(Router):
    """Sends a request to the replica that has its pages, unless that one has too much to do.

    `request_router_kwargs`: `page_size`, `num_pages` (of a replica) and `slack` (`Prefixes`).
    """

    def initialize_state(self, page_size: int = 16, num_pages: int = 512, slack: int = SLACK) -> None:
        """Called by Ray with the deployment's `request_router_kwargs`."""
        self._page_size = page_size
        self._prefixes = Prefixes(num_pages, slack)
        # Requests that were routed and have not ended, by id: the replica, and until they are sent the future that is
        # cancelled when nobody waits for them.
        self._routed: dict[str, tuple[str, asyncio.Future[Any] | None]] = {}

    def _rank(self, job: Job, replicas: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        named = {replica.replica_id.unique_id: replica for replica in replicas}
        ranked = self._prefixes.rank(self._blocks(job), self._loads(named))
        self._routed[pending.metadata.internal_request_id] = ranked[0], pending.future
        return [[named[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """The replica has taken it, and will have its pages."""
        job = _job(pending_request)
        if job is not None:
            self._routed[pending_request.metadata.internal_request_id] = replica_id.unique_id, None
            if replica_id.unique_id in self._prefixes.names:
                self._prefixes.insert(replica_id.unique_id, self._blocks(job))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        """It has ended, in whichever way."""
        self._routed.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas that there are from now on."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        for name in self._prefixes.names - names:
            self._prefixes.leave(name)
        for name in sorted(names - self._prefixes.names):
            self._prefixes.join(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its pages are gone."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.leave(replica_id.unique_id)

    def _blocks(self, job: Job) -> list[int]:
        root = b"" if job.namespace is None else repr(job.namespace).encode()
        return blocks_of(job.tokens, self._page_size, root)

    def _loads(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        """Requests of each replica: the count that it last reported, but at least those routed to it from here.

        Requests that arrive together are routed before any of them is sent.
        """
        for request, (_, future) in list(self._routed.items()):
            if future is not None and future.cancelled():
                del self._routed[request]
        mine = dict.fromkeys(replicas, 0)
        for name, _ in self._routed.values():
            if name in mine:
                mine[name] += 1
        reported = {name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in replicas.items()}
        return {name: max(count, reported[name] or 0) for name, count in mine.items()}


def _job(pending: PendingRequest) -> Job | None:
    job = pending.args[0] if pending.args else None
    return job if isinstance(job, Job) else None
