"""Inside Lightning: the weights of a plain loop, on one process and two."""

import logging

import pytest
import torch
import torch.nn.functional as F

import loops
import megabatch as mb
from megabatch.integrations import trainers as host

lightning = pytest.importorskip("lightning", reason="pip install lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning's, of new PyTorch
]


class Contrastive(host.CachedModule, lightning.LightningModule):
    chunk_size = (2, 3)

    def __init__(self, accumulate, clip=None, scheduler=None):
        super().__init__()
        self.model = loops.Model()
        self.accumulate, self.clip, self.scheduler = accumulate, clip, scheduler
        self.losses, self.validated = [], []

    def towers(self, batch):
        return [(self.model.image, batch["image"]), (self.model.encode_text, batch["text"])]

    def embedding_loss(self, image, text, *, group):
        return mb.clip_loss(F.normalize(image, dim=1), text, host.full_tensor(self.model.log_scale).exp(), group=group)

    def training_step(self, batch, batch_idx):
        self.losses.append(super().training_step(batch, batch_idx).item())

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.batch_loss(batch).item())

    def on_before_optimizer_step(self, optimizer):
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), **loops.ADAM)
        if self.scheduler is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.scheduler}}


def trained(module, folder, world=1, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        max_epochs=loops.EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # it would shuffle
        **options,
    )
    pairs = loops.Pairs()
    sampler = torch.utils.data.DistributedSampler(pairs, shuffle=False) if world > 1 else None
    data = torch.utils.data.DataLoader(pairs, batch_size=loops.BATCH // world, sampler=sampler)
    trainer.fit(module, data, data)
    return {name: value.detach() for name, value in module.model.named_parameters()}, trainer


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, None), (3, 0.05)])
def test_lightning_follows_the_plain_loop(tmp_path, accumulate, clip):
    wanted, losses = loops.plainly_trained(accumulate, clip)
    module = Contrastive(accumulate, clip)
    found, trainer = trained(module, tmp_path)
    loops.assert_trained(found, wanted)
    assert module.losses == pytest.approx(losses, rel=1e-8)
    assert trainer.global_step == loops.EPOCHS * -(-loops.BATCHES // accumulate)
    assert module.validated[-1] == pytest.approx(loops.dense_loss(module.model, slice(-loops.BATCH, None)).item(), rel=1e-8)


def test_a_scaler_is_used(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    class WithoutAutocast(MixedPrecision):
        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    module = Contrastive(3)
    found, _ = trained(module, tmp_path, plugins=[WithoutAutocast("16-mixed", "cpu", scaler)])
    loops.assert_trained(found, loops.plainly_trained(3)[0])


@pytest.mark.parametrize(
    ("scheduler", "halved"),
    [({"interval": "step"}, 6), ({"interval": "step", "frequency": 2}, 3), ({"interval": "epoch"}, 2)],
    ids=["step", "every other step", "epoch"],
)
def test_schedulers_are_stepped(tmp_path, scheduler, halved):
    module = Contrastive(3, scheduler=scheduler)
    trained(module, tmp_path)
    assert module.optimizers().param_groups[0]["lr"] == loops.ADAM["lr"] / 2**halved  # of 6 steps in 2 epochs


def on_a_rank(group, rank, folder, accumulate, how):
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    logging.disable(logging.INFO)

    class Running(LightningEnvironment):
        """Processes that somebody else has started, and that know each other already."""

        creates_processes_externally = True

        def local_rank(self):
            return rank

        def set_global_rank(self, rank):
            pass

        def global_rank(self):
            return rank

    class Sharded(Contrastive):
        def configure_model(self):
            from torch.distributed.fsdp import fully_shard

            # The text tower has to be reached through both.
            fully_shard(self.model.image, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    if how == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        strategy.cluster_environment = Running()
    else:
        strategy = DDPStrategy(
            cluster_environment=Running(), process_group_backend="gloo", find_unused_parameters=how == "ddp, unused"
        )
    module = (Sharded if how == "fsdp2" else Contrastive)(accumulate)
    found, _ = trained(module, folder, world=group.size(), strategy=strategy)
    weights = {name: value.full_tensor() if how == "fsdp2" else value for name, value in found.items()}
    return weights, module.losses, module.validated


@pytest.mark.thorough
@pytest.mark.parametrize(("accumulate", "how"), [(1, "ddp"), (3, "ddp"), (3, "ddp, unused"), (3, "fsdp2")])
def test_lightning_follows_the_plain_loop_on_two_ranks(two, tmp_path, accumulate, how):
    wanted, losses = loops.plainly_trained(accumulate)
    answers = two.run(on_a_rank, 2, tmp_path, accumulate, how)
    for found, _, _ in answers:
        loops.assert_trained(found, wanted)
    shares = [sum(each) / 2 for each in zip(*(answer[1] for answer in answers), strict=True)]
    assert shares == pytest.approx(losses, rel=1e-8)
