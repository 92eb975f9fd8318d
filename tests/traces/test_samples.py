"""The bundled samples are what their script makes, small, and readable by name."""

import pytest
from pagecast.traces import samples
from pagecast.traces.bundled import FOLDER, sample_names
from pagecast.traces.checks import validate
from pagecast.traces.read import read
from pagecast.traces.schema import nominal_arrival_s
from pagecast.traces.source import open_source
from pagecast.traces.write import jsonl_lines


@pytest.mark.parametrize("name", sorted(samples.MAKERS))
def test_the_script_reproduces_the_file(name: str) -> None:
    made = samples.MAKERS[name]()
    with open_source(FOLDER / f"{name}.jsonl.gz").open() as committed:
        assert committed.read() == b"".join(jsonl_lines(made))


def test_they_are_small_and_all_listed() -> None:
    assert sample_names() == sorted(samples.MAKERS)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


def test_chat_is_a_load_for_one_gpu() -> None:
    chat = read("chat")
    validate(chat)
    assert len(chat) == len(read("sample:chat")) == 2000
    seconds = nominal_arrival_s(chat)[-1]
    assert 10 < seconds < 180
    assert 10 < len(chat) / seconds < 20


def test_later_turns_quote_the_answer_before_them() -> None:
    chat = read("chat")
    assert chat.spans is not None
    follows = chat.integers("after")
    later = next(row for row in range(len(chat)) if follows[row] >= 0)
    before = int(follows[later])
    text, offset = chat.integers("output_content")[before], chat.integers("output_offset")[before]
    answered = offset + chat.integers("output_tokens")[before]
    content, start, length = chat.spans.row(later)[-1]
    assert (content, start) == (text, 0)
    assert length > answered
    assert chat.spans.row(before)[-1] == (text, 0, offset)
