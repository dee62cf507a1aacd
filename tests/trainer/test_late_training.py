"""Late-interaction models: the same scores in other libraries, exact gradients of cached steps, runs, and commands on them."""

import json

import numpy as np
import pytest
import torch

import colbert
from megabatch.cached.step import cached_backward
from megabatch.world import World
from megabatch_train import cli, export, towers
from megabatch_train.commands import train
from megabatch_train.data import load as data
from megabatch_train.evaluation import encode, evaluate
from megabatch_train.evaluation.late_interaction import StoredTokens, connect, rank_tokens
from megabatch_train.towers import models
from megabatch_train.towers.late_interaction import pack, token_dim, unpack
from megabatch_train.towers.tower import LoraConfig
from megabatch_train.trainer.config import LossConfig
from megabatch_train.trainer.loss import LossInputs, Objective
from megabatch_train.trainer.run import MetricsFile, load_checkpoint

pytest.importorskip("transformers")
TEXTS = ("text", "text")
ALONE = World(torch.device("cpu"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return colbert.write_encoder(tmp_path_factory.mktemp("encoder"))


def load(encoder, **options):
    torch.manual_seed(1)
    return towers.load(f"hf:{encoder}", TEXTS, **colbert.OPTIONS | options)


def vectors(pair, texts, side):
    """The vectors of each text."""
    rows = encode(pair.towers[side], texts)
    values, _, lengths = pack(rows, token_dim(pair))
    return list(values.split(lengths.tolist()))


def brute_force(queries, documents):
    return torch.stack([torch.stack([(q @ d.T).amax(1).sum() for d in documents]) for q in queries])


def scores(pair):
    return brute_force(vectors(pair, colbert.QUERIES, 0), vectors(pair, colbert.DOCUMENTS, 1))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_expansion": False},
        {"attend_expansion": True, "skiplist": []},
        {"query_prompt": "bat ", "document_prompt": ""},
    ],
)
def test_sentence_transformers_has_the_same_scores(encoder, tmp_path, options):
    sentences = pytest.importorskip("sentence_transformers")
    if not hasattr(sentences, "MultiVectorEncoder"):
        pytest.skip("this version has no MultiVectorEncoder")
    pair = load(encoder, **options)
    expected = scores(pair)
    assert expected.std() > 0.1  # the scores differ, so the comparison can fail
    export.export(pair, "hf", tmp_path / "run")
    model = sentences.MultiVectorEncoder(str(tmp_path / "run"), device="cpu")
    assert_close(model.similarity(model.encode_query(colbert.QUERIES), model.encode_document(colbert.DOCUMENTS)), expected)
    model.save_pretrained(str(tmp_path / "theirs"))
    for folder in ("run", "theirs"):
        again = towers.load(f"hf:{tmp_path / folder}", TEXTS)
        assert token_dim(again) == 6
        assert_close(scores(again), expected)
    assert_close(scores(models.load_saved(tmp_path / "run")), expected)


def test_vectors_are_those_of_the_transformer(encoder):
    """Counts the tokens by hand: [CLS], prefix, words and [SEP] of a document without punctuation, and filled queries."""
    pair = load(encoder)
    found = [len(value) for value in vectors(pair, ["bat fog.", "", "bat, " * 9], 1)]
    assert found == [5, 3, 8]  # the last text is cut to 12 tokens, 4 of them commas
    assert [len(value) for value in vectors(pair, ["bat", "", "bat " * 30], 0)] == [8, 8, 8]
    norms = torch.cat(vectors(pair, colbert.DOCUMENTS, 1)).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_rows_are_packed_and_unpacked():
    rows = torch.zeros(3, 8)
    rows[0, :4], rows[1, 2:4], rows[2] = 1.0, 2.0, torch.nan
    values, mask, _ = unpack(rows[:2], 2)
    assert values.shape == (2, 2, 2)
    assert mask.tolist() == [[True, True], [False, True]]
    values, _, lengths = pack(torch.cat([rows, torch.zeros(1, 8)]), 2)
    assert lengths.tolist() == [2, 1, 4, 1]
    assert values[2].tolist() == [2.0, 2.0]
    assert pack(rows[:0], 2).values.shape == (0, 2)


# Loss and gradients of steps, in float64


def batch(pair, hard=0):
    tables = [json.loads(line) for line in colbert.lines()]
    texts = [[row[key] for row in tables] for key in ("query", "document")]
    texts[1] += [row["document"].replace(".", " bun") for row in tables[:hard]]
    return [tower.collate([tower.prepare(text, None) for text in side]) for tower, side in zip(pair.towers, texts, strict=True)]


