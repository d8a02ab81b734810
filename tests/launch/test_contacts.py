"""Does an agent learn which servers answer, and how long ago?"""

import socket
import time
from collections.abc import Callable

from triax.launch.contacts import Contacts, interface_of, own_address, reachable


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_two_see_each_other_until_one_is_gone() -> None:
    one, other = Contacts("127.0.0.2"), Contacts("127.0.0.3")
    try:
        one.ask({"other": ("127.0.0.3", other.port), "nobody": ("127.0.0.4", 1)})
        until(lambda: one.seen(5.0) == ("other",))
        assert other.seen(5.0) == ()
        other.close()
        until(lambda: one.seen(1.2) == ())
    finally:
        one.close()


def test_who_does_not_answer_is_not_waited_for_longer_than_said() -> None:
    """A full queue of connections answers nothing, as a link that is cut."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        filling = [socket.socket() for _ in range(4)]
        try:
            for peer in filling:
                peer.setblocking(False)
                peer.connect_ex(("127.0.0.1", port))
            time.sleep(0.1)
            begun_s = time.monotonic()
            assert reachable({"deaf": ("127.0.0.1", port)}, 0.3) == []
            assert 0.25 < time.monotonic() - begun_s < 5
        finally:
            for peer in filling:
                peer.close()


def test_addresses() -> None:
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("192.0.2.77") is None
    address = own_address()
    assert socket.inet_aton(address)
    assert interface_of(address) is not None
