"""Rules: what an engine decides, as small objects.

A step is filled by four rules. `Order` says who is first in the queue, `Admission` whether the first may
come in, `Victim` who must go when blocks run out, and `Mix` who shares a step. A mix is made with an
admission and a victim rule, and calls them. Rules get `(step, memory, queue)`, so an
engine's behaviour is a folder of them (`sim/core/engines`); those that several engines follow are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.step import Step


class Admission(Protocol):
    """Whether a waiting request may run.

    A refusal must stand while the running requests only decode: the rule may not be asked again before a
    request comes or goes (`Queue.blocked`). So it must not depend on `step.now`.
    """

    def admits(self, step: Step, memory: Memory, queue: Queue, request: Request, hit: Hit) -> bool:
        """Whether `request`, for which `hit` was found, may be admitted in this step."""
        ...


class Victim(Protocol):
    """Who loses its blocks when a running request finds none free.

    It is asked again until there are enough, and may choose the very request that needs them. It has to
    spare somebody: where requests preempt one another in turn, nobody is ever done.
    """

    def choose(self, step: Step, memory: Memory, queue: Queue) -> Request:
        """One of `step.running.requests`, of which there is at least one."""
        ...


class Mix(Protocol):
    """Who computes in a step."""

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Lets requests compute, admits and preempts, by calling the step's methods."""


MakeAdmission = Callable[[Limits], Admission]
MakeVictim = Callable[[Limits], Victim]
