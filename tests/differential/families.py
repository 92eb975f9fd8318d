"""Families of scenarios: what is added to a random scenario, by the family's name."""

from __future__ import annotations

import hybrid_specifications
import specifications
from hybrid_specifications import HYBRID, RECURRENT
from specifications import Spec

EVENTS = "events"  # compare whole KV events, not contents alone
ALL_BUT_A_TIER = (HYBRID, "speculation", "keys")
FAMILIES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "keys": ("keys",),
    "cancelled": ("cancelled",),
    "events": (EVENTS,),
    "hybrid": (HYBRID,),
    "hybrid-cancelled": (HYBRID, "cancelled"),
    "hybrid-events": (HYBRID, EVENTS),
    "speculation": ("speculation",),
    "speculation-cancelled": ("speculation", "cancelled"),
    "hybrid-speculation": (HYBRID, "speculation"),
    "mixed": ALL_BUT_A_TIER,
    "offloading": ("offloading",),
    "offloading-cancelled": ("offloading", "cancelled"),
    "offloading-events": ("offloading", EVENTS),
    "hybrid-offloading": (HYBRID, "offloading"),
    "hybrid-offloading-events": (HYBRID, "offloading", EVENTS),
    "mixed-offloading": (*ALL_BUT_A_TIER, "offloading"),
    "mixed-stops": (*ALL_BUT_A_TIER, "offloading", "stops"),
    "disk": ("disk",),
    "disk-events": ("disk", EVENTS),
    "hybrid-disk": (HYBRID, "disk"),
    "mixed-disk": (*ALL_BUT_A_TIER, "disk"),
    "hybrid-drafter": (HYBRID, "speculation", "drafter"),
    "tuned": ("tuned",),
    "tuned-cancelled": ("tuned", "cancelled"),
    "hybrid-tuned": (HYBRID, "tuned"),
    "mixed-tuned": (*ALL_BUT_A_TIER, "tuned"),
    "tuned-offloading": ("offloading", "tuned"),
    "queued": ("queued",),
    "context-parallel": ("ranks",),
    "context-parallel-speculation": ("ranks", "speculation"),
    "encoder": ("encoder",),
    "encoder-cancelled": ("encoder", "cancelled"),
    "encoder-speculation": ("encoder", "speculation"),
    "hybrid-encoder": (HYBRID, "encoder"),
    "encoder-tuned": ("encoder", "tuned"),
    "recurrent": (HYBRID, RECURRENT),
    "recurrent-cancelled": (HYBRID, RECURRENT, "cancelled"),
    "recurrent-speculation": (HYBRID, RECURRENT, "speculation"),
    "recurrent-events": (HYBRID, RECURRENT, EVENTS),
    "recurrent-mixed": (HYBRID, RECURRENT, "speculation", "keys"),
    "recurrent-offloading": (HYBRID, RECURRENT, "offloading"),
    "recurrent-speculation-offloading": (HYBRID, RECURRENT, "speculation", "offloading"),
    "recurrent-disk": (HYBRID, RECURRENT, "disk"),
    "recurrent-speculation-disk": (HYBRID, RECURRENT, "speculation", "disk"),
    "recurrent-tuned": (HYBRID, RECURRENT, "tuned"),
    "failing": ("failing",),
    "unreadable": ("unreadable",),
}


def scenario(seed: int, features: tuple[str, ...]) -> Spec:
    """The scenario of a seed with features."""
    family = hybrid_specifications if HYBRID in features else specifications
    return family.specification(seed, *(one for one in features if one not in (HYBRID, EVENTS)))
