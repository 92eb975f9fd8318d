"""Block keys: what may be shared, and what never may."""

from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.identity.content import merge, token_ids
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope

SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=5)


def _keys_of_spans(spans, size, scope):
    return BlockKeys.of_spans(size, spans, (99, 0), scope)


@given(SPANS, SPANS, st.integers(1, 5), st.booleans())
def test_ids_and_spans_fall_in_the_same_equality_classes(a, b, size, other_scope):
    """Two blocks are equal by spans exactly if they are equal by token ids."""
    scopes = (Scope(), Scope(salt="other") if other_scope else Scope())
    blocks = min(sum(s[2] for s in a), sum(s[2] for s in b)) // size
    spans = [_keys_of_spans(x, size, scope) for x, scope in zip((a, b), scopes, strict=True)]
    ids = [
        BlockKeys.of_ids(size, token_ids(x).view("int64"), scope)
        for x, scope in zip((a, b), scopes, strict=True)
    ]
    for block in range(blocks):
        by_spans = spans[0].block_key(block) == spans[1].block_key(block)
        by_ids = ids[0].block_key(block) == ids[1].block_key(block)
        assert by_spans == by_ids


@given(SPANS, st.integers(1, 5), st.data())
def test_cutting_spans_does_not_change_keys(spans, size, data):
    """The same tokens told in smaller pieces have the same keys."""
    pieces = []
    for content, offset, length in spans:
        at = data.draw(st.integers(0, length))
        pieces += [(content, offset, at), (content, offset + at, length - at)]
    assert merge(pieces) == merge(spans)
    whole, cut = (BlockKeys.of_spans(size, x, (99, 0)) for x in (spans, pieces))
    assert whole.digests == cut.digests
    assert whole.ends == cut.ends


@given(SPANS, st.integers(1, 4))
def test_a_later_turn_finds_its_earlier_output(spans, size):
    """A prompt that quotes a prompt and its output has their keys."""
    prompt = sum(span[2] for span in spans)
    first = BlockKeys.of_spans(size, spans, (50, 0))
    second = BlockKeys.of_spans(size, [*spans, (50, 0, 12), (7, 0, 5)], (51, 0))
    for block in range((prompt + 12) // size):
        assert first.block_key(block) == second.block_key(block)


@given(SPANS, st.integers(1, 4))
def test_no_field_of_a_scope_can_be_told_as_another(spans, size):
    named = [Scope(**{name: "x"}) for name in Scope.__dataclass_fields__]
    named += [Scope(), Scope(model="ab", tokenizer="c"), Scope(model="a", tokenizer="bc")]
    if sum(span[2] for span in spans) >= size:
        keys = {_keys_of_spans(spans, size, scope).block_key(0) for scope in named}
        assert len(keys) == len(named)
