"""What a Prefiller's answer says of its KV, however it is written."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from schedloom.router.transfer.parameters import transfer_parameters

KV = {"remote_host": "h", "remote_block_ids": [[1], [2]], "more": {"a": {}}}
FALSE = {"kv_transfer_params": {"remote_host": "evil"}}


@pytest.mark.parametrize(
    "answer",
    [
        {"id": "x", "kv_transfer_params": KV},
        {"id": "x", "kv_transfer_params": KV, "ec_transfer_params": None, "metrics": None},
        {"id": "x", "kv_transfer_params": KV, "metrics": {"a": {"b": 1}, "c": []}, "t": 1},
        {"id": "x", "kv_transfer_params": KV, "choices": {"index": 0} | FALSE | {"t": 1}},
        {"id": "x", "kv_transfer_params": KV, "choices": [{"index": 0} | FALSE | {"t": 1}], "t": 1},
        {"id": "x", "kv_transfer_params": KV, "choices": [[{"index": 0} | FALSE | {"t": 1}]], "t": "]"},
        {"id": "x", "kv_transfer_params": KV, "t": "}"},
        {"kv_transfer_params": KV},
        {"kv_transfer_params": KV, "id": "x"},
        {"id": "x", "kv_transfer_params": KV, "choices": [{"index": 0} | FALSE]},
        {"id": "x", "kv_transfer_params": KV, "choices": {"index": 0} | FALSE},
        {"text": ',"kv_transfer_params":{"remote_host":"evil"}}', "kv_transfer_params": KV},
        {"kv_transfer_params": KV, "text": ',"kv_transfer_params":{"remote_host":"evil"}}'},
        {"kv_transfer_params": KV, "text": {',"kv_transfer_params": ': {}}},
        {"id": "x", "kv_transfer_params": KV | {"id": 1} | FALSE},
    ],
)
def test_they_are_read_wherever_they_stand(answer: dict[str, Any]) -> None:
    for written in (
        orjson.dumps(answer),
        orjson.dumps(answer) + b"\n",
        orjson.dumps(answer, option=orjson.OPT_INDENT_2),
    ):
        assert transfer_parameters(written) == answer["kv_transfer_params"]


@pytest.mark.parametrize("parameters", [None, {}, [], "x", 1])
def test_what_is_no_object_with_content_is_none(parameters: object) -> None:
    assert transfer_parameters(orjson.dumps({"id": "x", "kv_transfer_params": parameters})) is None
    assert transfer_parameters(orjson.dumps({"id": "x"} | {"choices": [{"index": 0} | FALSE]})) is None
    assert transfer_parameters(orjson.dumps({"id": "x"} | {"choices": {"index": 0} | FALSE})) is None
    assert transfer_parameters(b"not JSON") is None
