"""What the router says of itself in OpenAPI's terms, made from the table of its routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from schedloom import __version__
from schedloom.router.requests.dialect import DIALECTS
from schedloom.router.requests.guard import EXTRA_ARGUMENTS, SESSION_KEYS
from schedloom.router.requests.headers import (
    API_KEY_HEADER,
    DECISION_HEADER,
    DECODER_HEADER,
    MAX_SESSION_CHARACTERS,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
)
from schedloom.router.transfer.callbacks import CALLBACK_PATH

OPENAPI_PATH = "/openapi.json"
MODELS_PATH = "/v1/models"
MODEL_PATH = MODELS_PATH + "/{id}"

_Plain = dict[str, Any]

_SUMMARIES = {
    "/v1/chat/completions": "OpenAI's chat completions, by every route",
    "/v1/completions": "OpenAI's completions, by every route",
    "/v1/responses": "OpenAI's responses, by one Decoder",
    "/v1/messages": "Anthropic's messages, by one Decoder",
    "/v1/messages/count_tokens": "The number of tokens of messages, by one Decoder",
    "/tokenize": "The token ids of a text, by one Decoder",
    "/detokenize": "The text of token ids, by one Decoder",
    CALLBACK_PATH: "Where Decoders ask for prefills, each at an address that only it was told",
    MODELS_PATH: "The models of the Decoders that are there",
    MODEL_PATH: "One of them; its id may hold slashes",
    "/health": "The process lives",
    "/ready": "Whether any request can be served: a Decoder is there, and the router is not shutting down",
    "/version": "The version of schedloom",
    "/metrics": "Figures for Prometheus",
    OPENAPI_PATH: "This document",
}

_PROMPTS: Mapping[str, _Plain] = {
    "/v1/chat/completions": {"messages": {"type": "array", "items": {"type": "object"}}},
    "/v1/completions": {"prompt": {"type": ["string", "array"]}},
    "/v1/responses": {"input": {"type": ["string", "array"]}},
    "/v1/messages": {"messages": {"type": "array", "items": {"type": "object"}}},
    "/v1/messages/count_tokens": {"messages": {"type": "array", "items": {"type": "object"}}},
    "/tokenize": {"prompt": {"type": "string"}},
    "/detokenize": {"tokens": {"type": "array", "items": {"type": "integer"}}},
}
"""What a model is asked, by endpoint."""

_READ: _Plain = {
    "model": {"type": "string"},
    "stream": {"type": "boolean"},
    "n": {"type": "integer"},
    **{key: {"description": "Names the session, where it is a string"} for key in SESSION_KEYS},
    EXTRA_ARGUMENTS: {"type": ["object", "null"]},
}
"""What the router reads of a body."""

_FAILURES = {
    400: "The body cannot be understood",
    401: "The API key is missing or unknown, where keys are configured",
    408: "The request's head or body was too slow to arrive",
    413: "The body is too long",
    431: "The head is too long",
    500: "The router failed",
    502: "An engine failed or broke off",
    503: "Too many requests are waiting, no engine can be reached, or the router is shutting down",
    504: "An engine, or the whole request, took too long",
    "default": "An engine's own error, as it came",
}
"""How a request for engines fails. Everything else of it is judged by the engines."""

_MODEL_ID: _Plain = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

_OF_CALLBACKS = (400, 404, 408, 413, 431)
_NO_MODEL = "No Decoder that is there has this model"
_NOT_EXPECTED = "No request waits for this callback"


def openapi(routes: Mapping[str, Iterable[str]]) -> _Plain:
    """The document about ``routes``: the methods of each path. Raises KeyError for a path that nobody described."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "schedloom router",
            "version": __version__,
            "description": "What a request may hold is judged by the engines; this tells what the router makes of it.",
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
        "paths": {path: {one.lower(): _operation(path, one) for one in ways} for path, ways in sorted(routes.items())},
        "components": {
            "schemas": {"Error": _error_schema()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": _name(API_KEY_HEADER)},
            },
        },
    }


def _operation(path: str, method: str) -> _Plain:
    summary = {"summary": _SUMMARIES[path]}
    if path in DIALECTS:
        return summary | {"parameters": _parameters(path), "requestBody": _body(path), "responses": _answers(path)}
    if path == CALLBACK_PATH:
        failures = {str(status): _failure(_FAILURES.get(status, _NOT_EXPECTED)) for status in _OF_CALLBACKS}
        return summary | {"security": [{}], "requestBody": _json_body({}), "responses": {"200": _json(), **failures}}
    page = summary | {"responses": _page(path, with_body=method != "HEAD")}
    return page | {"parameters": [_MODEL_ID]} if path == MODEL_PATH else page


def _parameters(path: str) -> list[_Plain]:
    if not DIALECTS[path].turn:
        return []
    schema = {"type": "string", "maxLength": MAX_SESSION_CHARACTERS}
    described = f"Names the session; so do, in this order behind it, the body's {' and '.join(SESSION_KEYS)}."
    return [{"name": _name(SESSION_HEADER), "in": "header", "schema": schema, "description": described}]


def _body(path: str) -> _Plain:
    return _json_body(_PROMPTS[path] | _READ)


def _json_body(properties: _Plain) -> _Plain:
    schema = {"type": "object", "properties": properties, "additionalProperties": True}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _answers(path: str) -> _Plain:
    answer = _json() | {"headers": _about()}
    if DIALECTS[path].turn:
        answer["content"]["text/event-stream"] = {}
    return {"200": answer} | {str(status): _failure(meaning) for status, meaning in _FAILURES.items()}


def _about() -> _Plain:
    """Which engine an answer is of, and by which route."""
    decisions = {"type": "string", "enum": ["append", "pd", "pull_back", "fallback", "decode"]}
    schemas = {DECISION_HEADER: decisions, DECODER_HEADER: {"type": "string"}, REQUEST_ID_HEADER: {"type": "string"}}
    return {_name(header): {"required": True, "schema": schema} for header, schema in schemas.items()}


def _page(path: str, *, with_body: bool) -> _Plain:
    plain = {"description": "Figures", "content": {"text/plain": {"schema": {"type": "string"}}}}
    found = plain if path == "/metrics" else _json()
    pages = {"200": found if with_body else {"description": "The same without its body"}}
    if path == "/ready":
        pages["503"] = {**found, "description": "Not ready"} if with_body else {"description": "Not ready"}
    if path in (MODELS_PATH, MODEL_PATH):
        pages["401"] = _failure(_FAILURES[401]) if with_body else {"description": _FAILURES[401]}
    if path == MODEL_PATH:
        pages["404"] = _failure(_NO_MODEL) if with_body else {"description": _NO_MODEL}
    return pages | {"431": _failure(_FAILURES[431])}


def _json() -> _Plain:
    return {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}}


def _failure(meaning: str) -> _Plain:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}


def _error_schema() -> _Plain:
    """OpenAI's shape, and Anthropic's, which has a type beside the error. An engine's own codes are numbers."""
    texts = {"message": {"type": "string"}, "type": {"type": "string"}}
    more = {"param": {"type": ["string", "null"]}, "code": {"type": ["string", "integer", "null"]}}
    error = {"type": "object", "required": ["message", "type"], "properties": texts | more}
    return {"type": "object", "required": ["error"], "properties": {"type": {"const": "error"}, "error": error}}


def _name(header: bytes) -> str:
    return header.decode("ascii")
