"""Inputs and outputs of a tower.

Inputs are a tensor, or tensors in mappings, tuples and lists, with one row for each sample. A mapping becomes keyword
arguments, a tuple or list positional arguments, a tensor the only argument. Numbers, strings, None and 0-d tensors are the
same for all samples and are passed unchanged.

Outputs are embeddings alone, or `Encoded(embeddings, auxiliary_loss)`. A plain tuple is refused: many encoders return one, and
its second entry is rarely a loss (it may be a logit scale, or the tokens before pooling), so the
loss would be wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

_SAME_FOR_ALL = (bool, int, float, str, type(None))


def map_rows(function: Callable[[Tensor], Any], inputs: Any) -> Any:
    """Applies `function` to every tensor that has rows, and keeps the structure; mappings become dicts."""
    if isinstance(inputs, Tensor):
        return function(inputs) if inputs.dim() else inputs
    if isinstance(inputs, Mapping):
        return {key: map_rows(function, value) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        values = [map_rows(function, value) for value in inputs]
        is_named = hasattr(inputs, "_fields")  # a named tuple takes separate arguments
        return type(inputs)(*values) if is_named else type(inputs)(values)
    return inputs


def tensors(inputs: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """(name for messages, tensor) of every tensor that has rows."""
    if isinstance(inputs, Tensor):
        if inputs.dim():
            yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from tensors(value, f"{name}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for i, value in enumerate(inputs):
            yield from tensors(value, f"{name}[{i}]")
    elif not isinstance(inputs, _SAME_FOR_ALL):
        raise TypeError(
            f"{name} must be a tensor, a mapping, tuple or list of tensors, or a megabatch.Source, got {type(inputs).__name__}"
        )


def count_rows(inputs: Any, name: str) -> int:
    """The number of samples; all tensors must have the same number of rows."""
    found = list(tensors(inputs, name))
    if not found:
        raise ValueError(f"{name} must contain a tensor with one row for each sample, got {type(inputs).__name__} without one")
    counts = {label: len(tensor) for label, tensor in found}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {label}" for label, count in counts.items())
        raise ValueError(f"{name} must have the same number of rows in all its tensors, got {listed}")
    return next(iter(counts.values()))


def call(tower: Callable[..., Any], inputs: Any) -> Any:
    """Calls the tower with one chunk of inputs."""
    if isinstance(inputs, Mapping):
        return tower(**inputs)
    if isinstance(inputs, tuple | list):
        return tower(*inputs)
    return tower(inputs)


class Encoded(NamedTuple):
    """The output of a tower that has an auxiliary loss.

    Attributes:
        embeddings: (n, D), one row for each sample of the chunk.
        auxiliary_loss: a scalar (the mean over the chunk), or (n,) with one number for each sample; None for no loss. The
            cached step adds its mean over the whole batch to the loss.

    Example:
        class Tower(nn.Module):
            def forward(self, x):
                return megabatch.Encoded(self.head(x), self.router_loss(x))
    """

    embeddings: Tensor
    auxiliary_loss: Tensor | None = None


def as_encoded(answer: Any, name: str) -> Encoded:
    """A tower's output as `Encoded`, in either form; `name` is the tower's, for messages."""
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
