"""Two processes for trainers that take the default group for theirs; the eight of other tests are one group too many."""

import pytest


@pytest.fixture(scope="session")
def two():
    from ranks import Pool

    processes = Pool(size=2)
    yield processes
    processes.close()
