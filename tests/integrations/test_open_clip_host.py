"""Inside open_clip: its own training loop with our losses, the cached step for its models, its checkpoints."""

import argparse
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import clips
import megabatch as mb
from megabatch.integrations import open_clip as host
from megabatch_train import towers

open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')

STEPS, ROWS = 20, 6  # of a rank
# float64: two ways to the same gradient differ by about 1e-16. Adam makes lr / eps = 1e4 times that of it at most, where the
# gradient is nothing but rounding (a bias of keys has none), so 1e-12 a step; 20 steps, and what they do to one another.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
ADAM = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6}  # open_clip's for a ViT


class Batches:
    """What open_clip's loop takes for its data."""

    def __init__(self, steps, rank, world):
        self.rank, self.world, self.steps = rank, world, steps
        self.num_batches, self.num_samples, self.dataloader = steps, steps * ROWS * world, self

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        for step in range(self.steps):
            images, texts = clips.batch(ROWS * self.world, seed=step)
            part = slice(self.rank * ROWS, (self.rank + 1) * ROWS)
            yield images[part], texts[part]


def arguments(rank=0, world=1, siglip=False, distill=False, parts=1):
    return argparse.Namespace(
        device="cpu", precision="fp32", accum_freq=parts, skip_scheduler=False, distill=distill, siglip=siglip, model="tiny",
        horovod=False, local_loss=True, gather_with_grad=True, rank=rank, world_size=world, local_rank=rank,
        loss_dist_impl="gather", grad_clip_norm=None, log_every_n_steps=100, log_local=False, batch_size=ROWS, wandb=False,
    )  # fmt: skip


def trained(loss, rank=0, world=1, siglip=False, distill=False):
    """20 steps of open_clip's own loop; the weights after it."""
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch

    inner = model = clips.model(bias=-3.0 if siglip else None)
    if world > 1:
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    args = arguments(rank, world, siglip, distill)
    teacher = clips.model(seed=1) if distill else None
    scheduler = cosine_lr(optimizer, 1e-2, 3, STEPS)
    train_one_epoch(model, {"train": Batches(STEPS, rank, world)}, loss(args), 0, optimizer, None, scheduler, teacher, args)
    return inner.state_dict()


def ours(args):
    with host.install():
        loss = open_clip.create_loss(args)
    assert type(loss).__module__.startswith("megabatch.")
    return loss


def on_a_rank(group, rank, which, siglip):
    logging.disable(logging.INFO)
    loss = {"ours": ours, "theirs": open_clip.create_loss}[which]
    return trained(loss, rank, group.size(), siglip)


def assert_close(found, wanted, changed_from=None):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **CLOSE)
        if changed_from is not None and value.is_floating_point():
            assert (value - changed_from[name]).abs().max() > 1e-3, f"{name} has not been trained"


@pytest.mark.parametrize("case", [{}, {"siglip": True}, {"distill": True}], ids=["clip", "siglip", "distill"])
def test_its_loop_trains_to_the_same_weights(case):
    start = clips.model(bias=-3.0 if case.get("siglip") else None).state_dict()
    assert_close(trained(ours, **case), trained(open_clip.create_loss, **case), start)


@pytest.mark.thorough
@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
def test_its_loop_trains_to_the_same_weights_on_two_ranks(two, siglip):
    found, wanted = (two.run(on_a_rank, 2, which, siglip) for which in ("ours", "theirs"))
    for ours_there, theirs_there in zip(found, wanted, strict=True):
        assert_close(ours_there, theirs_there)
    assert_close(found[1], found[0])


def plain(model, loss, rows=7, teacher=None, inputs=None):
    images, texts = clips.batch(rows) if inputs is None else inputs
    output = model(images, texts)
    if teacher is not None:
        with torch.no_grad():
            output |= {f"dist_{name}": value for name, value in teacher(images, texts).items()}
    losses = loss(**output, output_dict=True)
    sum(losses.values()).backward()
    return {name: value.detach() for name, value in losses.items()}, clips.gradients(model)


def accumulate(parts, siglip=False, locked=None):
    """One step of open_clip's own loop with `--accum-freq`; the loss it was given."""
    from open_clip_train.train import train_one_epoch

    model = clips.model(bias=-3.0 if siglip else None)
    if locked:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("logit_") or name.startswith("visual.") == (locked == "text"))
    args, data = arguments(siglip=siglip, parts=parts), Batches(parts, 0, 1)
    loss, optimizer = ours(args), torch.optim.SGD(model.parameters(), lr=1e-3)
    train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, lambda step: None, None, args)
    return loss


