"""KV groups in words: what the layers of a group keep, and in which blocks."""

from __future__ import annotations

from pagecast.sim.core.group_spec import GroupSpec, KvKind


def group_words(group: GroupSpec) -> str:
    """What the layers of a group keep: `window of 1,024 tokens`."""
    words = {
        KvKind.FULL: "full attention",
        KvKind.LATENT: "latent attention (MLA)",
        KvKind.WINDOW: f"window of {group.window:,} tokens",
        KvKind.CHUNK: f"chunks of {group.window:,} tokens",
        KvKind.STATE: "recurrent states",
        KvKind.RING: "tokens that an indexer is still pooling",
        KvKind.CHECKPOINT: "recurrent states, cached at ends of blocks",
    }
    return words[group.kind]


def group_and_blocks(group: GroupSpec) -> str:
    """The same with its block size: `window of 1,024 tokens, blocks of 16 tokens`."""
    return f"{group_words(group)}, blocks of {group.block_size} tokens"
