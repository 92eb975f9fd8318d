"""Batch sizes captured as CUDA graphs."""

from pagecast.sim.costs.calibration.shape import graph_sizes
from pagecast.sim.machine.graphs import capture_sizes, engine_graphs, graph_reserve


def test_vllm_captures_up_to_twice_the_requests_and_at_most_512():
    assert capture_sizes(2) == [1, 2, 4]
    assert capture_sizes(256)[-3:] == [480, 496, 512]
    assert capture_sizes(256) == capture_sizes(1024)


def test_step_costs_and_the_memory_budget_share_vllms_sizes():
    meta = {"engine": "vllm", "config": {"cuda_graphs": "full", "max_num_seqs": 24}}
    assert graph_sizes(meta) == tuple(capture_sizes(24))


def test_our_engine_captures_its_largest_batch_and_no_larger_one():
    assert engine_graphs(20) == [1, 2, 4, 8, 16, 20]
    assert graph_reserve(0) == 0 < graph_reserve(1) < graph_reserve(2)
