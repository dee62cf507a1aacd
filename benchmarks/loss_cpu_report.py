"""The table and the plot of a run of `loss_cpu.py`: python benchmarks/loss_cpu_report.py benchmarks/results/loss_cpu.json."""

from functools import partial
from typing import Any

import reports

from megabatch.bench.figures import draw_losses
from megabatch.bench.tables import losses_table
from megabatch.display import plots


def _bench(record: dict[str, Any]) -> dict[str, Any]:
    """The record as `megabatch bench` writes it."""
    return record | {"device": "cpu", "dtype": "float32", "losses": record["results"], "products": []}


def markdown(record: dict[str, Any]) -> str:
    """The table of `megabatch bench`."""
    return losses_table(_bench(record)).markdown()


def draw(record: dict[str, Any]) -> Any:
    """Time and memory against the batch."""
    about = f"{record['machine']['cpu']}, {record['machine']['cores']} cores"
    title = f"CLIP loss, forward and backward, float32, D = {record['width']}; {about}"
    figure, (panels,) = plots.figure(title, columns=2, size=(11, 4.8))
    for axes, memory in zip(panels, (False, True), strict=True):
        draw_losses(axes, _bench(record), memory=memory)
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
