"""A request that can't be served gets vLLM's error, and the server goes on."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from pagecast.planner_app.cli import run


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        ("/v1/completions", {}, "Field required", "prompt"),
        ("/v1/completions", {"prompt": ""}, "the prompt is empty", "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "greater than or equal to 1", "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**30}, "less than or equal", "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 99999}, "maximum context length is 40960", None),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "greater than or equal to 0", "temperature"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, "empty string", None),
        ("/v1/completions", {"prompt": [-1]}, "greater than or equal to 0", None),
        ("/v1/completions", {"prompt": "x", "n": 100_000}, "less than or equal to 128", "n"),
        ("/v1/completions", {"prompt": "x", "stream_options": {}}, "only be defined when", None),
        ("/v1/chat/completions", {"messages": []}, "at least 1 item", "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "Field required", "messages.0.role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "only text is",
            "messages",
        ),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt: give a text, a list of texts", "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt.1: Input should be a valid string", "prompt.1"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt.1: Input should be greater", "prompt.1"),
        ("/v1/completions", {"prompt": "x", "stop": [1]}, "stop: give a text, or a list of texts", "stop"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 7}]},
            "messages.0.content: give a text, or a list of parts",
            "messages.0.content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            "`logprobs` must be set to true",
            None,
        ),
        ("/tokenize", {}, "either `prompt` or `messages`", None),
    ],
)
def test_a_bad_body_is_explained(server: Any, path: str, body: Any, words: str, param: str | None) -> None:
    with server.client() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        error = error_of(answer)
        assert words in error["message"]
        assert "Value error" not in error["message"]
        assert error["type"] == "BadRequestError"
        assert param is None or error["param"] == param


def test_what_is_not_json_and_paths_that_are_not_there_are_refused(server: Any) -> None:
    with server.client() as http:
        headers = {"content-type": "application/json"}
        broken = error_of(http.post("/v1/completions", content=b"{]", headers=headers))
        assert broken["message"].startswith("the body is not JSON: ")
        assert broken["message"].endswith("at character 1")
        assert broken["param"] is None
        form = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d sends without -H
        refused = error_of(http.post("/v1/completions", content=b'{"prompt": "x"}', headers=form))
        assert refused["message"] == "Unsupported Media Type: Only 'application/json' is allowed"
        no_object = error_of(http.post("/v1/completions", content=b"[]", headers=headers))
        assert no_object["message"] == "the body must be a JSON object"
        assert http.post("/v1/completions", content=b"\xff\xfe", headers=headers).status_code == 400
        for path in ("/v1/nothing", "/v1/responses", "/v1/messages", "/v1/embeddings", "/reset_prefix_cache"):
            missing = error_of(http.post(path, json={}))
            assert (missing["type"], missing["code"]) == ("Not Found", 404)
            assert missing["message"] == f"{path} is not served here; GET /docs lists what is"
        assert http.get("/v1/completions").status_code == 405


def test_long_and_slow_bodies_are_refused(serve: Any) -> None:
    one = serve(max_body_bytes=1000, body_timeout=0.3)
    with one.client() as http:
        assert error_of(http.post("/v1/completions", json={"prompt": "x" * 2000}))["code"] == 413

        def pieces() -> Any:
            yield b"{" + b" " * 600
            yield b" " * 600 + b"}"

        assert http.post("/v1/completions", content=pieces()).status_code == 413

        def slow() -> Any:
            yield b"{"
            time.sleep(0.6)
            yield b"}"

        assert http.post("/v1/completions", content=slow()).status_code == 408
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_token_beyond_the_vocabulary_is_refused(server: Any) -> None:
    with server.client() as http:
        for prompt in ([2**31], [1, server.replica.intake.vocabulary]):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 400
            assert error_of(answer)["message"] == f"Token id {prompt[-1]} is out of vocabulary"
        allowed = {"prompt": [server.replica.intake.vocabulary - 1], "max_tokens": 1}
        assert http.post("/v1/completions", json=allowed).status_code == 200


def test_adapters_come_and_go_while_it_serves(serve: Any) -> None:
    with serve(lora_modules=("sql=/adapters/sql",)).client() as http:
        asked = {"model": "chat", "prompt": "x", "max_tokens": 1}
        assert http.post("/v1/completions", json=asked).status_code == 404
        added = {"lora_name": "chat", "lora_path": "/adapters/chat"}
        assert http.post("/v1/load_lora_adapter", json=added).status_code == 200
        assert http.post("/v1/load_lora_adapter", json=added).status_code == 400  # twice
        assert http.post("/v1/completions", json=asked).status_code == 200
        served = {card["id"]: card["root"] for card in http.get("/v1/models").json()["data"]}
        assert served["chat"] == "/adapters/chat"
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "chat"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "chat"}).status_code == 404
        assert http.post("/v1/completions", json=asked).status_code == 404


def test_only_names_that_are_allowed_are_answered(serve: Any) -> None:
    with serve(allowed_hosts=("127.0.0.1",)).client() as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 400


def test_the_key_is_needed_where_one_is_set(serve: Any) -> None:
    one = serve(api_key=("secret", "other"))
    with one.client() as http:
        assert http.get("/v1/models").json() == {"error": "Unauthorized"}
        assert http.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        for key in ("secret", "other"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_full_queue_rejects_and_serves_on(serve: Any) -> None:
    one = serve({"max_num_seqs": 2}, max_waiting_queue_length=3)

    async def flood() -> list[int]:
        async with httpx.AsyncClient(base_url=one.url, timeout=30) as http:
            body = {"prompt": "x", "max_tokens": 50}
            answers = await asyncio.gather(*[http.post("/v1/completions", json=body) for _ in range(30)])
            return [answer.status_code for answer in answers]

    codes = asyncio.run(flood())
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 3
    with one.client() as http:
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_failures_are_injected_as_often_as_asked(serve: Any) -> None:
    one = serve(failure_injection_rate=50.0, failure_types=("rate_limit", "server_error"), seed=4)
    with one.client() as http:
        codes = [
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code for _ in range(40)
        ]
    assert set(codes) == {200, 429, 503}
    assert 8 <= codes.count(200) <= 32


def test_a_client_that_leaves_frees_its_blocks(serve: Any) -> None:
    one = serve({"num_gpu_blocks": 400})
    body = {"prompt": "x " * 300, "max_tokens": 4000, "stream": True}
    with one.client() as http:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        until = time.monotonic() + 5
        while one.replica.backend.load().running and time.monotonic() < until:
            time.sleep(0.01)
        assert one.replica.backend.load().used_blocks == 0
        assert 'finished_reason="abort",model_name="Qwen/Qwen3-8B"} 1.0' in http.get("/metrics").text


def test_each_option_of_the_server_is_there_once(capsys: Any) -> None:
    assert run(["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--max-loras ") == 1
    assert printed.count("--lora-modules ") == 1
