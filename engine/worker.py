"""A worker process of an engine on several GPUs: runs the steps that it is sent on its share of the model.

python -m pagecast.engine.worker SOCKET RING   (file descriptors; see `parallel.team`)
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

from pagecast.sim.core.errors import PagecastError


def main() -> NoReturn:
    """Serves until the engine's process says so, or is gone."""
    # The engine's process decides what these mean; a terminal or a container sends them to all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection, ring = Connection(int(sys.argv[1])), int(sys.argv[2])
    order = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        _serve(connection, ring, order)
    except PagecastError as error:
        connection.send(("failed", str(error), type(error).__name__))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}", ""))
    os._exit(1)


def _end_with(connection: Connection) -> NoReturn:
    """Ends this process when the engine's says so or has ended, whatever its GPU waits for."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    os._exit(0)


def _serve(connection: Connection, fd: int, order: object) -> NoReturn:
    import torch.distributed as dist
    from pagecast.engine.loading import find_device, load
    from pagecast.engine.options import Options
    from pagecast.engine.parallel.link import join
    from pagecast.engine.parallel.ring import Ring
    from pagecast.engine.parallel.team import JOINING, READY, StartOrder
    from pagecast.engine.shard import Shard

    assert isinstance(order, StartOrder)
    options = Options(**order.options)
    size = options.tensor_parallel_size
    device = find_device(options.device, order.rank)
    store = dist.TCPStore("127.0.0.1", order.port, size, is_master=False)
    connection.send((JOINING, "", ""))
    link = join(store, order.rank, size, device)
    loaded = load(order.model, options, Shard(order.rank, size, link, options.enable_expert_parallel))
    runner = loaded.runner({})
    ring = Ring(fd, size - 1, runner.step_capacity, reader=order.rank - 1)
    connection.send((READY, "", ""))
    while True:
        message, numbers = ring.read()
        layout, orders = pickle.loads(message)
        if layout is not None:
            runner.receive(numbers)
        ring.done()
        runner.follow(layout, orders)


if __name__ == "__main__":
    main()
