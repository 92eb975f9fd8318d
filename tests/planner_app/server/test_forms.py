"""Tools count in prompts, and answers have the form that a request asks for, or are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pagecast.planner_app.server.json_schema import NotSimulated, made_up

from .conftest import Running

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 3, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days", "at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": "x " * 20, "parameters": WEATHER},
    }
    for number in range(20)
]
ASK = {"messages": [{"role": "user", "content": "What is the weather?"}], "max_tokens": 400}


def chat(server: Running, **more: Any) -> tuple[int, Any]:
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json={**ASK, **more})
        return answer.status_code, answer.json()


def prompt_tokens(server: Running, **more: Any) -> int:
    return int(chat(server, max_tokens=1, **more)[1]["usage"]["prompt_tokens"])


def check(value: Any, schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema).validate(value)


def test_tools_their_calls_and_results_are_part_of_the_prompt(server: Running) -> None:
    plain, with_tools = prompt_tokens(server), prompt_tokens(server, tools=TOOLS)
    assert with_tools - plain > len(json.dumps(TOOLS)) / 8
    call = {"id": "1", "type": "function", "function": {"name": "tool_1", "arguments": '{"city": "Oslo"}'}}
    turns = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "1", "content": "rain " * 10}
    counts = [prompt_tokens(server, tools=TOOLS, messages=part) for part in (turns, [*turns, result])]
    assert with_tools + 10 < counts[0] < counts[1] - 10
    with server.client() as http:
        body = {"messages": ASK["messages"], "tools": TOOLS}
        assert http.post("/tokenize", json=body).json()["count"] == with_tools


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "tool_7"}}, "stop")],
)
def test_a_tool_that_must_be_called_is(server: Running, choice: Any, reason: str) -> None:
    status, body = chat(server, tools=TOOLS, tool_choice=choice, temperature=0)
    assert status == 200
    answer = body["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    check(json.loads(call["function"]["arguments"]), WEATHER)
    assert answer["finish_reason"] == reason and call["type"] == "function"
    if reason == "stop":
        assert call["function"]["name"] == "tool_7"
    streamed: dict[str, str] = {}
    with (
        server.client() as http,
        http.stream(
            "POST",
            "/v1/chat/completions",
            json={**ASK, "tools": TOOLS, "tool_choice": choice, "temperature": 0, "stream": True},
        ) as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])["choices"][0]
                for part in chunk["delta"].get("tool_calls", []):
                    streamed["arguments"] = streamed.get("arguments", "") + part["function"]["arguments"]
                    streamed["name"] = part["function"].get("name", streamed.get("name", ""))
                assert not chunk["delta"].get("content")
    assert streamed == call["function"]


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}},
        {"structured_outputs": {"json": json.dumps(WEATHER)}},
    ],
    ids=["object", "schema", "structured"],
)
def test_json_that_is_asked_for_is_json(server: Running, form: dict[str, Any]) -> None:
    status, body = chat(server, **form)
    assert status == 200
    value = json.loads(body["choices"][0]["message"]["content"])
    check(value, {"type": "object"} if "json_object" in str(form) else WEATHER)
    text = body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] > len(text) / 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a+"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"frequency_penalty": 5}, "frequency_penalty"),
        ({"presence_penalty": -9}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_can_t_be_answered_rightly_is_refused(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    status, body = chat(server, **fields)
    assert (status, body["error"]["param"]) == (400, param)


def test_made_up_values_meet_their_schema() -> None:
    node = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            "n": {"type": "integer"},
        },
        "required": ["next", "n"],
    }
    schemas: list[dict[str, Any]] = [
        {"$ref": "#/$defs/node", "$defs": {"node": node}},
        {"allOf": [{"properties": {"a": {"type": "null"}}}, {"required": ["a", "b"]}], "type": "object"},
        {"type": ["null", "number"], "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "minimum": -7, "exclusiveMaximum": -3, "multipleOf": 2},
        {"type": "string", "maxLength": 2},
        {"type": "string", "format": "date-time"},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
        {"const": {"a": 1}},
    ]
    for schema in schemas:
        for seed in range(20):
            check(made_up(schema, random.Random(seed)), schema)
    endless = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"required": ["a"], "properties": {"a": {"$ref": "#/$defs/a"}}}},
    }
    with pytest.raises(NotSimulated, match="nested more than"):
        made_up(endless, random.Random(0))
