"""Sandbox: the real scheduler and cache, driven by hand.

What was done is a list of actions, and the state is what they lead to: so it can be undone, and sent as a
link. Nothing here decides anything: every action is a call of the scheduler, or a step of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagecast.planner_app.dashboard.blocks.log import BlockLog, Collector
from pagecast.sim.core.engines.registry import profile as find_profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import Span, own_output, own_prompt
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import DONE, Outcome
from pagecast.sim.core.request import Request, State
from pagecast.sim.replica.scheduler_spec import SchedulerSpec

TEXTS = ("", "T", "U", "V")  # what prompts may begin with; "": a text of their own
MOST_ACTIONS = 300
MOST_STEPS = 512  # of an action
MOST_TOKENS = 4096
MOST_BLOCKS = 1024
_STEP_NS = 1_000_000
_FIELDS = {"add": 5, "fork": 2, "step": 1, "grow": 2, "cancel": 1, "finish": 1, "evict": 1}


@dataclass(frozen=True, slots=True)
class Action:
    """Something done by hand. `words` are its parameters:

    add PROMPT SHARED TEXT OUTPUT TENANT (tokens; TEXT a number into `TEXTS`, TENANT 0 for none), fork REQUEST
    OUTPUT, step COUNT, grow REQUEST TOKENS, cancel REQUEST, finish REQUEST, evict BLOCKS.
    """

    name: str
    words: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Action:
        """`add-96-32-1-64-0` and the like. Errors: BadInput."""
        name, *words = text.split("-")
        if len(words) != _FIELDS.get(name, -1) or not all(
            word.isascii() and word.isdigit() and len(word) < 7 for word in words
        ):
            raise BadInput(f"sandbox: {text[:40]!r} is no action; start the sandbox anew")
        return cls(name, tuple(map(int, words)))

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.words)])


@dataclass(frozen=True, slots=True)
class SandboxServer:
    """The server of a sandbox."""

    blocks: int = 48
    block_size: int = 16
    profile: str = "vllm"
    caching: bool = True
    batched_tokens: int = 256

    def limits(self) -> Limits:
        """Errors: BadInput."""
        if not 1 <= self.blocks <= MOST_BLOCKS:
            raise BadInput(f"sandbox: {self.blocks} blocks; give 1 to {MOST_BLOCKS:,}")
        limits = Limits(
            self.blocks,
            self.block_size,
            min(32, self.batched_tokens),
            self.batched_tokens,
            caching=self.caching,
        )
        limits.check()
        return limits


def parse(text: str) -> tuple[Action, ...]:
    """Actions from a link. Errors: BadInput."""
    actions = tuple(Action.parse(part) for part in text.split("_") if part)
    if len(actions) > MOST_ACTIONS:
        raise BadInput(f"sandbox: {len(actions)} actions; at most {MOST_ACTIONS}")
    return actions


def text_of(actions: tuple[Action, ...]) -> str:
    """The actions as `parse` takes them."""
    return "_".join(map(str, actions))


def name_of(number: int) -> str:
    """A request's name: A to Z, then A1 and so on."""
    letter = chr(ord("A") + number % 26)
    return letter + (str(number // 26) if number >= 26 else "")


@dataclass
class Sandbox:
    """The state after a list of actions. `requests` are all that were added, in order, the ended ones too."""

    setting: SandboxServer
    requests: list[Request] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    message: str = ""  # what came of the last action, where that is not plain to see

    def __post_init__(self) -> None:
        spec = SchedulerSpec(limits=self.setting.limits(), rules=find_profile(self.setting.profile))
        self.scheduler = spec.scheduler(log=True)
        self._numbers: dict[str, int] = {}
        self._collector = Collector(self.scheduler, self._numbers.__getitem__)

    @classmethod
    def of(cls, setting: SandboxServer, actions: tuple[Action, ...]) -> Sandbox:
        """The state after these actions. Errors: BadInput for one that can't be."""
        sandbox = cls(setting)
        for action in actions:
            sandbox.act(action)
        return sandbox

    def act(self, action: Action) -> None:
        """Does one thing. Errors: BadInput where there is no such request, or a number is out of bounds."""
        self.message = ""
        words = action.words
        if action.name == "add":
            self._add(*words)
        elif action.name == "fork":
            self._fork(self._request(words[0]), words[1])
        elif action.name == "step":
            self._steps(_within("steps", words[0], MOST_STEPS))
        elif action.name == "grow":
            self._grow(self._request(words[0]), _within("tokens", words[1], MOST_STEPS))
        elif action.name == "cancel":
            request = self._request(words[0])
            if not self.scheduler.cancel(request.id, self._now):
                self.message = f"{request.id} has ended already."
        elif action.name == "finish":
            self._finish(self._request(words[0]))
        else:
            self.message = f"{self.scheduler.evict(words[0])} free blocks were emptied."
        self._collector.take()

    def log(self) -> BlockLog:
        """All that happened to the blocks so far."""
        return self._collector.log()

    def tokens_of(self, request: Request) -> int:
        """Tokens whose KV a live request has."""
        return self.scheduler.running.planned(request)

    # ---- the actions

    def _add(self, prompt: int, shared: int, text: int, output: int, tenant: int) -> None:
        _within("prompt tokens", prompt, MOST_TOKENS)
        if text >= len(TEXTS):
            raise BadInput(f"sandbox: there is no text {text}; start the sandbox anew")
        number = len(self.requests)
        first = min(shared, prompt) if text else 0
        spans = [Span(text, 0, first), Span(own_prompt(number), 0, prompt - first)]
        scope = Scope(salt=f"tenant {tenant}") if tenant else Scope()
        self._submit([span for span in spans if span.length], scope, prompt, output, None)

    def _fork(self, parent: Request, output: int) -> None:
        number = parent.index
        if not parent.alive:
            self.message = (
                f"{parent.id} has ended: only what is still cached can be shared, by a new request."
            )
            return
        self._submit(self.spans[number], self.scopes[number], parent.prompt_tokens, output, parent)

    def _submit(
        self, spans: list[Span], scope: Scope, prompt: int, output: int, parent: Request | None
    ) -> None:
        _within("output tokens", output, MOST_TOKENS)
        number = len(self.requests)
        keys = BlockKeys.of_spans(self.setting.block_size, spans, (own_output(number), 0), scope)
        request = Request(
            name_of(number), keys, prompt, output, index=number, parent=parent, arrival_ns=self._now
        )
        self._numbers[request.id] = number
        self.requests.append(request)
        self.scopes.append(scope)
        self.spans.append(spans)
        if not self.scheduler.submit(request):
            self.message = f"{request.id} was rejected: it {request.reason}."

    def _steps(self, count: int) -> None:
        for done in range(count):
            if not self._step():
                self.message = f"After {done} of {count} steps: " + self._why_idle()
                return

    def _why_idle(self) -> str:
        if not self.scheduler.requests:
            return "no request runs or waits; add one."
        return "nothing can be computed until a request ends."

    def _step(self, stopped: tuple[str, ...] = ()) -> bool:
        """One step of the engine's loop. False: there is nothing to compute."""
        plan = self.scheduler.plan(self._now)
        if plan is None:
            return False
        self.scheduler.commit(plan, Outcome(stopped) if stopped else DONE, self._now)
        self._collector.take()
        return True

    def _grow(self, request: Request, tokens: int) -> None:
        """Steps until the request has so many more tokens; a step serves all, so others grow as well."""
        if not request.alive:
            self.message = f"{request.id} has ended already."
            return
        goal = self.tokens_of(request) + tokens
        for _ in range(MOST_STEPS):
            if not request.alive or self.tokens_of(request) >= goal:
                return
            if not self._step():
                self.message = f"{request.id} can't grow: " + self._why_idle()
                return

    def _finish(self, request: Request) -> None:
        """One step, with which the request ends as if it had said all it had to."""
        if request.state not in (State.DECODE, State.DRAINING):
            self.message = f"{request.id} is {_standing(request)}: only a request that generates can finish."
            return
        self._step((request.id,))

    def _request(self, number: int) -> Request:
        if number >= len(self.requests):
            raise BadInput(f"sandbox: there is no request {name_of(number)}; start the sandbox anew")
        return self.requests[number]

    @property
    def _now(self) -> int:
        return self.scheduler.log.step * _STEP_NS


def _standing(request: Request) -> str:
    return {State.WAITING: "waiting", State.PREFILL: "still at its prompt"}.get(request.state, "ended")


def _within(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise BadInput(f"sandbox: {value} {name}; give 1 to {most:,}")
    return value
