"""One function over many items in worker processes; an item that fails, or kills its worker, stops no other."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from threading import RLock
from typing import Any, TypeVar, cast

from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_workers(
    context: SpawnContext, function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[Item, Result | Exception], None, None]:
    """Each item, as it ends, with the result or the error of ``function(item)``.

    Closing the iterator terminates the workers. If this process is killed, they end after the item they are at.

    Args:
        context: of fresh interpreters: a forked one inherits locks of torch's thread pool.
        function: that can be pickled, as its results.
        items: that can be pickled.
    """
    waiting = list(reversed(items))
    # A pool of the standard library waits forever for the item of a killed worker, or gives up all others with it.
    processes = dict(_start(context, function) for _ in range(min(workers, len(waiting))))
    busy: dict[Connection, Item] = {}
    try:
        for connection in processes:
            busy[connection] = waiting.pop()
            connection.send(busy[connection])
        while busy:
            for connection in cast(list[Connection], wait(list(busy))):
                item = busy.pop(connection)
                result: Result | Exception
                try:
                    result = connection.recv()
                except (EOFError, OSError):
                    process = processes.pop(connection)
                    process.join()
                    result = RuntimeError(f"its process died with exit code {process.exitcode}")
                    if waiting:
                        connection, process = _start(context, function)
                        processes[connection] = process
                if waiting:
                    busy[connection] = waiting.pop()
                    connection.send(busy[connection])
                yield item, result
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


def attempt(function: Callable[[Item], Result], item: Item) -> Result | Exception:
    """The result of ``function(item)``, or the error that it raised."""
    try:
        return function(item)
    except Exception as error:
        return error


def _start(context: SpawnContext, function: Callable[[Any], Any]) -> tuple[Connection, BaseProcess]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the worker's death ends the pipe
    return ours, process


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    tqdm.set_lock(RLock())  # of this process alone; its default is a semaphore, which ending a worker would leak
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            connection.send(_portable(attempt(function, connection.recv())))


def _portable(result: Any) -> Any:
    """An error whose class cannot be rebuilt from its message becomes one that can."""
    if isinstance(result, Exception):
        try:
            pickle.loads(pickle.dumps(result))
        except Exception:
            return RuntimeError(f"{type(result).__name__}: {result}")
    return result
