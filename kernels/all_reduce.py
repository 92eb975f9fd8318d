"""All-reduce and all-gather among GPUs that write into each other's memory, in one launch, with no barrier.

Every GPU has a mailbox in its own memory, which its peers can write. A sender puts its words there; the
receiver polls until each place holds a word, takes it, and marks the place empty again with a bit pattern
that is never sent (negative zero; zero is sent in its place). Data and signal are one: a message takes one
trip over the link, with no fence and no flag. (The Lamport-style protocol of TensorRT-LLM's low-latency
all-reduce.)

Programs are channels of their own: program i of one GPU speaks only to program i of the others. A mailbox
has two slots for each channel, used in turn. A sender reaches a slot again after two messages of its channel.
By then the receiver has emptied it: it had ended the first message before it sent the second, which the
sender has waited for.

- **One-shot**: every GPU sends all of its words to every other and adds up what it got. Least latency.
- **Two-shot**: every GPU adds up its part of the words and sends the sums. Less traffic between three GPUs
  or more.

Sums are in float32 and in the order of the GPUs: every GPU gets the same bits.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, require
from torch import Tensor

PROGRAM_BYTES = 4096
"""What a program sends to a peer at most: 32 bytes for each of 128 threads."""
_WARPS = 4
_SLOTS = 2
_PHASES = 2
# Bytes 0x8000 over and over: negative zero in two bytes, and in four a number next to zero.
_EMPTY = {2: -0x8000, 4: -0x7FFF8000}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def mailbox_bytes(gpus: int, most_bytes: int) -> int:
    """Bytes of one GPU's mailbox for messages of at most `most_bytes`."""
    return _SLOTS * _PHASES * gpus * PROGRAM_BYTES * _channels(most_bytes)