@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
@pytest.mark.parametrize("locked", [None, "image", "text"])
def test_its_accumulation_is_refused(siglip, locked):
    """Its loop adds the gradients of scale and bias once for every part."""
    for parts in (2, 3):
        with pytest.raises(ValueError, match=rf"--accum-freq must be 1 .*got features of {parts} parts.*cached_backward"):
            accumulate(parts, siglip, locked)


@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
def test_a_loss_of_create_loss_works_in_other_loops(siglip):
    """Among them are loops that concatenate features that all have a graph."""
    loss = accumulate(1, siglip)
    model, (images, texts) = clips.model(bias=-3.0 if siglip else None), clips.batch(7)
    wanted = plain(clips.model(bias=-3.0 if siglip else None), mb.SigLipLoss() if siglip else mb.ClipLoss())[1]
    torch.testing.assert_close(plain(model, loss)[1], wanted, rtol=1e-9, atol=1e-11)
    model.zero_grad()
    host.cached_backward(model, images, texts, loss, chunk_size=3)
    torch.testing.assert_close(clips.gradients(model), wanted, rtol=1e-9, atol=1e-11)
    model.zero_grad()
    halves = [model(images[part], texts[part]) for part in (slice(0, 3), slice(3, 7))]
    features = {name: torch.cat([half[name] for half in halves]) for name in ("image_features", "text_features")}
    loss(**{**halves[0], **features}).backward()
    torch.testing.assert_close(clips.gradients(model), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["CLIP", "CustomTextCLIP"])
@pytest.mark.parametrize("bias", [None, -3.0])
def test_the_cached_step_has_the_gradients_of_the_plain_one(kind, bias):
    loss = open_clip.ClipLoss() if bias is None else open_clip.loss.SigLipLoss()
    losses, wanted = plain(clips.model(kind, bias), loss)
    for mine, options in [(mb.ClipLoss() if bias is None else mb.SigLipLoss(), {}), (loss, {"budget": 10**9})]:
        model = clips.model(kind, bias)
        found = host.cached_backward(model, *clips.batch(7), mine, chunk_size=(3, 2), **options)
        torch.testing.assert_close(found["contrastive_loss"], losses["contrastive_loss"])
        assert torch.equal(found["loss"], found["contrastive_loss"])
        torch.testing.assert_close(clips.gradients(model), wanted, rtol=1e-9, atol=1e-11)
        assert ("logit_bias" in wanted) == (bias is not None)


def captions(rows, length, longest):
    """Texts of 2 to `longest` tokens: the last one is the end token, which has the largest id, and zeros follow."""
    texts = torch.randint(1, clips.VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(0))
    for i, text in enumerate(texts):
        end = 1 + i * (longest - 2) // max(1, rows - 1)
        text[end], text[end + 1 :] = clips.VOCABULARY - 1, 0
    return texts


@pytest.mark.quick({"how": "alone", "kind": "CLIP"}, {"how": "taught", "kind": "CustomTextCLIP"})
@pytest.mark.parametrize("kind", ["CLIP", "CustomTextCLIP"])
@pytest.mark.parametrize("how", ["alone", "taught", "compiled"])
def test_the_cached_step_cuts_texts_after_their_end_token(kind, how):
    (images, _), texts = clips.batch(9), captions(9, 40, 24)
    make = partial(clips.model, kind, length=40)
    taught = {"teacher": make(seed=1)} if how == "taught" else {}
    loss = (open_clip.DistillClipLoss if taught else open_clip.ClipLoss)()
    wanted, model = make(), make()
    output = wanted(images, texts)
    if taught:
        with torch.no_grad():
            output |= {f"dist_{name}": value for name, value in taught["teacher"](images, texts).items()}
    sum(loss(**output, output_dict=True).values()).backward()
    widths = []
    (model if kind == "CLIP" else model.text).transformer.register_forward_pre_hook(lambda _, x: widths.append(x[0].shape[1]))
    if how == "compiled":
        model.compile(backend="eager")
    mine = host.DistillClipLoss() if taught else mb.ClipLoss()
    host.cached_backward(model, images, texts, mine, chunk_size=3, **taught)
    torch.testing.assert_close(clips.gradients(model), clips.gradients(wanted), rtol=1e-9, atol=1e-11)
    assert set(widths) == ({40} if how == "compiled" else {8, 16, 24})
    assert "encode_text" not in vars(model)


