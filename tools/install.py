"""Installs this project into the environment of the Python that runs it, and shows how far the installation is.

    .venv/bin/python tools/install.py ".[emoji,train]" 3100

The second argument is the largest expected download in MB; packages that are already there are not downloaded again. pip by
itself is either silent for minutes or prints pages, so pip runs quietly and this script watches its folders: the size of the
downloaded files, then the number of unpacked packages.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TextIO

PAUSE = 0.5  # seconds between two looks at the folders
PAUSE_WITHOUT_TERMINAL = 10.0  # seconds between two lines of a log
# Bytecode is compiled when a module is first imported: of 10,000 files of PyTorch and its packages the demo needs few.
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile")


def main() -> int:
    """Installs what the command line names; the status is pip's."""
    wanted, expected = sys.argv[1], int(sys.argv[2])
    root, packages = Path(__file__).resolve().parent.parent, Path(sysconfig.get_path("purelib"))
    command = [sys.executable, *PIP, "-c", "constraints.txt", "-e", wanted]
    downloads, began = Path(sys.prefix) / "downloads", time.monotonic()
    shutil.rmtree(downloads, ignore_errors=True)  # of an installation that was killed
    downloads.mkdir()
    with tempfile.TemporaryFile() as errors:  # shown at the end, not in the middle of the line that changes
        process = subprocess.Popen(command, cwd=root, env=os.environ | {"TMPDIR": str(downloads)}, stderr=errors)
        try:
            watch(process, downloads, packages, expected, sys.stdout)
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace"))
    if process.returncode == 0:
        size = megabytes(Path(sys.prefix)) / 1000
        print(f"Installed {count(packages)} packages, {size:.1f} GB, in {time.monotonic() - began:.0f} s")
    return process.returncode


def watch(process: "subprocess.Popen[bytes]", downloads: Path, packages: Path, expected: int, out: TextIO) -> None:
    """Shows progress until pip ends: on a terminal one line that changes, elsewhere a line every few seconds."""
    terminal, before, shown = out.isatty(), count(packages), ""
    pause = PAUSE if terminal else PAUSE_WITHOUT_TERMINAL
    try:
        while True:
            try:
                process.wait(pause)
                break
            except subprocess.TimeoutExpired:
                pass
            line = progress(megabytes(downloads, "pip-unpack-*"), expected, count(packages) - before)
            if line != shown:
                out.write(f"\r{line.ljust(len(shown))}" if terminal else f"{line}\n")
                out.flush()
                shown = line
    except BaseException:  # Ctrl-C: pip has it too, and cleans up
        process.terminate()
        process.wait()
        raise
    finally:
        if terminal and shown:
            out.write("\n")


def progress(downloaded: float, expected: int, unpacked: int) -> str:
    """The line for this moment. pip downloads everything before it unpacks anything."""
    if unpacked > 0:
        return f"  unpacking: {unpacked} package{'s' if unpacked > 1 else ''}"
    if downloaded < 1:
        return "  choosing versions"
    width = 30
    filled = min(width, round(width * downloaded / expected))
    return f"  downloading [{'#' * filled}{'.' * (width - filled)}] {downloaded:,.0f} of up to {expected:,} MB"


def megabytes(folder: Path, pattern: str = "*") -> float:
    """The size of the files in matching folders; files come and go while pip works."""
    total = 0
    for place in folder.glob(pattern):
        if place.is_symlink():  # lib64 is lib
            continue
        for parent, _, names in os.walk(place):
            for name in names:
                try:
                    total += os.lstat(os.path.join(parent, name)).st_size
                except FileNotFoundError:
                    continue
    return total / 1e6


def count(packages: Path) -> int:
    """The number of installed packages."""
    return sum(1 for _ in packages.glob("*.dist-info"))


if __name__ == "__main__":
    sys.exit(main() if len(sys.argv) == 3 else __doc__)