def plain_gradients(pair, hard=0):
    """Loss and gradients of all pairs at once, with a dense score matrix."""
    module = pair.first.module
    q, d = (module(**inputs) for inputs in batch(pair, hard))
    rows = [side.view(len(side), -1, token_dim(pair)) for side in (q, d)]
    inner = torch.einsum("itd,jud->ijtu", *rows)
    masked = inner.masked_fill((rows[1] == 0).all(2)[None, :, None, :], -torch.inf).amax(3).sum(2)
    loss = torch.nn.functional.cross_entropy(2.0 * masked, torch.arange(len(q)))
    module.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


def chunked_gradients(pair, world, rows, hard=0):
    module, objective = pair.first.module, Objective(LossConfig("late_interaction"), 2.0, None, torch.float64, token_dim(pair))
    module.zero_grad()
    texts = batch(pair, hard)
    own = [{key: value[rows] for key, value in side.items()} for side in texts]
    if hard:
        own[1] = {key: torch.cat([value[:12][rows], value[12:]]) for key, value in texts[1].items()}

    def loss_fn(first, second):
        n = len(first)
        inputs = LossInputs(owners=torch.arange(hard)) if hard else LossInputs()
        return objective(first, second[:n], None, world, inputs, second[n:] if hard else None)

    loss_fn.further_rows = bool(hard)
    loss = cached_backward(loss_fn, [(module, own[0]), (module, own[1])], chunk_size=[4, 3])
    return loss, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def double(folder):
    pair = load(folder)
    pair.first.module.double().eval()
    return pair


@pytest.mark.parametrize("hard", [0, 5])
def test_chunked_steps_have_the_gradients_of_plain_steps(encoder, hard):
    pair = double(encoder)
    loss, expected = plain_gradients(pair, hard)
    chunked, gradients = chunked_gradients(pair, ALONE, slice(None), hard)
    torch.testing.assert_close(chunked, loss)
    assert len(gradients) == len(expected) > 30
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-11)


def share(group, rank, folder, cuts):
    pair = double(folder)
    loss, gradients = chunked_gradients(pair, World.of(group, torch.device("cpu")), slice(cuts[rank], cuts[rank + 1]))
    return loss, gradients


def test_three_ranks_have_the_gradients_of_a_plain_step(pool, encoder):
    pair = double(encoder)
    loss, expected = plain_gradients(pair)
    shares = pool.run(share, 3, str(encoder), [0, 5, 6, 12])
    torch.testing.assert_close(sum(own for own, _ in shares) / 3, loss)
    means = [sum(parts) / 3 for parts in zip(*(own for _, own in shares), strict=True)]
    torch.testing.assert_close(means, expected, rtol=1e-9, atol=1e-11)


def test_negatives_that_match_a_query_are_excluded():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    objective = Objective(LossConfig("late_interaction"), 1.0, None, torch.float64, 2)
    inputs = LossInputs(owners=torch.tensor([0, 1]), negative_ids=torch.tensor([3, -1]))
    ids, negatives = torch.arange(4), torch.cat([second[3:], -second[:1]])
    found = objective(first, second, ids, ALONE, inputs, negatives)
    q, d = first.view(4, 3, 2), torch.cat([second, negatives[1:]]).view(5, 3, 2)
    dense = torch.einsum("itd,jud->ijtu", q, d).amax(3).sum(2)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(dense, torch.arange(4)))


def test_chains_of_shared_texts_get_one_id():
    ids = torch.tensor([[0, 10], [1, 10], [1, 11], [2, 12], [3, 13], [3, 14]])
    assert connect(ids, ALONE).tolist() == [0, 0, 0, 3, 4, 4]


# Runs, and commands on them


