"""How do the exit codes of workers become one?"""

import pytest

from triax.launch.workers import REQUEUE, Ended, ended


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({1: 1}, Ended(1)),
        ({0: 1, 2: 2}, Ended(2)),
        ({0: 3}, Ended(3)),
        ({0: REQUEUE, 1: 1}, Ended(REQUEUE)),
        ({3: -9}, Ended(1, {3: "was killed by SIGKILL"})),
        ({0: 1, 3: -6}, Ended(1, {3: "was killed by SIGABRT"})),
        ({2: 7}, Ended(1, {2: "left with exit code 7"})),
        ({0: -15}, Ended(1)),  # this process has ended it
    ],
)
def test_the_code_that_tells_most_and_who_was_killed(codes: dict[int, int], expected: Ended) -> None:
    assert ended(codes) == expected
