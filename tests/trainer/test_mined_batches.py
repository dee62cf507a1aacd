"""Runs with batches of groups or of one source: resumed runs, ranks, new groups during a run, and settings that do not fit."""

import argparse
import dataclasses
import json

import pytest
import torch

import runs
import word_pairs
from megabatch_train import cli, commands
from megabatch_train.data import batches
from megabatch_train.data.load import Mix
from megabatch_train.evaluation import results
from megabatch_train.trainer import loop, stages
from megabatch_train.trainer.config import TrainConfig, anchor_paths
from megabatch_train.trainer.health import StoppedError
from megabatch_train.trainer.stages import MINED

MINING = {"batches": "mined", "mining": {"every": 3, "group_size": 4, "neighbors": 6}, "ema": 0.9, "steps": 9}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def watch(made):
    """The samples of each step, in the order in which they are read."""
    seen = {}
    train_step = made._train_step

    def recorded(stage, step, inputs, *others):
        seen[inputs.batch.number] = inputs.batch.indices.clone()
        return train_step(stage, step, inputs, *others)

    made._train_step = recorded
    return seen


def finish(folder, changes=MINING, **options):
    made = runs.trainer(folder, changes, **options)
    seen = watch(made)
    made.fit()
    return made, seen


def test_groups_are_mined_again_and_a_resumed_run_has_the_same_batches(tmp_path):
    """The run is stopped after step 4: its groups are those of step 3, and it is in the middle of an epoch of three steps."""
    made, wanted = finish(tmp_path / "whole")
    numbers = runs.Numbers()
    stopped = runs.trainer(tmp_path / "run", MINING, data=numbers)
    first = watch(stopped)
    train_step = stopped._train_step

    def stop_after_four(*arguments):
        if stopped.step == 3:
            import signal

            signal.raise_signal(signal.SIGTERM)
        return train_step(*arguments)

    stopped._train_step = stop_after_four
    with pytest.raises(StoppedError, match="after step 4 of 9"):
        stopped.fit()
    again = runs.trainer(tmp_path / "run", MINING)
    rest = watch(again)
    assert again.resume()
    again.fit()
    assert sorted(first | rest) == sorted(wanted)
    assert sorted(rest) == [4, 5, 6, 7, 8]
    for number, indices in (first | rest).items():
        assert torch.equal(indices, wanted[number])
    assert runs.same_bits(runs.weights(again), runs.weights(made)) == []
    epoch = torch.cat([wanted[number] for number in range(3)])
    assert len(torch.unique(epoch)) == len(epoch)  # groups change at its end
    other = runs.trainer(tmp_path / "other", MINING)  # a checkpoint of another folder
    moved = watch(other)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[-2]
    assert other.resume(newest)
    other.fit()
    assert all(torch.equal(indices, wanted[number]) for number, indices in moved.items())
    for path in (tmp_path / "run" / MINED).iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="must have the groups of the run before step 10, got none"):
        runs.trainer(tmp_path / "run", MINING).resume()


def test_a_run_that_resumes_at_a_search_repeats_it(tmp_path):
    """The checkpoint of step 6 was saved before the search after step 6."""
    changes = {**MINING, "checkpoint": {"every": 3, "keep": 10}}
    _, wanted = finish(tmp_path / "whole", changes)
    for has_file in (True, False):
        if not has_file:
            (tmp_path / "whole" / MINED / "step_00000006.safetensors").unlink()
        again = runs.trainer(tmp_path / f"run {has_file}", changes)
        seen = watch(again)
        assert again.resume(tmp_path / "whole" / "checkpoints" / "step_00000006")
        again.fit()
        assert sorted(seen) == [6, 7, 8]
        assert all(torch.equal(indices, wanted[number]) for number, indices in seen.items())


