"""Towers that are parts of a wrapped model: called through the wrapper, or refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loops
import megabatch as mb
from megabatch.integrations import trainers
from megabatch.integrations.trainers import encode_towers, full_tensor, route_through_wrappers, unwrap

UNITS = [("model",), ("image", "model"), ("model", "root"), ("image", "text", "root"), ("image", "text"), ("root",)]


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = loops.Model()

    def forward(self, image):
        return self.model(image)


def sharded(group, rank, units):
    """Gradients of a batch where FSDP2 has cut up the model in one way or another; `full_tensor` of its scale."""
    from torch.distributed.fsdp import fully_shard

    root = Root()
    for name in units:
        fully_shard({"image": root.model.image, "text": root.model.text, "model": root.model, "root": root}[name])
    pairs, rows = loops.Pairs(), slice(3 * rank, 3 * rank + 3)
    towers = route_through_wrappers([(root.model.image, pairs.image[rows]), (root.model.encode_text, pairs.text[rows])], root)

    def loss_fn(image, text):
        return mb.clip_loss(F.normalize(image, dim=1), text, full_tensor(root.model.log_scale).exp(), group=group)

    mb.cached_backward(loss_fn, towers, chunk_size=2)
    return {name: p.grad.full_tensor() for name, p in root.model.named_parameters() if hasattr(p, "full_tensor")}


@pytest.mark.parametrize("units", UNITS, ids="+".join)
def test_parts_of_sharded_models(two, units):
    model = loops.Model()
    loops.dense_loss(model, slice(0, 6)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if units != ("image", "text") or name != "log_scale"}
    for found in two.run(sharded, 2, units):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def wrapped_apart(group, rank):
    """Gradients where each part has a wrapper of its own and towers are methods of what holds both."""
    model = loops.Model()
    model.image, model.text = (DistributedDataParallel(part, process_group=group) for part in (model.image, model.text))
    pairs, rows = loops.Pairs(), slice(3 * rank, 3 * rank + 3)
    towers = route_through_wrappers([(model.forward, pairs.image[rows]), (model.encode_text, pairs.text[rows])], model)
    scale = model.log_scale.detach().exp()
    mb.cached_backward(lambda i, t: mb.clip_loss(F.normalize(i, dim=1), t, scale, group=group), towers, chunk_size=2)
    return {name.replace(".module", ""): p.grad for name, p in model.named_parameters() if name != "log_scale"}


def test_of_two_wrapped_parts_the_one_that_is_called_is_reduced(two):
    model = loops.Model()
    loops.dense_loss(model, slice(0, 6)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if name != "log_scale"}
    for found in two.run(wrapped_apart, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def refused(group, rank):
    model = loops.Model()
    wrapper, rows = DistributedDataParallel(model, process_group=group), torch.ones(2, 5).double()
    with pytest.raises(ValueError, match=r"towers\[1\] .*2 processes.*got Model"):
        route_through_wrappers([(model, rows), (loops.Model(), rows)], wrapper)
    frozen = loops.Model().requires_grad_(False)
    found = route_through_wrappers([(model, rows), (model.image, rows), (frozen, rows), (wrapper, rows)], wrapper)
    assert [tower for tower, _ in found[2:]] == [frozen, wrapper]
    assert found[0][0] is wrapper
    assert unwrap(wrapper) is model
    own = lambda x: x  # noqa: E731
    model.forward = own  # as Accelerate does
    assert torch.equal(found[1][0](rows), model.image(rows))
    assert model.forward is own


def test_what_nobody_would_average_is_refused(two):
    two.run(refused, 2)


@pytest.mark.parametrize(("kind", "told"), [("DEEPSPEED", "FSDP2 shards like ZeRO"), ("FSDP", "fsdp_version: 2")])
def test_other_ways_to_shard_are_refused_with_what_to_use(kind, told):
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=False)
    with pytest.raises(ValueError, match=rf"accelerator must use one process, DDP or FSDP2, got .*{told}"):
        trainers.cached_backward(accelerator, None, lambda x: x.sum(), [])


def test_one_process_needs_no_way_round():
    model, rows = loops.Model(), torch.ones(3, 5).double()
    towers = [(model.image, rows), (model.encode_text, rows)]
    assert route_through_wrappers(towers, model) == route_through_wrappers(towers, None) == towers
    for found, (tower, _) in zip(encode_towers(towers, 2), towers, strict=True):
        torch.testing.assert_close(found, tower(rows))
        assert not found.requires_grad
    (found,) = encode_towers([(lambda x: mb.Encoded(x, x.mean()), rows)], 2)
    assert torch.equal(found, rows)
    with pytest.raises(TypeError, match=r"towers\[0\] must return embeddings.*got a tuple of 2"):
        encode_towers([(lambda x: (x, x.mean()), rows)], 2)
    with pytest.raises(TypeError, match=r"model .* got DataParallel"):
        route_through_wrappers(towers, nn.DataParallel(model))
