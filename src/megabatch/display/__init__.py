"""Presentation: numbers, tables, plots and pages for reports, benchmarks and plans; observers that show a run's progress.

The observers are exported here: a bar in the terminal, TensorBoard, Weights & Biases.
"""

from megabatch.display.progress import ProgressDisplay
from megabatch.display.tensorboard import TensorBoardLog
from megabatch.display.wandb import WandbLog

__all__ = ["ProgressDisplay", "TensorBoardLog", "WandbLog"]
