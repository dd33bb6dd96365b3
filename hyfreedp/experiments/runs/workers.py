"""One function over many items in worker processes; an item that fails, or kills its worker, stops no other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from functools import partial
from threading import RLock
from typing import TypeVar

from joblib.externals.loky.process_executor import ProcessPoolExecutor
from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_workers(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[Item, Result | Exception], None, None]:
    """Each item, as it ends, with the result or the error of ``function(item)``.

    Closing the iterator terminates the workers. If this process is killed, they end after the item they are at.

    Args:
        function: that can be pickled, as its results and items.
    """
    # A pool for each worker: the item that kills its worker takes all others of its pool with it.
    start = partial(ProcessPoolExecutor, 1, initializer=_quiet, timeout=10)
    waiting = list(reversed(items))
    pools = [start() for _ in range(min(workers, len(waiting)))]
    busy: dict[Future[Result], tuple[int, Item]] = {}

    def give(place: int) -> None:
        if waiting:
            item = waiting.pop()
            busy[pools[place].submit(function, item)] = (place, item)

    try:
        for place in range(len(pools)):
            give(place)
        while busy:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                place, item = busy.pop(future)
                error = future.exception()
                if isinstance(error, BrokenExecutor):
                    pools[place] = start()
                give(place)
                yield item, future.result() if error is None else error  # type: ignore[misc]
    finally:
        for pool in pools:
            pool.shutdown(kill_workers=True)


def attempt(function: Callable[[Item], Result], item: Item) -> Result | Exception:
    """The result of ``function(item)``, or the error that it raised."""
    try:
        return function(item)
    except Exception as error:
        return error


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    tqdm.set_lock(RLock())  # of this process alone; its default is a semaphore, which ending a worker would leak
