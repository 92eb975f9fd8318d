"""The kernels beside their peers on one GPU: `python tests/benchmarks/kernels.py [ceilings decode ...]`.

FlashAttention-3 joins where it is found (see flash_peer.py), and its results must equal ours. `pagecast bench
--kernels` prints the same without a peer.
"""

import sys

import flash_peer
from pagecast.engine.kernel_bench import tables
from pagecast.sim.core.errors import PagecastError


def main() -> int:
    """Prints the sections named, or all, as one Markdown table."""
    try:
        for line in tables(sys.argv[1:], flash_peer if flash_peer.load() else None):
            print(line, flush=True)
    except PagecastError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
