"""A client's latencies beside the engine's: HTTP, tokenizing, and the way to the engine and back.

Latencies of the simulator and of recorded runs count from a request's arrival in the engine. A client's TTFT
and E2E are longer by a share that depends on the prompt's length.

The share was fitted to two public runs of which both sides are known, guidellm's requests and the spans of
vLLM 0.11 on an H100 (inference-sim/inference-sim at e7a4aa37, eval/ground_truth/jan20-codellama-prefill-1 and
jan20-prefill-llama7b-tp1-1; `tests/benchmarks/public_spread.py --client` repeats it): the client's TTFT
exceeds the server's by 3.8 and 4.9 ms, and by 2.2 and 1.6 ms per 1,000 prompt tokens. The server's exceeds
queue and prefill by 1.7 and 1.9 ms at the least; what is more is waiting for a step in progress, which is
simulated. Those runs judge nothing. The spread is that of four other set-ups around the share
(`public_spread.py --training`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pagecast.sim.costs.calibration.draw import client_level
from pagecast.sim.replay.result import Result


@dataclass(frozen=True, slots=True)
class ClientShare:
    """Seconds that a client adds to TTFT and E2E: `fixed_s`, and `token_s` for each prompt token.

    `sd` and `freedom`: spread of its logarithm between set-ups (Student's t).
    """

    fixed_s: float
    token_s: float
    sd: float
    freedom: float

    def drawn(self, index: int, seed: int) -> ClientShare:
        """The share in draw number `index`."""
        level = math.exp(client_level(self.sd, self.freedom, index, seed))
        return replace(self, fixed_s=self.fixed_s * level, token_s=self.token_s * level)

    def seen(self, result: Result) -> Result:
        """The result with latencies as a client sees them."""
        requests = result.requests.copy()
        share = self.fixed_s + self.token_s * requests["input_tokens"]
        for name in ("ttft_s", "e2e_s"):
            requests[name] = requests[name] + share
        return replace(result, requests=requests)

    def observed(self, result: Result, index: int | None, seed: int) -> Result:
        """What a client sees of a replay: of draw number `index`, or of the forecast itself."""
        share = self if index is None else self.drawn(index, seed)
        return share.seen(result)


def known_share(milliseconds: float) -> ClientShare:
    """A share that was measured: no spread. 0: latencies are the engine's own."""
    return ClientShare(milliseconds / 1e3, 0.0, 0.0, math.inf)


CLIENT_SHARE = ClientShare(6.2e-3, 1.9e-6, 0.16, 4.0)
