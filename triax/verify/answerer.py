"""Can one server connect to another, and by how much do their clocks differ?

Each server answers at a port of its own; the others connect and ask for the time, as NTP does (Mills 1991,
doi:10.1109/26.103043): a clock is read there at some moment between two readings here.
"""

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Final, Self

_TIME: Final = struct.Struct("!d")
_TRIES: Final = 5
"""The one that came back fastest says most."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server learned of another by asking it."""

    ahead_s: float
    """How far the other's clock is ahead of ours."""
    uncertain_s: float
    """By how much ``ahead_s`` may be wrong: half of what an answer took."""


class Answerer:
    """Tells who connects what time it is here, from the beginning of a ``with`` to its end."""

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._clock = clock
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        Thread(target=self._listen, name="answerer", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):  # where the system has no such operation for one that listens
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake who waits in accept
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            Thread(target=self._answer, args=(peer,), name="answer", daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while peer.recv(1):
                    peer.sendall(_TIME.pack(self._clock()))
            except OSError:
                return  # whoever asked has gone


def ask(address: str, port: int, patience_s: float, clock: Callable[[], float] = time.time) -> Asked:
    """Ask the answerer at ``address`` for the time; raise OSError where it is not reached within ``patience_s``."""
    answers = []
    with socket.create_connection((address, port), timeout=patience_s) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TRIES):
            asked_s, began_s = clock(), time.perf_counter()
            peer.sendall(b"?")
            said = b""
            while len(said) < _TIME.size:
                part = peer.recv(_TIME.size - len(said))
                if not part:
                    raise ConnectionError("the connection was closed")
                said += part
            half_s = (time.perf_counter() - began_s) / 2
            answers.append(Asked(_TIME.unpack(said)[0] - (asked_s + half_s), half_s))
    return min(answers, key=lambda answer: answer.uncertain_s)
