import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool():
    processes = Pool()
    yield processes
    processes.close()
