"""Inside transformers' Trainer, and in a loop of Accelerate's: the weights of a plain loop, on one process and two."""

import os

import pytest
import torch
import torch.nn.functional as F

import loops
import megabatch as mb
from megabatch.integrations import trainers as host
from megabatch.world import is_sharded

accelerate = pytest.importorskip("accelerate", reason='pip install "megabatch[huggingface]"')


def forget_state():
    """Accelerate keeps one state for a process; a test has its own."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def as_rank(rank, world):
    """What a launcher would have set."""
    forget_state()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")


def weights(model):
    found = dict(model.named_parameters())
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in found.items()}


def trainer(folder, accumulate, world, **options):
    from transformers import Trainer, TrainingArguments

    class Contrastive(host.CachedTrainer, Trainer):
        chunk_size = (2, 3)

        def towers(self, module, inputs):
            return [(module, inputs["image"]), (module.encode_text, inputs["text"])]

        def embedding_loss(self, module, image, text, *, group):
            scale = host.full_tensor(module.log_scale).exp()
            return mb.clip_loss(F.normalize(image, dim=1), text, scale, group=group)

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=loops.EPOCHS,
        per_device_train_batch_size=loops.BATCH // world,
        per_device_eval_batch_size=loops.BATCH // world,
        gradient_accumulation_steps=accumulate,
        learning_rate=loops.ADAM["lr"],
        adam_epsilon=loops.ADAM["eps"],
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        **{"max_grad_norm": 0.0, **options},
    )
    return Contrastive(model=loops.Model(), args=arguments, train_dataset=loops.Pairs(), eval_dataset=loops.Pairs())


def trained(folder, accumulate, world=1, **options):
    made = trainer(folder, accumulate, world, **options)
    made.train()
    logged = [line["loss"] for line in made.state.log_history if "loss" in line]
    return weights(made.accelerator.unwrap_model(made.model)), logged


@pytest.fixture
def fresh():
    before = dict(os.environ)
    forget_state()
    yield
    forget_state()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, None), (3, 0.05)])
def test_the_trainer_follows_the_plain_loop(tmp_path, fresh, accumulate, clip):
    wanted, losses = loops.plainly_trained(accumulate, clip)
    found, logged = trained(tmp_path, accumulate, max_grad_norm=clip or 0.0)
    loops.assert_trained(found, wanted)
    if accumulate == 1:
        mean = sum(losses[: loops.BATCHES]) / loops.BATCHES
        assert logged[0] == pytest.approx(mean, rel=1e-3)  # the trainer's log is rounded


def test_the_trainer_evaluates(tmp_path, fresh):
    made = trainer(tmp_path, 1, 1)
    model = loops.Model()
    losses = [loops.dense_loss(model, slice(i * loops.BATCH, (i + 1) * loops.BATCH)).item() for i in range(loops.BATCHES)]
    assert made.evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def trainer_on_a_rank(group, rank, folder, accumulate, unused):
    as_rank(rank, group.size())
    return trained(folder, accumulate, group.size(), ddp_find_unused_parameters=unused)[0]


@pytest.mark.quick({"accumulate": 3, "unused": False})
@pytest.mark.parametrize(("accumulate", "unused"), [(1, False), (3, True), (3, False)])
@pytest.mark.thorough
def test_the_trainer_follows_the_plain_loop_on_two_ranks(two, tmp_path, accumulate, unused):
    wanted, _ = loops.plainly_trained(accumulate)
    for found in two.run(trainer_on_a_rank, 2, tmp_path, accumulate, unused):
        loops.assert_trained(found, wanted)


def looped(accelerator, steps):
    """A loop as Accelerate's documentation has it, with the cached step for `accelerator.backward`."""
    model = loops.Model()
    optimizer = torch.optim.AdamW(model.parameters(), **loops.ADAM)
    data = torch.utils.data.DataLoader(loops.Pairs(steps), batch_size=loops.BATCH // accelerator.num_processes)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    assert is_sharded(next(model.parameters())) == (accelerator.distributed_type.value == "FSDP")
    module = accelerator.unwrap_model(model)

    def loss_fn(image, text):
        image, scale = F.normalize(image, dim=1), host.full_tensor(module.log_scale).exp()
        return mb.clip_loss(image, text, scale, group=host.default_group())

    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            towers = [(module.image, batch["image"]), (module.encode_text, batch["text"])]
            losses.append(host.cached_backward(accelerator, model, loss_fn, towers, chunk_size=2))
            optimizer.step()
            optimizer.zero_grad()
    return weights(module), losses


def plain_accumulation(steps, accumulate):
    """As Accelerate accumulates: the last ones of an epoch are divided by as many as the others."""
    model, losses = loops.Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), **loops.ADAM)
    for i in range(steps):
        loss = loops.dense_loss(model, slice(i * loops.BATCH, (i + 1) * loops.BATCH))
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (i + 1) % accumulate == 0 or i + 1 == steps:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), losses


@pytest.mark.parametrize(("accumulate", "scale"), [(1, None), (3, None), (3, 2.0**10)])
def test_a_loop_of_accelerate(fresh, accumulate, scale):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if scale is not None:  # as it has one itself with fp16, on GPUs
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    found, losses = looped(accelerator, 7)
    wanted, expected = plain_accumulation(7, accumulate)
    loops.assert_trained(found, wanted)
    torch.testing.assert_close(losses, expected)


def loop_on_a_rank(group, rank, accumulate, sharded):
    as_rank(rank, group.size())
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if sharded:  # Accelerate offers FSDP2 on GPUs alone; what it does is the same on any device
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, accelerate.PartialState()):
            state.distributed_type = accelerate.DistributedType.FSDP
    found = looped(accelerator, 7)
    assert sharded == accelerator.is_fsdp2
    return found


@pytest.mark.parametrize(("accumulate", "sharded"), [(3, False), (3, True)], ids=["ddp", "fsdp2"])
def test_a_loop_of_accelerate_on_two_ranks(two, accumulate, sharded):
    wanted, losses = plain_accumulation(7, accumulate)
    answers = two.run(loop_on_a_rank, 2, accumulate, sharded)
    for found, _ in answers:
        loops.assert_trained(found, wanted)
    shares = [sum(each) / 2 for each in zip(*(answer[1] for answer in answers), strict=True)]
    torch.testing.assert_close(shares, losses)
