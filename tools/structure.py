"""Counts what a reader has to open: lines and files of each package, files from a call to the kernel and from a command to the
gradient, and names that break the rules.

    python tools/structure.py           everything, about a minute on a CPU
    python tools/structure.py --names   only what needs no run

Calls are traced, not guessed: each count is the number of files of this project whose functions ran between the call and its
end, in the order in which they ran first. The Triton kernels run interpreted, and the limits of `dispatch` are lowered so that
a few rows take the path of a large batch.
"""

import argparse
import ast
import contextlib
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGES = ("src/megabatch", "src/megabatch_train", "tests", "benchmarks")
# Rows of a batch on a GPU that takes this path, and the limits with which 300 rows take it.
PATHS = {
    "1,024 rows (dense)": {},
    "32,768 rows (fused, one GPU)": {"dense_triton": 0},
    "1,048,576 rows (fused)": {"dense_triton": 0, "one_gpu": 0},
}


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="only lines, files and names, without a run")
    parser.add_argument("--trace", choices=["losses", "train"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace == "losses":
        trace_losses()
    elif options.trace == "train":
        trace_training()
    else:
        print_sizes()
        print_names()
        if not options.names:
            for trace in ("losses", "train"):  # each in a process of its own, because an import counts only once
                environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)}
                subprocess.run([sys.executable, __file__, "--trace", trace], env=environment, check=True)


def print_sizes() -> None:
    """Lines and files of each package."""
    print("Python files and lines")
    for package in PACKAGES:
        files = [path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts]
        lines = [len(path.read_text("utf-8").splitlines()) for path in files]
        print(f"  {package:22} {len(files):4} files {sum(lines):7,} lines, {max(lines)} in the longest")
    largest = Counter(str(path.parent.relative_to(ROOT)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    folder, count = largest.most_common(1)[0]
    print(f"  largest folder of src: {folder}, {count} modules")


def print_names() -> None:
    """Modules with one importer, and class names with two meanings."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    modules = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in trees}
    importers: dict[str, set[Path]] = defaultdict(set)
    classes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else node.module or "" for name in inner]
            else:
                continue
            for name in names:
                if name in modules:
                    importers[name].add(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
    alone = sum(len(found) == 1 for name, found in importers.items() if modules[name].name != "__init__.py")
    print(f"  modules of src with exactly one importer: {alone} of {len(modules)}")
    print(f"  class names with several meanings: {sum(len(found) > 1 for found in classes.values())}")


def record_files(call: Callable[[], Any]) -> list[str]:
    """Returns the files of the project whose functions run during a call, in the order in which they first run."""
    files: dict[str, None] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        # The body of a module or of a class, which an import runs, has no fast local variables.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            files.setdefault(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return [str(Path(name).relative_to(SOURCE)) for name in files if name.startswith(str(SOURCE))]


def print_files(title: str, files: list[str]) -> None:
    """One count, and the files by folder."""
    print(f"  {title}: {len(files)} files")
    folders: dict[str, list[str]] = defaultdict(list)
    for name in files:
        folder, _, module = name.rpartition("/")
        folders[folder].append(module.removesuffix(".py"))
    for folder, modules in folders.items():
        print(f"      {folder}: {', '.join(modules)}")


def trace_losses() -> None:
    """From `clip_loss` to the gradients, on each path of the Triton engine."""
    import torch

    import megabatch as mb
    from megabatch import dispatch

    x, y = (torch.nn.functional.normalize(torch.randn(300, 32), dim=1).requires_grad_() for _ in range(2))

    def step() -> None:
        mb.clip_loss(x, y, 10.0, backend="triton").backward()

    print("Files from clip_loss to the gradients of the embeddings")
    for title, limits in PATHS.items():
        with dispatch.override(**limits):
            step()  # the first call compiles, imports and fills caches
            print_files(title, record_files(step))


def trace_training() -> None:
    """From the command to the end of the first step."""
    from megabatch_train import cli
    from megabatch_train.trainer.step import Step

    class Enough(BaseException):
        """Ends the run after the first step."""

    first = Step.__call__

    def one_step(*arguments: Any, **options: Any) -> Any:
        first(*arguments, **options)
        raise Enough

    def run() -> None:
        with contextlib.suppress(Enough):
            cli.main(["train", "--output", f"{folder}/run", "--batch-size", "64", "--steps", "1"])

    print("Files from `megabatch train` to the gradient")
    Step.__call__ = one_step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        print_files("emoji, small", record_files(run))


if __name__ == "__main__":
    main()
