"""What do tests share that write many small files, or send alerts?"""

import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest


@pytest.fixture
def ram() -> Iterator[Path]:
    """A folder in memory where there is one: these tests write thousands of small files."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """An address on this machine, and what was posted to it; a path of /slow never answers in time."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/slow":
                time.sleep(2)
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if self.path == "/broken" else 204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", got
    http.shutdown()
    http.server_close()
