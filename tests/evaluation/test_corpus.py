"""Retrieval from a corpus: metrics of trec_eval, files of BEIR and TREC, and a search that equals a full sort."""

import argparse
import json
import math
import random

import pytest
import torch

from megabatch_train import cli, towers
from megabatch_train.evaluation import corpus as corpora
from megabatch_train.evaluation.corpus import RetrievalConfig, RetrievalTask, TextFile, evaluate_corpus, read_judgments

WORDS = ["red", "green", "blue", "old", "new", "big", "small", "house", "tree", "river", "stone", "bird", "cloud", "road"]
SMALL = {"width": 16, "buckets": 512}


def texts(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 4))) for _ in range(count)]


def write(folder, documents=60, queries=12, missing=True, trec=False):
    """A corpus with equal texts, graded judgments, queries without relevant documents, and documents that are missing."""
    folder.mkdir(exist_ok=True, parents=True)
    draw = random.Random(1)
    titles = [{"title": ""}, {"title": "of the"}, {}]
    lines = [{"_id": f"d{i}", **draw.choice(titles), "text": text} for i, text in enumerate(texts(documents, 2))]
    lines += [{"_id": f"copy{i}", "text": lines[i]["text"]} for i in range(0, documents, 4)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    asked = [{"_id": f"q{i}", "text": text} for i, text in enumerate(texts(queries, 3))] + [{"_id": "d1", "text": "unjudged"}]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, asked)))
    judged = {}
    for i in range(queries):
        chosen = draw.sample([line["_id"] for line in lines], 6)
        judged[f"q{i}"] = {name: draw.choice((0, 1, 1, 2, 3, -1)) for name in chosen}
    judged["q1"] = dict.fromkeys(judged["q1"], 0)
    if missing:
        judged["q2"] |= {"gone": 3, "also gone": 1}
        judged["q3"] = {"gone": 1}
    judged["nobody"] = {"d1": 1}
    (folder / "qrels").mkdir(exist_ok=True)
    if trec:
        rows = [f"{q} 0 {d.replace(' ', '_')} {v}" for q, own in judged.items() for d, v in own.items()]
    else:
        rows = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t{v}" for q, own in judged.items() for d, v in own.items())]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")
    return folder, lines, asked, judged


def plain(judged, run):
    """nDCG@10, MRR@10, R@100 and MAP of one query, from the definitions. `run` has (id, score); later ids win ties."""
    names = [name for name, _ in sorted(run.items(), key=lambda item: (item[1], item[0].encode()), reverse=True)][:1000]
    gains = [max(0, judged.get(name, 0)) for name in names]
    best = sorted((value for value in judged.values() if value > 0), reverse=True)

    def dcg(values):
        return sum(value / math.log2(place + 2) for place, value in enumerate(values[:10]))

    if not best:
        return dict.fromkeys(corpora.METRICS, 0.0)
    hits = [place for place, gain in enumerate(gains) if gain]
    precisions = [(number + 1) / (place + 1) for number, place in enumerate(hits)]
    return {
        "nDCG@10": dcg(gains) / dcg(best),
        "MRR@10": 1 / (hits[0] + 1) if hits and hits[0] < 10 else 0.0,
        "R@100": sum(place < 100 for place in hits) / len(best),
        "MAP": sum(precisions) / len(best),
    }


def small(folder=None):
    torch.manual_seed(0)
    return towers.load("small", ("text", "text"), **SMALL)


def scores(pair, lines, asked):
    """The similarity of each query and each document, from embeddings of one text at a time."""
    from megabatch_train.evaluation import encode

    documents = [f"{line.get('title', '')} {line['text']}".strip() for line in lines]
    found = {}
    for query in asked:
        x = encode(pair.first, [query["text"]])
        found[query["_id"]] = {
            line["_id"]: round(float(x @ encode(pair.second, [text]).T), 5)  # equal texts have equal scores
            for line, text in zip(lines, documents, strict=True)
            if line["_id"] != query["_id"]
        }
    return found


@pytest.mark.parametrize("trec", [False, True])
def test_metrics_are_those_of_the_definitions(tmp_path, monkeypatch, trec):
    """Embeddings are rounded, so that many scores tie."""
    folder, lines, asked, judged = write(tmp_path / "data", trec=trec)
    pair = small()
    for tower in pair.towers:
        tower.module.register_forward_hook(lambda module, inputs, output: output.mul(8).round())
    monkeypatch.setattr(corpora, "SEARCHED", 10)
    monkeypatch.setattr(corpora, "QUERIES", 5)
    found = evaluate_corpus(pair, RetrievalTask(RetrievalConfig(str(folder))), chunk_size=7)
    run = scores(pair, lines, asked)
    wanted = [plain(own, run[name]) for name, own in judged.items() if name in run]
    assert (found.pop("num_queries"), found.pop("num_documents")) == (12, len(lines))
    assert found.keys() == {f"query_to_document_{name}" for name in corpora.METRICS}
    for name in corpora.METRICS:
        assert found[f"query_to_document_{name}"] == pytest.approx(sum(one[name] for one in wanted) / len(wanted), abs=1e-12)


