"""Replays on a Dask cluster: the executor behind `--cluster ADDRESS`.

A worker that dies takes nothing with it: Dask gives its replays to the others, and the function with the
trace bound to it is kept with the scheduler, which hands it to every worker that joins.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import xxhash
from pagecast.planner_app.planner.execution.interface import AnswerT, Executor, ItemT
from pagecast.sim.core.errors import BadInput, CannotRunHere

CONNECT_S = 3.0  # until a scheduler counts as unreachable
LONELY_S = 30.0  # without any worker until a run is given up
_HOW = "start one with `dask scheduler` and `dask worker ADDRESS`"


class Cluster(Executor):
    """The workers of a running Dask scheduler. They need pagecast of the same version installed.

    Errors: CannotRunHere without Dask; BadInput for a scheduler that can't be reached, that has no worker,
    or that goes away.
    """

    def __init__(self, address: str) -> None:
        self.address = address if "://" in address else f"tcp://{address}"
        client = _client_class()
        _check_reachable(self.address)
        try:
            with ThreadPoolExecutor(1) as aside:  # a notebook's own loop may be running in this thread
                aside.submit(lambda: asyncio.run(_greet(self.address))).result()
            self._client = client(self.address, timeout=CONNECT_S, set_as_default=False)
        except Exception as error:
            raise BadInput(
                f"--cluster {address}: no Dask scheduler answers there ({_first_line(error)}); {_HOW}"
            ) from None
        self._shipped: dict[str, Callable[[Any], Any]] = {}

    def stream(
        self, function: Callable[[ItemT], AnswerT], items: Sequence[ItemT]
    ) -> Generator[tuple[int, AnswerT], None, None]:
        """As answers come, from whichever worker."""
        if not items:
            return
        self._check_workers()
        name = self._ship(function)
        futures = self._client.map(_call, [name] * len(items), items, pure=False)
        index_of = {future.key: index for index, future in enumerate(futures)}
        try:
            yield from ((index_of[future.key], future.result()) for future in self._completed(futures))
        except Exception as error:
            raise self._user_error(error) from None
        finally:
            with suppress(Exception):  # a scheduler that has gone has nothing to cancel
                self._client.cancel(futures, force=True)

    def close(self) -> None:
        """Takes back what was shipped and says goodbye; scheduler and workers stay."""
        with suppress(Exception):  # nor holds it anything
            for name in self._shipped:
                self._client.unregister_worker_plugin(name)
        self._client.close(timeout=CONNECT_S)

    def _completed(self, futures: list[Any]) -> Iterator[Any]:
        """Futures as they end. Errors: BadInput where no worker is left for `LONELY_S`."""
        from distributed import TimeoutError as NotYet
        from distributed import wait

        waiting, last_seen_s = set(futures), time.monotonic()
        while waiting:
            try:
                with self._client.as_current():
                    state = wait(list(waiting), timeout=1.0, return_when="FIRST_COMPLETED")
            except (NotYet, TimeoutError):
                if self._workers():
                    last_seen_s = time.monotonic()
                elif time.monotonic() - last_seen_s > LONELY_S:
                    raise BadInput(f"--cluster {self.address}: all workers have gone; {_HOW}") from None
                continue
            last_seen_s = time.monotonic()
            waiting = set(state.not_done)
            yield from state.done

    def _workers(self) -> dict[str, Any]:
        workers: dict[str, Any] = self._client.scheduler_info(n_workers=-1)["workers"]
        return workers

    def _check_workers(self) -> None:
        if not self._workers():
            raise BadInput(
                f"--cluster {self.address}: the scheduler has no workers; start some with "
                f"`dask worker {self.address}`"
            )

    def _ship(self, function: Callable[[Any], Any]) -> str:
        """Gives the function to every worker, those that join later included; returns its name."""
        from pagecast.planner_app.planner.execution.cluster_worker import Shipment

        for name, shipped in self._shipped.items():
            if shipped is function:
                return name
        body = pickle.dumps(function, pickle.HIGHEST_PROTOCOL)
        name = f"pagecast-{xxhash.xxh3_128_hexdigest(body)}"
        try:
            self._client.register_plugin(Shipment(name, body))
        except Exception as error:
            raise BadInput(
                f"--cluster {self.address}: the workers can't run pagecast ({_first_line(error)}); "
                "install the same version there"
            ) from None
        self._shipped[name] = function
        return name

    def _user_error(self, error: Exception) -> Exception:
        """A task's own exception, or a BadInput with one line on what happened to the cluster."""
        kind = type(error).__name__
        if kind == "KilledWorker":
            return BadInput(
                f"--cluster {self.address}: a replay killed every worker that took it (out of memory?); "
                "give the workers more memory, or use a shorter trace"
            )
        if "Cancelled" in kind or kind == "CommClosedError":
            return BadInput(f"--cluster {self.address}: the scheduler has gone; start it and run again")
        return error


def _call(name: str, item: Any) -> Any:
    from pagecast.planner_app.planner.execution.cluster_worker import shipped

    return shipped(name)(item)


def _client_class() -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise CannotRunHere("--cluster needs Dask: pip install 'pagecast[cluster]'") from None
    for name in ("distributed", "distributed.client"):  # what goes wrong is told by our own errors
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="distributed")
    return Client


def _check_reachable(address: str) -> None:
    """A quick look at the socket, for Dask's client goes on trying. Errors: BadInput."""
    try:
        where = urlsplit(address)
        host, port = where.hostname, where.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise BadInput(f"--cluster {address}: give a scheduler's address, such as tcp://127.0.0.1:8786")
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or "no answer"
        raise BadInput(f"--cluster {address}: can't be reached ({reason}); {_HOW}") from None


async def _greet(address: str) -> None:
    """Asks who is there, for Dask's client waits for ever on something that takes calls and says nothing."""
    from distributed.core import rpc

    async with rpc(address) as scheduler:
        await asyncio.wait_for(scheduler.identity(), CONNECT_S)


def _first_line(error: BaseException) -> str:
    if isinstance(error, MemoryError):  # the first bytes of another protocol, read as a length
        return "what does speaks another protocol"
    return (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__
