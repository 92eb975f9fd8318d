"""KV events tell an index exactly what the replica has cached, in vLLM's format."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq
from pagecast.planner_app.server.kv_events import KvEvents, Publisher
from pagecast.sim.core.identity.keys import BlockKeys

from .conftest import make_replica
from .test_recording import converse


class Index:
    """The blocks that a replica has, as far as its events tell."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}
        self.stored = 0
        self.removed = 0

    def take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "BlockStored":
                size = event["block_size"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                parent = event["parent_block_hash"]
                assert parent is None or parent in self.blocks
                for i, name in enumerate(event["block_hashes"]):
                    assert name not in self.blocks
                    ids = tuple(event["token_ids"][i * size : (i + 1) * size])
                    self.blocks[name] = (parent, ids, event["lora_name"])
                    parent = name
                    self.stored += 1
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.blocks[name]
                    self.removed += 1


class Listed(Publisher):
    """Hands batches over at once."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def send(self, events: list[dict[str, Any]]) -> None:
        self._index.take(events)

    def answer(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_index_of_the_events_has_what_the_replica_can_find() -> None:
    replica = make_replica(
        {"num_gpu_blocks": 120}, {"time_scale": 20.0}, kv_events_endpoint="inproc://unused"
    )
    backend: Any = replica.backend
    index = Index()
    events = KvEvents(lambda: backend.scheduler.events, Listed(index))
    backend.history._keepers[:] = [events]

    async def serve() -> list[Any]:
        return await converse(backend, 1, 120)

    generations = asyncio.run(serve())
    events.publish()
    assert index.removed > 100
    findable = backend.scheduler.memory.findable_blocks()
    names = {events._name_of[block] for block in findable if block in events._name_of}
    assert len(findable) > 20
    assert names == set(index.blocks)
    # A block's tokens are those of the request that stored it, and its name is that of these tokens.
    whole = {}
    for generation in generations:
        ids = [*generation.prompt, *generation.tokens]
        if not generation.adapter:
            for i, digest in enumerate(BlockKeys.of_ids(16, ids).digests):
                whole[int.from_bytes(digest[:8], "little")] = tuple(ids[16 * i : 16 * i + 16])
    told = {name: ids for name, (_, ids, adapter) in index.blocks.items() if adapter is None}
    assert told and all(whole[name] == ids for name, ids in told.items())


def test_messages_are_numbered_and_sent_again(serve: Any, tmp_path: Path) -> None:
    context: Any = zmq.Context.instance()
    out, missed = f"ipc://{tmp_path}/out", f"ipc://{tmp_path}/missed"
    one = serve(kv_events_endpoint=out, kv_events_replay_endpoint=missed, kv_events_topic="kv@pod@model")
    probe, again = context.socket(zmq.SUB), context.socket(zmq.REQ)
    probe.setsockopt(zmq.SUBSCRIBE, b"kv@")
    for socket, endpoint in ((probe, out), (again, missed)):
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(endpoint)
    time.sleep(0.5)
    with one.client() as http:
        assert http.post("/v1/completions", json={"prompt": "x y " * 40, "max_tokens": 40}).status_code == 200
    topic, number, payload = probe.recv_multipart()
    assert (topic, int.from_bytes(number, "big")) == (b"kv@pod@model", 0)
    at, events, rank = msgpack.unpackb(payload)
    assert abs(at - time.time()) < 30 and rank == 0
    assert events[0]["type"] == "BlockStored" and events[0]["medium"] == "GPU"
    assert len(events[0]["block_hashes"]) == 5 and events[0]["parent_block_hash"] is None
    again.send((0).to_bytes(8, "big"))
    assert again.recv_multipart() == [number, payload]
    for socket in (probe, again):
        socket.close(linger=0)
