"""The table and the plot of all finished runs of `batch_size_study.py`, for one learning rate at 1,024 pairs.

python benchmarks/batch_size_study_report.py benchmarks/results/batch_size_study.jsonl 0.02
"""

import sys
from pathlib import Path
from typing import Any

from batch_size_study import BASE, BY, RULES, TRIAL, draw, summary, table

from megabatch.evaluation import results


def gaps(lines: list[dict[str, Any]], base_lr: float) -> str:
    """The runs that are missing or have fewer seeds than others."""
    seeds, found = len({line["seed"] for line in lines}), []
    for size in sorted({line["batch_size"] for line in lines}):
        for rule, power in RULES.items():
            known = summary(lines, size, base_lr * (size / BASE) ** power, BY)
            if known is None:
                found.append(f"{size:,} {rule} (not run)")
            elif known[2] < seeds:
                found.append(f"{size:,} {rule} ({known[2]} seeds)")
    return f"Incomplete: {', '.join(found)}." if found else "All runs are complete."


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, base_lr = Path(sys.argv[1]), float(sys.argv[2])
    lines = [line for line in results.read(path) if line["seed"] != TRIAL]
    (samples,) = {line["samples"] for line in lines}
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    command = f"Command: `python benchmarks/batch_size_study.py --lr {base_lr:g}`"
    text = [table(lines, base_lr, samples).markdown(), gaps(lines, base_lr), f"Machine: {machines}.", command]
    stem = f"{path.stem}_{base_lr:g}"
    (path.parent / f"{stem}.md").write_text("\n\n".join(text) + "\n", "utf-8")
    draw(lines, base_lr, samples, path.parent / f"{stem}.png")


if __name__ == "__main__":
    main()
