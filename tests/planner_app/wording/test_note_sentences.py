"""Notes and their sentences."""

import json
import pickle

import pytest
from pagecast.planner_app.cli import run as pagecast
from pagecast.planner_app.wording.note_sentences import sentence, sentences
from pagecast.sim.note import Note
from pagecast.sim.replay import replay
from pagecast.sim.replay.notes import memory_notes
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

FIGURES = {
    "in_sample": {"calibration": "a", "run": "r", "part": 0.5},
    "other_engine": {"fitted": "vllm", "recorded": "pagecast"},
    "other_kernels": {"fitted": "e3e7d863", "recorded": "0.1.0"},
    "few_draws": {"draws": 3, "enough": 20},
    "beyond_model_length": {"model": "m", "longest_tokens": 50_000, "model_tokens": 40_960},
    "sliding_windows": {"model": "m", "blocks_per_block": 1.5},
    "context_parallel": {"ranks": 8},
    "blocks_given": {"blocks": 99, "unused": ("kv_tokens",)},
    "blocks_beyond_memory": {"blocks": 99, "most_blocks": 9, "gpus": 1, "gpu": "g", "model": "m"},
    "out_of_memory": {"gpu": "L4", "limit": "gpu_memory_utilization 0.95", "missing_gib": 0.19},
    "memory_uncertain": {"blocks": 907, "uncertain": 758},
    "no_acceptance": {"method": "eagle", "drafts": 3},
    "outside_fit": {"tokens": (9000, 8192), "context": (20_000, 16_000, 64_000)},
}


def test_a_note_reads_as_code_and_figures_and_survives_copies():
    note = Note("few_draws", draws=3, enough=20)
    assert note == "few_draws: draws=3, enough=20"
    again = pickle.loads(pickle.dumps(note))
    assert (again, again.code, again.figures) == (note, note.code, note.figures)
    assert json.loads(json.dumps(note)) == str(note)


@pytest.mark.parametrize(("code", "figures"), FIGURES.items())
def test_a_note_becomes_sentences(code, figures):
    text = sentence(Note(code, **figures))
    assert text.endswith(".")
    assert text[0].isupper() or text.startswith(("num_gpu_blocks", "1 x", "a was", "m has"))
    assert "None" not in text


def test_text_that_is_no_note_stays():
    assert sentences(("columns are ignored", Note("few_draws", draws=1, enough=20))) == (
        "columns are ignored",
        "Intervals from 1 draw are rough: a 90% interval takes at least 20 draws.",
    )


def test_a_redrawn_workload_tells_how_much_reuse_is_lost():
    note = Note("workload_redrawn", source="sessions", reused=0.5, reused_in_draws=0.3)
    assert sentence(note).endswith(
        "50.0% of eligible prompt tokens are reused in the trace, 30.0% in the median replicate."
    )
    assert "another seed" in sentence(Note("workload_redrawn", source="generator"))


def test_an_uncertain_memory_is_pointed_out_where_it_matters():
    large = {
        "model": "meta-llama/Llama-3.1-70B",
        "gpu": "H100",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 4096,
    }
    text = " ".join(sentences(memory_notes(Scenario(**large))))
    assert "may have 758 KV blocks more or fewer than the 907 of this forecast (84%)" in text
    assert not list(memory_notes(Scenario(**large, num_gpu_blocks=900)))
    assert not list(memory_notes(Scenario()))
    assert (
        next(
            memory_notes(
                Scenario(
                    gpu="L4", max_model_len=16_384, max_num_batched_tokens=8192, gpu_memory_utilization=0.9
                )
            )
        )
        in replay(
            read("chat", limit=5),
            Scenario(gpu="L4", max_model_len=16_384, max_num_batched_tokens=8192, gpu_memory_utilization=0.9),
        ).notes
    )


def test_a_replay_says_that_the_engine_would_run_out_of_memory_at_its_start():
    full = Scenario(gpu="L4", max_model_len=16_384, max_num_batched_tokens=8192, gpu_memory_utilization=0.95)
    (text,) = [
        text for text in sentences(replay(read("chat", limit=5), full).notes) if "Does not start" in text
    ]
    assert "gpu_memory_utilization 0.95" in text and "memory runs out when CUDA graphs are captured" in text
    usual = replay(
        read("chat", limit=5),
        Scenario(gpu="L4", max_model_len=16_384, max_num_batched_tokens=8192, gpu_memory_utilization=0.9),
    )
    assert "Does not start" not in " ".join(sentences(usual.notes))


def test_roofline_costs_name_their_errors():
    text = sentence(
        replay(
            read("chat", limit=5),
            Scenario(gpu="L4", max_model_len=16_384, max_num_batched_tokens=8192, gpu_memory_utilization=0.9),
        ).notes[0]
    )
    assert text.startswith("Roofline costs") and "No shipped calibration fits (" in text
    assert "-2 to +5% in the time of decode steps, 0 to +9% in the time of steps with prompts" in text
    assert "allow 25%" in text


def test_the_summary_that_a_replay_leaves_is_the_one_that_it_prints(tmp_path, capsys):
    assert pagecast(["replay", "chat", "--limit", "5", "--out", str(tmp_path / "run"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["notes"][0] == printed["expected_error"]
    assert json.loads((tmp_path / "run/summary.json").read_text()) == {
        name: figure for name, figure in printed.items() if name != "notes"
    }
    assert "Step costs fitted to 5,146 steps of vllm" in printed["expected_error"]
    assert printed["expected_error"].startswith("TPOT follows step times: for a recording that was left out")


@pytest.mark.parametrize(("given", "noted"), [("", True), (', "acceptance": 0.0', False)])
def test_speculation_without_an_acceptance_is_pointed_out(given, noted, capsys):
    config = '{"method": "eagle", "num_speculative_tokens": 3' + given + "}"
    assert pagecast(["replay", "chat", "--limit", "5", "--speculative-config", config]) == 0
    assert ("every draft token is rejected" in capsys.readouterr().out) == noted
