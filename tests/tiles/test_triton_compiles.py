"""Every kernel compiles for the supported GPUs and fits in their shared memory. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import PATIENCE

pytest.importorskip("triton")


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "precision", "features"),
    [
        (90, "bfloat16", ""),
        (90, "bfloat16", "features"),
        (90, "tf32", "features"),
        (90, "float16", "features two_columns"),
        (90, "float32", ""),
        (80, "float32", ""),
        (80, "bfloat16", "features"),
        (89, "float16", ""),
        (89, "tf32", ""),
        (86, "bfloat16", "features"),
        (100, "bfloat16", ""),
        (120, "bfloat16", ""),
    ],
)
def test_kernels_compile(capability, precision, features):
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(program), str(capability), precision, *features.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled" in done.stdout.splitlines()[-1]
