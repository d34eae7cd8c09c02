"""Registry of engines, which provide ranks' processes; entry points and `ENGINES.register` can add further engines."""

from __future__ import annotations

from unisono.core.registry import Registry
from unisono.engines.dask import Dask
from unisono.engines.engine import Engine
from unisono.engines.mpi import Mpi
from unisono.engines.ray import Ray
from unisono.engines.submitit import Submitit

__all__ = ["ENGINES", "Dask", "Engine", "Mpi", "Ray", "Submitit"]

ENGINES: Registry[type[Engine]] = Registry(
    "engine", "unisono.engines", "ENGINE", group="unisono.launchers", helpers=("engine",)
)
