"""Every loss from the command line, with what it takes beside the pairs: hard negatives, labels, a teacher, a guide."""

import json
import typing
from pathlib import Path

import pytest
import torch

import megabatch as mb
from megabatch.world import World
from megabatch_train import cli, settings, towers
from megabatch_train.commands import train
from megabatch_train.data.load import WithNegatives
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import encode, results
from megabatch_train.trainer.checkpoints import read_weights
from megabatch_train.trainer.config import LossConfig, Name
from megabatch_train.trainer.loss import LossInputs, Objective, ReadablePairs
from megabatch_train.trainer.run import MetricsFile

ALONE = World(torch.device("cpu"))
ROWS = [
    {"query": f"q{i}", "positive": f"p{i}", "negative": [f"n{i}", f"p{(i + 1) % 12}"][: 1 + i % 2], "label": "abc"[i % 3]}
    for i in range(12)
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_list_observers", lambda args: [MetricsFile()])
    (tmp_path / "hard.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps({k: v for k, v in row.items() if k != "negative"}) for row in ROWS)
    )
    (tmp_path / "bare.jsonl").write_text("\n".join(json.dumps({k: row[k] for k in ("query", "positive")}) for row in ROWS))
    options = "width = 16\nbuckets = 256\ndropout = 0.0\n"
    (tmp_path / "small.toml").write_text(f'data = "pairs.jsonl"\nbatch_size = 6\nsteps = 2\n[model_options]\n{options}')
    return tmp_path


def call(*arguments):
    return cli.main(["train", "--config", "small.toml", "--no-report", *arguments])


def unit(seed, rows=6, width=8):
    z = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(z, dim=1)


def objective(name, **options):
    return Objective(LossConfig(name, **options), 5.0, None, torch.float64)


def test_each_loss_is_the_loss_of_its_name():
    x, y, t, u, hard, ids = unit(1), unit(2), unit(3), unit(4), unit(5, 3), torch.arange(6) // 2
    labels, owners, negative_ids = torch.tensor([0, 1, 0, 1, 2, 2]), torch.tensor([0, 3, 5]), torch.tensor([-1, 0, -3])
    negatives = mb.Negatives(hard, ids=negative_ids, owner=owners)
    inputs, taught = LossInputs(labels, None, owners, negative_ids), LossInputs(teacher=(t, u))
    scale = torch.tensor(5.0, dtype=torch.float64).log().exp()
    cases = {
        "clip": (objective("clip")(x, y, ids, ALONE), mb.clip_loss(x, y, scale, ids=ids)),
        "siglip": (objective("siglip", scale=5.0, bias=-1.0)(x, y, ids, ALONE), mb.siglip_loss(x, y, scale, -1.0, ids=ids)),
        "info_nce": (
            objective("info_nce", margin=0.1)(x, y, ids, ALONE, inputs, hard),
            mb.info_nce_loss(x, y, scale=scale, negatives=negatives, ids=ids, margin=0.1),
        ),
        "dcl": (
            objective("dcl", symmetric=True, guide="x")(x, y, ids, ALONE, taught),
            mb.dcl_loss(x, y, scale=scale, ids=ids, symmetric=True, guide=(t, u)),
        ),
        "hcl": (
            objective("hcl", beta=0.5, tau_plus=0.05)(x, y, ids, ALONE, inputs, hard),
            mb.hcl_loss(x, y, scale=scale, negatives=negatives, ids=ids, beta=0.5, tau_plus=0.05),
        ),
        "late_interaction": (
            Objective(LossConfig("late_interaction", symmetric=True), 5.0, None, torch.float64, 4)(x, y, ids, ALONE),
            mb.late_interaction_loss(x.view(6, 2, 4), y.view(6, 2, 4), scale, ids=ids, symmetric=True),
        ),
        "nt_xent": (objective("nt_xent")(x, y, ids, ALONE), mb.nt_xent_loss(x, y, scale)),
        "sup_con": (
            objective("sup_con")(x, y, ids, ALONE, inputs),
            mb.sup_con_loss(torch.cat([x, y]), labels.repeat(2), scale),
        ),
        "matryoshka": (
            objective("matryoshka", widths=(4, 8))(x, y, ids, ALONE),  # 8 columns in all
            mb.matryoshka_clip_loss(x, y, scale, widths=[4, 8], ids=ids),
        ),
        "distill": (
            objective("distill", teacher="x", teacher_weight=0.5)(x, y, ids, ALONE, taught),
            mb.clip_loss(x, y, scale, ids=ids) + 0.5 * mb.soft_clip_loss(x, y, scale, t, u, 1.0),
        ),
    }
    assert set(cases) == set(typing.get_args(Name))
    for name, (found, wanted) in cases.items():
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0, msg=name)


