"""A driver of TensorRT-LLM's own V1 scheduler in virtual time: prints what it decided, a line per seed.

    PAGECAST_TRTLLM=FOLDER python drive_trtllm.py FIRST LAST no-evict|utilization|static

FOLDER holds tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py (see README.md); nothing else is needed.
The capacity policies and micro batches are TensorRT-LLM's. `trtllm_stubs.py` has its request,
`trtllm_blocks.py` its block manager, and this script takes the part of `PyExecutor` (py_executor.py
@0004396, `_executor_loop_overlap`; resource_manager.py, `fit_token_budget`).

The clock counts microseconds. Requests are handed in before a turn; the turn is one microsecond later.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import trtllm_stubs
from sglang_decisions import Decisions, Served, Turn, to_line
from trtllm_blocks import Blocks, NoFreeBlock
from trtllm_specifications import Spec, checksum, specification
from trtllm_stubs import CapacitySchedulerPolicy, LlmRequest, LlmRequestState

Row = dict[str, Any]
TRTLLM = trtllm_stubs.load()
PRIVATE_PROMPT = 1_000_000  # content ids of what a specification gives no name
PRIVATE_OUTPUT = 2_000_000
TOKENS_PER_CONTENT = 1 << 20


class Undefined(Exception):
    """The engine's own behaviour is not known here: the seed is left out."""


def token(content: int, offset: int, salt: str) -> int:
    """The token at a place of a text: no two places have the same, nor two tenants."""
    salted = int(salt.rsplit(" ", 1)[1]) if salt else 0
    return (salted << 60) + content * TOKENS_PER_CONTENT + offset


def make_scheduler(config: Row, blocks: Blocks) -> Any:
    """`SimpleScheduler` with the policy and chunks of a configuration."""
    capacity = TRTLLM.PyCapacityScheduler(
        config["max_batch_size"], blocks, None, CapacitySchedulerPolicy[config["policy"]]
    )
    chunking = None
    if config["chunked_context"]:
        policy = TRTLLM.ChunkingPolicy[config["chunking"]]
        chunking = TRTLLM.ContextChunkingConfig(policy, config["block_size"])
    batches = TRTLLM.PyMicroBatchScheduler(config["max_batch_size"], config["max_num_tokens"], chunking)
    return TRTLLM.SimpleScheduler(capacity, batches)


class Batch:
    """One scheduled batch: its prompts, its decodes, and when it is computed."""

    def __init__(self, contexts: list[LlmRequest], decodes: list[LlmRequest]) -> None:
        self.contexts = contexts
        self.decodes = decodes
        self.end_us = 0
        self.sampled: list[LlmRequest] = []


