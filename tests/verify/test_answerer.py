"""Is a clock that differs found, and a server that does not answer?"""

import socket
import time

import pytest

from triax.verify.answerer import Answerer, ask


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -3600.0])
def test_how_far_another_clock_is_ahead(ahead_s: float) -> None:
    with Answerer("127.0.0.1", clock=lambda: time.time() + ahead_s) as there:
        answer = ask("127.0.0.1", there.port, patience_s=5)
    assert abs(answer.ahead_s - ahead_s) <= answer.uncertain_s + 0.001
    assert answer.uncertain_s < 0.5


def test_nobody_answers_after_the_end_and_where_nobody_listens() -> None:
    with Answerer("127.0.0.1") as there:
        port = there.port
    with pytest.raises(OSError, match="refused"):
        ask("127.0.0.1", port, patience_s=1)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent, pytest.raises(OSError, match="timed out"):
        ask("127.0.0.1", silent.getsockname()[1], patience_s=0.2)
