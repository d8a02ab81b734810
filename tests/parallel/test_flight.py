"""Is NCCL's flight recorder told what torch's source reads, and is it asked where it listens?"""

import os
from pathlib import Path

import pytest
import torch

from triax.parallel.flight import ask_for_record, flight_recorder, recorder_variables

SOURCES = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"


def test_it_is_switched_on_for_the_process_and_leaves_what_a_person_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = recorder_variables(tmp_path, os.getpid())
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    with flight_recorder(tmp_path / "stacks", 3):
        assert {name: os.environ[name] for name in names} == {
            **recorder_variables(tmp_path / "stacks", os.getpid()), "TORCH_FR_BUFFER_SIZE": "7",
        }  # fmt: skip
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/stacks/nccl-"
        assert (tmp_path / "stacks").is_dir()


def test_who_is_asked_hears_it_where_torch_makes_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ask_for_record(12, 3)  # nobody listens: nothing happens
    pipe = Path(recorder_variables(tmp_path, 12)["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe")
    os.mkfifo(pipe)
    ask_for_record(12, 3)
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ask_for_record(12, 3)
        assert os.read(listener, 128) == b"1"
    finally:
        os.close(listener)


def test_torch_knows_these_names() -> None:
    """A name that torch drops would be ignored without a word. Some stand in its headers, some in its library alone."""
    headers = "".join((SOURCES / name).read_text() for name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp"))
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    for name in recorder_variables(Path("folder"), 1):
        assert name in headers or name.encode() in library, name
    assert 'c10::str(fileStem, rank, ".pipe")' in headers
