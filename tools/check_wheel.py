"""Installs a wheel into an empty environment outside of the clone, and runs what the README promises.

    python tools/check_wheel.py dist/megabatch-0.1.0-py3-none-any.whl [--demo]

Without --demo: no extras, so torch is the only other package asked for, and the first Python lines of the README. With --demo:
the extras `train` and `emoji`, a short training run on emoji, and a search.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
ALLOWED = {"torch"}  # packages that the bare wheel may ask for


def main() -> int:
    """Checks the wheel of the command line; 0 if everything ran."""
    wheel, demo = Path(sys.argv[1]).resolve(), "--demo" in sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        python = Path(folder) / "venv" / "bin" / "python"
        wanted = f"{wheel}[train,emoji]" if demo else str(wheel)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wanted], check=True)

        def run(*words: str) -> str:
            done = subprocess.run([str(python), *words], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        print(run("-m", "megabatch", "--version"), end="")
        if demo:
            run("-m", "megabatch", "train", "--output", "demo", "--steps", "20")
            print(run("-m", "megabatch", "search", "demo", "red heart", "-k", "3"))
            return 0
        needed = run("-c", "from importlib.metadata import requires; print(*requires('megabatch'), sep='\\n')").splitlines()
        bare = {re.match(r"[\w-]+", line)[0] for line in needed if "extra ==" not in line}  # type: ignore[index]
        assert bare == ALLOWED, f"the wheel asks for {bare}"
        code = README.read_text("utf-8").partition("```python\n")[2].partition("```")[0]
        assert "mb.clip_loss" in code, "the first Python lines of the README call the loss"
        run("-c", code)
        print("installed with torch alone, and the README's lines ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
