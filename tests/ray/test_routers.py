"""The rules that all routers keep; no cluster is needed."""

import asyncio
from itertools import combinations
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import FIFOMixin, PendingRequest

from paged_kv.engine import Sampling
from paged_kv.ray.application import ROUTERS
from paged_kv.serve.backend import Job

HERE = DeploymentID("Replica", "app")
NAMES = ["a", "b", "c", "d"]


def offered(router, avoid: frozenset[str], turns: int = 8) -> list[list[list[str]]]:
    """The replicas that some requests are offered to, in their order."""

    async def ask(number: int):
        job = Job((1, 2, 3), Sampling(4, seed=1), avoid=avoid)
        pending = PendingRequest([job], {}, RequestMetadata(str(number), str(number)))
        ranks = await router.choose_replicas(replicas, pending)
        assert pending.routing_context.should_backoff
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]

    async def all_of_them():
        return [await ask(number) for number in range(turns)]

    replicas = [SimpleNamespace(replica_id=ReplicaID(name, HERE)) for name in NAMES]
    return asyncio.run(all_of_them())


@pytest.mark.parametrize("name", ROUTERS)
def test_a_request_goes_to_no_replica_on_which_it_failed_while_there_is_another_one(name):
    assert not issubclass(ROUTERS[name], FIFOMixin)  # which gives a replica to the request that has waited longest
    router = ROUTERS[name](HERE, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    for count in range(4):
        for avoid in combinations(NAMES, count):
            for ranks in offered(router, frozenset(avoid)):
                assert ranks
                assert all(ranks)
                assert not {name for rank in ranks for name in rank} & set(avoid)
    assert {name for ranks in offered(router, frozenset(NAMES), 64) for rank in ranks for name in rank} == set(NAMES)


def test_round_robin_takes_one_after_the_other_and_load_two_at_random():
    turns = ROUTERS["round_robin"](HERE, DeploymentHandleSource.REPLICA)
    turns.initialize_state()
    orders = ["".join(name for (name,) in ranks) for ranks in offered(turns, frozenset())]
    assert set(orders) == {"abcd", "bcda", "cdab", "dabc"}
    assert orders[:4] == orders[4:]
    load = ROUTERS["load"](HERE, DeploymentHandleSource.REPLICA)
    pairs = offered(load, frozenset(), 64)
    assert all(len(ranks) == 1 and len(set(ranks[0])) == 2 for ranks in pairs)
    assert {name for ((first, second),) in pairs for name in (first, second)} == set(NAMES)
