"""Does a test read what triax says on an emulated server, and learn that it waited in vain?"""

from pathlib import Path

import pytest

from tests.harness.servers import servers, start_triax, wait_for


def test_triax_starts_on_a_server_and_its_words_are_read(tmp_path: Path) -> None:
    log = tmp_path / "words"
    with servers(1) as cluster:
        assert start_triax(cluster, 0, "train", "absent.toml", log=log).wait(timeout=60) == 2
    assert "absent.toml" in log.read_text()


def test_waiting_in_vain_fails_with_what_was_waited_for() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"waited 0.05 s in vain for the end of time"):
        wait_for(lambda: False, "the end of time", timeout_s=0.05)
