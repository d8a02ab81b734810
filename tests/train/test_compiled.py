"""Does a run whose layers are compiled come to the losses of one whose layers are not, in every layout that may be?"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.experts import with_experts
from tests.harness.runs import Told, series, start
from tests.harness.toy import lay
from tests.train.test_resume import make_run
from triax.spec.check import check
from triax.spec.layout import Layout
from triax.spec.run import Run


def compiled(run: Run, backend: str) -> Run:
    return Run.model_validate(run.model_dump() | {"train": run.train.model_dump() | {"compile": backend}})


def short_run(folder: Path, *, has_experts: bool) -> Run:
    folder.mkdir()
    run = make_run(folder)
    said = run.model_dump() | {"train": {"steps": 3, "sequences_per_step": 8}, "guard": {"window": 16}}
    run = Run.model_validate(said)
    return run.model_copy(update={"model": with_experts(run.model)}) if has_experts else run


@pytest.mark.parametrize(
    ("degrees", "has_experts", "backend"),
    [
        pytest.param({"dp_shard": 2, "zero": 3, "recompute": "selective"}, False, "aot_eager", id="zero 3, recomputed"),
        pytest.param({"pp": 2, "tp": 2}, False, "aot_eager", id="pp x tp", marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2, "zero": 2}, False, "aot_eager", id="tp x zero 2", marks=pytest.mark.slow),
        pytest.param({}, True, "aot_eager", id="experts", marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "zero": 1}, False, "inductor", id="fused kernels", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_come_to_the_same_losses(
    degrees: dict[str, Any], has_experts: bool, backend: str, tmp_path: Path
) -> None:
    losses = {}
    for name in ("none", backend):
        run = compiled(short_run(tmp_path / name, has_experts=has_experts), name)
        layout = lay(run, 1, **degrees)
        assert start(run, layout, tmp_path / name / "run", timeout_s=280) == [Told()] * layout.world_size
        losses[name] = [series(tmp_path / name / "run", key) for key in ("train/loss", "train/grad_norm")]
    for plain, fused in zip(losses["none"], losses[backend], strict=True):
        assert fused == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("degrees", "key"),
    [
        ({"cp": 2}, "cp"),
        ({"dp_shard": 2, "ep": 2}, "ep"),
        ({"pp": 2, "stages_per_rank": 2, "schedule": "ZBVZeroBubble", "microbatches": 8}, "schedule"),
    ],
)
def test_what_cannot_be_traced_is_refused(degrees: dict[str, Any], key: str, tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", has_experts="ep" in degrees)
    layout = Layout.model_validate({"microbatches": 8} | degrees)
    assert key not in [refusal.key for refusal in check(layout, run)]
    (refusal,) = [each for each in check(layout, compiled(run, "inductor")) if each.key == key]
    assert "train.compile=inductor traces whole layers" in refusal.message
    assert "use train.compile=none" in refusal.message