def _channels(most_bytes: int) -> int:
    return -(-most_bytes // PROGRAM_BYTES)


class Mailboxes:
    """The mailboxes of a group of GPUs, as number `rank` sees them.

    `addresses`: where each GPU's mailbox, of `mailbox_bytes`, lies in this GPU's address space, at a multiple
    of 16 bytes.
    `own`: this GPU's mailbox as a tensor; it must be emptied (`clear`) on every GPU before any sends.
    `stop`: int32 [1] on the device; once it is not 0, nobody waits any longer, and results mean nothing.
    """

    def __init__(self, own: Tensor, addresses: Sequence[int], rank: int, most_bytes: int) -> None:
        self.rank, self.size, self.most_bytes = rank, len(addresses), most_bytes
        self.device = own.device
        self.channels = _channels(most_bytes)
        require(
            own.nbytes >= mailbox_bytes(self.size, most_bytes) and all(a % 16 == 0 for a in addresses),
            f"a mailbox of {mailbox_bytes(self.size, most_bytes)} bytes at a multiple of 16 is needed",
        )
        self._own = own
        self.addresses = torch.tensor(list(addresses), dtype=torch.int64, device=own.device)
        self.turns = torch.zeros(self.channels, dtype=torch.int32, device=own.device)
        self.stop = torch.zeros(1, dtype=torch.int32, device=own.device)
        self.launches: dict[Any, Launch] = {}

    def clear(self) -> None:
        """Empties this GPU's mailbox."""
        whole = self._own.view(torch.uint8)[: mailbox_bytes(self.size, self.most_bytes)]
        whole.view(torch.int16).fill_(_EMPTY[2])


@triton.jit
def _place(mailbox, slot, channel, phase, sender, CHANNELS, GPUS, WORDS, word: tl.constexpr):
    """Where `sender`'s words of a channel lie in a GPU's mailbox, whose address is in `mailbox`."""
    start = tl.multiple_of(tl.load(mailbox).to(tl.pointer_type(word)), 16)
    at = ((slot * CHANNELS + channel) * 2 + phase) * GPUS + sender
    return start + at.to(tl.int64) * WORDS


@triton.jit
def _sendable(words, EMPTY: tl.constexpr):
    """Words as they may be sent."""
    return tl.where(words == EMPTY, 0, words)


@triton.jit
def _send(
    words,
    mask,
    mailboxes,
    slot,
    channel,
    peer,
    PHASE: tl.constexpr,
    RANK: tl.constexpr,
    GPUS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Puts words into this GPU's place in the mailbox of `peer`."""
    WORDS: tl.constexpr = words.shape[0]
    to = _place(mailboxes + peer, slot, channel, PHASE, RANK, CHANNELS, GPUS, WORDS, words.dtype)
    tl.store(to + tl.arange(0, WORDS), words, mask=mask)


@triton.jit
def _receive(
    mask,
    mailboxes,
    stop,
    slot,
    channel,
    sender,
    PHASE: tl.constexpr,
    RANK: tl.constexpr,
    GPUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
    EMPTY: tl.constexpr,
    WORD: tl.constexpr,
):
    """Waits for the words of `sender`, takes them and leaves their place empty."""
    at = _place(mailboxes + RANK, slot, channel, PHASE, sender, CHANNELS, GPUS, WORDS, WORD)
    at += tl.arange(0, WORDS)
    words = tl.load(at, mask=mask, other=0, volatile=True)
    missing = tl.max((words == EMPTY).to(tl.int32), 0)
    while missing > 0:
        words = tl.load(at, mask=mask, other=0, volatile=True)
        stopped = tl.load(stop, volatile=True)
        missing = tl.where(stopped != 0, 0, tl.max((words == EMPTY).to(tl.int32), 0))
    tl.store(at, tl.full(words.shape, EMPTY, words.dtype), mask=mask)
    return words


@triton.jit
def _sum(
    own,
    mask,
    mailboxes,
    stop,
    slot,
    channel,
    RANK: tl.constexpr,
    GPUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EMPTY: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """The sum, as words, of `own` and what others sent in the first phase, in the order of the GPUs."""
    WORDS: tl.constexpr = own.shape[0]
    total = tl.zeros([WORDS], tl.float32)
    for gpu in tl.static_range(GPUS):
        if gpu == RANK:
            words = own
        else:
            words = _receive(
                mask, mailboxes, stop, slot, channel, gpu, 0, RANK, GPUS, CHANNELS, WORDS, EMPTY, own.dtype
            )
        total += words.to(FLOAT, bitcast=True).to(tl.float32)
    return total.to(FLOAT).to(own.dtype, bitcast=True)


@triton.jit(do_not_specialize=["units"])
def _one_shot(
    x,
    out,
    mailboxes,
    turns,
    stop,
    units,
    RANK: tl.constexpr,
    GPUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
    EMPTY: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    SUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums of all GPUs' words, `units` of UNIT words each, or, without SUM, these one after another."""
    after_predecessor(OVERLAP)
    count = units * UNIT
    channel = tl.program_id(0)
    turn = tl.load(turns + channel)
    slot = turn % 2
    at = channel * WORDS + tl.arange(0, WORDS)
    mask = at < count
    own = _sendable(tl.load(x + at, mask=mask, other=0), EMPTY)
    for step in tl.static_range(1, GPUS):
        _send(own, mask, mailboxes, slot, channel, (RANK + step) % GPUS, 0, RANK, GPUS, CHANNELS)
    if SUM:
        total = _sum(own, mask, mailboxes, stop, slot, channel, RANK, GPUS, CHANNELS, EMPTY, FLOAT)
        tl.store(out + at, total, mask=mask)
    else:
        tl.store(out + RANK * count + at, own, mask=mask)
        for step in tl.static_range(1, GPUS):
            gpu = (RANK + step) % GPUS
            words = _receive(
                mask, mailboxes, stop, slot, channel, gpu, 0, RANK, GPUS, CHANNELS, WORDS, EMPTY, own.dtype
            )
            tl.store(out + gpu * count + at, words, mask=mask)
    tl.store(turns + channel, turn + 1)


@triton.jit(do_not_specialize=["units", "part_units"])
def _two_shot(
    x,
    out,
    mailboxes,
    turns,
    stop,
    units,
    part_units,
    RANK: tl.constexpr,
    GPUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
    EMPTY: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums of all GPUs' words, `units` of UNIT words each; GPU r adds up unit r * part_units and on."""
    after_predecessor(OVERLAP)
    count = units * UNIT
    part = part_units * UNIT
    channel = tl.program_id(0)
    turn = tl.load(turns + channel)
    slot = turn % 2
    inside = channel * WORDS + tl.arange(0, WORDS)
    for step in tl.static_range(1, GPUS):
        peer = (RANK + step) % GPUS
        at = peer * part + inside
        mask = (inside < part) & (at < count)
        words = _sendable(tl.load(x + at, mask=mask, other=0), EMPTY)
        _send(words, mask, mailboxes, slot, channel, peer, 0, RANK, GPUS, CHANNELS)
    at = RANK * part + inside
    mask = (inside < part) & (at < count)
    own = tl.load(x + at, mask=mask, other=0)
    total = _sum(own, mask, mailboxes, stop, slot, channel, RANK, GPUS, CHANNELS, EMPTY, FLOAT)
    total = _sendable(total, EMPTY)
    tl.store(out + at, total, mask=mask)
    for step in tl.static_range(1, GPUS):
        _send(total, mask, mailboxes, slot, channel, (RANK + step) % GPUS, 1, RANK, GPUS, CHANNELS)
    for step in tl.static_range(1, GPUS):
        peer = (RANK + step) % GPUS
        at = peer * part + inside
        mask = (inside < part) & (at < count)
        words = _receive(
            mask, mailboxes, stop, slot, channel, peer, 1, RANK, GPUS, CHANNELS, WORDS, EMPTY, own.dtype
        )
        tl.store(out + at, words, mask=mask)
    tl.store(turns + channel, turn + 1)


def all_reduce(x: Tensor, boxes: Mailboxes, *, two_shot: bool = False, out: Tensor | None = None) -> Tensor:
    """The sum of every GPU's x, a dense float tensor of one shape on all of them; `out` may be x.

    Every GPU must call this in the same order with the same sizes. Errors: BadInput for a message of more
    than `boxes.most_bytes`.
    """
    require(
        x.dtype in _FLOATS and x.is_contiguous() and x.nbytes <= boxes.most_bytes,
        f"all_reduce takes dense floats of at most {boxes.most_bytes} bytes, not {x.nbytes} of {x.dtype}",
    )
    out = torch.empty_like(x) if out is None else out
    if not x.numel():
        return out
    words, target = _words(x), _words(out)
    own, units = (boxes.addresses, boxes.turns, boxes.stop), words.shape[0] // _unit(x)
    if two_shot:
        part = -(-units // boxes.size)
        launch = _launch(boxes, _two_shot, x)
        launch(_programs(part * _unit(x), x), (words, target, *own), units, part)
        return out
    launch = _launch(boxes, _one_shot, x, SUM=True)
    launch(_programs(words.shape[0], x), (words, target, *own), units)
    return out


def all_gather(x: Tensor, boxes: Mailboxes) -> Tensor:
    """Every GPU's x, dense and of one shape: [GPUs, *x.shape].

    Words that stand for an empty place arrive as 0: integers of -2^15 (two bytes) or 2^15 - 2^31 (four), and
    negative zeros in two bytes. See `all_reduce` for the rest.
    """
    require(
        x.is_contiguous() and x.element_size() in _EMPTY and x.nbytes <= boxes.most_bytes,
        f"all_gather takes dense words of at most {boxes.most_bytes} bytes, not {x.nbytes} of {x.dtype}",
    )
    out = torch.empty(boxes.size, *x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    words = _words(x)
    launch = _launch(boxes, _one_shot, x, SUM=False)
    own = (boxes.addresses, boxes.turns, boxes.stop)
    launch(_programs(words.shape[0], x), (words, _words(out), *own), words.shape[0] // _unit(x))
    return out


def _words(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int16 if x.element_size() == 2 else torch.int32)


def _unit(x: Tensor) -> int:
    """Words that are moved at once: 16 bytes where the message is a whole number of these."""
    return 1 if x.nbytes % 16 else 16 // x.element_size()


def _programs(words: int, x: Tensor) -> int:
    return -(-words * x.element_size() // PROGRAM_BYTES)


_NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _launch(boxes: Mailboxes, kernel: Any, x: Tensor, **more: bool) -> Launch:
    key = (kernel, x.dtype, _unit(x), *more.values())
    launch = boxes.launches.get(key)
    if launch is None:
        constants = {
            "RANK": boxes.rank,
            "GPUS": boxes.size,
            "CHANNELS": boxes.channels,
            "WORDS": PROGRAM_BYTES // x.element_size(),
            "EMPTY": _EMPTY[x.element_size()],
            "FLOAT": _NAMES.get(x.dtype, tl.float32),
            "UNIT": _unit(x),
            **more,
        }
        launch = boxes.launches[key] = Launch(kernel, constants, boxes.device, num_warps=_WARPS)
    return launch
