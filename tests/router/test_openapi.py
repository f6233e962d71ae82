"""B1: what the router says of itself in OpenAPI's terms is all there is, and holds for whatever schemathesis thinks of.

The engines are fakes that judge bodies as the document has them; everything else is the router's own doing.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import TimedOut
from schedloom.router.requests.dialect import DIALECTS
from schedloom.router.settings import router_settings
from tests.router.conftest import Make
from tests.router.fakes import BROKEN, Answer, FakeEngine, FakeUpstream, Seen, decoder, prefiller
from tests.router.sockets import served

pytestmark = pytest.mark.anyio

KEY = "a-key-of-the-clients"


class Judging(FakeEngine):
    """Turns away what the document does not allow, and streams what is streamed."""

    async def answer(self, seen: Seen) -> Answer:
        if seen.path not in DIALECTS:
            return await super().answer(seen)
        if not JUDGES[seen.path].is_valid(seen.body):
            return Answer.error(400, "fake: this does not fit")
        return self._ordinary(seen) if DIALECTS[seen.path].split else Answer.of({"fake": True})


ERRORS = [Answer.error(status) for status in (400, 404, 422, 429, 500, 503)]
FAULTS = itertools.cycle([*ERRORS, Answer(200, steps=[BROKEN]), Answer(200, steps=[TimedOut("fake: silent")])])


class Failing(Judging):
    """Every other time it fails, each time in another way."""

    async def answer(self, seen: Seen) -> Answer:
        fails = seen.path in DIALECTS and next(self._ids) % 2
        return next(FAULTS) if fails else await super().answer(seen)


def router(kind: type[FakeEngine] = Judging) -> RouterApp:
    engines = [kind(one.origin, one.contract) for one in (prefiller(), decoder(0), decoder(1))]
    settings = {
        "workers": [{"url": engine.origin} for engine in engines],
        "enable_decoder_append_prefill": True,
        "api_keys": [{"key": KEY, "tenant": "fuzz"}],
    }
    return RouterApp(router_settings(settings), FakeUpstream(engines))


DOCUMENT = router().openapi
JUDGES = {
    path: Draft202012Validator(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    for path in DIALECTS
}


async def searched(place: Path, kind: type[FakeEngine], *options: str) -> None:
    app = router(kind)
    await app.start()
    async with served(app) as address:
        await schemathesis(place, f"{address}/openapi.json", *options)
    await app.close()
    assert [worker.in_flight for worker in app.fleet.workers] == [0, 0, 0]


async def schemathesis(place: Path, url: str, *options: str) -> None:
    """It leaves files in ``place``."""
    always = ["--seed", "1", "--no-color", "--warnings", "off", "--header", f"Authorization: Bearer {KEY}"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, *always, *options]
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=same, cwd=place)
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()


async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    await searched(tmp_path, Judging, "--phases", "fuzzing", "--max-examples", "1")


@pytest.mark.deep
@pytest.mark.timeout(1800)
async def test_schemathesis_finds_nothing_in_a_long_search(tmp_path: Path) -> None:
    await searched(tmp_path, Judging, "--max-examples", "50")


@pytest.mark.deep
@pytest.mark.timeout(1800)
async def test_what_engines_do_wrong_is_told_as_the_document_says(tmp_path: Path) -> None:
    """That data is turned away or not says nothing here."""
    of_data = "not_a_server_error,negative_data_rejection,positive_data_acceptance"
    await searched(tmp_path, Failing, "--max-examples", "50", "--exclude-checks", of_data)


async def test_the_document_is_of_all_routes_and_served(bench: Make) -> None:
    made = await bench(prefiller(), decoder())
    received = await made.client.get("/openapi.json")
    assert (received.status, received.json) == (200, DOCUMENT)
    for path, ways in DOCUMENT["paths"].items():
        status = (await made.client.get(path.replace("{id}", "fake-model"))).status
        assert status == (200 if "get" in ways else 405)
    assert set(DOCUMENT["paths"]) >= {*DIALECTS, "/health", "/ready", "/metrics", "/version", "/v1/models"}
