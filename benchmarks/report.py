"""Rebuilds the tables (.md) and the plots (.svg) of stored records, on any machine.

python benchmarks/report.py                                       all records in benchmarks/results
python benchmarks/report.py benchmarks/results/loss_gpu.json
"""

import importlib
import json
import sys
from pathlib import Path

from megabatch_train.bench.measure import RESULTS, write_report


def rebuild(path: Path) -> None:
    """Writes the report of a record with the script that its command names. The script of a .jsonl study defines `report`."""
    if path.suffix == ".jsonl":
        importlib.import_module(path.stem).report(path)
        return
    script = importlib.import_module(Path(json.loads(path.read_text())["command"].split()[1]).stem)
    write_report(path, script.markdown, getattr(script, "draw", None))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(map(str, RESULTS.glob("*.json*")))):
        rebuild(path)
