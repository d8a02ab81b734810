"""Do finished checkpoints reach a store and come back, and does a store that fails ever stop training?"""

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch

from tests.harness.runs import Told, saved_weights, series, start
from tests.harness.toy import lay
from tests.train.test_resume import STEPS, assert_bits_equal, make_run
from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.store import Store, Uploader
from triax.checkpoint.verify import verified
from triax.errors import BadInput
from triax.spec.run import Run


def save(folder: Path, *steps: int, run: str = "toy") -> None:
    writer = CheckpointWriter(folder, keep=9, run=run)
    for step in steps:
        outcome = writer.save(step, {"w": torch.full((5,), float(step))}, {}, wait=True).outcome
        assert outcome is not None
        assert outcome.ok


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return Store(f"file://{tmp_path}/store")
    fsspec.filesystem("memory").store.clear()
    return Store("memory://bucket/run")


def test_what_was_pushed_comes_back_whole(store: Store, tmp_path: Path) -> None:
    assert store.complete() == []
    save(tmp_path / "here", 1, 2)
    for name in ("step-00000001", "step-00000002", "step-00000002"):
        store.push(tmp_path / "here" / name)
    assert store.complete() == ["step-00000002", "step-00000001"]
    store.pull("step-00000002", tmp_path / "there")
    assert verified(tmp_path / "there" / "step-00000002").digest == verified(tmp_path / "here" / "step-00000002").digest


def test_what_is_not_all_there_does_not_count_and_what_is_damaged_is_refused(store: Store, tmp_path: Path) -> None:
    save(tmp_path / "here", 1, 2)
    for name in ("step-00000001", "step-00000002"):
        store.push(tmp_path / "here" / name)
    shard = store._at("step-00000002", "shard-00000-of-00001.safetensors")
    store._files.pipe_file(shard, store._files.cat_file(shard)[:-1] + b"?")
    with pytest.raises(BadInput, match="arrived damaged"):
        store.pull("step-00000002", tmp_path / "there")
    with pytest.raises(BadInput, match="no finished checkpoint"):
        verified(tmp_path / "there" / "step-00000002")
    # A pull that was interrupted is begun anew.
    store._files.put_file(str(tmp_path / "here" / "step-00000002" / shard.rpartition("/")[2]), shard)
    store.pull("step-00000002", tmp_path / "there")
    verified(tmp_path / "there" / "step-00000002")
    store._files.rm_file(store._at("step-00000002", "manifest.json"))
    assert store.complete() == ["step-00000001"]


def test_only_old_ones_of_this_run_go(store: Store, tmp_path: Path) -> None:
    save(tmp_path / "mine", 1, 3, 4)
    save(tmp_path / "theirs", 2, run="another")
    for folder in sorted(tmp_path.glob("*s/step-*")) + sorted(tmp_path.glob("mine/step-*")):
        store.push(folder)
    store._files.pipe_file(store._at("step-00000001", "notes.txt"), b"mine")
    store.prune("toy", 2)
    assert store.complete() == ["step-00000004", "step-00000003", "step-00000002"]
    assert store._files.exists(store._at("step-00000001", "notes.txt"))


def test_a_store_that_fails_is_a_line_and_no_more(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "here", 1, 2)
    uploader = Uploader(store, tmp_path / "here", "toy", 3)
    with monkeypatch.context() as patch:
        patch.setattr(store, "push", lambda _: 1 // 0)
        uploader.offer(1)
        assert uploader.finish(10)
    (problem,) = uploader.take_told()
    assert problem.startswith("step 1 could not be copied to the store: ZeroDivisionError")
    uploader.offer(2)
    uploader.offer(7)  # retention was faster
    assert uploader.finish(10)
    assert uploader.take_told() == []


def test_what_is_no_store_is_bad_input() -> None:
    with pytest.raises(BadInput, match="cannot be opened"):
        Store("nosuch://bucket")


def uploading(folder: Path) -> Run:
    run = make_run(folder)
    checkpoint = run.checkpoint.model_copy(update={"upload": f"file://{folder}/store"})
    # At a rate that does not follow from the number of steps, since the first start takes fewer.
    rate = run.learning_rate.model_copy(update={"schedule": "constant"})
    return run.model_copy(update={"checkpoint": checkpoint, "learning_rate": rate})


def shorter(run: Run) -> Run:
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": 4})})


def test_a_run_whose_folder_is_lost_goes_on_from_the_store(tmp_path: Path) -> None:
    run = uploading(tmp_path)
    layout = lay(run, 1, dp_shard=2, zero=3)
    elsewhere = run.checkpoint.model_copy(update={"upload": None})
    start(run.model_copy(update={"checkpoint": elsewhere}), layout, tmp_path / "whole")
    assert start(shorter(run), layout, tmp_path / "run") == [Told(), Told()]
    assert "step-00000004" in {path.name for path in (tmp_path / "store").iterdir()}
    shutil.rmtree(tmp_path / "run")
    assert start(run, layout, tmp_path / "elsewhere") == [Told(), Told()]
    assert series(tmp_path / "elsewhere", "step") == list(range(5, STEPS + 1))
    assert_bits_equal(saved_weights(tmp_path / "elsewhere", run), saved_weights(tmp_path / "whole", run))
    assert (tmp_path / "store" / f"step-{STEPS:08d}" / "manifest.json").exists()


def unreachable(*_: object) -> None:
    raise ConnectionError("no route to the store")


def test_training_goes_on_without_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = uploading(tmp_path)
    layout = lay(run, 1, dp_shard=1, zero=3)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "complete", unreachable)
        (told,) = start(run, layout, tmp_path / "run")
    # Nobody knows whether the store has states of this run: the start says so instead of beginning anew.
    assert told.error == "TriaxError"
    assert "cannot be read: ConnectionError: no route to the store" in told.message
    monkeypatch.setattr(Store, "push", unreachable)
    assert start(run, layout, tmp_path / "run") == [Told()]
    assert series(tmp_path / "run", "step") == list(range(1, STEPS + 1))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    failed = [event["detail"]["reason"] for event in events if event["kind"] == "upload_failed"]
    assert failed
    assert all("no route to the store" in reason for reason in failed)
