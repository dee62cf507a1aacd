"""What a tower returns: embeddings alone, or embeddings with an auxiliary loss, by a type of its own.

A plain tuple is refused. Many encoders return one, and its second entry is rarely a loss: it may be a logit scale, or the
tokens before pooling. Training would go on, on the wrong number.
"""

from typing import Any, NamedTuple

from torch import Tensor


class Encoded(NamedTuple):
    """What a tower returns that has an auxiliary loss: the embeddings of a chunk, and that loss.

    Attributes:
        embeddings: (n, D), one row for each sample of the chunk.
        auxiliary_loss: a scalar, the mean over the chunk, or one number for each sample, (n,); None for no loss. The cached
            step adds its mean over the whole batch to the loss.
    """

    embeddings: Tensor
    auxiliary_loss: Tensor | None = None


def opened(answer: Any, name: str) -> Encoded:
    """A tower's answer in one form, whichever of the two it has; `name` is the tower's, for messages."""
    embeddings: Any
    embeddings, auxiliary = answer if isinstance(answer, Encoded) else (answer, None)
    if not isinstance(embeddings, Tensor):
        within = " in megabatch.Encoded" if isinstance(answer, Encoded) else ""
        raise TypeError(
            f"{name} must return embeddings, a tensor of shape (n, D), or megabatch.Encoded(embeddings, auxiliary_loss), "
            f"got {_kind(embeddings)}{within}; wrap the tower in a module that picks them"
        )
    return Encoded(embeddings, auxiliary)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
