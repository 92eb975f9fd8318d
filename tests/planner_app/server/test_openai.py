"""The official client gets what it asks for, streamed and not."""

from itertools import product
from typing import Any

import openai
import pytest
from pagecast.planner_app.server.tokenizer import PackedTokenizer

MODEL = "Qwen/Qwen3-8B"


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_completion_has_the_tokens_that_were_asked_for(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].text.split()) == 12
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (12, 4)


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Tell me", "max_tokens": 40, "seed": 7}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 40


def test_a_chat_streams_its_role_first_and_goes_on_from_the_cache(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "word " * 200}]
    chunks = list(client.chat.completions.create(model=MODEL, messages=turns, max_tokens=30, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    second = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    # The second prompt quotes the first and its answer: all their full blocks are found.
    assert second.usage.prompt_tokens_details.cached_tokens == (200 + 3 * 2 + 30 + 4) // 16 * 16


def test_choices_are_told_apart(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 5, "n": 2}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    texts = ["", "", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [len(text.split()) for text in texts] == [5, 5, 5, 5]


def test_a_text_ends_at_a_stop_string(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Tell me", "max_tokens": 40, "seed": 3}
    words = client.completions.create(**asked).choices[0].text.split()
    stop = f"{words[5]} {words[6][:2]}"
    for stream in (False, True):
        parts = client.completions.create(**asked, stop=[stop, "never"], stream=stream)
        chunks = list(parts) if stream else [parts]
        assert "".join(c.choices[0].text for c in chunks).split() == words[:5]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("least", "stop", "text", "count"),
    [
        (0, ["two"], "one ", 3),
        (3, ["two"], "one two one ", 7),  # the first "two" ends within three tokens
        (4, ["two one"], "one ", 5),  # it begins within four tokens, and ends after them
        (3, ["wo", "never met"], "one two one t", 7),
        (0, ["never met"], "one two one two", 7),
        (10, ["never met"], "one two one twoone two", 10),
        (12, ["two"], "one two one twoone two one", 12),
    ],
)
def test_stop_strings_are_text_within_the_least_number_of_tokens(
    serve: Any, stream: bool, least: int, stop: list[str], text: str, count: int
) -> None:
    tokenizer = PackedTokenizer()
    prompt = [
        token for word in ("one", " ", "two", " ", "one", " ", "two") for token in tokenizer.encode(word)
    ]
    one = serve({}, {"mode": "echo"})
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "stop": stop}
    found = client.completions.create(**asked, extra_body={"min_tokens": least}, stream=stream)
    chunks = list(found) if stream else [found]
    assert "".join(c.choices[0].text for c in chunks) == text
    if not stream:
        assert chunks[0].usage.completion_tokens == count


def test_the_same_prompt_has_the_same_answer_at_temperature_zero(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Tell me", "max_tokens": 10}
    first, second = (client.completions.create(**asked, temperature=0).choices[0].text for _ in range(2))
    drawn = client.completions.create(**asked, temperature=1).choices[0].text
    assert first == second != drawn


def test_logprobs_belong_to_the_tokens(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True, top_logprobs=3
    )
    told = chat.choices[0].logprobs
    assert told is not None and told.content is not None
    assert "".join(token.token for token in told.content) == chat.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 for token in told.content)
    assert all(token.top_logprobs[0].logprob == token.logprob < 0 for token in told.content)


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_a_completion_say_where_each_token_stands(client: openai.OpenAI, echo: bool) -> None:
    asked: Any = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "logprobs": 1, "seed": 1, "echo": echo}
    whole = client.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    places = zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True)
    assert all(whole.text[at : at + len(token)] == token for token, at in places)
    chunks = client.completions.create(**asked, stream=True)
    streamed = [at for chunk in chunks for at in chunk.choices[0].logprobs.text_offset]
    assert streamed == whole.logprobs.text_offset and streamed[0] == 0
    assert (whole.logprobs.token_logprobs[0] is None) == echo  # the prompt's first token has none
    assert "".join(whole.logprobs.tokens) == whole.text


def test_models_and_adapters_are_listed(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {MODEL, "sql"}
    assert models["sql"].parent == MODEL  # type: ignore[attr-defined]
    answer = client.completions.create(model="sql", prompt="select", max_tokens=1)
    assert answer.model == "sql"
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        client.completions.create(model="other", prompt="select")


def test_an_adapter_shares_no_prefix_with_the_model(client: openai.OpenAI) -> None:
    prompt = "shared words go here " * 30

    def cached(model: str) -> int:
        usage = client.completions.create(model=model, prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached(MODEL) == 0
    assert cached(MODEL) > 0
    assert cached("sql") == 0


def test_tokens_of_any_whitespace_give_the_text_back() -> None:
    tokenizer = PackedTokenizer()
    spaces = [character for character in map(chr, range(0x3001)) if character.isspace()]
    texts = ["".join(parts) + "x" for parts in product(spaces, repeat=3)]
    assert len(texts) > 10_000
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_tokens_and_text_are_each_other(server: Any) -> None:
    with server.client() as http:
        text = "Straße 漢字 🎉, 12345 and\n\n  more"
        body = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert "".join(body["token_strs"]) == text
        assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert chat["max_model_len"] == 40960 and chat["count"] > 5
