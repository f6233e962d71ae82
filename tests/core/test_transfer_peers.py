"""SEC-1: which addresses in transfer parameters are known."""

from __future__ import annotations

from typing import Any

import pytest

from schedloom.core.config import parse_section
from schedloom.core.errors import ConfigurationError
from schedloom.core.transfer_peers import stranger_in

PEERS = ["10.0.0.1:5600", "10.0.0.2", "[fd00::1]:5600", "p.example:5600"]


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"do_remote_decode": True, "remote_host": None, "remote_port": None},
        {"remote_host": "10.0.0.1", "remote_port": 5600},
        {"remote_host": "10.0.0.2", "remote_port": 7},
        {"remote_host": "fd00::1", "remote_port": 5600},
        {"remote_host": "P.example", "remote_port": 5600},
        {"metaserver": "http://10.0.0.2:9000/v1/metaserver?x"},
        {"remote_bootstrap_addr": "10.0.0.1:5600"},
    ],
)
def test_known(parameters: Any) -> None:
    assert stranger_in(parameters, PEERS) is None


@pytest.mark.parametrize(
    ("parameters", "stranger"),
    [
        ({"remote_host": "10.0.0.1", "remote_port": 5601}, "10.0.0.1:5601"),
        ({"remote_host": "10.0.0.1", "remote_port": None}, "10.0.0.1:None"),
        ({"remote_host": "10.0.0.1"}, "10.0.0.1:None"),
        ({"remote_host": "10.0.0.1@evil", "remote_port": 5600}, "10.0.0.1@evil:5600"),
        ({"remote_host": "10.0.0.2.evil", "remote_port": 5600}, "10.0.0.2.evil:5600"),
        ({"remote_host": ["10.0.0.1"], "remote_port": 5600}, "['10.0.0.1']:5600"),
        ({"remote_host": "", "remote_port": 5600}, ":5600"),
        ({"remote_host": "[", "remote_port": 5600}, "[:5600"),
        ({"remote_host": {"a": 1}, "remote_port": {}}, "[{'a': 1}]:{}"),
        ({"remote_host": "fd00::2", "remote_port": 5600}, "[fd00::2]:5600"),
        ({"remote_host": "10.0.0.2", "remote_port": 7, "metaserver": "http://evil/"}, "http://evil/"),
        ({"metaserver": "http://evil@10.0.0.2:99999/"}, "http://evil@10.0.0.2:99999/"),
    ],
)
def test_strangers(parameters: Any, stranger: str) -> None:
    assert stranger_in(parameters, PEERS) == stranger


@pytest.mark.parametrize("peer", ["", ":5600", "http://10.0.0.1:5600", "10.0.0.1:port", "10.0.0.1:", "10.0.0.1/8"])
def test_what_is_no_peer_is_refused_in_one_sentence(peer: str) -> None:
    with pytest.raises(ConfigurationError, match="write it as host:port"):
        parse_section({"transfer_peers": [peer]})


def test_peers_are_taken_as_they_are_written() -> None:
    assert parse_section({"transfer_peers": PEERS}).transfer_peers == PEERS