def test_both_towers_encode_under_the_autocast_of_a_run(tmp_path, monkeypatch):
    """The search itself is not under autocast."""
    folder, *_ = write(tmp_path / "data")
    pair, towers_saw, searches_saw = small(), [], []
    for tower in pair.towers:
        tower.module.register_forward_hook(lambda *_: towers_saw.append(torch.is_autocast_enabled("cpu")))
    topk = corpora.pairwise.pairwise_topk

    def search(*arguments, **options):
        searches_saw.append(torch.is_autocast_enabled("cpu"))
        return topk(*arguments, **options)

    monkeypatch.setattr(corpora.pairwise, "pairwise_topk", search)
    with torch.autocast("cpu", torch.bfloat16):
        evaluate_corpus(pair, RetrievalTask(RetrievalConfig(str(folder))), chunk_size=30)
    assert len(towers_saw) > 2
    assert all(towers_saw)
    assert searches_saw
    assert not any(searches_saw)


def ranking_of(run, places):
    """The first 1,000 documents of each query, as numbers of `places`."""
    rows = []
    for own in run:
        names = sorted(own, key=lambda name: (own[name], name.encode()), reverse=True)[:1000]
        rows.append([places[name] for name in names] + [-1] * (1000 - len(names)))
    return torch.tensor(rows)


@pytest.mark.parametrize("judge", ["plain", "pytrec_eval"])
def test_scores_of_rankings(judge):
    """Ties, graded and negative relevance, queries without relevant documents, and documents that are not in the corpus."""
    draw, names = random.Random(0), [f"doc{i}" for i in range(1500)]
    order = sorted(names, reverse=True)
    places = {name: place for place, name in enumerate(order)}
    run, judged = {}, {}
    for query in range(20):
        chosen = draw.sample(names, draw.choice((1, 40, 1500)))
        run[str(query)] = {name: float(draw.randint(0, 30)) for name in chosen}
        judged[str(query)] = {name: draw.choice((0, 0, 1, 2, -1)) for name in draw.sample([*names, "gone", "lost"], 200)}
    judged["4"] = dict.fromkeys(judged["4"], 0)
    judged["5"] = {"gone": 2, "lost": 1}
    relevance = corpora.Relevance.of(list(judged.values()), places)
    found = corpora.score_ranking(ranking_of(run.values(), places), relevance)
    if judge == "plain":
        wanted = [plain(judged[query], run[query]) for query in run]
    else:
        pytrec_eval = pytest.importorskip("pytrec_eval")
        measures = {"ndcg_cut.10": "nDCG@10", "recall.100": "R@100", "map": "MAP"}
        # The library itself cuts no ranking, so it gets the first 1,000 documents.
        cut = {
            q: dict(sorted(own.items(), key=lambda item: (item[1], item[0].encode()), reverse=True)[:1000])
            for q, own in run.items()
        }
        result = pytrec_eval.RelevanceEvaluator(judged, set(measures)).evaluate(cut)
        wanted = [{ours: result[q][name.replace(".", "_")] for name, ours in measures.items()} for q in run]
    for name in wanted[0]:
        assert found[name].tolist() == pytest.approx([one[name] for one in wanted], abs=1e-9)


def test_no_judgment_in_the_corpus():
    relevance = corpora.Relevance.of([{"gone": 1}, {}], {})
    assert relevance.missing == 1
    assert all(not values.any() for values in corpora.score_ranking(torch.full((2, 3), -1), relevance).values())


def test_a_text_does_not_find_itself(tmp_path):
    lines = [{"_id": str(i), "text": text} for i, text in enumerate(("red tree", "red tree river", "blue"))]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "queries.jsonl").write_text(json.dumps(lines[0]))
    (tmp_path / "test.txt").write_text("0 0 1 1\n")
    result = evaluate_corpus(small(), RetrievalTask(RetrievalConfig(str(tmp_path), qrels=str(tmp_path / "test.txt"))))
    assert result["query_to_document_MRR@10"] == 1


def on_rank(group, rank, folder):
    return evaluate_corpus(small(), RetrievalTask(RetrievalConfig(str(folder))), chunk_size=16, group=group)


def test_ranks_search_a_part_of_the_corpus_each(pool, tmp_path):
    folder, *_ = write(tmp_path / "data")
    alone = on_rank(None, 0, folder)
    for found in pool.run(on_rank, 3, folder):
        assert found == pytest.approx(alone, abs=1e-12)