def test_the_cached_step_distils():
    losses, wanted = plain(clips.model(), open_clip.DistillClipLoss(), teacher=clips.model(seed=1))
    model, teacher = clips.model(), clips.model(seed=1)
    found = host.cached_backward(model, *clips.batch(7), host.DistillClipLoss(), teacher=teacher, chunk_size=3)
    assert found.keys() == {*losses, "loss"}
    for name, value in losses.items():
        torch.testing.assert_close(found[name], value)
    torch.testing.assert_close(found["loss"], sum(losses.values()))
    torch.testing.assert_close(clips.gradients(model), wanted, rtol=1e-9, atol=1e-11)
    assert not clips.gradients(teacher)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_model_that_answers_with_a_tuple(compiled):
    model = clips.model(bias=-3.0)
    wanted = plain(model, mb.SigLipLoss())[1]
    model.zero_grad()
    model.output_dict = False
    called = torch.compile(model, backend="eager") if compiled else model
    host.cached_backward(called, *clips.batch(7), mb.SigLipLoss(), chunk_size=4)
    torch.testing.assert_close(clips.gradients(model), wanted, rtol=1e-9, atol=1e-11)


def bias_where(how):
    """DDP that looks for unused parameters fails, in open_clip's own loop too, with a model that returns its bias itself."""
    return None if how == "ddp, unused" else -3.0


def shared(group, rank, how):
    """The cached step on this rank's part of seven pairs: three and four."""
    from torch.distributed.fsdp import fully_shard

    bias = bias_where(how)
    inner = model = clips.model(bias=bias, nonscalar=True)
    if how == "fsdp2":
        fully_shard(model.transformer.resblocks[0])
        fully_shard(model, reshard_after_forward=True)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=how == "ddp, unused")
    images, texts = (part.split([3, 4])[rank] for part in clips.batch(7))
    loss = (mb.ClipLoss if bias is None else mb.SigLipLoss)(rank=rank, world_size=2)
    results = []
    for _ in range(2):  # DDP arranges its buckets anew after the first
        model.zero_grad()
        share = host.cached_backward(model, images, texts, loss, chunk_size=2)["loss"]
        found = clips.gradients(inner)
        results.append((share, {name: g.full_tensor() if how == "fsdp2" else g for name, g in found.items()}))
    return results


@pytest.mark.quick({"how": "ddp"}, {"how": "fsdp2"})
@pytest.mark.parametrize("how", ["ddp", "ddp, unused", "fsdp2"])
@pytest.mark.thorough
def test_the_cached_step_on_uneven_ranks(two, how):
    bias = bias_where(how)
    losses, wanted = plain(clips.model(bias=bias, nonscalar=True), mb.ClipLoss() if bias is None else mb.SigLipLoss())
    for shares in zip(*two.run(shared, 2, how), strict=True):
        torch.testing.assert_close(sum(share for share, _ in shares) / 2, losses["contrastive_loss"])
        for _, found in shares:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_models_whose_loss_needs_more_than_features_are_refused():
    class Captioner(torch.nn.Module):
        logit_scale = torch.nn.Parameter(torch.zeros(()))

        def forward(self, image=None, text=None):
            return {"image_features": image, "text_features": text, "logits": image}

    with pytest.raises(TypeError, match=r"model .*got Captioner.* logits"):
        host.cached_backward(Captioner(), torch.ones(2, 3), torch.ones(2, 3), mb.ClipLoss())


def test_install_says_what_it_does_and_undoes_it():
    factory = open_clip.factory
    before = factory.ClipLoss, factory.SigLipLoss, factory.DistillClipLoss
    create_loss = open_clip.create_loss  # as a script has imported it before
    installed = host.install()
    try:
        assert "megabatch's ClipLoss, SigLipLoss, DistillClipLoss" in str(installed)
        assert set(installed.replaced.values()) == set(before)
        for case, ours_there in [({}, mb.ClipLoss), ({"siglip": True}, mb.SigLipLoss), ({"distill": True}, mb.DistillClipLoss)]:
            assert type(create_loss(arguments(rank=1, world=2, **case))) is ours_there
        with host.install() as again:  # one inside the other changes nothing
            assert again.replaced == {}
        assert type(create_loss(arguments())) is mb.ClipLoss
    finally:
        installed.uninstall()
    assert (factory.ClipLoss, factory.SigLipLoss, factory.DistillClipLoss) == before
    assert type(create_loss(arguments())) is open_clip.ClipLoss
    assert "builds open_clip's losses" in str(installed)


