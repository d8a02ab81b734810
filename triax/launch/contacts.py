"""Which servers answer over the network that ranks train over? Asked once a second, since training itself would wait.

A link that is cut gives no error for as long as ranks are patient: bytes are simply not acknowledged. A connection that
cannot be made is seen at once.
"""

import fcntl
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Thread
from typing import Final

_EVERY_S: Final = 1.0
_PATIENCE_S: Final = 1.0
_BACKLOG: Final = 1024
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR, netdevice(7)


class Contacts:
    """Answers other agents, and asks them."""

    def __init__(self, address: str) -> None:
        """Answer at ``address``; raises OSError where it is none of this server's."""
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._asked: dict[str, tuple[str, int]] = {}
        self._heard_s: dict[str, float] = {}
        self._is_over = Event()
        for work in (self._answer, self._ask):
            Thread(target=work, name=f"contacts-{work.__name__}", daemon=True).start()

    def ask(self, servers: Mapping[str, tuple[str, int]]) -> None:
        """From now on ask these servers, at their addresses and ports."""
        self._asked = dict(servers)

    def seen(self, within_s: float) -> tuple[str, ...]:
        """Return the servers that have answered in the last ``within_s`` seconds."""
        now_s = time.monotonic()
        return tuple(sorted(name for name, at_s in list(self._heard_s.items()) if now_s - at_s < within_s))

    def close(self) -> None:
        """Answer and ask no more."""
        self._is_over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while not self._is_over.is_set():
            try:
                self._listener.accept()[0].close()
            except OSError:
                self._is_over.wait(0.1)

    def _ask(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            asked = self._asked
            for name in reachable(asked, _PATIENCE_S):
                self._heard_s[name] = time.monotonic()


def reachable(servers: Mapping[str, tuple[str, int]], patience_s: float) -> list[str]:
    """Return the servers to which a connection can be made within ``patience_s``."""
    trying: dict[socket.socket, str] = {}
    for name, (address, port) in servers.items():
        peer = socket.socket(_family(address))
        peer.setblocking(False)
        try:
            peer.connect_ex((address, port))
        except OSError:  # no such address, or no way there
            peer.close()
            continue
        trying[peer] = name
    found: list[str] = []
    gives_up_s = time.monotonic() + patience_s
    while trying and (left_s := gives_up_s - time.monotonic()) > 0:
        for peer in select.select([], list(trying), [], left_s)[1]:
            name = trying.pop(peer)
            if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                found.append(name)
            peer.close()
    for peer in trying:
        peer.close()
    return found


def own_address() -> str:
    """Return the address under which other servers most likely reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: it only asks which way messages would go (RFC 5737)
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 ``address``; None where that cannot be said."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24]) == address:
                    return name
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
