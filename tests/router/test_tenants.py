"""API keys, and what keeps the tenants behind them apart."""

from __future__ import annotations

from typing import Any

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.router.laboratory.client import Received
from schedloom.router.requests.tenants import Tenants
from schedloom.router.settings import router_settings
from tests.router.conftest import Bench, Make
from tests.router.fakes import FakeEngine, decoder, prefiller

pytestmark = pytest.mark.anyio

KEYS = [
    {"key": "alpha-key-1", "tenant": "alpha"},
    {"key": "alpha-key-2", "tenant": "alpha"},
    {"key": "beta-key-1", "tenant": "beta"},
]
CHAT: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}


async def ask(router: Bench, key: str | None, session: str = "s", **body: Any) -> Received:
    headers = {"X-Session-ID": session} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return await router.client.post("/v1/chat/completions", CHAT | body, headers)


@pytest.fixture
async def town(bench: Make) -> tuple[Bench, FakeEngine, FakeEngine]:
    p, d = prefiller(), decoder()
    return await bench(p, d, api_keys=KEYS, secret="a secret"), p, d


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic alpha-key-1", "alpha-key-1"]
)
async def test_without_a_known_key_nothing_is_served(
    town: tuple[Bench, FakeEngine, FakeEngine], authorization: str | None
) -> None:
    router, p, d = town
    headers = {} if authorization is None else {"Authorization": authorization}
    received = await router.client.post("/v1/chat/completions", CHAT, headers)
    assert (received.status, received.json["error"]["type"]) == (401, "authentication_error")
    assert "key-1" not in received.body.decode()
    assert (await router.client.get("/v1/models")).status == 401
    assert p.seen == d.seen == []


async def test_a_key_may_stand_in_anthropics_header_where_no_other_does(
    town: tuple[Bench, FakeEngine, FakeEngine],
) -> None:
    router, p, d = town
    for path in ("/v1/messages", "/v1/chat/completions"):
        assert (await router.client.post(path, CHAT, {"x-api-key": "alpha-key-1"})).status == 200
        assert (await router.client.post(path, CHAT, {"x-api-key": "wrong"})).status == 401
        both = {"Authorization": "Bearer wrong", "x-api-key": "alpha-key-1"}
        assert (await router.client.post(path, CHAT, both)).status == 401
    assert not any(seen.headers.keys() & {"x-api-key", "authorization"} for seen in p.seen + d.seen)


def test_keys_are_compared_as_digests_of_one_length() -> None:
    """So that neither the time of a look-up nor the table tells anything of them."""
    settings = router_settings({"workers": [{"url": "http://h:1"}], "api_keys": KEYS})
    tenants = Tenants(settings)
    assert {len(known) for known in tenants._known} == {64} and len(tenants._known) == len(KEYS)
    assert not any(one["key"].encode() in known for known in tenants._known for one in KEYS)


async def test_every_key_of_a_tenant_reaches_its_sessions(town: tuple[Bench, FakeEngine, FakeEngine]) -> None:
    router, _, _ = town
    decisions = [(await ask(router, key)).decision for key in ("alpha-key-1", "alpha-key-2", "beta-key-1")]
    assert decisions == ["pd", "append", "pd"]


async def test_no_tenant_can_name_anothers_session_or_cache(town: tuple[Bench, FakeEngine, FakeEngine]) -> None:
    router, p, d = town
    for key in ("alpha-key-1", "beta-key-1"):
        await ask(router, key)
        await ask(router, key)
    for seen in (p.seen, d.seen):
        by_tenant = [(one.headers["x-session-id"], one.body["cache_salt"]) for one in seen]
        assert len(set(by_tenant)) == 2 and "s" not in {session for session, _ in by_tenant}
    assert {one.body["cache_salt"] for one in p.seen} == {one.body["cache_salt"] for one in d.seen}


async def test_a_salt_of_the_clients_own_is_overwritten_on_every_path(
    town: tuple[Bench, FakeEngine, FakeEngine],
) -> None:
    router, p, d = town
    await ask(router, "alpha-key-1")
    (salt,) = {one.body["cache_salt"] for one in p.seen + d.seen}
    d.holds = False
    await ask(router, "beta-key-1", cache_salt=salt)
    await ask(router, "beta-key-1", cache_salt=salt)
    await ask(router, "beta-key-1", cache_salt=salt, n=2)
    later = [one.body["cache_salt"] for one in p.seen[1:] + d.seen[1:]]
    assert len(later) == 6 and salt not in later and len(set(later)) == 1
    assert {one.raw.count(b"cache_salt") for one in p.seen + d.seen} == {1}


async def test_the_cache_may_be_shared_and_sessions_never_are(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, api_keys=KEYS, share_prefix_across_tenants=True)
    assert (await ask(router, "alpha-key-1")).decision == "pd"
    assert (await ask(router, "beta-key-1")).decision == "pd"
    assert all("cache_salt" not in one.body for one in p.seen + d.seen)
    assert len({one.headers["x-session-id"] for one in p.seen}) == 2


async def test_replicas_with_one_secret_agree(bench: Make) -> None:
    salts = []
    for secret in ("one", "one", "two", None, None):
        p, d = prefiller(), decoder()
        router = await bench(p, d, api_keys=KEYS, **({} if secret is None else {"secret": secret}))
        await ask(router, "alpha-key-1")
        salts.append(p.seen[0].body["cache_salt"])
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4


async def test_without_api_keys_nothing_is_added(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    await ask(router, None)
    assert "cache_salt" not in d.seen[0].body and d.seen[0].headers["x-session-id"] == "s"


def test_keys_do_not_show_in_settings_or_errors() -> None:
    workers = [{"url": "http://h:1"}]
    settings = router_settings({"workers": workers, "api_keys": KEYS, "secret": "a secret", "engine_api_key": "e-key"})
    for hidden in ("alpha-key", "a secret", "e-key"):
        assert hidden not in repr(settings)
    with pytest.raises(ConfigurationError) as refused:
        router_settings({"workers": workers, "api_keys": [{"key": "short", "tenant": "t"}]})
    assert "short" not in str(refused.value).replace("at least", "").replace("short'", "")
