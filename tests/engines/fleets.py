"""A real Prefiller and a real Decoder, and the router before them in this process."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedloom.demo.engines import Engine, EngineSpec, Fleet, Runner, free_ports
from schedloom.demo.model import cached_model
from schedloom.router.app import RouterApp
from schedloom.router.laboratory.client import Client, Received
from schedloom.router.settings import router_settings

REFUSED: list[dict[str, Any]] = [
    {"max_tokens": 100_000},
    {"logprobs": 9999},
    {"response_format": {"type": "nonsense"}},
]
"""What a Prefiller is not told, and a Decoder refuses: the first two when it has read them, the last as it does."""

PLUGINS = {"VLLM_PLUGINS": "schedloom,schedloom_cpu_engine"}


@dataclass(frozen=True)
class Pair:
    prefiller: Engine
    decoder: Engine

    @property
    def settings(self) -> dict[str, Any]:
        return {"workers": [{"url": self.prefiller.url}, {"url": self.decoder.url}]}

    @asynccontextmanager
    async def routed(self, **settings: Any) -> AsyncIterator[RouterApp]:
        app = RouterApp(router_settings(self.settings | settings))
        await app.start()
        try:
            yield app
        finally:
            await app.close()

    def kept(self) -> tuple[float, float]:
        """The Prefiller's use of KV, and the leases that ended before somebody fetched the KV."""
        return metric(self.prefiller, "vllm:kv_cache_usage_perc"), metric(
            self.prefiller, "vllm:nixl_num_kv_expired_reqs_total"
        )

    async def until_free(self, *engines: Engine, seconds: float = 10.0) -> None:
        """Waits until nobody keeps KV or waits for any."""
        for _ in range(int(seconds / 0.2)):
            if all(metric(one, "vllm:kv_cache_usage_perc") == 0 for one in engines):
                return
            await asyncio.sleep(0.2)


@contextmanager
def running_pair(
    logs: Path,
    connector: str,
    prefiller: tuple[str, ...] = (),
    decoder: tuple[str, ...] = (),
    runner: Runner = "v1",
    **extra: Any,
) -> Iterator[Pair]:
    """``prefiller`` and ``decoder`` are further arguments of theirs, ``extra`` is the connectors' configuration."""
    ports = free_ports(4)
    common: dict[str, Any] = {
        "environment": PLUGINS,
        "runner": runner,
        "connector": connector,
        "connector_config": extra,
    }
    specs = [
        EngineSpec("prefiller", ports[0], "producer", ports[1], arguments=prefiller, **common),
        EngineSpec("decoder", ports[2], "consumer", ports[3], arguments=decoder, **common),
    ]
    with Fleet(specs, cached_model(), logs) as fleet:
        yield Pair(fleet.engines["prefiller"], fleet.engines["decoder"])


def prompt(seed: int, length: int = 300) -> list[int]:
    return [32 + (seed * 31 + index * 7 + index * index // 5) % 90 for index in range(length)]


def request(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": tokens, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **more}


def undisturbed(engine: Engine, tokens: list[int], **more: Any) -> list[int]:
    """What one engine alone says, reusing nothing."""
    raw = json.dumps(request(tokens, cache_salt=f"alone {random.random()}", **more)).encode()
    asked = urllib.request.Request(f"{engine.url}/v1/completions", raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        answer: list[int] = json.load(response)["choices"][0]["token_ids"]
    return answer


async def complete(app: RouterApp, body: dict[str, Any], session: str | None = None) -> Received:
    headers = {} if session is None else {"X-Session-ID": session}
    return await Client(app).post("/v1/completions", body, headers)


def token_ids(received: Received) -> list[int]:
    assert received.status == 200, received.body
    if received.headers["content-type"].startswith("application/json"):
        whole: list[int] = received.json["choices"][0]["token_ids"]
        return whole
    choices = [choice for part in received.objects for choice in part.get("choices", [])]
    return [token for choice in choices for token in choice.get("token_ids") or []]


async def leave_after(app: RouterApp, body: dict[str, Any], seconds: float) -> None:
    """A client that hangs up."""
    client = Client(app)
    asyncio.get_running_loop().call_later(seconds, client.leave.set)
    await client.post("/v1/completions", body)


def metric(engine: Engine, name: str) -> float:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
