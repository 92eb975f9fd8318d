"""What a choice of block size or HBM budget is worth, in words: for the cards and for `tune` alike."""

from __future__ import annotations

from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, Choice
from pagecast.planner_app.wording.quantities import counted, seconds

_MATTERS = 1.005  # times as many requests per second, that are worth a word


def shown(knob: str, value: float | None) -> str:
    """A value as people write it."""
    if value is None:
        return "not set"
    return f"{value:.0f}" if knob == BLOCK_SIZE else f"{value:.2f}"


def worth(choice: Choice, *, by_value: bool = False) -> str:
    """What the difference between now and best is worth. `by_value`: the value in force is named."""
    now, best = choice.now, choice.best
    others = f"of {', '.join(shown(choice.knob, value) for value in choice.tried)}"
    if not choice.load:
        return "One user alone breaks the SLO: take a faster GPU or loosen it."
    force = f"with {shown(choice.knob, now.value)}" if by_value else "now"
    admits = f"{counted(now.users, 'user')} at once keep the SLO {force}"
    if not choice.changes:
        return f"{admits}, and no value {others} admits more, is faster or leaves more memory."
    gains = []
    if best.users > now.users:
        gains.append(f"{best.users:,} with {shown(choice.knob, best.value)}: {_part(best.users, now.users)}")
    if now.rate is not None and best.rate is not None and best.rate > _MATTERS * now.rate:
        gains.append(f"{_part(best.rate, now.rate)} requests per second")
    if gains:
        return f"{admits}, {', and '.join(gains)}."
    if choice.knob != BLOCK_SIZE and best.value < now.value:
        return (
            f"{admits}, as many as with {shown(choice.knob, best.value)}, which leaves "
            f"{now.kv_gib - best.kv_gib:.0f} GiB per replica to others; less is worse."
        )
    if now.ttft_s and best.ttft_s and best.ttft_s < now.ttft_s:
        times = f"{seconds(best.ttft_s)} instead of {seconds(now.ttft_s)}"
        return f"{admits}, as many as at best; mean TTFT would be {times}."
    return f"{admits}, as many as at best; the best is faster at a rate."


def _part(best: float, now: float) -> str:
    return f"{(best - now) / max(now, 1e-9):+.0%}" if now else f"{best:,.3g} instead of none"
