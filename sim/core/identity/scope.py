"""Sharing scope: everything besides the tokens that decides whether cached KV fits a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import xxhash


@dataclass(frozen=True)
class Scope:
    """The facts that must be equal before prefixes are compared; a different scope never hits.

    Fields left empty are the deployment's defaults. `positional` digests RoPE scaling and the like,
    `multimodal` the images or audio a prompt refers to, `salt` keeps tenants apart.
    """

    model: str = ""
    tokenizer: str = ""
    adapter: str = ""
    positional: str = ""
    multimodal: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that begin every chain of block keys in this scope (xxHash, 128 bits)."""
        parts = (self.model, self.tokenizer, self.adapter, self.positional, self.multimodal, self.salt)
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return xxhash.xxh3_128_digest(text.encode())


DEFAULT_SCOPE = Scope()
