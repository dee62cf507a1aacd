"""Every wrong call of the cached step gets an error that names the argument, what was expected and what came."""

import numpy as np
import pytest
import torch
from torch import nn

import megabatch as mb

X = torch.randn(6, 4)
TOWER = nn.Linear(4, 3)


def loss(x, y):
    return (x * y).sum()


TWO = [(TOWER, X), (TOWER, X)]
ENGINE = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(4, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, TWO), {}, TypeError, "loss_fn must be a function of the embeddings of each tower, got NoneType"),
        ((loss, TOWER), {}, TypeError, r"towers must be a list of pairs \(tower, inputs\), got Linear"),
        ((loss, []), {}, ValueError, "towers must have at least one pair.*got an empty list"),
        ((loss, [TOWER, X]), {}, TypeError, r"towers\[0\] must be a pair \(tower, inputs\), got Linear"),
        ((loss, [(TOWER, X), (TOWER, X, X)]), {}, TypeError, r"towers\[1\] must be a pair \(tower, inputs\), got tuple of 3"),
        (
            (loss, [(X, TOWER)]),
            {},
            TypeError,
            r"towers\[0\]\[0\] must be a module or another callable, got a tensor of float32",
        ),
        (
            (loss, [(ENGINE, X)]),
            {},
            ValueError,
            r"towers\[0\]\[0\] must be a module, or wrapped in DDP or FSDP2, got DeepSpeedEngine of DeepSpeed",
        ),
        ((loss, [(TOWER, "text")]), {}, ValueError, r"towers\[0\]\[1\] must contain a tensor with one row.*got str"),
        ((loss, [(TOWER, object())]), {}, TypeError, r"towers\[0\]\[1\] must be a tensor, a mapping.*got object"),
        ((loss, [(TOWER, {"x": [object()]})]), {}, TypeError, r"towers\[0\]\[1\]\['x'\]\[0\] must be a tensor.*got object"),
        ((loss, [(TOWER, {"a": X, "b": X[:5]})]), {}, ValueError, r"same number of rows.*6 in .*\['a'\], 5 in .*\['b'\]"),
        ((loss, [(TOWER, X), (TOWER, X[:5])]), {}, ValueError, "towers must all have the same number of samples, got 6, 5"),
        (
            (loss, [(TOWER, X[:0]), (TOWER, X[:0])]),
            {},
            ValueError,
            "towers must have at least one sample, got inputs with 0 rows",
        ),
        ((loss, TWO), {"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ((loss, TWO), {"chunk_size": -3}, ValueError, "chunk_size must be at least 1, got -3"),
        ((loss, TWO), {"chunk_size": 2.0}, TypeError, "chunk_size must be an integer or a list of integers, got float"),
        (
            (loss, TWO),
            {"chunk_size": (1, 2, 3)},
            ValueError,
            "chunk_size must be one number or one for each of the 2 towers, got 3",
        ),
        ((loss, TWO), {"budget": -1}, ValueError, r"budget must be a number of bytes.*got -1"),
        (
            (loss, TWO),
            {"budget": 0.5},
            ValueError,
            r"budget must be a number of bytes.*got 0\.5; .*budget_fraction",
        ),
        ((loss, TWO), {"budget": True}, ValueError, "budget must be .*got True"),
        ((loss, TWO), {"budget": "most"}, ValueError, "budget must be .*got 'most'"),
        ((loss, TWO), {"budget_fraction": 1.5}, ValueError, r"budget_fraction must be .*got 1\.5"),
        ((loss, TWO), {"budget_fraction": 0}, ValueError, "budget_fraction must be .*got 0"),
        (
            (loss, TWO),
            {"budget_fraction": 0.5, "budget": 7},
            ValueError,
            r"budget must not be set with budget_fraction=0\.5, got 7",
        ),
        ((loss, TWO), {"budget": float("nan")}, ValueError, "budget must be .*got nan"),
        ((loss, TWO), {"scaler": 1024.0}, TypeError, "scaler must be a GradScaler or None, got float"),
        ((loss, TWO), {"embeddings": "disk"}, ValueError, "embeddings must be 'device' or 'host', got 'disk'"),
        ((loss, TWO), {"on_chunk": True}, TypeError, "on_chunk must be a function of a Progress or None, got bool"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        mb.cached_backward(*arguments, **options)


def one(tower):
    return [(tower, X), (TOWER, X)]


@pytest.mark.parametrize(
    ("tower", "error", "message"),
    [
        (lambda x: None, TypeError, r"towers\[0\] must return embeddings, a tensor of shape \(n, D\).*got NoneType"),
        (lambda x: {"embeddings": x}, TypeError, r"towers\[0\] must return embeddings.*got dict; wrap the tower"),
        (lambda x: (x, x, x), TypeError, r"towers\[0\] must return embeddings.*or megabatch.Encoded\(.*got a tuple of 3"),
        (lambda x: (x, x.new_tensor(14.0)), TypeError, r"or megabatch.Encoded\(embeddings, auxiliary_loss\), got a tuple of 2"),
        (lambda x: [x, x.mean()], TypeError, r"or megabatch.Encoded\(embeddings, auxiliary_loss\), got a list of 2"),
        (lambda x: mb.Encoded((x, x)), TypeError, r"towers\[0\] must return embeddings.*got a tuple of 2 in megabatch.Encoded"),
        (lambda x: x[0], ValueError, r"towers\[0\] must return embeddings of shape \(4, D\).*got shape \(4,\) of float32"),
        (lambda x: x[:1], ValueError, r"of shape \(4, D\) for a chunk of 4 samples, got shape \(1, 4\)"),
        (lambda x: x.long(), ValueError, r"got shape \(4, 4\) of int64"),
        (lambda x: mb.Encoded(x, x), ValueError, r"towers\[0\] must return an auxiliary loss .*got shape \(4, 4\)"),
        (lambda x: mb.Encoded(x, 1.0), ValueError, r"towers\[0\] must return an auxiliary loss .*got float"),
        (lambda x: x[:, : len(x)], ValueError, r"towers\[0\] must return embeddings of one dimension.*\(4, .*first and \(2, "),
    ],
)
def test_towers_that_return_something_else(tower, error, message):
    with pytest.raises(error, match=message):
        mb.cached_backward(loss, one(tower), chunk_size=4)


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    def gradient(**options):
        TOWER.zero_grad()
        mb.cached_backward(loss, TWO, **options)
        return TOWER.weight.grad

    wanted = gradient(chunk_size=4)
    for size in (np.int64(4), [np.int32(4), 4], np.array([4, 4])):
        assert torch.equal(gradient(chunk_size=size), wanted)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda x, y: x, ValueError, r"loss_fn must return a scalar, got a tensor of float32 of shape \(6, 3\)"),
        (lambda x, y: 1.0, TypeError, "loss_fn must return a scalar tensor, got float"),
        (lambda x, y: x.sum().long(), ValueError, "loss_fn must return a scalar, got a tensor of int64"),
    ],
)
def test_losses_that_return_something_else(wrong, error, message):
    with pytest.raises(error, match=message):
        mb.cached_backward(wrong, TWO)


@pytest.mark.parametrize("budget", [None, 10**6])
def test_nothing_to_train(budget):
    frozen = nn.Linear(4, 3).requires_grad_(False)
    message = "towers or loss_fn must have a parameter that requires a gradient"
    with pytest.raises(ValueError, match=message):
        mb.cached_backward(loss, [(frozen, X), (frozen, X)], chunk_size=4, budget=budget)
    hidden = torch.no_grad()(lambda x: TOWER(x))
    with pytest.raises(ValueError, match=message):
        mb.cached_backward(loss, [(hidden, X), (hidden, X)], chunk_size=4, budget=budget)


def test_a_call_without_gradients():
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"gradients enabled, got a call under torch.no_grad\(\)"):
        mb.cached_backward(loss, TWO)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"gradients enabled, got .* torch.inference_mode\(\)"):
        mb.cached_backward(loss, TWO)