def test_matryoshka_trains_the_full_dimension_too(caplog):
    caplog.set_level("INFO")
    x, y = unit(1).requires_grad_(), unit(2)
    made = objective("matryoshka", widths=(4,))
    for _ in range(2):
        loss = made(x, y, None, ALONE)
    wanted = mb.matryoshka_clip_loss(x, y, made.log_scale.exp(), widths=[4, x.shape[1]])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    loss.backward()
    assert x.grad[:, 4:].abs().min() > 0
    assert caplog.text.count(f"loss.widths [4] do not contain the full dim {x.shape[1]}, so the full dim is trained, too") == 1


def test_unreadable_pairs_go_with_their_negatives_labels_and_teacher():
    x, second, hard, t, u = unit(1), unit(2), unit(5, 4), unit(3), unit(4)
    owners, usable = torch.tensor([0, 1, 1, 4]), torch.tensor([True, False, True, True, True, False])
    made = objective("info_nce")
    made.inputs_of = lambda indices: LossInputs(owners=owners, negative_ids=torch.tensor([-1, -2, -3, -4]))
    loss = ReadablePairs(made, ALONE, lambda: usable, torch.arange(6), {}, torch.arange(6))(x, torch.cat([second, hard]))
    kept = mb.Negatives(hard[[0, 3]], ids=torch.tensor([-1, -4]), owner=torch.tensor([0, 3]))
    scale = made.log_scale.exp()
    wanted = mb.info_nce_loss(x[usable], second[usable], scale=scale, negatives=kept, ids=torch.arange(6)[usable])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    made = objective("distill", teacher="x")
    made.inputs_of = lambda indices: LossInputs(teacher=(t, u))
    loss = ReadablePairs(made, ALONE, lambda: usable, None, {}, torch.arange(6))(x, second)
    part = (x[usable], second[usable], made.log_scale.exp())
    wanted = mb.clip_loss(*part) + mb.soft_clip_loss(*part, t[usable], u[usable], 1.0)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)


def test_hard_negatives_of_a_table(place):
    table = Table(place / "hard.jsonl")
    assert (table.negative_columns, table.label_column) == (("negative",), "label")
    hard = WithNegatives(table)
    numbers = table.negatives_of([3, 0, 5]).tolist()
    assert [table.read(number, 1) for number in numbers] == ["n3", "p4", "n0", "n5", "p6"]
    assert hard.owners([3, 0, 5]).tolist() == [0, 0, 1, 2, 2]
    found = hard.negative_ids([3, 0, 5]).tolist()
    assert [found[1], found[4]] == table.ids([4, 6]).tolist()  # the positives of other rows
    assert all(number < 0 for number in (found[0], found[2], found[3]))
    assert table.labels([0, 3, 1]).tolist() == [0, 0, 1]
    many = place / "many.csv"
    many.write_text("query,positive,negative_1,negative_2\na,b,c,d\ne,f,,g\n")
    assert Table(many)._negatives == ["c", "d", "g"]
    named = {"query": "query", "document": "positive"}
    assert Table(many, columns=named).negative_columns == ("negative_1", "negative_2")
    assert Table(many, columns={**named, "negative": ""}).negative_columns == ()


def test_a_step_with_hard_negatives_is_the_loss_with_them(place):
    assert call("--data", "hard.jsonl", "--loss", "info_nce", "--steps", "1", "--output", "mine", "--set", "seed=3") == 0
    config = settings.read("mine/config.toml")
    torch.manual_seed(0)
    from megabatch.cached import second_pass

    second_pass.seed_host(3)
    pair = towers.load("small", ("text", "text"), **config["model_options"])
    from megabatch_train.data.loader import Order

    (batch,) = Order(12, 6, 3).batches(0, 1)
    indices, table = batch.indices.tolist(), Table("hard.jsonl")
    hard = [table.read(number, 1) for number in table.negatives_of(indices).tolist()]
    one, two, three = (
        encode(pair.second, texts) for texts in ([table.read(i, 0) for i in indices], [table.read(i, 1) for i in indices], hard)
    )
    wrapped = WithNegatives(table)
    negatives = mb.Negatives(three, ids=wrapped.negative_ids(indices), owner=wrapped.owners(indices))
    wanted = mb.info_nce_loss(one, two, scale=10.0, negatives=negatives, ids=table.ids(indices))
    assert results.read("mine/metrics.jsonl")[0]["loss"] == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss", "info_nce", "--data", "hard.jsonl"],
        ["--loss", "hcl", "--data", "hard.jsonl", "--set", "loss.symmetric=true"],
        ["--loss", "sup_con"],
        ["--loss", "nt_xent"],
        ["--loss", "matryoshka", "--set", "loss.widths=[4, 8, 16]"],
        ["--loss", "distill", "--set", "loss.teacher=teacher"],
        ["--loss", "info_nce", "--set", "loss.guide=teacher"],
    ],
)
def test_the_command_trains_resumes_and_evaluates_with_every_loss(place, flags):
    assert call("--steps", "1", "--output", "teacher") == 0
    assert call(*flags, "--output", "mine") == 0
    assert cli.main(["train", "--resume", "mine", "--steps", "3", "--no-report"]) == 0
    assert [line["step"] for line in results.read("mine/metrics.jsonl")] == [1, 2, 3]
    assert cli.main(["eval", "mine"]) == 0


