"""tools/install.py: it shows how far pip is, and ends as pip ends."""

import importlib.util
import io
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import PATIENCE

PLACE = Path(__file__).parent.parent / "tools" / "install.py"


class Pip:
    """A pip that gets one step further whenever it is waited for: downloads 6 MB in three files, unpacks two packages, ends."""

    def __init__(self, downloads, packages, status):
        self.returncode, self._status = None, status
        (downloads / "pip-build-env-1").mkdir(parents=True)
        (downloads / "pip-build-env-1" / "setuptools.py").write_bytes(bytes(9_000_000))  # no download
        (packages / "old.dist-info").mkdir(parents=True)
        wheels = [downloads / f"pip-unpack-{number}" / "a.whl" for number in range(3)]
        self._steps = iter(
            [
                lambda: None,
                *(lambda wheel=wheel: (wheel.parent.mkdir(), wheel.write_bytes(bytes(2_000_000))) for wheel in wheels),
                lambda: None,
                *(lambda name=name: (packages / f"{name}.dist-info").mkdir() for name in ("first", "second")),
            ]
        )

    def wait(self, timeout=None):
        step = next(self._steps, None)
        if step is None or timeout is None:
            self.returncode = self._status
            return
        step()
        raise subprocess.TimeoutExpired("pip", timeout)

    def terminate(self):
        self._status = -15


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("install", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINES = [
    "  choosing versions",
    f"  downloading [{'#' * 8}{'.' * 22}] 2 of up to 8 MB",
    f"  downloading [{'#' * 15}{'.' * 15}] 4 of up to 8 MB",
    f"  downloading [{'#' * 22}{'.' * 8}] 6 of up to 8 MB",
    "  unpacking: 1 package",
    "  unpacking: 2 packages",
]


@pytest.fixture
def watched(tool, tmp_path):
    """A pip, and the line for every moment of it."""

    def show(out, status=0):
        folders = tmp_path / "downloads", tmp_path / "packages"
        process = Pip(*folders, status)
        tool.watch(process, *folders, 8, out)
        return process.returncode, out.getvalue()

    return show


def test_a_log_has_a_line_for_every_change(watched):
    status, shown = watched(io.StringIO(), status=3)
    assert status == 3
    assert shown.splitlines() == LINES


def test_a_terminal_has_one_line_that_changes(watched):
    status, shown = watched(Terminal())
    assert status == 0
    parts = shown.split("\r")
    assert [part.rstrip() for part in parts] == ["", *LINES]
    for before, after in itertools.pairwise(parts):
        assert len(after.rstrip("\n")) >= len(before.rstrip())  # nothing of the longer line stays
    assert shown.count("\n") == 1
    assert shown.endswith("\n")


def test_ctrl_c_ends_pip_first(tool, tmp_path):
    process = Pip(tmp_path / "downloads", tmp_path / "packages", 0)
    out = Terminal()
    out.flush = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tool.watch(process, tmp_path / "downloads", tmp_path / "packages", 8, out)
    assert process.returncode == -15


def test_progress_never_exceeds_its_bar(tool):
    assert tool.progress(0.0, 3000, 0) == "  choosing versions"
    assert f"[{'#' * 30}]" in tool.progress(9000.0, 3000, 0)


def test_files_that_vanish_are_not_counted(tool, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    for name in ("here", "gone"):
        (tmp_path / "a" / name).write_bytes(bytes(1_000_000))
    monkeypatch.setattr(tool.os, "walk", lambda place: [(str(place), [], ["here", "gone", "never"])])
    (tmp_path / "a" / "gone").unlink()
    assert tool.megabytes(tmp_path) == 1.0


def test_a_folder_and_a_link_to_it_are_counted_once(tool, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a").write_bytes(bytes(1_000_000))
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    assert tool.megabytes(tmp_path) == 1.0


def test_an_error_of_pip_is_shown_and_is_the_status():
    done = subprocess.run([sys.executable, PLACE, ".[no such extra", "10"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "ERROR" in done.stderr
    assert "no such extra" in done.stderr
    assert not (Path(sys.prefix) / "downloads").exists()
