"""Window rules: what engines and their versions do otherwise with layers that keep different tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowRules:
    """The defaults are those of vLLM 0.24.

    `leaves_computed`: blocks leave a window by the tokens that are computed; else by those that are planned,
    although a plan in flight may still read the blocks. `keeps_boundaries`: of layers with a window only
    those blocks can be found that a hit needs which ends where the prompt does, or where a prefix ends that
    other layers had found (vLLM's prefix_cache_retention_interval 0). `sees_whole_prompt`: where hits leave
    out their last block, that block may have the last token of the prompt, in models of several groups.
    `names_partial`: where groups have blocks of several sizes, a prompt's last key within a larger block is
    one more name of that block. No hit asks for it: only events tell. `names_ends`: also where that key has
    the last token of the prompt; where hits leave out their last block it always has. `keeps_below`: where
    hits leave out their last block, so does one that ends where other layers had found a prefix: what it
    needs is kept too.
    """

    leaves_computed: bool = False
    keeps_boundaries: bool = False
    sees_whole_prompt: bool = False
    names_partial: bool = False
    names_ends: bool = False
    keeps_below: bool = False


DENSE = WindowRules()
