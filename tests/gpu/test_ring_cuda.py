"""Several ranks that share one GPU, joined by gloo through pinned host memory: kernels and ring together, against float64."""

import pytest
import torch

import megabatch as mb
from helpers import leaves, unit
from megabatch import reference, ring
from ranks import Pool

pytestmark = pytest.mark.gpu

COUNTS = [300, 0, 517, 64]
D = 128


@pytest.fixture(scope="module")
def ranks():
    processes = Pool(4, seconds=120)
    yield processes
    processes.close()


def data(dtype):
    x, y = (unit(sum(COUNTS), D, seed=s).to(dtype) for s in (0, 1))
    return x, y, torch.arange(len(x)) % 200


def part(tensor, rank):
    return tensor[sum(COUNTS[:rank]) : sum(COUNTS[: rank + 1])].cuda()


def loss_on_a_rank(group, rank, dtype, backend, route):
    x, y, ids = (part(t, rank) for t in data(dtype))
    x, y, scale, bias = leaves(x, y, torch.tensor(20.0).cuda(), torch.tensor(-5.0).cuda())
    results = []
    for loss in ("clip", "siglip"):
        for t in (x, y, scale, bias):
            t.grad = None
        with ring.use_route(route):
            if loss == "clip":
                value = mb.clip_loss(x, y, scale, ids=ids, group=group, backend=backend)
            else:
                value = mb.siglip_loss(x, y, scale, bias, group=group, backend=backend)
        value.backward()
        results.append([t.double().cpu() for t in (value.detach(), x.grad, y.grad, scale.grad)])
    return results


@pytest.mark.parametrize("route", ["ring", "two_level:2", "gather"])
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_on_one_gpu_give_the_result_of_one_process(ranks, dtype, backend, route):
    answers = ranks.run(loss_on_a_rank, 4, dtype, backend, route, seconds=180)
    x, y, ids = data(dtype)
    for i, loss in enumerate(("clip", "siglip")):
        inputs = leaves(x.double(), y.double(), torch.tensor(20.0).double(), torch.tensor(-5.0).double())
        wanted = reference.clip_loss(*inputs[:3], ids=ids) if loss == "clip" else reference.siglip_loss(*inputs)
        wanted.backward()
        values, dx, dy, dscale = zip(*(answer[i] for answer in answers), strict=True)
        found = [sum(values) / 4, torch.cat(dx) / 4, torch.cat(dy) / 4, sum(dscale) / 4]
        rounding = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        for actual, expected in zip(found, [wanted.detach(), *(t.grad for t in inputs[:3])], strict=True):
            error = (actual - expected).norm() / expected.norm()
            assert error < rounding, (loss, error)


def ranks_of_pairs(group, rank, route):
    x, y, _ = data(torch.float32)
    with ring.use_route(route):
        return [r.cpu() for r in mb.pairwise_rank(part(x, rank), part(y, rank), group=group)]


@pytest.mark.parametrize("route", ["ring", "gather"])
def test_ranks_of_pairs(ranks, route):
    answers = ranks.run(ranks_of_pairs, 4, route, seconds=120)
    x, y, _ = data(torch.float32)
    for i, wanted in enumerate(mb.pairwise_rank(x, y)):
        assert torch.equal(torch.cat([answer[i] for answer in answers]), wanted)