def test_a_run_can_end_at_a_search_that_is_stored(tmp_path):
    changes = {**MINING, "checkpoint": {"every": 3, "keep": 10}}
    finish(tmp_path, changes)
    again = runs.trainer(tmp_path, {**changes, "steps": 6})
    assert again.resume(tmp_path / "checkpoints" / "step_00000006")
    again.fit()
    assert again.step == 6


def test_groups_that_no_checkpoint_needs_are_deleted(tmp_path):
    finish(tmp_path, {**MINING, "steps": 16})
    files = [int(path.stem.removeprefix("step_")) for path in (tmp_path / MINED).iterdir()]
    assert max(files) == 15
    assert 0 not in files
    finish(tmp_path, {"steps": 2})  # a new run in this folder
    assert not list((tmp_path / MINED).iterdir())


def test_new_groups_within_an_epoch_repeat_no_sample(tmp_path):
    changes = {**MINING, "mining": {"every": 2, "group_size": 4, "neighbors": 6}, "steps": 6}
    made, seen = finish(tmp_path / "run", changes)
    assert made.order.batches_per_epoch == 3
    for epoch in (0, 1):
        samples = torch.cat([seen[3 * epoch + number] for number in range(3)])
        assert len(torch.unique(samples)) == 36
    _, plain = finish(tmp_path / "random", {"steps": 6, "ema": 0.9})
    assert not torch.equal(torch.cat([plain[number] for number in range(6)]), torch.cat([seen[number] for number in range(6)]))


def test_an_epoch_that_continues_in_another_stage_repeats_no_sample(tmp_path, monkeypatch):
    """The last steps keep all patches, as with `schedule.unmask_fraction`: stages with one schedule share their epochs."""
    plan = loop.plan_stages

    def plan_two(*arguments):
        (whole,) = plan(*arguments)
        return [dataclasses.replace(whole, stop=5), dataclasses.replace(whole, first=5)]

    monkeypatch.setattr(loop, "plan_stages", plan_two)
    _, seen = finish(tmp_path, {**MINING, "mining": {"every": 4, "group_size": 4, "neighbors": 6}, "steps": 6})
    assert len(torch.unique(torch.cat([seen[number] for number in (3, 4, 5)]))) == 36


def test_a_checkpoint_of_another_folder_replaces_the_groups_of_this_folder(tmp_path):
    changes = {**MINING, "checkpoint": {"every": 2, "keep": 10}}
    finish(tmp_path / "one", {**changes, "steps": 4})
    finish(tmp_path / "two", {**changes, "mining": {"every": 4, "group_size": 4, "neighbors": 6}, "steps": 6})
    made = runs.trainer(tmp_path / "two", changes)
    assert made.resume(tmp_path / "one" / "checkpoints" / "step_00000004")
    assert [path.stem for path in (tmp_path / "two" / MINED).iterdir()] == ["step_00000003"]


def test_neighbors_are_not_searched_under_autocast(tmp_path, monkeypatch):
    saw, find_neighbors = [], stages.find_neighbors

    def find(*arguments, **options):
        saw.append(torch.is_autocast_enabled("cpu"))
        return find_neighbors(*arguments, **options)

    monkeypatch.setattr(stages, "find_neighbors", find)
    finish(tmp_path, {**MINING, "precision": "bf16"})
    assert saw == [False] * 3


def test_a_new_run_needs_its_file_of_groups(tmp_path):
    """A killed run has left groups in the folder, and no checkpoint."""
    path = tmp_path / "groups.safetensors"
    batches.write_groups(path, {"groups": torch.arange(40) % 10}, {"samples": batches.fingerprint(runs.Numbers())})
    changes = {"batches": "mined", "batch_groups": str(path), "steps": 3}
    runs.trainer(tmp_path / "run", changes)._miner.start()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="No such file"):
        finish(tmp_path / "run", changes)


