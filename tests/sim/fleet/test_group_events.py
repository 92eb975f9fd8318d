"""Indexes fed by the KV events of hybrid models: what Dynamo's router takes of them, and what it drops."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.fleet.index.events import EventIndex
from pagecast.sim.fleet.query import pieces
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

SIZE = 4
FULL = GroupSpec(KvKind.FULL, SIZE)
LATENT = GroupSpec(KvKind.LATENT, SIZE)
WINDOW = GroupSpec(KvKind.WINDOW, SIZE, window=8)


class Watched:
    """A scheduler of a hybrid model and the index that its events feed. Times are step numbers."""

    def __init__(self, *groups: GroupSpec, blocks: int = 60) -> None:
        self.s = Scheduler(Limits(blocks, SIZE, 8, 32, groups=groups))
        self.index = EventIndex()
        self.s.memory.watch(self.index.feed(0, lambda: 0))
        self.steps = 0
        self.twice: set[bytes] = set()  # texts of which there were two copies after some step

    def serve(self, request: Request) -> None:
        """Serves a request to its end."""
        assert self.s.submit(request)
        while request.id in self.s.requests:
            plan = self.s.plan(self.steps)
            self.s.commit(plan, now=self.steps)
            self.steps += 1
            self.twice.update(key[:-2] for key in self.s.memory.pool.spares)

    def overlap(self, text: int, tokens: int) -> int:
        """How many blocks of a text's first tokens the index believes the replica to have."""
        keys = BlockKeys.of_spans(SIZE, [(text, 0, tokens)], (0, 0))
        return self.index.overlaps(pieces(keys, tokens // SIZE), 0).get(0, 0)


def request(id: int, text: int, prompt: int, output: int = 2) -> Request:
    keys = BlockKeys.of_spans(SIZE, [(text, 0, prompt)], (1000 + id, 0))
    return Request(str(id), keys, prompt, output)


def test_the_index_believes_in_prefixes_whose_windows_are_gone():
    served = Watched(FULL, WINDOW)
    served.serve(request(1, text=1, prompt=40))
    again = request(2, text=1, prompt=17)
    assert (served.s.memory.find(again).tokens, served.overlap(1, 17)) == (16, 4)
    # Of the free blocks those without content go first, then those that have left the window.
    served.s.evict(40 + 6)
    assert (served.s.memory.find(again).tokens, served.overlap(1, 17)) == (0, 4)


def test_a_block_that_a_layer_with_a_window_gives_up_stays_in_the_index():
    served = Watched(FULL, WINDOW, blocks=26)
    served.serve(request(1, text=1, prompt=40))
    # 10 blocks of text 1 are in each group; the next request takes those that were free first.
    for id in (2, 3, 4):
        served.serve(request(id, text=id, prompt=8))
    findable = served.s.memory.findable_blocks()
    assert len(findable) < 26
    full = [extent for key, extents in served.s.memory.pool.index.items() for extent in extents]
    kept = sum(extent.rows for extent in full if extent.key[-2:] == bytes([0, 1]))
    assert kept == sum(served.overlap(text, 40 if text == 1 else 8) for text in (1, 2, 3, 4))


@settings(max_examples=25, deadline=None)
@example([(2, 1), (2, 12), (1, 11), (2, 8)], (LATENT, WINDOW, WINDOW))
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 14)), min_size=1, max_size=14),
    st.sampled_from([(FULL, WINDOW), (WINDOW, FULL), (LATENT, WINDOW, WINDOW)]),
)
def test_the_index_has_what_the_group_that_keeps_every_token_has(requests, groups):
    served = Watched(*groups, blocks=64)
    main = next(number for number, spec in enumerate(groups) if spec.window == 0)
    longest: dict[int, int] = {}
    for id, (text, blocks) in enumerate(requests, 1):
        served.serve(request(id, text, blocks * SIZE + 1))
        longest[text] = max(longest.get(text, 0), blocks * SIZE)
        own: dict[bytes, set[int]] = {}
        for key, extents in served.s.memory.pool.index.items():
            if key[-2:] == bytes([main, 1]):
                numbers = {number for each in extents for number in range(each.number, each.end)}
                own[key[:-2]] = numbers
        for seen, most in longest.items():
            keys = BlockKeys.of_spans(SIZE, [(seen, 0, most)], (0, 0))
            have = own.get(keys.digests[0], set())
            prefix = next((i for i in range(most // SIZE) if i not in have), most // SIZE)
            believed = served.overlap(seen, most)
            # Of two copies one may be evicted; the index then has neither.
            assert believed == prefix or (believed < prefix and keys.digests[0] in served.twice)


def test_of_two_groups_that_keep_every_token_the_first_to_evict_counts():
    served = Watched(FULL, FULL, blocks=26)
    served.serve(request(1, text=1, prompt=40))
    served.serve(request(2, text=2, prompt=12))
    lost = 10 - served.overlap(1, 40)
    assert lost > 0
    groups = [
        sum(
            extent.rows
            for extents in served.s.memory.pool.index.values()
            for extent in extents
            if extent.key[-2:] == bytes([number, 1])
        )
        for number in (0, 1)
    ]
    assert served.overlap(1, 40) + served.overlap(2, 12) <= min(groups)


def test_clearing_the_cache_empties_the_index():
    served = Watched(FULL, WINDOW)
    served.serve(request(1, text=1, prompt=40))
    assert served.s.reset_prefix_cache()
    assert served.overlap(1, 40) == 0


def dynamo(index: str) -> FleetSettings:
    return FleetSettings.make({"groups": [{"replicas": 2}], "router": {"policy": "dynamo", "index": index}})


def test_a_fleet_of_models_with_windows_is_routed_by_events():
    trace = read("chat", limit=60)
    scenario = Scenario(model="openai/gpt-oss-20b", costs="roofline")
    results = {index: replay_fleet(trace, scenario, dynamo(index)) for index in ("events", "approximate")}
    for result in results.values():
        assert result.summary["completed"] == 60
    hits = {index: result.summary["reused_prefix_tokens"] for index, result in results.items()}
    assert hits["events"] > 0.9 * hits["approximate"] > 0


def test_a_model_of_windows_alone_has_no_events_that_count(tmp_path):
    config = {
        "model_type": "mistral",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 2048,
        "vocab_size": 1000,
        "max_position_embeddings": 100000,
        "sliding_window": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    scenario = Scenario(model=str(tmp_path), num_gpu_blocks=8000, costs="roofline")
    with pytest.raises(BadInput, match="no layers that keep every token; use --index approximate"):
        replay_fleet(read("chat", limit=5), scenario, dynamo("events"))
