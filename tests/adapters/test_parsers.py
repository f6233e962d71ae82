"""A5: vLLM's own parsers, behind which streams are continued, make the same of an answer wherever it was cut in two."""

import asyncio
from functools import cache
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

from schedloom.demo.model import cached_model
from schedloom.router.continuation.continuable import SEAMLESS_REASONING, SEAMLESS_TOOLS
from schedloom.router.continuation.told import Differs, Retold, Told
from schedloom.router.sse import event_of

TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]

ARGUMENTS = '{"city": "Zurich", "days": 3}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
IN_XML = "<function=get_weather>\n<parameter=city>\nZurich\n</parameter>\n</function>"
PYTHON = 'get_weather(city="Zurich", days=3)'
TOOL_ANSWERS = {
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zurich</arg_value>\n</tool_call>",
    "granite": f"<|tool_call|>[{CALL}]",
    "granite4": TAGGED,
    "hermes": f"Sure.{TAGGED}\n{TAGGED}",
    "kimi_k2": "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "llama4_pythonic": f"[{PYTHON}, {PYTHON}]",
    "longcat": f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zurich</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "olmo3": f"<function_calls>{PYTHON}\n{PYTHON}</function_calls>",
    "pythonic": f"[{PYTHON}, {PYTHON}]",
    "qwen3_coder": f"I look.\n<tool_call>\n{IN_XML}\n</tool_call>",
    "qwen3_json": TAGGED,
    "qwen3_xml": f"I look.\n<tool_call>\n{IN_XML}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{IN_XML}\n</seed:tool_call>",
}
THOUGHTS = ("I think. So.\n</think>\n\nThe answer is 42.", "<think>\nI think. So.\n</think>\n\nThe answer is 42.")
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": CITY}}]


@cache
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(cached_model())
    made.add_tokens(TAGS, special_tokens=False)
    return made


def events(tool: str | None, reasoning: str | None, pieces: list[list[int]]) -> list[bytes]:
    """What the client gets of each piece."""
    kind = ParserManager.get_parser(tool_parser_name=tool, reasoning_parser_name=reasoning, enable_auto_tools=True)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
    request = ChatCompletionRequest.model_validate(body)
    parser: Any = kind(tokenizer(), request.tools)
    told = []
    for place, ids in enumerate(pieces):
        last = place == len(pieces) - 1
        text = tokenizer().decode(ids)
        delta = parser.parse_delta(
            delta_text=text, delta_token_ids=ids, request=request, prompt_token_ids=[1], finished=last
        )
        said = {} if delta is None else delta.model_dump(exclude_unset=True)
        choice = {"index": 0, "delta": said, "finish_reason": "stop" if last else None}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        told.append(event_of(orjson.dumps(chunk)) if said or last else b"")
    return told


def by_field(told: list[bytes]) -> Any:
    whole = Told()
    whole.add(b"".join(told))
    return asyncio.run(whole.by_field())


async def continued(delivered: list[bytes], again: list[bytes]) -> list[bytes]:
    told = Told()
    told.add(b"".join(delivered))
    rest = (await Retold.of(told)).rest_of(b"".join(again)) if told.begun else b"".join(again)
    return [*delivered, rest]


def seams(tool: str | None, reasoning: str | None, answer: str) -> list[int]:
    """After how many tokens a cut changes what the client gets."""
    ids = tokenizer().encode(answer, add_special_tokens=False)
    single = [[token] for token in ids]
    undisturbed = events(tool, reasoning, single)
    found = []
    for cut in range(1, len(ids)):
        again = events(tool, reasoning, [ids[: cut + 1], *single[cut + 1 :]])
        try:
            got = by_field(asyncio.run(continued(undisturbed[:cut], again)))
        except Differs:
            got = None
        if got != by_field(undisturbed):
            found.append(cut)
    return found


@pytest.mark.parametrize("parser", sorted(SEAMLESS_TOOLS - {None}))  # type: ignore[type-var]
def test_no_cut_shows_behind_these_tool_parsers(parser: str) -> None:
    assert seams(parser, None, TOOL_ANSWERS[parser]) == []


@pytest.mark.parametrize("parser", sorted(SEAMLESS_REASONING - {None}))  # type: ignore[type-var]
@pytest.mark.parametrize("answer", THOUGHTS)
def test_no_cut_shows_behind_these_reasoning_parsers(parser: str, answer: str) -> None:
    assert seams(None, parser, answer) == []


def test_cuts_do_show_behind_others() -> None:
    assert seams("xlam", None, f"[{CALL}]") and seams(None, "ernie45", THOUGHTS[0])
