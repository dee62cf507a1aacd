"""What a run shows while it goes on: a bar in the terminal, TensorBoard, Weights & Biases. Each observes the trainer."""

from megabatch.display.progress import ProgressDisplay
from megabatch.display.tensorboard import TensorBoardLog
from megabatch.display.wandb import WandbLog

__all__ = ["ProgressDisplay", "TensorBoardLog", "WandbLog"]
