"""Text and token ids: the model's own tokenizer where it is on disk, and one that needs no files.

`PackedTokenizer` cuts text into pieces of a few characters and writes a piece's characters into its id. So
it has no vocabulary, the same text always has the same ids, and ids always give the text back. It counts
about as many tokens for English text as models' tokenizers do; for true counts give the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pagecast.planner_app.server.errors import ApiError
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Ints

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
WORDS = 4096  # different tokens that made-up text consists of


class Tokenizer(Protocol):
    """The tokenizer interface of the server. Errors: ApiError for input that can't be encoded."""

    words: Ints
    """Ids of words to make up text from. Encoding their text gives the same ids."""

    alone: bool
    """Whether a token's text depends on no other token."""

    most_characters: int
    """Of a text, that one token may stand for."""

    vocabulary: int
    """One more than the largest token id; 0 where ids are no range (`PackedTokenizer.makes`)."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ...

    def chat(self, messages: list[Message], *, generate: bool = True, tools: Tools = None) -> str:
        """A conversation as one text, which begins with the tools that the model may call.

        `generate`: with the beginning of the assistant's turn.
        """
        ...


class PackedTokenizer:
    """Tokens of up to five lower-case letters with a space before them, or else of up to four bytes.

    An id has 32 bits. With both top bits set it holds up to six symbols of five bits each; any other id
    holds up to four bytes of UTF-8, whole characters, the first lowest. No UTF-8 text has both bits set in
    a character's last byte, so the two can't be mistaken for one another.
    """

    alone = True
    most_characters = 6
    vocabulary = 0

    def __init__(self) -> None:
        self.words = np.array([_pack(" " + word) for word in _made_up_words()], np.int64)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = []
        place = 0
        while place < len(text):
            # A part at a time, for nobody else runs while a pattern is looked for. The last pieces of a part
            # depend on what follows, and begin the next one.
            pieces = _PIECES.findall(text, place, place + _PART)
            if place + _PART < len(text):
                del pieces[-_UNSURE:]
            ids += map(_pack, pieces)
            place += sum(map(len, pieces))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; ids that no text has give replacement characters."""
        return "".join([_unpack(id) for id in ids])

    def makes(self, id: int) -> bool:
        """Whether some text has this token."""
        return _pack(_unpack(id)) == id

    def chat(self, messages: list[Message], *, generate: bool = True, tools: Tools = None) -> str:
        """A conversation, each turn between marks (ChatML)."""
        return _chatml(messages, generate, tools)


_ABOUT_TOOLS = (
    "These functions are available, each described by a JSON schema between the marks <tools> and </tools>:\n"
    "<tools>\n{}\n</tools>\nTo use one, answer with its name and its arguments as JSON, between the marks "
    "<tool_call> and </tool_call>.\n"
)


def _chatml(messages: list[Message], generate: bool, tools: Tools) -> str:
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}{_calls(turn)}<|im_end|>\n" for turn in messages]
    if tools:
        about = _ABOUT_TOOLS.format("\n".join(json.dumps(tool) for tool in tools))
        turns.insert(0, f"<|im_start|>system\n{about}<|im_end|>\n")
    if generate:
        turns.append("<|im_start|>assistant\n")
    return "".join(turns)


def _calls(turn: Message) -> str:
    """The calls of tools that a turn of the assistant holds."""
    calls = [json.dumps(call.get("function")) for call in turn.get("tool_calls") or ()]
    return "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


_FLAG = 0xC0000000
_PART = 1 << 15  # characters
_UNSURE = 8  # pieces: each looks at most six characters ahead
# Lower-case letters of a word, five at a time; a capital and three more; other ASCII characters, four at a
# time; any other character alone. But for words, a piece has four bytes at most: an id has no room for more.
_PIECES = re.compile(
    r" ?[a-z]{1,5}|[A-Z][a-z]{0,3}|[^\sa-z\x00-\x1f\x7f-\U0010ffff]{1,4}|[ \t\n\r\f\v]{1,4}(?=\s)|[\s\S]"
)


@lru_cache(maxsize=1 << 16)
def _pack(piece: str) -> int:
    if piece.isascii() and piece.lstrip(" ").isalpha() and piece.islower():
        packed = _FLAG
        for place, letter in enumerate(piece):
            packed |= (1 if letter == " " else ord(letter) - ord("a") + 2) << (5 * place)
        return packed
    return int.from_bytes(piece.encode("utf-8", "replace")[:4], "little")