def test_batches_have_whole_groups_of_hard_negatives(tmp_path):
    changes = {**MINING, "mining": {"every": 100, "group_size": 4, "neighbors": 6}, "steps": 3}
    _, seen = finish(tmp_path / "run", changes)
    groups = batches.read_groups(tmp_path / "run" / MINED / "step_00000000.safetensors")[0]["groups"]
    assert torch.bincount(groups).tolist() == [4] * 10
    for indices in seen.values():
        assert (torch.unique(groups[indices], return_counts=True)[1] == 4).all()
        assert len(torch.unique(indices // 2)) > 6  # pairs with one id are in different groups


def mine_on_rank(group, rank, folder, changes):
    from megabatch.world import World

    made = runs.trainer(folder, changes, world=World(torch.device("cpu"), group))
    seen = watch(made)
    made.fit()
    return seen


def test_the_order_is_the_same_for_any_number_of_ranks(pool, tmp_path):
    """The towers are in float64, so that the neighbors do not depend on rounding."""
    changes = {**MINING, "ema": 0.0, "steps": 5}
    _, wanted = finish(tmp_path / "one", changes)
    found = pool.run(mine_on_rank, 3, tmp_path / "three", changes)
    for number, indices in wanted.items():
        assert torch.equal(torch.cat([seen[number] for seen in found]), indices)


def test_stages_have_groups_of_one_file(tmp_path):
    data, path = runs.Numbers(), tmp_path / "groups.safetensors"
    groups = torch.arange(40) % 10
    batches.write_groups(path, {"groups": groups}, {"samples": batches.fingerprint(data), "data": "numbers"})
    changes = {
        "batches": "mined",
        "batch_groups": str(path),
        "steps": 0,
        "stage": [{"steps": 4}, {"steps": 4, "batch_size": 8}],
    }
    _, wanted = finish(tmp_path / "run", changes)
    for number in range(8):
        counts = torch.unique(groups[wanted[number]], return_counts=True)[1]
        assert (counts == 4).all()
        assert counts.sum() == (12 if number < 4 else 8)
    path.unlink()  # the run keeps a copy
    again = runs.trainer(tmp_path / "run", changes)
    assert again.resume(sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[0])
    seen = watch(again)
    again.fit()
    assert seen
    assert all(torch.equal(indices, wanted[number]) for number, indices in seen.items())
    with pytest.raises(FileNotFoundError, match="No such file"):
        runs.trainer(tmp_path / "new", changes)


def test_a_batch_of_a_mixture_has_one_source(tmp_path):
    data = Mix([runs.Numbers(samples=30), runs.Numbers(samples=18)], [1.0, 1.0])
    _, seen = finish(tmp_path / "run", {"batches": "source", "steps": 8}, data=data)
    firsts = [bool((indices < 30).all()) for indices in seen.values()]
    assert firsts == [not (indices >= 30).all() for indices in seen.values()]
    assert sum(firsts) == 4
    with pytest.raises(ValueError, match='data must be a mixture without weights with batches = "mined"'):
        runs.trainer(tmp_path / "weights", MINING, data=data)
    runs.trainer(tmp_path / "sizes", MINING, data=Mix([runs.Numbers(samples=30), runs.Numbers(samples=18)]))
    with pytest.raises(ValueError, match="for data that is not a mixture"):
        runs.trainer(tmp_path / "one", {"batches": "source"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_groups": "x"}, "must not be set unless batches is \"mined\", got 'random'"),
        ({"batches": "source", "mining": {"every": 2}}, "got 'source'"),
        ({"batches": "mined"}, r"batch_groups or mining.every must be set with batches = \"mined\""),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        runs.config(**changes)


def test_paths_become_absolute(tmp_path):
    (tmp_path / "groups").touch()
    (tmp_path / "corpus.jsonl").touch()
    values = {"batch_groups": "groups", "retrieval": {"corpus": "corpus.jsonl", "queries": "none", "qrels": ""}}
    found = anchor_paths(values, str(tmp_path))
    assert found["batch_groups"] == str(tmp_path / "groups")
    assert found["retrieval"] == {"corpus": str(tmp_path / "corpus.jsonl"), "queries": "none", "qrels": ""}
    assert TrainConfig().retrieval.corpus == ""


def test_commands_mine_groups_and_train_with_them(tmp_path, monkeypatch, capsys):
    """The corpus of the evaluation is searched during training, too."""
    word_pairs.enter(tmp_path, monkeypatch)
    mine = ["mine", "small", "--data", "pairs.jsonl", "--batches", "--negatives", "4", "--group-size", "3", "--device", "cpu"]
    assert cli.main(mine) == 0
    said = capsys.readouterr()
    assert "wrote 4 groups of 3 of 12 pairs to batches.safetensors" in said.out + said.err
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    for name, key in (("corpus", "document"), ("queries", "query")):
        rows = [json.dumps({"_id": f"{name[0]}{i}", "text": line[key]}) for i, line in enumerate(lines)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "qrels").mkdir()
    options = ["--batches", "mined", "--batch-groups", "batches.safetensors", "--steps", "4", "--output", "run"]
    settings = ["--set", "retrieval.corpus=corpus.jsonl", "--evaluate-every", "2"]
    assert word_pairs.call(*options, *settings) == 1
    assert "retrieval.qrels must be a file, but there is no file" in capsys.readouterr().err
    (tmp_path / "qrels" / "test.tsv").write_text("".join(f"q{i} 0 c{i} 1\n" for i in range(12)))
    assert word_pairs.call(*options, *settings) == 0
    run = results.read_run("run")
    assert [one["step"] for one in run.evaluations] == [2, 4]
    assert 0 < run.evaluations[-1]["evaluation"]["corpus/query_to_document_nDCG@10"] <= 1
    assert run.best["metric"] == "corpus/query_to_document_nDCG@10"
    (tmp_path / "pairs.jsonl").write_text((tmp_path / "pairs.jsonl").read_text().replace("five", "FIVE"))
    assert word_pairs.call(*options[:-1], "other") == 1
    assert "the names, the texts or their order differ" in capsys.readouterr().err
    for wrong, message in (
        (["--corpus", "corpus.jsonl"], "--corpus must not be set with --batches"),
        (["--output", "x.jsonl"], "--output must end in .safetensors"),
    ):
        assert cli.main([*mine, *wrong]) == 1
        assert message in capsys.readouterr().err


def test_the_command_mines_in_the_split_that_a_run_trains_on():
    """Otherwise the file of groups would not fit `megabatch train --data wordnet`."""
    given = argparse.Namespace(data="wordnet", columns=None, split=None)
    assert commands._choose_data(given, None, training=True)[1] == "train"
    assert commands._choose_data(given, None, training=False)[1] == "test"


def test_negatives_of_a_corpus(tmp_path, monkeypatch, capsys):
    word_pairs.enter(tmp_path, monkeypatch)
    texts = [f"what comes after {word}" for word in ("one", "thirteen", "fourteen")] + ["number twelve", "number twelve"]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    command = ["mine", "small", "--data", "pairs.jsonl", "--corpus", "corpus.jsonl", "--device", "cpu", "--negatives", "14"]
    assert cli.main(command) == 0
    mined = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    for line in mined:
        negatives = [line[f"negative_{number}"] for number in range(1, 15)]
        candidates = {one["document"] for one in mined} | set(texts)  # 15 texts, each once
        assert set(negatives) == candidates - {line["document"]}
    assert cli.main([*command, "--output", "corpus.jsonl"]) == 1
    assert "--output must not replace the corpus" in capsys.readouterr().err
    assert cli.main(["mine", "small", "--data", "pairs.jsonl", "--group-size", "3"]) == 1
    assert "--group-size must not be set without --batches" in capsys.readouterr().err
    assert cli.main(["mine", "small", "--data", "pairs.jsonl", "--batches", "--group-size", "1"]) == 1
    assert "--group-size must be at least 2" in capsys.readouterr().err
