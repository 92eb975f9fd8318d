"""Form of an answer: the call of a tool, or JSON, where a request asks for one.

A simulated answer gets the form, with made-up contents, so that clients can read it; its length is that of
the text. What is not simulated is refused, for an answer in another form would break its reader.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pagecast.planner_app.server.errors import ApiError
from pagecast.planner_app.server.json_schema import NotSimulated, made_up
from pagecast.planner_app.server.protocol import ChatRequest, Generating

_ANY_OBJECT = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The call that a text is. Its arguments are the characters from `start` to `end` of the text.

    `finish_reason`: what the API says of a text that ends by itself (vLLM: "stop" for a named tool).
    """

    name: str
    start: int
    end: int
    finish_reason: str

    def begin(self, arguments: str) -> dict[str, Any]:
        """The call with the first of its arguments."""
        function = {"name": self.name, "arguments": arguments}
        return {"id": f"chatcmpl-tool-{uuid4().hex}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """An answer's text, and the call that it is, if it is one."""

    text: str
    call: ToolCall | None = None


def tool_names(tools: list[dict[str, Any]] | None) -> list[str]:
    """The names of the tools. Errors: ApiError for what is no function with a name."""
    names = []
    for at, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(f"tools.{at}: must be a function", param="tools")
        if not isinstance(function.get("name"), str):
            raise ApiError(f"tools.{at}.function.name: must be a text", param="tools")
        names.append(function["name"])
    return names


def chosen_tool(body: ChatRequest, rng: random.Random) -> dict[str, Any] | None:
    """The function that must be called; None where the model may answer with text. Errors: ApiError."""
    names, choice = tool_names(body.tools), body.tool_choice
    if choice is None or choice == "none":
        return None
    if not names:
        raise ApiError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if choice == "auto":
        return None
    if choice == "required":
        name = rng.choice(names)
    elif isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
    else:
        raise ApiError(
            f'Invalid value for `tool_choice`: {str(choice)[:100]}! Only named tools, "none", "auto" or '
            '"required" are supported.',
            param="tool_choice",
        )
    if name not in names:
        raise ApiError(
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
            param="tool_choice",
        )
    function: dict[str, Any] = (body.tools or [])[names.index(name)]["function"]
    return function


def answer_form(body: Generating, prompt: str) -> AnswerForm | None:
    """The form that a request's answer must have; None for any text. The same request gets the same answer.

    Errors: ApiError for a form that is not known, or not simulated.
    """
    rng = random.Random(f"{body.seed} {prompt}")
    if isinstance(body, ChatRequest) and (function := chosen_tool(body, rng)) is not None:
        return _call(function, _made_up(function.get("parameters") or {}, rng, "tools"), body.tool_choice)
    schema = _schema(body)
    return None if schema is None else AnswerForm(_text(_made_up(schema, rng, "response_format")))


def _call(function: dict[str, Any], arguments: Any, choice: Any) -> AnswerForm:
    text = _text(arguments if isinstance(arguments, dict) else {})
    if choice != "required":
        return AnswerForm(text, ToolCall(function["name"], 0, len(text), "stop"))
    # Where the model chooses the tool, vLLM has it write a list of calls.
    before = f'[{{"name": {json.dumps(function["name"])}, "parameters": '
    start, end = len(before), len(before) + len(text)
    return AnswerForm(f"{before}{text}}}]", ToolCall(function["name"], start, end, "tool_calls"))


def _schema(body: Generating) -> Any:
    """The schema of the answer; None where it may be any text. Errors: ApiError."""
    given, structured = body.response_format, body.structured_outputs
    kind = "text" if given is None else given.get("type")
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema":
        outer = (given or {}).get("json_schema")
        if not isinstance(outer, dict) or not isinstance(outer.get("schema"), dict):
            raise ApiError("response_format.json_schema.schema: give a schema", param="response_format")
        return outer["schema"]
    if kind != "text":
        raise ApiError(
            f"response_format.type {str(kind)[:100]!r} is not served here; give text, json_object or "
            "json_schema",
            param="response_format",
        )
    wanted = {name: value for name, value in (structured or {}).items() if value is not None}
    forms = [
        name
        for name in wanted
        if name in ("json", "json_object", "choice", "regex", "grammar", "structural_tag")
    ]
    if not forms:
        return None
    if len(forms) > 1:
        raise ApiError(
            f"structured_outputs: {forms[0]} and {forms[1]} exclude one another", param="structured_outputs"
        )
    value = wanted[forms[0]]
    if forms[0] == "json_object":
        return _ANY_OBJECT if value else None
    if forms[0] == "json":
        return _parsed(value)
    raise ApiError(
        f"structured_outputs.{forms[0]} is not simulated; give json or json_object",
        param="structured_outputs",
    )


def _parsed(schema: Any) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ApiError(f"structured_outputs.json: not JSON ({error})", param="structured_outputs") from None


def _made_up(schema: Any, rng: random.Random, param: str) -> Any:
    try:
        return made_up(schema, rng)
    except (NotSimulated, RecursionError) as error:
        raise ApiError(f"{param}: {error}", param=param) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise ApiError(f"{param}: the schema is not valid ({error})", param=param) from None


def _text(value: Any) -> str:
    return json.dumps(value)
