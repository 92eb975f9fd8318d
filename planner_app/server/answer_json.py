"""Bodies of answers: whole ones, and the chunks of a stream, with the fields that vLLM sends.

A stream has one chunk for each token of each client. So what is the same in all chunks of a request is
rendered once, and so is each token's text where it depends on no other token.
"""

from __future__ import annotations

import json
import math
from typing import Any

import xxhash
from pagecast.planner_app.server.forms import ToolCall
from pagecast.planner_app.server.generation import Generation
from pagecast.planner_app.server.intake import GenerationRequest
from pagecast.planner_app.server.text import GrowingText
from pagecast.planner_app.server.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_MOST_QUOTED = 1 << 16
_quoted = json.encoder.encode_basestring_ascii


class QuotedTokens(dict[int, bytes]):
    """Text of single tokens as it stands within a JSON string, made when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> bytes:
        if len(self) >= _MOST_QUOTED:
            self.clear()
        text = _quoted(self._tokenizer.decode((id,)))[1:-1].encode()
        self[id] = text
        return text


class AnswerChoice:
    """One generation on its way to the client: its text, and how much of it has been sent."""

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        self.index = index
        self.generation = generation
        self.text = GrowingText(tokenizer, generation.sampling)
        self.sent = 0  # tokens whose text has been taken
        self.offset = 0  # characters before the next token, for logprobs
        self.characters = 0  # of the text, that have been taken
        self.begun = False
        self.finished = False

    def take(self) -> tuple[list[int], str]:
        """The tokens that have come since the last call, and their text."""
        generation = self.generation
        fresh = generation.tokens[self.sent : generation.count]
        shown = generation.tokens[self.sent : generation.count - generation.hidden]
        self.sent = generation.count
        piece = self.text.add(shown) if shown else ""
        if generation.done:
            piece += self.text.rest()
        return fresh, piece


class AnswerWriter:
    """Renders one request's answer. `choices` are in the order of their index.

    `quoted` are the texts of tokens that depend on no other token; None where the tokenizer has none such.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        created: int,
        quoted: QuotedTokens | None = None,
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.choices = [AnswerChoice(i, one, tokenizer) for i, one in enumerate(request.generations)]
        self._created = created
        kind = "chat.completion.chunk" if request.chat else "text_completion"
        head = {"id": request.id, "object": kind, "created": created, "model": request.model}
        self._head = "data: " + json.dumps(head)[:-1] + ', "choices": ['
        plain = (
            request.logprobs is None
            and request.call is None
            and not request.return_token_ids
            and not request.continuous_usage
        )
        single = plain and len(self.choices) == 1 and not request.generations[0].sampling.stop
        self._quoted = quoted if single and not request.echo else None
        field = '"delta": {"content": "' if request.chat else '"text": "'
        self._before = f'{self._head}{{"index": 0, {field}'.encode()
        close = "}" if request.chat else ""
        self._after = f'"{close}, "logprobs": null, "finish_reason": null}}]}}\n\n'.encode()

    # ---- streams

    def chunks(self) -> bytes:
        """The chunks since the last call, as server-sent events; b"" for nothing."""
        quoted = self._quoted
        if quoted is not None:
            choice = self.choices[0]
            generation = choice.generation
            sent, count = choice.sent, generation.count
            if sent < count and (sent or not self.request.chat) and not generation.finish_reason:
                choice.sent = count
                if count - sent == 1:
                    return b"%b%b%b" % (self._before, quoted[generation.tokens[sent]], self._after)
                text = b"".join([quoted[id] for id in generation.tokens[sent:count]])
                return b"%b%b%b" % (self._before, text, self._after)
        return self._rendered().encode()

    def _rendered(self) -> str:
        parts: list[str] = []
        for choice in self.choices:
            if choice.finished:
                continue
            generation = choice.generation
            if self.request.chat and not choice.begun and (generation.count or generation.done):
                parts.append(self._first(choice))
            if choice.sent < generation.count or generation.done:
                parts.append(self._next(choice))
        return "".join(parts)

    def tail(self) -> bytes:
        """The end of a stream: usage where it was asked for, and the mark."""
        if not self.request.include_usage:
            return DONE
        return f'{self._head}], "usage": {json.dumps(self.usage())}}}\n\n'.encode() + DONE

    def _first(self, choice: AnswerChoice) -> str:
        choice.begun = True
        delta = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'
        return f'{self._head}{{"index": {choice.index}, {delta}}}]{self._counts(choice)}}}\n\n'

    def _next(self, choice: AnswerChoice) -> str:
        generation = choice.generation
        fresh, piece = choice.take()
        rated = fresh  # tokens that get logprobs: those of an echoed prompt too
        if self.request.echo and not choice.begun:
            choice.begun = True
            piece = self._echo(choice) + piece
            rated = [*generation.prompt, *fresh]
        quoted = _quoted(piece)
        text = f'"delta": {{"content": {quoted}}}' if self.request.chat else f'"text": {quoted}'
        if self.request.call is not None:
            text = f'"delta": {json.dumps(_called(choice, self.request.call, piece))}'
        choice.finished = generation.done
        finish = json.dumps(self._finish_reason(generation))
        more = f', "stop_reason": {json.dumps(generation.stop_reason)}' if generation.done else ""
        if self.request.return_token_ids:
            more += f', "token_ids": {json.dumps(fresh)}'
        logprobs = json.dumps(self._logprobs(choice, rated))
        return (
            f'{self._head}{{"index": {choice.index}, {text}, "logprobs": {logprobs}, '
            f'"finish_reason": {finish}{more}}}]{self._counts(choice)}}}\n\n'
        )

    def _echo(self, choice: AnswerChoice) -> str:
        """The text of the prompt, which goes before the answer's."""
        return self.tokenizer.decode(choice.generation.prompt)

    def _counts(self, choice: AnswerChoice) -> str:
        if not self.request.continuous_usage:
            return ""
        prompt = len(choice.generation.prompt)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": choice.sent,
            "total_tokens": prompt + choice.sent,
        }
        return f', "usage": {json.dumps(usage)}'

    # ---- whole answers

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        request = self.request
        return {
            "id": request.id,
            "object": "chat.completion" if request.chat else "text_completion",
            "created": self._created,
            "model": request.model,
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "usage": self.usage(),
        }

    def _whole_choice(self, choice: AnswerChoice) -> dict[str, Any]:
        generation = choice.generation
        ids, text = choice.take()
        fields: dict[str, Any] = {"index": choice.index}
        if self.request.chat:
            call = self.request.call
            calls = [] if call is None else [call.begin(text[call.start : call.end])]
            content = text if call is None else ""
            fields["message"] = {
                "role": "assistant",
                "content": content,
                "refusal": None,
                "tool_calls": calls,
            }
        else:
            fields["text"] = self._echo(choice) + text if self.request.echo else text
        rated = [*generation.prompt, *ids] if self.request.echo else ids
        fields["logprobs"] = self._logprobs(choice, rated)
        fields["finish_reason"] = self._finish_reason(generation)
        fields["stop_reason"] = generation.stop_reason
        if self.request.return_token_ids:
            fields["token_ids"] = ids
        return fields

    def _finish_reason(self, generation: Generation) -> str | None:
        """The reason why a text ended, in the words of the API; None while it has not."""
        call = self.request.call
        if call is not None and generation.finish_reason == "stop":
            return call.finish_reason
        return generation.finish_reason or None

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices."""
        generations = self.request.generations
        prompt = sum(len(one.prompt) for one in generations if not one.choice)
        output = sum(one.count for one in generations)
        cached = sum(max(one.cached_tokens, 0) for one in generations if not one.choice)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # ---- logprobs

    def _logprobs(self, choice: AnswerChoice, ids: list[int]) -> dict[str, Any] | None:
        """Made-up logprobs, which depend on the token alone; None where none were asked for."""
        count = self.request.logprobs
        if count is None:
            return None
        rows = [self._alternatives(id, count) for id in ids]
        if self.request.chat:
            return {
                "content": [
                    {**_logprob_entry(*row[0]), "top_logprobs": [_logprob_entry(*one) for one in row[:count]]}
                    for row in rows
                ]
            }
        offsets: list[int] = []
        begins = self.request.echo and not choice.offset  # with a token that nothing comes before
        for row in rows:
            offsets.append(choice.offset)
            choice.offset += len(row[0][0])
        return {
            "tokens": [row[0][0] for row in rows],
            "token_logprobs": [None if begins and not at else row[0][1] for at, row in enumerate(rows)],
            "top_logprobs": [None if begins and not at else dict(row[:count]) for at, row in enumerate(rows)]
            if count
            else None,
            "text_offset": offsets,
        }

    def _alternatives(self, id: int, count: int) -> list[tuple[str, float]]:
        words = self.tokenizer.words
        rest = 0.05 + (xxhash.xxh3_64_intdigest(id.to_bytes(8, "little")) % 1000) / 2000
        rows = [(self.tokenizer.decode((id,)), round(math.log(1 - rest), 6))]
        for rank in range(1, count):
            rest /= 2
            other = int(words[(id + rank) % len(words)])
            rows.append((self.tokenizer.decode((other,)), round(math.log(rest), 6)))
        return rows


def _logprob_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


def _called(choice: AnswerChoice, call: ToolCall, piece: str) -> dict[str, Any]:
    """The delta of a call that a piece of its text makes."""
    start = choice.characters
    choice.characters += len(piece)
    arguments = piece[max(call.start - start, 0) : max(call.end - start, 0)]
    if not start:
        return {"tool_calls": [{"index": 0, **call.begin(arguments)}]} if piece else {}
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]} if arguments else {}