def test_install_refuses_versions_it_does_not_know(monkeypatch):
    factory = open_clip.factory

    class Changed(open_clip.ClipLoss):
        def forward(self, image_features, text_features, logit_scale, temperature_schedule=None, output_dict=False):
            raise AssertionError

    own = factory.SigLipLoss
    monkeypatch.setattr(factory, "ClipLoss", Changed)
    message = rf"ClipLoss.forward must take .*got also temperature_schedule in open_clip {open_clip.__version__}; nothing was"
    with pytest.raises(RuntimeError, match=message):
        host.install()
    assert factory.SigLipLoss is own
    monkeypatch.delattr(factory, "ClipLoss")
    with pytest.raises(RuntimeError, match="must have a class ClipLoss to replace, got none"):
        host.install()
    monkeypatch.undo()
    monkeypatch.setattr(factory, "create_loss", lambda args: None)
    with pytest.raises(RuntimeError, match="must be open_clip's own function"):
        host.install()


def an_optimizer(model):
    from open_clip_train.scheduler import cosine_lr

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, cosine_lr(optimizer, 1e-2, 3, STEPS)


def step(model, optimizer, seed=0):
    host.cached_backward(model, *clips.batch(5, seed), mb.ClipLoss(), chunk_size=2)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_open_clip_is_continued(tmp_path, prefix):
    model = clips.model()
    optimizer, scheduler = an_optimizer(model)
    scheduler(5)
    step(model, optimizer)
    checkpoint = {  # as open_clip's main writes it
        "epoch": 3,
        "name": "run",
        "state_dict": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(checkpoint, tmp_path / "epoch_3.pt")
    again = clips.model(seed=1)
    other, _ = an_optimizer(again)
    assert host.load_checkpoint(tmp_path / "epoch_3.pt", again, other) == 3
    for one, its in [(model, optimizer), (again, other)]:
        step(one, its, seed=1)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match=r"bare.pt .* got \["):
        host.load_checkpoint(tmp_path / "bare.pt", again)


def test_open_clip_reads_our_checkpoints_and_we_its_weights(tmp_path):
    from open_clip_train.file_utils import pt_load

    model = clips.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    path = tmp_path / "checkpoints" / "epoch_1.pt"
    host.save_checkpoint(path, model, optimizer, epoch=1, scaler=SimpleNamespace(state_dict=lambda: {"scale": 2.0}))
    read = pt_load(str(path), map_location="cpu")  # as `--resume` reads it
    assert (read["epoch"], read["scaler"]) == (1, {"scale": 2.0})
    wrapped = torch.nn.ModuleDict({"module": clips.model(seed=1)})  # the names of a model in DDP
    wrapped.load_state_dict(read["state_dict"])
    torch.optim.AdamW(wrapped.parameters()).load_state_dict(read["optimizer"])
    alone = clips.model(seed=1)
    open_clip.load_checkpoint(alone, str(path))
    for name, value in model.state_dict().items():
        assert torch.equal(wrapped.state_dict()[f"module.{name}"], value)
        assert torch.equal(alone.state_dict()[name], value)


@pytest.mark.thorough
def test_towers_are_loaded_from_a_training_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = open_clip.create_model("ViT-S-32-alt")
    host.save_checkpoint(tmp_path / "epoch_1.pt", model, torch.optim.AdamW(model.parameters()), epoch=1)
    pair = towers.load(f"open_clip:ViT-S-32-alt@{tmp_path / 'epoch_1.pt'}")
    for name, value in model.state_dict().items():
        assert torch.equal(pair.first.module.model.state_dict()[name], value)
    towers.save(pair, tmp_path / "run")
    again = open_clip.create_model(f"local-dir:{tmp_path / 'run'}")
    assert torch.equal(again.state_dict()["visual.proj"], model.state_dict()["visual.proj"])