@pytest.fixture(scope="module")
def run(encoder, tmp_path_factory):
    """A run that overfits twelve pairs."""
    folder = tmp_path_factory.mktemp("run")
    colbert.write_pairs(folder / "pairs.jsonl")
    options = "token_dim = 16\nquery_length = 8\nmax_length = 12"
    settings = f'data = "{folder / "pairs.jsonl"}"\nmodel = "hf:{encoder}"\nbatch_size = 12\nchunk_size = 5\nsteps = 40\n'
    settings += (
        f"[loss]\nname = 'late_interaction'\n[optimizer]\nlr = 3e-3\n[schedule]\nwarmup_steps = 4\n[model_options]\n{options}\n"
    )
    (folder / "late.toml").write_text(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_list_observers", lambda args: [MetricsFile()])
        assert cli.main(["train", "--config", str(folder / "late.toml"), "--output", str(folder / "run"), "--no-report"]) == 0
    return folder


def texts_of(run):
    rows = [json.loads(line) for line in (run / "pairs.jsonl").read_text().splitlines()]
    return [row["query"] for row in rows], [row["document"] for row in rows]


def trained_scores(run):
    pair = models.load_saved(run / "run")
    queries, documents = texts_of(run)
    return brute_force(vectors(pair, queries, 0), vectors(pair, documents, 1))


def test_training_lowers_the_loss_and_checkpoints_load(run):
    losses = [json.loads(line)["loss"] for line in (run / "run" / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert losses[-1] < 0.3 * losses[0]
    saved, (checkpoint, step) = models.load_saved(run / "run"), load_checkpoint(run / "run")
    assert step == 40
    assert saved.options == checkpoint.options
    torch.testing.assert_close(scores(saved), scores(checkpoint), rtol=0, atol=0)


def test_a_trained_model_has_the_same_scores_in_sentence_transformers(run):
    sentences = pytest.importorskip("sentence_transformers")
    if not hasattr(sentences, "MultiVectorEncoder"):
        pytest.skip("this version has no MultiVectorEncoder")
    model = sentences.MultiVectorEncoder(str(run / "run"), device="cpu")
    queries, documents = texts_of(run)
    assert_close(model.similarity(model.encode_query(queries), model.encode_document(documents)), trained_scores(run))


def test_evaluation_counts_ranks_of_maxsim_scores(run):
    expected = trained_scores(run)
    result = evaluate(models.load_saved(run / "run"), data.load(str(run / "pairs.jsonl")), chunk_size=5)
    order = (-expected).argsort(dim=1)
    ranks = (order == torch.arange(12)[:, None]).int().argmax(1)
    assert result["query_to_text_R@1"] == pytest.approx((ranks < 1).double().mean().item())
    assert result["query_to_text_mean_rank"] == pytest.approx(ranks.double().mean().item() + 1)
    back = ((-expected.T).argsort(dim=1) == torch.arange(12)[:, None]).int().argmax(1)
    assert result["text_to_query_mean_rank"] == pytest.approx(back.double().mean().item() + 1)


def rank_share(group, rank, rows, cuts):
    mine = slice(cuts[rank], cuts[rank + 1])
    return rank_tokens(rows[0][mine], rows[1][mine], None, 2, group)


def test_ranks_count_as_one_process(pool):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(9, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    rows[1][4] = torch.nan  # ranks last
    expected = rank_tokens(*rows, None, 2, None)
    dense = torch.einsum("itd,jud->ijtu", *(side.view(9, 3, 2) for side in rows)).amax(3).sum(2).nan_to_num(nan=-1e9)
    correct = (dense > dense.diagonal()[:, None]).sum(1)
    assert expected.row[4] == 8
    assert torch.equal(expected.row, correct)
    shares = pool.run(rank_share, 3, rows, [0, 2, 7, 9])
    assert torch.equal(torch.cat([own.row for own in shares]), expected.row)
    assert torch.equal(torch.cat([own.col for own in shares]), expected.col)


def test_several_matches_count_once():
    generator = torch.Generator().manual_seed(5)
    query, document = torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator)
    pairs = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 3, 1, 2, 4])
    found = rank_tokens(query, document, pairs, 2, None)
    dense = torch.einsum("itd,jud->ijtu", query.view(3, 2, 2), document.view(5, 2, 2)).amax(3).sum(2)
    for i, own in enumerate([[0, 3], [1], [2, 4]]):
        others = [j for j in range(5) if j not in own]
        assert found.row[i] == sum(dense[i, j] > dense[i, own].max() for j in others)


def test_search_and_its_file_agree_with_brute_force(run, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    pair, source = str(run / "run"), str(run / "pairs.jsonl")
    queries, _ = texts_of(run)
    assert cli.main(["embed", pair, "--data", source, "--output", "e.npy", "--chunk-size", "5"]) == 0
    lengths, array = np.load("e.lengths.npy"), np.load("e.npy", mmap_mode="r")
    assert array.shape == (lengths.sum(), 16)
    expected = vectors(models.load_saved(run / "run"), texts_of(run)[1], 1)
    np.testing.assert_allclose(array, torch.cat(expected).numpy(), atol=1e-6)
    capsys.readouterr()
    order = trained_scores(run).argsort(dim=1, descending=True)[:3, :4]
    for where in (["--data", source, "--chunk-size", "5"], ["--embeddings", "e.npy"]):
        assert cli.main(["search", pair, *queries[:3], "-k", "4", "--json", *where]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [[match["index"] for match in row["matches"]] for row in found] == order.tolist()
        values = [match["similarity"] for match in found[0]["matches"]]
        np.testing.assert_allclose(values, trained_scores(run)[0, order[0]], atol=1e-4)


def test_embeddings_replace_only_their_own_lengths(run, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("e.lengths.npy", np.ones(3))
    call = ["embed", str(run / "run"), "--data", str(run / "pairs.jsonl"), "--output", "e.npy"]
    assert cli.main(call) != 0
    assert "must replace only files that `megabatch embed` wrote, got e.lengths.npy" in capsys.readouterr().err
    (tmp_path / "e.lengths.npy").unlink()
    assert cli.main(call) == 0
    assert cli.main(["embed", "small", *call[2:]]) == 0  # one vector per text
    assert not (tmp_path / "e.lengths.npy").exists()


def test_sides_do_not_share_the_state_of_a_tokenizer(encoder):
    pair = load(encoder)
    first, second = (tower.collate.__self__.tokenizer for tower in pair.towers)
    assert first is not second
    pair.first.collate(["bat"])
    assert second.backend_tokenizer.padding is None


def test_mined_negatives_agree_with_brute_force(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["mine", str(run / "run"), "--data", str(run / "pairs.jsonl"), "--negatives", "3"]) == 0
    expected, documents = trained_scores(run).fill_diagonal_(-torch.inf), texts_of(run)[1]
    for row, line in zip(expected, (tmp_path / "mined.jsonl").read_text().splitlines(), strict=True):
        mined = [json.loads(line)[f"negative_{i}"] for i in (1, 2, 3)]
        assert mined == [documents[j] for j in row.argsort(descending=True)[:3]]


def test_stored_vectors_continue_after_an_incomplete_text(tmp_path):
    stored = StoredTokens(tmp_path / "rows", 4, 2)
    rows = torch.tensor([[1.0, 2, 3, 4], [5, 6, 0, 0], [torch.nan] * 4])
    stored.append(rows)
    with (tmp_path / "rows.bin").open("ab") as file:
        file.write(b"1234")
    with (tmp_path / "rows.lengths").open("ab") as file:
        file.write(np.int64(2).tobytes())
    again = StoredTokens(tmp_path / "rows", 4, 2)
    assert (again.done, again.vectors, again.count_unreadable()) == (3, 4, 1)
    values, _, lengths = again.part([1, 0])
    assert lengths.tolist() == [1, 2]
    assert values.tolist() == [[5.0, 6], [1, 2], [3, 4]]


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_dim": 0}, r"token_dim must be an integer of at least 1, got 0"),
        ({"query_length": 99}, r"query_length must be from 1 to 16 tokens, got 99"),
        ({"pooling": "cls"}, r"pooling must not be set for late interaction, got 'cls'"),
        ({"query_expansion": "yes"}, r"query_expansion must be true or false, got 'yes'"),
        ({"skiplist": 3}, r"skiplist must be a list of tokens, got 3"),
        ({"lora": LoraConfig(2)}, r"lora.rank must be 0 for late interaction, got 2"),
    ],
)
def test_options_are_checked(encoder, options, message):
    with pytest.raises(ValueError, match=message):
        load(encoder, **options)


def test_unsupported_calls_have_clear_errors(encoder, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="query_length is for late-interaction models"):
        towers.load(f"hf:{encoder}", TEXTS, query_length=8)
    with pytest.raises(ValueError, match=r"loss\.name must be 'late_interaction' for a model with one vector per token"):
        Objective(LossConfig("clip"), 1.0, None, token_dim=6)
    with pytest.raises(ValueError, match="got 'late_interaction' for a model with one vector per sample"):
        Objective(LossConfig("late_interaction"), 1.0, None)
    with pytest.raises(ValueError, match="--to onnx needs a model with one vector per text"):
        export.export(load(encoder), "onnx", tmp_path)
    for option in ("--batches", "--corpus=pairs.jsonl"):
        assert cli.main(["mine", str(run / "run"), option]) != 0
        assert f"{option.partition('=')[0]} must not be set for a late-interaction model" in capsys.readouterr().err
    config = ["--config", str(run / "late.toml"), "--output", str(tmp_path / "other")]
    assert cli.main(["train", *config, "--set", "mining.every=2", "--set", "batches=mined"]) != 0
    assert "mining.every must not be set for the loss 'late_interaction'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="token_dim must be 16 or not set"):
        towers.load(f"hf:{run / 'run'}", TEXTS, token_dim=8)