class Engine:
    """One specification being served."""

    def __init__(self, seed: int, spec: Spec) -> None:
        self.seed = seed
        self.spec = spec
        self.config: Row = spec["config"]
        self.rows: list[Row] = spec["requests"]
        size = self.config["block_size"]
        self.blocks = Blocks(self.config["usable_blocks"], size, reuse=self.config["enable_block_reuse"])
        self.scheduler = make_scheduler(self.config, self.blocks)
        self.requests = [
            LlmRequest(number, self._prompt(number, row), row["output_tokens"])
            for number, row in enumerate(self.rows)
        ]
        self.waiting: list[LlmRequest] = []
        self.active: list[LlmRequest] = []
        self.submitted_us: list[int] = []
        self.first_us = [-1] * len(self.rows)
        self.finish_us = [-1] * len(self.rows)
        self.cached = [-1] * len(self.rows)
        self.out = [0] * len(self.rows)
        self.pauses = [0] * len(self.rows)
        self.turns: list[Turn] = []
        self.now_us = self.device_free_us = 0

    def _prompt(self, number: int, row: Row) -> list[int]:
        spans = row.get("spans") or [[PRIVATE_PROMPT + number, 0, row["input_tokens"]]]
        salt = row.get("salt", "")
        return [token(content, offset + i, salt) for content, offset, length in spans for i in range(length)]

    def run(self) -> Decisions:
        """Serves every request to its end."""
        previous: Batch | None = None
        idle = 0
        while min(self.finish_us) < 0:
            self._take_in()
            self.now_us += 1
            output = self.scheduler.schedule_request(self.active, set())
            for req in output.paused_requests:
                self.blocks.remove_sequence(req)
                self.pauses[req.request_id] += 1
            batch = self._prepare(output)
            if batch is not None:
                self._launch(batch, output.paused_requests)
            if not self.config["overlap"]:
                previous = batch
            if previous is not None:
                self._update(previous)
            for req in output.paused_requests:
                if req.state is LlmRequestState.GENERATION_COMPLETE:
                    raise Undefined(
                        f"seed {self.seed}: request {req.request_id} is paused, and begun anew, at its end"
                    )
                req.pause()
            if batch is not None:
                self._move_on(batch)
            if previous is not None:
                self._end(previous)
            if batch is not None and self.config["overlap"]:
                for req in batch.decodes:
                    if req.state is not LlmRequestState.GENERATION_COMPLETE:
                        self._near_end(req)
            if batch is None and previous is None:
                if not output.paused_requests:
                    self._idle()
                idle += 1
                if idle > 1000:
                    raise RuntimeError(f"seed {self.seed}: nothing can be scheduled")
            else:
                idle = 0
            previous = batch
        served = [self._served(number) for number in range(len(self.rows))]
        return Decisions(self.seed, checksum(self.spec), self.turns, served)

    def _take_in(self) -> None:
        for number in range(len(self.submitted_us), len(self.rows)):
            if self.rows[number]["arrival_us"] > self.now_us:
                break
            self.submitted_us.append(self.now_us)
            self.waiting.append(self.requests[number])
        while self.waiting and len(self.active) < self.config["max_batch_size"]:
            self.active.append(self.waiting.pop(0))

    def _idle(self) -> None:
        if min(self.finish_us) < 0:
            if len(self.submitted_us) == len(self.rows):
                raise RuntimeError(f"seed {self.seed}: nothing can be scheduled")
            self.now_us = max(self.now_us, self.rows[len(self.submitted_us)]["arrival_us"])

    def _prepare(self, output: Any) -> Batch | None:
        """The batch with its blocks; None where there is nobody in it."""
        if not output.context_requests and not output.generation_requests:
            return None
        contexts = list(output.context_requests)
        begun = [req for req in contexts if req.is_first_context_chunk]
        self.blocks.add_sequence_batch(begun)
        for req in begun:
            if self.cached[req.request_id] < 0:
                self.cached[req.request_id] = req.context_current_position
        for req in output.generation_requests:
            self.blocks.add_token(req.request_id)
        self._fit(contexts, len(output.generation_requests))
        chunking = [req for req in contexts if not req.is_last_context_chunk]
        return Batch(
            chunking + [req for req in contexts if req.is_last_context_chunk],
            list(output.generation_requests),
        )

    def _fit(self, contexts: list[LlmRequest], decodes: int) -> None:
        """`fit_token_budget`: where less is reused than was estimated, chunks are cut from the back."""
        excess = decodes + sum(req.context_chunk_size for req in contexts) - self.config["max_num_tokens"]
        if excess <= 0 or not self.config["chunked_context"]:
            return
        size = self.config["block_size"]
        last = [req for req in contexts if req.is_last_context_chunk]
        for req in reversed([req for req in contexts if not req.is_last_context_chunk] + last):
            if excess <= 0:
                return
            start = req.context_current_position
            kept = max(req.context_chunk_size - excess, 0)
            kept = (start + kept) // size * size - start
            if kept > 0:
                excess -= req.context_chunk_size - kept
                req.context_chunk_size = kept

    def _launch(self, batch: Batch, paused: list[LlmRequest]) -> None:
        cost = self.spec["cost"]
        tokens = len(batch.decodes) + sum(req.context_chunk_size for req in batch.contexts)
        contexts = sum(self.blocks.sequences[req.request_id].tokens - 1 for req in batch.decodes)
        context = contexts + len(batch.decodes)
        context += sum(req.context_current_position + req.context_chunk_size for req in batch.contexts)
        spent_us = int(cost["step_us"] + cost["token_us"] * tokens + cost["context_ns"] * context // 1000)
        batch.end_us = self.device_free_us = max(self.now_us, self.device_free_us) + spent_us
        batch.sampled = [req for req in batch.contexts if req.is_last_context_chunk] + batch.decodes
        begun = {req.request_id for req in batch.contexts}
        queue = [req for req in self.active if req.request_id not in self.blocks.sequences] + self.waiting
        self.turns.append(
            Turn(
                start_us=self.now_us,
                end_us=batch.end_us,
                prefill=tuple(
                    (req.request_id, req.context_current_position, req.context_chunk_size)
                    for req in batch.contexts
                ),
                decodes=tuple(sorted(req.request_id for req in batch.decodes)),
                context=contexts,
                retracted=tuple(sorted(req.request_id for req in paused)),
                waiting=tuple(sorted(req.request_id for req in queue if req.request_id not in begun)),
                free_pages=len(self.blocks.free),
                evictable_pages=0,
                evicted_tokens=0,
                ratio=0.0,
            )
        )

    def _update(self, batch: Batch) -> None:
        """The batch is computed: those that sampled get their token."""
        self.now_us = max(self.now_us, batch.end_us)
        for req in batch.sampled:
            number = req.request_id
            if req.state is LlmRequestState.GENERATION_COMPLETE:
                continue
            row = self.rows[number]
            content = row.get("output_content", PRIVATE_OUTPUT + number)
            req.tokens.append(token(content, self.out[number], row.get("salt", "")))
            self.out[number] += 1
            if self.first_us[number] < 0:
                self.first_us[number] = self.now_us
            if req.generated >= req.max_new_tokens or row.get("stop_after") == self.out[number]:
                req.state = LlmRequestState.GENERATION_COMPLETE
                self.finish_us[number] = self.now_us

    def _move_on(self, batch: Batch) -> None:
        for req in batch.contexts:
            if req.state is LlmRequestState.GENERATION_COMPLETE:
                continue
            req.move_to_next_context_chunk()
            if not req.context_remaining_length:
                req.state = LlmRequestState.GENERATION_IN_PROGRESS
                if self.config["overlap"]:
                    self._near_end(req)

    def _near_end(self, req: LlmRequest) -> None:
        if req.will_complete_next_iteration():
            req.state = LlmRequestState.GENERATION_TO_COMPLETE

    def _end(self, batch: Batch) -> None:
        """Ends requests, in the order of their arrival, and makes prompts findable."""
        done = [req for req in self.active if req.state is LlmRequestState.GENERATION_COMPLETE]
        self.active = [req for req in self.active if req not in done]
        for req in done:
            self.blocks.remove_sequence(req)
        for req in batch.contexts:
            self.blocks.store_context_blocks(req)

    def _served(self, number: int) -> Served:
        return Served(
            self.submitted_us[number],
            self.first_us[number],
            self.finish_us[number],
            self.cached[number],
            self.out[number],
            self.pauses[number],
        )


def main() -> None:
    """Prints the decisions of the seeds named on the command line; left out: what is not known here."""
    first, last, policy = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for seed in range(first, last + 1):
        try:
            print(to_line(Engine(seed, specification(seed, policy)).run()), flush=True)
        except Undefined as reason:
            print(reason, file=sys.stderr)
        except NoFreeBlock:
            print(f"seed {seed}: the policy admits more than there are blocks for", file=sys.stderr)


if __name__ == "__main__":
    main()
