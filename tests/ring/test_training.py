"""The ring inside PyTorch: DDP, FSDP2, meshes, loss modules, compile, checkpointing. Against one process on the whole batch."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from helpers import leaves, unit
from megabatch import ring


class Model(nn.Module):
    """Two towers, a learned scale and a learned bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor([1.5]))
        self.bias = nn.Parameter(torch.tensor([-1.0]))
        self.double()

    def forward(self, images, texts):
        embeddings = [nn.functional.normalize(tower(x), dim=1) for tower, x in ((self.image, images), (self.text, texts))]
        return *embeddings, self.log_scale.exp(), self.bias


def loss_of(outputs, group):
    image, text, scale, bias = outputs
    return mb.clip_loss(image, text, scale, group=group) + mb.siglip_loss(image, text, scale, bias, group=group)


def batch(counts, rank=None):
    images, texts = unit(sum(counts), 6, seed=1), unit(sum(counts), 6, seed=2)
    part = slice(None) if rank is None else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return images[part], texts[part]


def steps(model, parameters, images, texts, group, count=2):
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        loss_of(model(images, texts), group).backward()
        optimizer.step()


def alone(counts):
    model = Model()
    steps(model, model.parameters(), *batch(counts), None)
    return [p.detach() for p in model.parameters()]


def with_ddp(group, rank, counts, route):
    model = Model()
    wrapped = DistributedDataParallel(model, process_group=group)
    with ring.use_route(route):
        steps(wrapped, model.parameters(), *batch(counts, rank), group)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("counts", [[4, 4], [3, 0, 6, 2]])
@pytest.mark.parametrize("route", ["ring", "two_level:2", "gather"])
def test_ddp_trains_as_one_process_does(pool, counts, route):
    wanted = alone(counts)
    start = [p.detach() for p in Model().parameters()]
    assert all((p - q).abs().max() > 1e-4 for p, q in zip(start, wanted, strict=True))
    for parameters in pool.run(with_ddp, len(counts), counts, route):
        for found, expected in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def with_fsdp(group, rank, counts):
    model = Model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for tower in (model.image, model.text):
        fully_shard(tower, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps(model, model.parameters(), *batch(counts, rank), mesh)
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("counts", [[4, 4], [7, 2]])
def test_fsdp2_trains_as_one_process_does(pool, counts):
    wanted = alone(counts)
    for parameters in pool.run(with_fsdp, 2, counts):
        for found, expected in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def wrong_groups(group, rank):
    x = unit(3, 4, seed=rank)
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4))
    others = torch.distributed.new_group([0, 1])
    messages = []
    for wrong in (mesh, others) if rank > 1 else (mesh,):
        try:
            mb.clip_loss(x, x, 1.0, group=wrong)
        except ValueError as error:
            messages.append(str(error))
    part = mb.clip_loss(x, x, 1.0, group=mesh.get_group(1))
    return messages, part


@pytest.mark.thorough  # eight processes
def test_meshes_and_groups_that_are_refused(pool):
    answers = pool.run(wrong_groups, 8)
    for rank, (messages, _) in enumerate(answers):
        assert "group must be a DeviceMesh with one dimension, got 2 dimensions (shape (2, 4))" in messages[0]
        if rank > 1:
            assert messages[1] == "group must contain this process, got a group of other processes"
    for half in (range(4), range(4, 8)):
        x = torch.cat([unit(3, 4, seed=rank) for rank in half])
        torch.testing.assert_close(sum(answers[rank][1] for rank in half) / 4, mb.clip_loss(x, x, 1.0))


def modules(group, rank):
    x, y = unit(3, 4, seed=rank), unit(3, 4, seed=rank + 20)
    values = [
        mb.ClipLoss(rank=rank, world_size=8, local_loss=True)(x, y, 3.0),
        mb.SigLipLoss(rank=rank, world_size=8)(x, y, 3.0, -2.0),
    ]
    try:
        mb.ClipLoss(rank=rank, world_size=4)(x, y, 3.0)
    except ValueError as error:
        return values, str(error)


@pytest.mark.thorough  # eight processes
def test_loss_modules_use_the_default_group(pool):
    answers = pool.run(modules, 8)
    x, y = (torch.cat([unit(3, 4, seed=rank + plus) for rank in range(8)]) for plus in (0, 20))
    wanted = mb.clip_loss(x, y, 3.0), mb.siglip_loss(x, y, 3.0, -2.0)
    for i, expected in enumerate(wanted):
        torch.testing.assert_close(sum(values[i] for values, _ in answers) / 8, expected, rtol=1e-10, atol=1e-10)
    for rank, (_, message) in enumerate(answers):
        assert message == f"rank and world_size must match the default process group, {rank} and 8, got {rank} and 4"


def everything(x, y, scale, bias, group):
    row, col = mb.pairwise_logsumexp(x, y, scale, exclude="diagonal", group=group)
    total = mb.pairwise_softplus(x, y, scale, bias, group=group)
    losses = mb.clip_loss(x, y, scale, group=group) + mb.siglip_loss(x, y, scale, bias, group=group)
    return losses + row.sum() + col.sum() + total.sum()


def in_other_ways(group, rank):
    inputs = leaves(
        unit(5 + rank, 6, seed=rank), unit(5 + rank, 6, seed=rank + 9), torch.tensor(3.0).double(), torch.tensor(-1.0).double()
    )
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    ways = [
        everything,
        compiled,
        lambda *a: checkpoint(everything, *a, use_reentrant=False),
        lambda *a: checkpoint(everything, *a, use_reentrant=True),
    ]
    results = []
    for route in ("ring", "gather"):
        with ring.use_route(route):
            for way in ways:
                value = way(*inputs, group)
                for i in inputs:
                    i.grad = None
                value.backward()
                results.append([value.detach(), *(i.grad for i in inputs)])
    return results


@pytest.mark.thorough
def test_compiled_and_checkpointed(pool):
    for plain, *others in pool.run(in_other_ways, 2):
        for other in others:
            for found, expected in zip(other, plain, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
