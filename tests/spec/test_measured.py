"""Is a measured step the schedule it claims to be, and does it come back from its file?"""

from pathlib import Path

import pytest

from triax.errors import BadInput
from triax.spec.layout import Layout
from triax.spec.schedule import (
    MeasuredStep,
    RankTimes,
    Timeline,
    build,
    executed_table,
    measured_as_text,
    price,
    price_as_measured,
    read_measured,
)

LAYOUT = Layout(pp=2, tp=2, stages_per_rank=2, schedule="DualPipeV", microbatches=4, zero=1)


def step_of(layout: Layout, timeline: Timeline, late_s: float = 0.0) -> MeasuredStep:
    """A step in which every pipeline ran as ``timeline``, each ``late_s`` after the one before."""
    ranks = []
    for rank in range(layout.world_size):
        here = layout.coordinate(rank)
        late = late_s * here.tp
        ranks.append(
            RankTimes(
                rank=rank,
                actions=tuple(map(str, timeline.table.rows[here.pp])),
                start_s=tuple(moment + late for moment in timeline.start_s[here.pp]),
                end_s=tuple(moment + late for moment in timeline.end_s[here.pp]),
            )
        )
    return MeasuredStep(step=3, layout=layout, ranks=tuple(ranks))


def test_a_step_comes_back_from_its_file(tmp_path: Path) -> None:
    measured = step_of(LAYOUT, price(executed_table(LAYOUT)), late_s=0.5)
    path = tmp_path / "timeline-step00000003.json"
    path.write_text(measured_as_text(measured))
    assert read_measured(path) == measured


def test_each_pipeline_counts_from_its_own_first_action() -> None:
    timeline = price(executed_table(LAYOUT))
    measured = step_of(LAYOUT, timeline, late_s=0.5)
    assert list(measured.pipelines) == [0, 1]
    for rank in range(LAYOUT.world_size):
        assert measured.timeline(rank) == timeline


def test_a_step_priced_with_its_own_times_is_itself() -> None:
    """No send, every action of a kind equally long: then what was measured is what the table says."""
    layout = Layout(pp=4, schedule="1F1B", microbatches=6)
    timeline = price(build("1F1B", 4, 1, 6))
    assert price_as_measured(timeline, layout) == timeline


def test_an_overlapped_pair_runs_one_after_the_other() -> None:
    """Forward first: so it is executed, and so its two times are written down."""
    table = build("DualPipeV", 2, 2, 4)
    executed = executed_table(LAYOUT)
    for rank in range(2):
        assert executed.rows[rank] == tuple(table.actions(rank))
        assert len(executed.rows[rank]) > len(table.rows[rank])
    assert price_as_measured(price(executed), LAYOUT).table == table


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"1F0"', '"1F9"', "not those of its row"),
        ('"rank": 3', '"rank": 4', "not those of ranks 0 to 3"),
        ('"start_s": [0.0,', '"start_s": [', "not those of its row"),
        ('"step": 3', '"step": 0', "use 1 or more"),
        ('"format_version": 1', '"format_version": 2', "format_version"),
        ("{", "[", "JSON"),
    ],
)
def test_a_damaged_file_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = measured_as_text(step_of(LAYOUT, price(executed_table(LAYOUT))))
    path = tmp_path / "timeline.json"
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput, match=said):
        read_measured(path)
