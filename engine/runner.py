"""The runner of steps: it queues a step on the device and returns before the device has computed it.

It holds what steps share there: the model, the KV cache, block tables, CUDA graphs and the sampler's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine import attention, ops
from pagecast.engine.backend import Pages, PromptChunks, Shape
from pagecast.engine.batch import PADDING, Batches, StepBuffer, StepLayout, graph_sections
from pagecast.engine.graphs import StepGraphs
from pagecast.engine.host_tier import HostOrders, HostTier
from pagecast.engine.model import Decoder
from pagecast.engine.ops import TokenInputs, Turn
from pagecast.engine.rope import rotary_table
from pagecast.engine.rows import Rows
from pagecast.engine.sampling import FIELDS, Sampler
from pagecast.engine.sequence import Sequence as Text
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.request import Request
from torch import Tensor

# Bytes of a pickled step: without its chunks, of each chunk, and of each block in a host transfer.
_LAYOUT_BYTES, _CHUNK_BYTES, _MOVE_BYTES = 4096, 64, 64


class Peers(Protocol):
    """The other GPUs of an engine."""

    def publish(
        self, layout: StepLayout | None, numbers: NDArray[np.int32], orders: HostOrders | None
    ) -> None:
        """Sends them a step to run, or transfers alone."""
        ...

    def guarded(self, *, shared_step: bool = False) -> AbstractContextManager[None]:
        """The context in which to wait for them."""
        ...

    def check(self) -> None:
        """Raises where one of them is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A queued step: the sequences that take its tokens, and the host tensor in which these will arrive.

    A request that verifies n draft tokens stands n + 1 times in a row among the takers.
    """

    takers: list[Text | None]
    tokens: Tensor
    landed: torch.cuda.Event | None
    team: Peers | None = None

    def wait(self) -> list[int]:
        """The token drawn for each of `takers`, -1 where its logits were not finite."""
        with nullcontext() if self.team is None else self.team.guarded():
            if self.landed is not None:
                self.landed.synchronize()
        return self.tokens.tolist()


class Runner:
    """Runs a model's steps over its KV cache.

    `kv` is [layers, blocks, 2, block_size, kv heads, head_dim], on the device where everything runs.
    `most_drafts`: the most draft tokens of one request that a step verifies.
    """

    def __init__(
        self,
        model: Decoder,
        kv: Tensor,
        backend: str,
        sequences: Mapping[Request, Text],
        *,
        max_rows: int,
        max_tokens: int,
        max_len: int,
        most_drafts: int = 0,
    ) -> None:
        device = kv.device
        self.model = model
        self.device = device
        self.kv = kv
        self.host: HostTier | None = None
        block_size = kv.shape[3]
        columns = -(-max_len // block_size)
        shard = model.shard
        self.backend = attention.make(
            backend, Shape.of(model.spec, kv, model.dtype, max_rows + 1, shard.size)
        )
        self.rows = Rows(max_rows, columns, block_size)
        self._most_draws = max(max_rows, min(max_tokens, max_rows * (1 + most_drafts)))
        plan = self.backend.plan_room(max_tokens + max_rows)
        capacity = _capacity(max_rows, max_tokens, columns, plan) + 3 * self._most_draws
        self._step_bytes, self._step_numbers = _LAYOUT_BYTES + _CHUNK_BYTES * max_rows, capacity
        buffer = StepBuffer(capacity, device)
        self.batches = Batches(buffer, self.rows, sequences, self.backend)
        self.sampler = Sampler(max_rows + 1, device, shard=shard, vocab=model.spec.facts.vocab)
        self._tables = torch.zeros(max_rows + 1, columns, dtype=torch.int32, device=device)
        self._angles = rotary_table(model.spec, max_len).to(device)
        pin = device.type == "cuda"
        landing = self._most_draws + 1
        self._landing = [torch.zeros(landing, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._turn = 0
        self._caches = [(layer[:, 0], layer[:, 1]) for layer in kv]
        self._graphs: StepGraphs | None = None
        self._prompt_graphs: StepGraphs | None = None
        self.team: Peers | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, memory: Memory) -> Flight:
        """Lays a step out and queues it on all GPUs. `wait` of the result returns the tokens."""
        if self.host is not None:
            self.host.begin(plan)
        batch = self.batches.lay_out(plan, memory)
        if self.team is None:
            tokens = self.execute(batch)
            if self.host is not None:
                self.host.finish(plan)
            return self._bring_back(batch, tokens)
        with self.team.guarded(shared_step=True):
            orders = None if self.host is None else self.host.orders(plan)
            self.team.publish(batch.without_takers(), self.batches.buffer.sent, orders)
            tokens = self.execute(batch)
            if self.host is not None:
                self.host.finish(plan)
            return self._bring_back(batch, tokens)

    @torch.inference_mode()
    def transfer(self, plan: StepPlan) -> None:
        """Begins the transfers of a plan that computes nothing, on all GPUs."""
        assert self.host is not None
        self.host.begin(plan)
        if self.team is not None:
            with self.team.guarded(shared_step=True):
                self.team.publish(None, np.empty(0, np.int32), self.host.orders(plan))

    @torch.inference_mode()
    def follow(self, batch: StepLayout | None, orders: HostOrders | None) -> None:
        """Queues what another process has published: a step, transfers, or both."""
        if orders is not None:
            assert self.host is not None
            self.host.settle(orders)
            self.host.begin(orders)
        if batch is not None:
            self.execute(batch)
            if orders is not None and self.host is not None:
                self.host.finish(orders)

    @property
    def step_capacity(self) -> tuple[int, int]:
        """Bytes and numbers that a published step takes at most."""
        moved = 0 if self.host is None else 2 * self.kv.shape[1]
        return self._step_bytes + _MOVE_BYTES * moved, self._step_numbers

    @torch.inference_mode()
    def execute(self, batch: StepLayout) -> Tensor:
        """Queues a step whose numbers are on their way to the device; returns the tokens drawn."""
        self._change_tables(batch)
        return self._draw(batch, self._states(batch))

    def receive(self, numbers: NDArray[np.int32]) -> None:
        """Queues the transfer of a step that another process has laid out; `numbers` are copied first."""
        self.batches.buffer.receive(numbers)

    def check(self) -> None:
        """Errors: EngineFailed where a GPU of several is gone."""
        if self.team is not None:
            self.team.check()

    def close(self) -> None:
        """Lets go of captured steps; no step may follow."""
        for graphs in (self._graphs, self._prompt_graphs):
            if graphs is not None:
                graphs.close()

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], prompt_sizes: Sequence[int]) -> None:
        """Captures decode steps of these batch sizes, and steps with prompts of these token counts, to be
        replayed from now on."""
        if not self.backend.graphs:
            return
        self._forget_rows()
        pool = torch.cuda.graph_pool_handle()
        if prompt_sizes and self.backend.plan_room(prompt_sizes[0]):
            self._prompt_graphs = StepGraphs(self._prompt_states, prompt_sizes, pool)
            self.batches.prompt_graphs = sorted(prompt_sizes)
        if sizes:
            self._graphs = StepGraphs(self._single_states, sizes, pool)
            self.batches.graphs = sorted(sizes)

    @torch.inference_mode()
    def rehearse(self, tokens: int) -> None:
        """Runs a prefill of `tokens` tokens, a draw for every row and a decode of padding.

        This compiles their kernels and shows how much memory they take. All tokens share one block, so the
        results have no meaning.
        """
        longest = len(self._angles)
        chunks = [min(longest, tokens - start) for start in range(0, tokens, longest)]
        ids = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        positions = torch.cat([torch.arange(n, dtype=torch.int32, device=self.device) for n in chunks])
        rows, draws = min(tokens, self.rows.padding), min(tokens, self._most_draws)
        prompts = PromptChunks(chunks, chunks, [0] * len(chunks))
        extra = torch.from_numpy(self.backend.plan(prompts, 0, captured=False)).to(self.device)
        slots = positions % self.rows.block_size
        self.backend.warm_up()
        pages = Pages(0, self._tables[:0], ids[:0], slots, self._tables, prompts, extra)
        states = self._forward(self._place(ids, ids, positions), pages, ids[:draws])
        self.sampler.sample(self.model.logits(states), ids[:draws], ids[:draws], ids[:draws] - 1, ids[:1])
        self._forget_rows()
        self._single_states(rows)

    def _forget_rows(self) -> None:
        """Fills the step buffer with padding rows."""
        self.batches.buffer.device.fill_(PADDING)

    def _single_states(self, size: int) -> Tensor:
        """Final states of a batch of `size` single tokens, whose inputs are read on the device alone."""
        buffer, (where, _) = self.batches.buffer.device, graph_sections(size)
        rows = buffer[where.rows]
        inputs = self._place(rows, buffer[where.ids], buffer[where.positions])
        pages = Pages(size, self._tables[rows], inputs.lens, inputs.slots, self._tables)
        return self._forward(inputs, pages, None)

    def _prompt_states(self, size: int) -> Tensor:
        """The same for a step with prompts of `size` tokens."""
        singles = self.batches.most_singles(size)
        buffer = self.batches.buffer.device
        where, chunks = graph_sections(size, singles, self.backend.plan_room(size))
        rows = buffer[where.rows]
        inputs = self._place(rows, buffer[where.ids], buffer[where.positions])
        lens = buffer[chunks.lens].clamp(min=0)
        table, extra = self._tables[rows[:singles]], buffer[chunks.extra]
        pages = Pages(singles, table, lens, inputs.slots, self._tables, extra=extra)
        return self._forward(inputs, pages, None)

    def _change_tables(self, batch: StepLayout) -> None:
        buffer, changes = self.batches.buffer.device, batch.changes
        if changes.places.stop > changes.places.start:
            ops.put_numbers(buffer[changes.places], buffer[changes.blocks], self._tables)
        if changes.params.stop > changes.params.start:
            rows = buffer[changes.params].view(-1, FIELDS + 1)
            self.sampler.params[:, rows[:, 0]] = rows[:, 1:].T
        if changes.copies.stop > changes.copies.start:
            self.backend.copy_blocks(buffer[changes.copies].view(-1, 2))

    def _states(self, batch: StepLayout) -> Tensor:
        """Final states of the tokens that are sampled from, [rows, hidden]."""
        graphs = self._prompt_graphs if batch.chunks.prompts.tokens else self._graphs
        if graphs is None or not batch.graph:
            return self._eager_states(batch)
        states = graphs(batch.graph)
        if batch.draws.sampled is None:
            return states
        return states.index_select(0, self.batches.buffer.device[batch.draws.sampled])

    def _eager_states(self, batch: StepLayout) -> Tensor:
        buffer, tokens = self.batches.buffer.device, batch.tokens
        rows = buffer[tokens.rows]
        inputs = self._place(rows, buffer[tokens.ids], buffer[tokens.positions])
        chunks, n = batch.chunks, batch.singles
        pages = Pages(
            decode_rows=n,
            decode_table=self._tables[rows[:n], : batch.columns],
            decode_lens=inputs.lens[:n],
            slots=inputs.slots,
            tables=self._tables,
            prompts=chunks.prompts,
            extra=buffer[chunks.extra] if chunks.prompts.tokens else None,
        )
        sampled = None if batch.draws.sampled is None else buffer[batch.draws.sampled]
        return self._forward(inputs, pages, sampled)

    def _place(self, rows: Tensor, ids: Tensor, positions: Tensor) -> TokenInputs:
        size = self.rows.block_size
        return ops.place(rows, ids, positions, self.sampler.newest, self._tables, self._angles, size)

    def _forward(self, inputs: TokenInputs, pages: Pages, sampled: Tensor | None) -> Tensor:
        """The model over one step's tokens."""
        self.backend.begin(pages)

        def attend(layer: int, qkv: Tensor, turn: Turn) -> Tensor:
            keys, values = self._caches[layer]
            return self.backend.attend(layer, ops.turn_and_store(qkv, turn, keys, values, pages.slots))

        return self.model(inputs.ids, inputs.angles, attend, sampled, inputs.slots)

    def _draw(self, batch: StepLayout, states: Tensor) -> Tensor:
        buffer, draws = self.batches.buffer.device, batch.draws
        rows, positions = buffer[batch.tokens.rows], buffer[batch.tokens.positions]
        if draws.sampled is not None:
            sampled = buffer[draws.sampled]
            rows, positions = rows[sampled], positions[sampled]
        filtered = None if draws.filtered is None else buffer[draws.filtered]
        logits = self.model.logits(states)
        return self.sampler.sample(logits, rows, positions + 1, buffer[draws.forced], filtered)

    def _bring_back(self, batch: StepLayout, tokens: Tensor) -> Flight:
        takers = batch.draws.takers
        self._turn ^= 1
        landing = self._landing[self._turn][: len(takers)]
        ops.copy_numbers(tokens[: len(takers)], landing)
        landed = None
        if self.device.type == "cuda":
            landed = torch.cuda.Event()
            landed.record()
        return Flight(takers, landing, landed, self.team)


def _capacity(max_rows: int, max_tokens: int, columns: int, plan: int) -> int:
    """Numbers a step can have at most: of tokens, draws and chunks, tiles of chunks, and changed tables."""
    tokens = 3 * (max_tokens + max_rows)
    tiles = max(plan, 4 * (max_tokens + max_rows))
    changes = 2 * (max_rows + 1) * columns + (FIELDS + 1) * max_rows + 2 * max_rows
    return tokens + tiles + changes + 8 * max_rows + 1024