@pytest.mark.parametrize("flags", [["distill", "--set", "loss.teacher=teacher"], ["info_nce", "--set", "loss.guide=teacher"]])
def test_a_taught_run_that_resumes_ends_with_the_same_bits(place, flags):
    assert call("--steps", "1", "--output", "teacher") == 0
    flags = ["--loss", *flags, "--set", "model_options.dropout=0.5", "--set", "checkpoint.every=2", "--steps", "4"]
    assert call(*flags, "--output", "whole") == 0
    again = ["--resume", "whole/checkpoints/step_00000002", "--output", "again", "--no-report"]
    assert cli.main(["train", *again]) == 0
    first, second = (read_weights(Path(f"{run}/checkpoints/step_00000004"))[0] for run in ("whole", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data", "hard.jsonl", "--loss", "info_nce", "--set", "freeze=second"],
            "hard negatives … frozen … keep_frozen=false",
        ),
        (["--data", "hard.jsonl"], "the data has hard negatives in the column negative, but the loss clip cannot use them"),
        (
            ["--data", "hard.jsonl", "--loss", "info_nce", "--set", "loss.guide=x"],
            "a loss with a guide (loss.guide) cannot use them",
        ),
        (["--loss", "matryoshka"], "loss.widths must be given for the loss 'matryoshka'"),
        (["--set", "loss.widths=[4]"], "loss.widths is for the losses matryoshka, got loss.name = 'clip'"),
        (["--set", "loss.bias=-5"], "loss.bias is for the losses siglip, got loss.name = 'clip'"),
        (["--loss", "dcl", "--set", "loss.tau_plus=0.2"], "loss.tau_plus is for the losses hcl, got loss.name = 'dcl'"),
        (["--loss", "distill"], "loss.teacher must be given"),
        (
            ["--data", "bare.jsonl", "--loss", "sup_con"],
            "sup_con needs a table with a column of labels",
        ),
    ],
)
def test_losses_that_lack_something_say_what(place, capsys, flags, message):
    assert call(*flags) == 1
    told = capsys.readouterr().err
    assert all(part in told for part in message.split(" … ")), told


def test_prompts_are_part_of_the_model(place):
    prompts = ["--set", "model_options.query_prompt=ask: ", "--set", "model_options.document_prompt=tell: "]
    assert call(*prompts, "--output", "mine") == 0
    pair, plain = towers.load_saved("mine"), towers.load_saved("mine")
    inner = [tower.prepare.inner for tower in plain.towers]
    assert pair.towers[0].prepare("x", None).tolist() == inner[0]("ask: x", None).tolist()
    assert pair.towers[1].prepare("x", None).tolist() == inner[1]("tell: x", None).tolist()
    assert pair.first.module is pair.second.module
    with pytest.raises(ValueError, match='max_length is for models "hf:"'):
        towers.load("small", ("text", "text"), max_length=3)


def test_the_longest_text_of_an_encoder_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 16, "vocab_size": 99, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"max_length": 5, "query_prompt": "query: "}
    pair = towers.load(f"hf-config:{tmp_path}", ("text", "text"), **options)
    for made in (pair, towers.load_saved(towers.save(pair, tmp_path / "saved").parent)):
        assert len(made.second.prepare("a b c d e f g h", None)) == 5
        assert encode(made.first, ["x"]).ne(encode(made.second, ["x"])).any()
        assert made.options == options
    with pytest.raises(ValueError, match="max_length must be from 1 to 64 tokens, got 65"):
        towers.load(f"hf-config:{tmp_path}", ("text", "text"), max_length=65)