@lru_cache(maxsize=1 << 16)
def _unpack(id: int) -> str:
    if id & _FLAG == _FLAG and id < 1 << 32:
        letters = []
        for place in range(6):
            symbol = id >> (5 * place) & 31
            if symbol:
                letters.append(" " if symbol == 1 else chr(min(symbol - 2, 25) + ord("a")))
        return "".join(letters)
    if not 0 <= id < 1 << 32:
        return "�"
    return (id.to_bytes(4, "little").rstrip(b"\0") or b"\0").decode("utf-8", "replace")


def _made_up_words() -> list[str]:
    """Words of four letters, consonants and vowels in turn, all different."""
    first, second = "bdfghklmnprstvwz", "aeio"
    syllables = [a + b for a in first for b in second]
    return [a + b for a in syllables for b in syllables]


class NumberTokenizer:
    """For models with random weights: text goes in as bytes, and tokens come out as characters or numbers."""

    alone = True
    most_characters = 1

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = self._vocabulary = vocabulary
        self.words = np.arange(min(vocabulary, WORDS), dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """A token for each byte."""
        return [byte % self._vocabulary for byte in text.encode("utf-8", "replace")]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """A character for each token that is one in ASCII, and the number of any other.

        `skip_special_tokens` is there for those who call transformers' tokenizers: none is special here.
        """
        return "".join([chr(id) if 32 <= id < 127 or id == 10 else f" t{id}" for id in ids])

    def chat(self, messages: list[Message], *, generate: bool = True, tools: Tools = None) -> str:
        """A conversation, each turn between marks (ChatML)."""
        return _chatml(messages, generate, tools)


class FileTokenizer:
    """The tokenizer in a transformers folder: `tokenizer.json`, and the template in its configuration."""

    alone = False

    def __init__(self, folder: Path) -> None:
        missing = "its tokenizer is read by the package tokenizers: pip install 'tokenizers>=0.21'"
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise BadInput(f"{folder}: {missing}") from None
        if not hasattr(Fast, "encode_batch_fast"):
            raise BadInput(f"{folder}: {missing}")
        try:
            self._fast = Fast.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more specific
            raise BadInput(f"{folder}/tokenizer.json: can't be read ({error})") from None
        self._template = _template(folder)
        vocabulary = self._fast.get_vocab()
        self.vocabulary = max(vocabulary.values(), default=0) + 1
        self.most_characters = max(map(len, vocabulary), default=1)
        self.words = self._find_words()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        # As `encode`, without the places of tokens in the text: half the time.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        try:
            return str(self._fast.decode(list(ids), skip_special_tokens=True))
        except (OverflowError, TypeError):
            raise ApiError("token ids are out of range", param="tokens") from None

    def chat(self, messages: list[Message], *, generate: bool = True, tools: Tools = None) -> str:
        """A conversation by the model's own template. Errors: ApiError where the template refuses it."""
        if self._template is None:
            return _chatml(messages, generate, tools)
        from jinja2 import TemplateError

        try:
            return str(
                self._template.render(messages=messages, add_generation_prompt=generate, tools=tools or None)
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(f"the chat template can't render these messages: {error}") from None

    def _find_words(self) -> Ints:
        """Ids whose text is a space and lower-case letters, and which that text is encoded as."""
        words = []
        for id in range(self._fast.get_vocab_size()):
            text = self._fast.decode([id])
            plain = text.lstrip(" ")
            if plain.isascii() and plain.isalpha() and plain.islower() and text.startswith(" "):
                if self.encode(text) == [id]:
                    words.append(id)
                if len(words) == WORDS:
                    break
        if not words:
            words = [id for id in range(self._fast.get_vocab_size()) if self._fast.decode([id]).isalpha()]
        return np.array(words or [0], np.int64)


def _template(folder: Path) -> Any:
    """The chat template of a folder; None where it has none."""
    text = None
    if (folder / "chat_template.jinja").is_file():
        text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        text = config.get("chat_template")
    if not isinstance(text, str):
        return None
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(text)


def _refuse(message: str) -> None:
    raise ValueError(message)


def tokenizer_for(model: str, path: Path | None = None) -> Tokenizer:
    """The tokenizer in `path`, or in the model's folder; the one without files where neither has one.

    Errors: BadInput where `path` has none.
    """
    folder = path if path is not None else Path(model).expanduser()
    try:
        there = (folder / "tokenizer.json").is_file()
    except OSError:
        there = False
    if there:
        return FileTokenizer(folder)
    if path is not None:
        raise BadInput(f"--tokenizer {path}: holds no tokenizer.json; name a transformers folder")
    return PackedTokenizer()
