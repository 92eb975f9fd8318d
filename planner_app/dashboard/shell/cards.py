"""Cards at the top of a page: value, interval, change against the baseline, and the SLO's verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import plain

Words = Callable[[float], str]
_MULTIPLE = 10
_LEAST_WIDTH = 18  # letters


@dataclass(frozen=True, slots=True)
class Card:
    """One figure. `low` and `high` bound its 90% interval, None while not in; `pending` greys the value.

    `better`: -1 where less is better, 1 where more is. `share`: the value is one, its change in points.
    `verdicts` are terms of the SLO and whether they hold. `advice` is one sentence that says what to do.
    """

    title: str
    value: float | None
    words: Words
    help: str
    low: float | None = None
    high: float | None = None
    waiting: str = ""
    pending: bool = False
    baseline: float | None = None
    better: int = -1
    share: bool = False
    verdicts: tuple[tuple[str, bool], ...] = ()
    note: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class LaterCard:
    """A card that takes a while to make: the others are drawn before it."""

    title: str
    make: Callable[[], Card]


def show_cards(cards: Sequence[Card | LaterCard]) -> None:
    """The cards side by side."""
    columns = st.columns([max(len(card.title), _LEAST_WIDTH) for card in cards])  # titles are not cut
    frames = [column.container(border=True, height="stretch") for column in columns]
    order = sorted(range(len(cards)), key=lambda number: isinstance(cards[number], LaterCard))
    for number in order:
        card = cards[number]
        with frames[number]:
            _show_card(card.make() if isinstance(card, LaterCard) else card, number)


def _show_card(card: Card, number: int) -> None:
    broken = any(not holds for _, holds in card.verdicts)
    state = "pending" if card.pending else "broken" if broken else "card"
    with st.container(key=f"{state}_{number}"):
        st.metric(
            card.title,
            "–" if card.value is None else card.words(card.value),
            _change(card),
            delta_color=_color(card),
            help=card.help,
            delta_description=_against(card),
        )
    _interval(card, number)
    if card.note:
        st.caption(plain(card.note))
    for term, holds in card.verdicts:
        show_verdict(term, holds)
    if card.advice:
        st.markdown(f"**{plain(card.advice)}**")


def show_verdict(term: str, holds: bool) -> None:
    """One term of the SLO: told by word, sign and colour."""
    st.badge(
        plain(term) + (" holds" if holds else " is broken"),
        icon=":material/check_circle:" if holds else ":material/cancel:",
        color="blue" if holds else "red",
    )


def _interval(card: Card, number: int) -> None:
    if card.low is not None and card.high is not None:
        st.caption(f"90% interval: {card.words(card.low)} to {card.words(card.high)}")
    elif card.waiting:
        with st.container(key=f"pending_interval_{number}"):
            st.caption(card.waiting)


def _change(card: Card) -> str | None:
    """Signed, for its first letter decides the arrow."""
    if card.value is None or card.baseline is None:
        return None
    if not card.baseline and not card.share:
        more = card.value - card.baseline
        return None if not more else f"{'+' if more > 0 else '-'}{card.words(abs(more))}"
    return change(card.value, card.baseline, share=card.share)


def change(value: float, base: float, *, share: bool = False) -> str:
    """The change from `base`, not 0: in percent, from tenfold on as a multiple, of a share in points."""
    if share:
        return f"{100 * (value - base):+.1f} points"
    if value / base >= _MULTIPLE:
        return f"{value / base:,.0f} times"
    return f"{(value - base) / abs(base):+.1%}"


def _against(card: Card) -> str | None:
    change = _change(card)
    return None if change is None else "the baseline" if change.endswith("times") else "vs baseline"


def _color(card: Card) -> str:
    if (_change(card) or "").startswith(("+0.0%", "-0.0%", "+0.0 ", "-0.0 ")):
        return "off"
    return "inverse" if card.better < 0 else "normal"
