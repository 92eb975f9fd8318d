"""LoRA adapters, images in prompts and cache salts for random scenarios.

`tell_apart(spec, seed)` adds to a specification:

- to `config`: `max_loras`, how many adapters a step computes with at most.
- to requests: `adapter` (a name), `salt`, and `items`: images as [name, offset, length], in order. The tokens
  there are placeholders, the same for all images.
"""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]


def tell_apart(spec: Spec, seed: int) -> Spec:
    """Gives the requests of a specification adapters, images and salts."""
    draw = random.Random(f"extra keys {seed}")
    spec["config"]["max_loras"] = draw.choice((1, 1, 2, 3, 8))
    adapters = draw.randrange(4)
    images = draw.randrange(3) > 0
    salts = draw.randrange(4) == 0
    for number, request in enumerate(spec["requests"]):
        if adapters and draw.randrange(4):
            request["adapter"] = f"adapter {draw.randrange(adapters + 1)}"
        if salts and draw.randrange(2):
            request["salt"] = f"tenant {draw.randrange(2)}"
        if images and draw.randrange(4):
            beginning = request["spans"][0][0] if "spans" in request else -number
            items = _items(f"{seed} {beginning} {draw.choice((0, 0, 1))}", request["input_tokens"])
            if items:
                request["items"] = items
    return spec


def _items(name: str, tokens: int) -> list[list[Any]]:
    """Images in a prompt of so many tokens; prompts with one beginning have the same, but for a variant."""
    draw = random.Random(name)
    items: list[list[Any]] = []
    at = 0
    for _ in range(draw.randrange(1, 4)):
        at += draw.choice((0, 0, 1, 3, draw.randrange(1 + tokens)))
        length = draw.choice((1, 2, 5, 16, 40))
        if at + length > tokens:
            break
        items.append([f"image{draw.randrange(3)}", at, length])
        at += length
    return items


def encode(spec: Spec, seed: int) -> Spec:
    """Gives requests images, and the encoder a budget and a cache: `encoder_tokens` in `config`.

    Images come again in other prompts, and at times twice in one. Equal names have equal lengths.
    """
    draw = random.Random(f"encoder {seed}")
    pictures = [draw.choice((1, 2, 5, 16, 40)) for _ in range(draw.randrange(2, 10))]
    longest = 1
    for request in spec["requests"]:
        request.pop("items", None)
        if not draw.randrange(4):
            continue
        items: list[list[Any]] = []
        at = 0
        for _ in range(draw.randrange(1, 5)):
            at += draw.choice((0, 0, 1, 3, draw.randrange(1 + request["input_tokens"])))
            picture = draw.randrange(len(pictures))
            if at + pictures[picture] > request["input_tokens"]:
                break
            items.append([f"picture-{picture}", at, pictures[picture]])
            longest = max(longest, pictures[picture])
            at += pictures[picture]
        if items:
            request["items"] = items
    budget = max(spec["config"]["max_num_batched_tokens"], longest)
    spec["config"]["encoder_tokens"] = max(longest, budget // draw.choice((1, 1, 2, 8)))
    return spec
