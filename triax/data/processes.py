"""Who tokenises which span? Each process asks for the next one when it is done.

A process is told what to do through a pipe of its own. When the process that started it dies, the pipe closes and it
leaves; when it dies itself, the other end sees that. Nothing is shared and nothing waits for ever.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from typing import Final

from triax.data.parts import Job, make_parts
from triax.data.tokenizer import Tokenizer
from triax.errors import TriaxError

Told = int | Exception | None
"""Bytes that are done, what went wrong, or that the job is done."""

_PATIENCE_S: Final = 10.0


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_all_parts(
    jobs: Sequence[Job], tokenizer: Tokenizer, num_processes: int, progress: Callable[[int], None]
) -> None:
    """Make the parts of ``jobs`` that are not there; call ``progress`` with the bytes of their files done so far.

    Raises BadInput where a file is broken, OSError where the disk is, TriaxError where a process was killed. Parts that
    are whole stay.
    """
    num_processes = min(num_processes, len(jobs))
    is_alone = num_processes == 1 or multiprocessing.current_process().daemon  # which may start no others
    bytes_done = 0
    with closing(_here(jobs, tokenizer) if is_alone else _apart(jobs, tokenizer, num_processes)) as told:
        for num_bytes in told:
            bytes_done += num_bytes
            progress(bytes_done)


def _here(jobs: Sequence[Job], tokenizer: Tokenizer) -> Generator[int, None, None]:
    for job in jobs:
        yield from make_parts(job, tokenizer)


def _apart(jobs: Sequence[Job], tokenizer: Tokenizer, num_processes: int) -> Generator[int, None, None]:
    """Yield the bytes that processes have done, bit by bit."""
    context = multiprocessing.get_context("spawn")
    # Fewer spans than cores: then the tokenizer itself uses the cores that are left.
    threads = max(1, usable_cores() // num_processes)
    waiting = iter(jobs)
    connections: list[Connection] = []
    processes = []
    try:
        for _ in range(num_processes):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(its, tokenizer, threads), daemon=True)
            process.start()
            its.close()
            connections.append(mine)
            processes.append(process)
            _send(mine, next(waiting))
        while connections:
            for connection in wait(connections):
                assert isinstance(connection, Connection)
                told = _receive(connection)
                if isinstance(told, Exception):
                    raise told
                if told is not None:
                    yield told
                elif (job := next(waiting, None)) is not None:
                    _send(connection, job)
                else:
                    connections.remove(connection)
                    connection.close()
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.terminate()
            process.join(_PATIENCE_S)


def _send(connection: Connection, job: Job) -> None:
    with _while_it_lives():
        connection.send(job)


def _receive(connection: Connection) -> Told:
    with _while_it_lives():
        told: Told = connection.recv()
    return told


@contextmanager
def _while_it_lives() -> Iterator[None]:
    """Raise TriaxError where the process at the other end of a connection is gone."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise TriaxError(
            "a process that turned text into tokens was killed, most likely because memory ran out: start again with "
            "fewer of them (triax data prepare --processes 1); what is finished was kept."
        ) from None


def _serve(connection: Connection, tokenizer: Tokenizer, threads: int) -> None:
    """Do the jobs that come through ``connection`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the one who started this process ends it
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    try:
        while True:
            job = connection.recv()
            for told in _answers(job, tokenizer):
                connection.send(told)
    except (EOFError, ConnectionError):
        return


def _answers(job: Job, tokenizer: Tokenizer) -> Iterator[Told]:
    try:
        yield from make_parts(job, tokenizer)
    except Exception as error:  # told to the one who asked, who raises it
        error.add_note(traceback.format_exc())
        yield error
    else:
        yield None