def test_texts_are_read_by_position(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = ['{"_id": 7, "text": "föö\\nbar", "extra": 1}', "", '{"_id": "b", "title": "Ti tle", "text": "x", "x": {}}', "  "]
    path.write_bytes("\r\n".join(lines).encode())
    found = TextFile(path, "--corpus", ids=True)
    assert [found.read(index, 1) for index in (1, 0)] == ["Ti tle x", "föö\nbar"]
    assert found.identifiers == ["7", "b"]
    assert (len(found), found.name(1)) == (2, "b")
    import pickle

    assert pickle.loads(pickle.dumps(found)).read(1, 0) == "Ti tle x"
    path.write_text("x" * 200)
    with pytest.raises(corpora.UnreadableSampleError, match="has changed"):
        found.read(0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have at least one line, got an empty file"),
        ("[1]", 'line 1 of .* must be a JSON object with a "text"'),
        ('{"_id": "a", "text": "b"}\n{"_id": ', "line 2 of .* must be a JSON object"),
        ('{"_id": "a", "text": 5}', 'with a "text", got'),
        ('{"_id": "a", "text": "b", "title": 5}', 'must have a string as "title", got 5'),
        ('{"text": "b"}', 'must have an "_id", got None'),
        ('{"_id": "\\ud800", "text": "b"}', "line 1 of .* must be Unicode text, got half of a surrogate pair"),
        ('{"_id": "a", "text": "\\ud800"}', "line 1 of .* must be Unicode text, got half of a surrogate pair"),
        ('{"_id": "a", "text": "b"}\n' * 2, "must have each _id once, got 'a'"),
    ],
)
def test_files_of_texts_that_are_refused(tmp_path, content, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        TextFile(path, "--corpus", ids=True)
    with pytest.raises(ValueError, match="must be a file of JSON lines"):
        TextFile(tmp_path / "corpus.csv", "--corpus")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        TextFile(tmp_path / "none.jsonl", "--corpus")


def test_formats_of_judgments(tmp_path):
    path = tmp_path / "qrels"
    for content in ("query-id\tcorpus-id\tscore\n1\ta b\t2\n1\tc\t0\n", "1\ta b\t2\n\n1\tc\t0", "1\t0\ta b\t2\n1\t0\tc\t0"):
        path.write_text(content)
        assert read_judgments(path) == {"1": {"a b": 2, "c": 0}}
    path.write_text("1 0  c -1\n2 Q0 d 1\n")
    assert read_judgments(path) == {"1": {"c": -1}, "2": {"d": 1}}
    path.write_bytes(b"\xef\xbb\xbf1 0 c 1\n")  # a byte order mark is not a part of the first id
    assert read_judgments(path) == {"1": {"c": 1}}
    for content, message in (
        ("", "at least one judgment"),
        ("a\tb\tscore\na\tb\tx\n", r"got 'a\\tb\\tx' in line 2"),
        ("1 2\n", "got '1 2' in line 1"),
        ("1 0 a 1\n1 0 a 2\n", "must judge a document once for a query, got 1 and 2"),
        ("1 0 a 1\n1 0 b 99999999999999999999\n", "a whole number, got '1 0 b 9+' in line 2"),
        (b"1 0 a 1\n1 0 \xff 1\n", "--qrels must be UTF-8 text, got .*qrels"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            read_judgments(path)
    with pytest.raises(FileNotFoundError, match="--qrels must be a file"):
        read_judgments(tmp_path / "none")


def test_the_command_evaluates_a_corpus(tmp_path, capsys):
    folder, *_ = write(tmp_path / "data", trec=True)
    output = tmp_path / "out.jsonl"
    files = {name: str(folder / f"{name}.jsonl") for name in ("corpus", "queries")} | {"qrels": str(folder / "qrels/test.tsv")}
    options = [text for name, path in files.items() for text in (f"--{name}", path)]
    for given in (options, ["--corpus", str(folder)]):
        assert cli.main(["eval", "small", *given, "--device", "cpu", "--output", str(output)]) == 0
    first, second = map(json.loads, output.read_text().splitlines())
    assert first == second
    assert {name: first[name] for name in files} == files
    assert "nDCG@10" in capsys.readouterr().out
    assert cli.main(["eval", "small", *options, "--device", "cpu", "--output", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() <= json.loads(output.read_text().splitlines()[-1]).items()
    for wrong, message in (
        (["--queries", "x.jsonl"], "--queries needs --corpus"),
        (["--corpus", "x", "--zero-shot"], "--corpus must not be set with --zero-shot or --data"),
        (["--corpus", str(tmp_path / "none")], "--corpus must be a file or a folder, but there is none at "),
        (["--corpus", str(tmp_path)], "--qrels must be a file"),
    ):
        assert cli.main(["eval", "small", *wrong, "--device", "cpu"]) != 0
        assert message in capsys.readouterr().err
    (folder / "qrels" / "test.tsv").write_text("other 0 d1 1\n")
    assert cli.main(["eval", "small", *options, "--device", "cpu"]) != 0
    assert "--qrels must judge at least one query" in capsys.readouterr().err


def test_models_that_encode_no_texts_are_refused(tmp_path):
    folder, *_ = write(tmp_path / "data")
    pair = argparse.Namespace(first=argparse.Namespace(kind="image"), second=argparse.Namespace(kind="image"))
    with pytest.raises(ValueError, match="MODEL must encode texts to search a corpus"):
        evaluate_corpus(pair, RetrievalTask(RetrievalConfig(str(folder))))
    with pytest.raises(ValueError, match=r"retrieval\.corpus must be set"):
        RetrievalConfig(queries="queries.jsonl")
