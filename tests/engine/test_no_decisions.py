"""The engine makes no scheduling or allocation decision of its own: that is read from its source."""

import ast
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "engine"
# What the engine may know of the core: the scheduler's front, and the words it is spoken to in.
FRONT = {
    "drafter",
    "errors",
    "events",
    "handoff",
    "identity.content",
    "identity.keys",
    "limits",
    "memory.memory",
    "option",
    "pipeline",
    "plan",
    "request",
    "scheduler",
    "tier_spec",
}
DECIDING = {"lifecycle", "queue", "running", "quiet", "stride", "cut"}
READ = {"blocks", "last_block"}  # what the engine may ask of the memory: block tables

CALLS = {"plan", "commit", "submit", "cancel", "preempt", "admit", "decode", "compute", "evict", "decide"}


def trees() -> dict[str, ast.Module]:
    modules = {path.stem: ast.parse(path.read_text()) for path in ENGINE.rglob("*.py")}
    assert len(modules) > 15
    return modules


def test_the_engine_imports_only_the_cores_front() -> None:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if module.startswith("pagecast.sim.core"):
                    assert module.removeprefix("pagecast.sim.core.") in FRONT, (name, module)


def test_only_the_loop_speaks_to_the_scheduler_and_never_behind_its_front() -> None:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            held = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if held == "memory" and name in {"batch", "rows", "runner", "loop"}:
                assert node.attr in READ, (name, node.attr)
            if held == "scheduler":
                assert node.attr not in DECIDING, (name, node.attr)
                assert name == "loop" or node.attr not in CALLS, (name, node.attr)
                if name == "loop" and node.attr in CALLS:
                    assert node.attr in {"plan", "submit", "cancel"}


def test_nothing_in_the_engine_writes_to_a_request_but_its_times_and_reasons() -> None:
    allowed = {"arrival_ns", "reason"}
    for name, tree in trees().items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute):
                    owner = target.value
                    held = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                    assert held != "request" or target.attr in allowed, (name, target.attr)
