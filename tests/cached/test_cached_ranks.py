"""The cached step under DDP, FSDP2 and tensor parallelism: gradients of one process on the whole batch, each reduced once."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb
from helpers import unit
from megabatch.integrations.trainers import full_tensor as gathered
from ranks import CountedReduceScatter

CHUNKS = (3, 2)


class Model(nn.Module):
    """Both towers and the scale in one module, as CLIP has them; called with one modality at a time."""

    def __init__(self, auxiliary=False):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor([1.5]))
        self.auxiliary = auxiliary
        self.double()

    def forward(self, image=None, text=None):
        embeddings = self.image(image) if text is None else self.text(text)
        return mb.Encoded(embeddings, embeddings.square().mean(1)) if self.auxiliary else embeddings


def loss_with(scale, group):
    def loss(image, text):
        return mb.clip_loss(F.normalize(image, dim=1), F.normalize(text, dim=1), scale(), group=group)

    return loss


def batch(counts, rank=None, seed=0):
    part = slice(None) if rank is None else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return [unit(sum(counts), 6, seed=seed + s)[part] for s in (1, 2)]


def alone(counts, auxiliary=False, frozen=None, seeds=(0,)):
    model = Model(auxiliary)
    if frozen:
        getattr(model, frozen).requires_grad_(False)
    for seed in seeds:
        images, texts = batch(counts, seed=seed)
        outputs = model(image=images), model(text=texts)
        extra = 0.0
        if auxiliary:
            extra = sum(o[1].mean() for o in outputs)
            outputs = [o[0] for o in outputs]
        loss = loss_with(lambda: model.log_scale.exp(), None)(*outputs) + extra
        (loss / len(seeds)).backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def counted(ddp):
    """Counts how often each gradient is reduced."""
    times = Counter()
    names = {id(p): name for name, p in ddp.module.named_parameters()}

    def hook(state, bucket):
        times.update(names[id(p)] for p in bucket.parameters())
        work = dist.all_reduce(bucket.buffer(), group=ddp.process_group, async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / ddp.process_group.size())

    ddp.register_comm_hook(None, hook)
    return times


def one_ddp(group, rank, counts, budget, find_unused, auxiliary, frozen):
    """One wrapper in two roles, with the scale inside."""
    model = Model(auxiliary)
    if frozen:
        getattr(model, frozen).requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=find_unused)
    times = counted(ddp)
    images, texts = batch(counts, rank)
    results = []
    for _ in range(2):  # DDP arranges its buckets anew after the first
        model.zero_grad()
        times.clear()
        loss = mb.cached_backward(
            loss_with(lambda: model.log_scale.exp(), group),
            [(ddp, {"image": images}), (ddp, {"text": texts})],
            chunk_size=CHUNKS,
            budget=budget,
        )
        results.append((loss, [p.grad for p in model.parameters()], dict(times)))
    return results


def check(answers, wanted, reductions=None):
    loss, gradients = wanted
    torch.testing.assert_close(sum(answer[0] for answer in answers) / len(answers), loss, rtol=1e-10, atol=1e-10)
    for answer in answers:
        for found, expected in zip(answer[1], gradients, strict=True):
            assert (found is None) == (expected is None)
            if expected is not None:
                assert expected.abs().max() > 1e-6
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        if reductions is not None:
            assert answer[2] == reductions


def names(frozen=None):
    return [n for n, _ in Model().named_parameters() if frozen is None or not n.startswith(frozen)]


@pytest.mark.parametrize(
    ("counts", "budget", "find_unused", "auxiliary", "frozen"),
    [
        ([6, 6], None, False, False, None),
        ([9, 4], None, False, True, None),
        ([5, 0], None, True, True, None),
        ([0, 7], "all", False, False, None),
        ([9, 4], 1500, False, False, None),
        ([9, 4], "all", True, True, None),
        ([9, 4], None, False, False, "text"),
        ([9, 4], None, False, False, "image"),
        ([9, 4], "all", True, False, "text"),
    ],
)
def test_one_ddp_wrapper_in_two_roles(pool, counts, budget, find_unused, auxiliary, frozen):
    wanted = alone(counts, auxiliary, frozen)
    once = dict.fromkeys(names(frozen), 1)
    for answers in zip(*pool.run(one_ddp, 2, counts, budget, find_unused, auxiliary, frozen), strict=True):
        check(answers, wanted, once)


class Scale(nn.Module):
    """The scale as a module, so that DDP has it in charge, whether or not it is ever called."""

    def __init__(self, model):
        super().__init__()
        self.tower, self.log_scale = model.text, model.log_scale

    def forward(self, x):
        return self.tower(x)


def two_ddps(group, rank, counts, budget):
    """A wrapper for each tower, over two accumulated batches, one of them under no_sync()."""
    model = Model()
    image = DistributedDataParallel(model.image, process_group=group)
    text = DistributedDataParallel(Scale(model), process_group=group)
    times = [counted(image), counted(text)]

    def step(seed, sync=True):
        images, texts = batch(counts, rank, seed)
        loss = loss_with(lambda: model.log_scale.exp(), group)
        return mb.cached_backward(
            lambda x, y: loss(x, y) / 2, [(image, images), (text, texts)], chunk_size=CHUNKS, budget=budget, sync=sync
        )

    results = []
    for by_argument in (True, False):
        model.zero_grad()
        for counter in times:
            counter.clear()
        if by_argument:
            step(0, sync=False)
        else:
            with image.no_sync(), text.no_sync():
                step(0)
        value = step(20)
        results.append((2 * value, [p.grad for p in model.parameters()], [dict(counter) for counter in times]))
    return results


@pytest.mark.parametrize("budget", [None, "all"])
def test_a_wrapper_for_each_tower_and_accumulation(pool, budget):
    counts = [4, 9]
    wanted = alone(counts, seeds=(0, 20))
    once = [
        dict.fromkeys((n for n, _ in Model().image.named_parameters()), 1),
        dict.fromkeys((n for n, _ in Scale(Model()).named_parameters()), 1),
    ]
    for answers in zip(*pool.run(two_ddps, 2, counts, budget), strict=True):
        check(answers, wanted, once)


def with_fsdp(group, rank, counts, budget, whole, auxiliary, reshard):
    """Sharded: tower by tower, or one root over both with the scale in it, whose blocks are sharded too."""
    model = Model(auxiliary)
    mesh = DeviceMesh.from_group(group, "cpu")
    for tower in (model.image, model.text):
        if whole:
            fully_shard(tower[0], mesh=mesh)
        fully_shard(tower, mesh=mesh)
    if whole:
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    images, texts = batch(counts, rank)

    def scale():
        value = model.log_scale
        assert hasattr(value, "full_tensor") == bool(reshard)
        if reshard:  # the gradient is each rank's own part, of which FSDP2 would take the mean, as `full_tensor` does
            value = gathered(value)
        return value.exp()

    results = []
    for _ in range(2):
        model.zero_grad()
        towers = (
            [(model, {"image": images}), (model, {"text": texts})]
            if whole
            else [(Picked(model.image, auxiliary), images), (Picked(model.text, auxiliary), texts)]
        )
        with CountedReduceScatter() as counted:
            loss = mb.cached_backward(loss_with(scale, group), towers, chunk_size=CHUNKS, budget=budget)
        if not whole:  # a parameter that nobody shards is nobody's to reduce either
            dist.all_reduce(model.log_scale.grad, group=group)
            model.log_scale.grad /= group.size()
        found = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
        results.append((loss, found, counted.calls))
    return results


class Picked(nn.Module):
    def __init__(self, inner, auxiliary):
        super().__init__()
        self.inner, self.auxiliary = inner, auxiliary

    def forward(self, x):
        embeddings = self.inner(x)
        return mb.Encoded(embeddings, embeddings.square().mean(1)) if self.auxiliary else embeddings


@pytest.mark.parametrize(
    ("counts", "budget", "whole", "auxiliary", "reshard", "groups"),
    [
        ([6, 6], None, False, False, None, 2),
        ([9, 4], None, False, True, None, 2),
        ([9, 4], None, True, False, None, 5),
        ([0, 7], None, True, True, None, 5),
        ([9, 4], None, True, False, True, 4),  # the scale, which no chunk uses, is reduced by its own placement
        ([9, 4], 1500, True, False, None, 5),
        ([9, 4], "all", True, False, None, 5),
        ([9, 4], "all", False, True, None, 2),
    ],
)
def test_fsdp2(pool, counts, budget, whole, auxiliary, reshard, groups):
    """`groups` are the modules with sharded parameters of their own: one reduction of each, in the whole step."""
    wanted = alone(counts, auxiliary)
    for answers in zip(*pool.run(with_fsdp, 2, counts, budget, whole, auxiliary, reshard), strict=True):
        check(answers, wanted, groups)


def tensor_parallel(group, rank):
    """Parameters sharded over a mesh, every rank with the same batch; the output comes as a sharded tensor."""
    model = Model()
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)}
    for tower in (model.image, model.text):
        parallelize_module(tower, mesh, plan)
    images, texts = batch([8])
    loss = loss_with(lambda: model.log_scale.exp(), None)
    value = mb.cached_backward(loss, [(model.image, images), (model.text, texts)], chunk_size=3)
    return value, [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def test_parameters_sharded_by_a_mesh(pool):
    check(pool.run(tensor_parallel, 2), alone([8]))


def nothing_to_show(group, rank, wrapped):
    model = Model()
    image, text = model.image, model.text
    if wrapped:
        image, text = (DistributedDataParallel(t, process_group=group) for t in (image, text))
    elif rank == 0:
        return None  # its partner would wait in the loss, and does not come that far
    rows = 0 if rank == 1 else 4
    source = mb.ReplaySource(range(rows), lambda i, generator: torch.randn(6, generator=generator, dtype=torch.float64))
    try:
        mb.cached_backward(loss_with(lambda: 2.0, group), [(image, source), (text, batch([4, 0], rank)[1])], chunk_size=2)
    except ValueError as error:
        return str(error)


def test_an_empty_replay_source_is_refused_on_all_ranks(pool):
    assert "at least one sample on every rank" in pool.run(nothing_to_show, 2, False)[1]
    messages = pool.run(nothing_to_show, 2, True)
    assert messages[0] == messages[1]
    assert "towers[0][1] must have at least one sample on every rank" in messages[0]
    assert "got none on rank 1" in messages[0]


def static_graph(group, rank):
    tower = DistributedDataParallel(Model().image, process_group=group, static_graph=True)
    try:
        mb.cached_backward(lambda x: x.sum(), [(tower, batch([4, 4], rank)[0])], chunk_size=2)
    except ValueError as error:
        return str(error)


def test_a_static_graph_is_refused(pool):
    for message in pool.run(static_graph, 2):
        assert "towers[0][0] must be wrapped without static_graph=True" in message


def by_hand(group, rank, counts):
    """Plain towers, gradients averaged by whoever trains; a rank may be empty here too."""
    model = Model()
    images, texts = batch(counts, rank)
    loss = loss_with(lambda: model.log_scale.exp(), group)
    value = mb.cached_backward(loss, [(model.image, images), (model.text, texts)], chunk_size=2)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()
    return value, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("counts", [[5, 0], [1, 7]])
def test_gradients_averaged_by_hand(pool, counts):
    check(pool.run(by_hand, 2, counts), alone(counts))


def replayed(group, rank):
    """Replay and dropout under DDP, against the same in memory."""
    torch.manual_seed(rank)
    model = Model()
    model.image[1] = nn.Dropout(0.5)
    ddp = DistributedDataParallel(model, process_group=group)

    def read(i, generator):
        return unit(1, 6, seed=100 * rank + i)[0] + torch.randn(6, generator=generator, dtype=torch.float64)

    rows = 5 + 3 * rank
    texts = unit(rows, 6, seed=50 + rank)
    results = []
    source = mb.ReplaySource(range(rows), read, seed=rank, workers=2)
    whole = torch.cat(list(source.chunks([(0, rows)], None)))
    for images in (whole, source):
        model.zero_grad()
        torch.manual_seed(10 + rank)
        inputs = {"image": images} if images is whole else Named(images)
        mb.cached_backward(
            loss_with(lambda: model.log_scale.exp(), group), [(ddp, inputs), (ddp, {"text": texts})], chunk_size=2
        )
        results.append([p.grad.clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Named(mb.Source):
    """Gives another source's tensors a name."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def chunks(self, spans, device):
        for chunk in self.inner.chunks(spans, device):
            yield {"image": chunk}


def test_replay_under_ddp_with_uneven_ranks(pool):
    assert pool.run(replayed, 2) == [True, True]
