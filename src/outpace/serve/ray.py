"""The server as a deployment of Ray Serve: the same app and engine in every replica, on several machines.

    serve run outpace.serve.ray:build model=NAME max_replicas=4

Ray Serve starts and stops replicas by the number of requests in progress, each with its requested devices; it
replaces unhealthy ones, and lets stopping ones finish their requests.
"""

from __future__ import annotations

from typing import Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from outpace.core import OutpaceError
from outpace.loading import Loaded, load
from outpace.serve.admission import Limits
from outpace.serve.app import make_app
from outpace.serve.door import Keys
from outpace.serve.engine import make_engine
from outpace.serve.service import Service


class Config(BaseModel):
    """Configuration of a deployment, from the command line or a file.

    Attributes:
        model, drafter, dtype, trust_remote_code: as for ``outpace serve``.
        name: name of the model in requests; by default its own name.
        api_keys: keys, separated by commas, one of which each request must send; empty accepts all requests.
        max_running, max_waiting, max_wait, memory, prefix_cache: limits of each replica, as for
            ``outpace serve``.
        min_replicas, max_replicas: bounds of the number of replicas.
        target_ongoing: target number of requests in progress per replica.
        cpus, gpus: number of these per replica.
        drain: seconds for a replica to finish its requests.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    drafter: str = "lookahead"
    dtype: str = "auto"
    trust_remote_code: bool = False
    name: str | None = None
    api_keys: str = ""
    max_running: int = Field(32, ge=1)
    max_waiting: int = Field(256, ge=0)
    max_wait: float = Field(60.0, ge=0)
    memory: float = Field(0.9, gt=0)
    prefix_cache: int = Field(256, ge=0)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing: float = Field(16.0, gt=0)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    drain: float = Field(30.0, ge=0)


def build(config: Config) -> Application:
    """An application for ``serve.run`` or ``serve run outpace.serve.ray:build``.

    Raises:
        OutpaceError: bounds that contradict each other.
    """
    if config.max_replicas < config.min_replicas:
        raise OutpaceError(
            f"max_replicas ({config.max_replicas}) must be at least min_replicas ({config.min_replicas})"
        )
    limits = Limits(config.max_running, config.max_waiting, config.max_wait)
    made: list[tuple[Loaded, Any]] = []  # a replica's model, between its start and that of its app

    def app() -> FastAPI:
        async def opening() -> Service:
            loaded, engine = made.pop()
            return Service(loaded, engine, limits, [config.name or loaded.name.rsplit("/", 1)[-1]])

        keys = Keys(key.strip() for key in config.api_keys.split(",") if key.strip())
        return make_app(keys, limits.body, (), opening)

    class Outpace:
        """One replica: ready when its model is loaded."""

        app: FastAPI  # Ray Serve's ingress sets it

        def __init__(self) -> None:
            if config.gpus == 0:
                torch.set_num_threads(max(1, int(config.cpus)))
            loaded = load(config.model, config.dtype, trust_remote_code=config.trust_remote_code)
            engine = make_engine(
                loaded,
                config.drafter,
                limits,
                memory=config.memory if config.memory < 1 else int(config.memory * 2**30),
                prefix_cache=config.prefix_cache * 2**20 or None,
            )
            made.append((loaded, engine))

        def check_health(self) -> None:
            """Raise the error that ended the engine, so that Ray Serve replaces the replica."""
            service = self.app.state.service
            if service is not None and service.engine.failed is not None:
                raise RuntimeError("the engine has failed") from service.engine.failed

    deployment = serve.deployment(
        serve.ingress(app)(Outpace),
        name="outpace",
        max_ongoing_requests=config.max_running + config.max_waiting,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        autoscaling_config={
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.target_ongoing,
        },
        health_check_period_s=5,
        graceful_shutdown_timeout_s=config.drain,
    )
    application: Application = deployment.bind()
    return application
