"""The deployment for Ray Serve, against a stand-in for its two decorators."""

from __future__ import annotations

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from outpace.core import OutpaceError, SamplingParams
from outpace.loading import load


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``outpace.serve.ray`` over a ray whose applications are what they were made of."""
    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    fakes: dict[str, Any] = {
        "Application": object,
        "ingress": lambda app: lambda cls: SimpleNamespace(cls=cls, app=app),
        "deployment": lambda made, **options: SimpleNamespace(bind=lambda: (made, options)),
    }
    vars(serve).update(fakes)
    vars(ray)["serve"] = serve
    for name, fake in (("ray", ray), ("ray.serve", serve)):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, "outpace.serve.ray", raising=False)
    yield importlib.import_module("outpace.serve.ray")
    sys.modules.pop("outpace.serve.ray", None)


def test_a_replica_is_a_server_with_its_engine(module: Any) -> None:
    made, options = module.build(
        module.Config(name="mine", drafter="prompt_lookup", max_replicas=3, cpus=2, prefix_cache=16)
    )
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}
    assert options["autoscaling_config"]["max_replicas"] == 3
    replica = made.cls()
    replica.app = made.app()
    replica.check_health()  # before it serves

    async def serve() -> list[int]:
        async with replica.app.router.lifespan_context(replica.app):
            while replica.app.state.service is None:
                await asyncio.sleep(0)
            service = replica.app.state.service
            assert service.names == ("mine",)
            replica.check_health()
            prompt = service.model.encode("Question: What is 2 + 3?")
            tokens: list[int] = (await service.engine.generate(prompt, PARAMS)).tokens
            service.engine._failed = ValueError("planted")
            with pytest.raises(RuntimeError, match="failed"):
                replica.check_health()
            return tokens

    plain = load()
    prompt = plain.encode("Question: What is 2 + 3?")
    assert asyncio.run(serve()) == plain.engine("none").generate([prompt], PARAMS)[0].tokens


PARAMS = SamplingParams(max_new_tokens=12)


def test_mistakes_are_refused(module: Any) -> None:
    with pytest.raises(OutpaceError, match="at least min_replicas"):
        module.build(module.Config(min_replicas=3, max_replicas=2))
    with pytest.raises(ValidationError, match="replicas"):
        module.Config(replicas=3)
