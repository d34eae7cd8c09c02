"""Runs ranks as Ray actors, one per bundle of a placement group, which Ray reserves completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from unisono.engines.engine import Engine, required
from unisono.errors import CommTimeoutError

__all__ = ["ENGINE", "Ray", "RayActors"]

_ANY_FREE = -1


class Ray(Engine):
    """Engine for Ray: each rank is a separate actor, which lives as long as the launch.

    A placement group reserves the resources of all ranks. If Ray is not initialized, `ray.init()` connects to the
    cluster at RAY_ADDRESS or starts one on this host, and Ray is shut down when the launch ends. Workers must be able
    to import unisono; Ray's runtime environments can install it.

    Args:
        num_cpus, num_gpus, resources: Resources per rank, as in `ray.remote`.
        strategy: Strategy of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        options: Other options for actors, such as runtime_env=. Ray neither restarts ranks nor retries their tasks.

    Raises:
        ValueError: All resources per rank are zero, so there is nothing to reserve.

    Example:
        >>> un.engines.Ray(num_cpus=2, resources={"fast_disk": 1}).bundle
        {'CPU': 2, 'fast_disk': 1}
    """

    replaces = True
    starts_workers = True

    def __init__(
        self,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        **options: Any,
    ) -> None:
        wanted = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        self.bundle: dict[str, float] = {name: amount for name, amount in wanted.items() if amount}
        if not self.bundle:
            raise ValueError("a rank on Ray needs some resource to be reserved: pass num_cpus, such as 0.5")
        self._options = {
            **options,
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(resources or {}),
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        self._strategy = strategy

    @contextmanager
    def workers(self, size: int, timeout_s: float) -> Iterator[Executor]:
        ray = required("ray", "ray")
        util = required("ray.util", "ray")
        was_there = ray.is_initialized()
        if not was_there:
            ray.init()
        try:
            group = util.placement_group([self.bundle] * size, strategy=self._strategy)
            try:
                if not group.wait(timeout_s):
                    raise CommTimeoutError(self._shortage(ray, size, timeout_s), waited_s=timeout_s)
                yield RayActors(ray, group, self._options)
            finally:
                # Removing the placement group kills its actors, even unresponsive ones. Skip this if the program has
                # shut Ray down, because the call would start Ray again.
                if ray.is_initialized():
                    util.remove_placement_group(group)
        finally:
            if not was_there:
                ray.shutdown()

    def _shortage(self, ray: Any, size: int, timeout_s: float) -> str:
        has = ray.cluster_resources()
        free = ray.available_resources()
        room = max(0, min(int(has.get(name, 0) / amount) for name, amount in self.bundle.items()))
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        stock = ", ".join(f"{has.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self.bundle)
        return (
            f"Ray has not reserved {amounts} for each of {size} ranks within {timeout_s:g} s: the cluster has {stock}, "
            f"room for {min(room, size)} of {size} ranks at most when idle; pass a smaller nprocs, ask less for each "
            "rank, or pass a longer timeout="
        )


class RayActors(Executor):
    """Runs each task on a new actor. Actors get the placement group's bundles in order, and after that any free bundle.

    Args:
        ray: The module `ray`.
        group: The placement group.
        options: Options for the actors.
    """

    def __init__(self, ray: Any, group: Any, options: Mapping[str, Any]) -> None:
        self._ray = ray
        self._group = group
        self._options = options
        self._actors: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start an actor for a task, and return a future for its result."""
        strategies = required("ray.util.scheduling_strategies", "ray")
        index = len(self._actors)
        place = strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=index if index < self._group.bundle_count else _ANY_FREE,
        )
        actor = self._ray.remote(_Actor).options(**self._options, scheduling_strategy=place).remote()
        self._actors.append(actor)
        future: Future[Any] = actor.run.remote(fn, *args, **kwargs).future()
        return future


class _Actor:
    """Actor that runs one rank."""

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)


ENGINE = Ray
