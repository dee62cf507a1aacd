"""Folders of sentence-transformers give the same embeddings here, and stay the same models when they are saved."""

import json

import pytest
import torch

import sentences
from megabatch_train import towers
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from megabatch_train.towers.sentence_transformer import ABOUT, MODULES, POOLINGS, TEXTS, SentenceModelError, read

TEXTS_OF = ["bat cog dip", "fun", "gat gog gip gun bat bog bip bun cat cog"]
PROMPTS = {"query": "bun gun ", "document": "dog "}
NAMES = {"last": "lasttoken", "weighted_mean": "weightedmean", "mean_sqrt_len": "mean_sqrt_len_tokens"}  # of the library


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a transformer and a tokenizer, without the files of sentence-transformers."""
    pytest.importorskip("sentence_transformers", reason='pip install "megabatch[sentence-transformers]"')
    folder = tmp_path_factory.mktemp("encoder")
    sentences.write_model(folder)
    return folder


def library(encoder, folder, *layers, pooling="mean", include_prompt=True, longest=8, normalize=True, **options):
    """A model of the library, which is also saved into the folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    torch.manual_seed(1)
    transformer = Transformer(str(encoder), max_seq_length=longest)
    pooled = Pooling(16, NAMES.get(pooling, pooling), include_prompt=include_prompt)
    last = [Normalize()] if normalize else []
    made = SentenceTransformer(modules=[transformer, pooled, *(layer() for layer in layers), *last], device="cpu", **options)
    made.save_pretrained(str(folder))
    return made


def dense():
    from sentence_transformers.sentence_transformer.modules import Dense

    return Dense(16, 6)


def compare(pair, model, texts=TEXTS_OF):
    found = [encode(tower, texts) for tower in pair.towers]
    for embeddings, wanted in zip(found, (model.encode_query(texts), model.encode_document(texts)), strict=True):
        torch.testing.assert_close(embeddings, torch.as_tensor(wanted), rtol=0, atol=1e-6)
    return found


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_is_the_librarys(encoder, tmp_path, pooling):
    model = library(encoder, tmp_path, pooling=pooling)
    compare(towers.load(f"hf:{tmp_path}", ("text", "text")), model)


@pytest.mark.parametrize("pooling", ["cls", "mean", "weighted_mean"])
def test_prompts_that_are_not_pooled(encoder, tmp_path, pooling):
    model = library(encoder, tmp_path / "model", pooling=pooling, include_prompt=False, prompts=PROMPTS)
    pair = towers.load(f"hf:{tmp_path / 'model'}", ("text", "text"))
    queries, documents = compare(pair, model)
    assert not torch.allclose(queries, documents, atol=1e-3)
    towers.save(pair, tmp_path / "run")
    again = towers.load_saved(tmp_path / "run")
    assert torch.equal(encode(again.first, TEXTS_OF), queries)
    torch.testing.assert_close(compare(again, type(model)(str(tmp_path / "run"), device="cpu"))[1], documents)


def test_a_dense_layer_prompts_and_the_length_survive_loading_saving_and_continuing(encoder, tmp_path):
    model = library(encoder, tmp_path / "model", dense, pooling="cls", prompts=PROMPTS)
    pair = towers.load(f"hf:{tmp_path / 'model'}", ("text", "text"))
    found = compare(pair, model)
    assert found[0].shape == (3, 6)
    assert pair.options["max_length"] == 8
    assert pair.first.module.layers[0].linear.weight.requires_grad
    towers.save(pair, tmp_path / "run")
    for again in (
        towers.load_saved(tmp_path / "run"),
        towers.load(f"hf:{tmp_path / 'run'}", ("text", "text")),
    ):
        for tower, wanted in zip(again.towers, found, strict=True):
            torch.testing.assert_close(encode(tower, TEXTS_OF), wanted, rtol=0, atol=1e-6)
        assert again.options == pair.options
    compare(pair, type(model)(str(tmp_path / "run"), device="cpu"))
    changed = towers.load(f"hf:{tmp_path / 'run'}", ("text", "text"), query_prompt="", pooling="max", max_length=3)
    assert (changed.first.module.pooling, changed.options["query_prompt"]) == ("max", "")
    assert changed.first.collate(["bat " * 9])["input_ids"].shape == (1, 3)


def test_the_files_of_old_versions(encoder, tmp_path):
    """Flags for the pooling, the length in a file of its own, weights in PyTorch's format, the transformer in a folder."""
    model = library(encoder, tmp_path / "new", dense, pooling="max", prompts={"passage": "dog "}, longest=5)
    old = tmp_path / "old"
    (old / "0_Transformer").mkdir(parents=True)
    for path in (tmp_path / "new").iterdir():
        if path.is_file() and path.name not in (MODULES, ABOUT, TEXTS, "README.md"):
            (old / "0_Transformer" / path.name).write_bytes(path.read_bytes())
    tokenizer = old / "0_Transformer" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 512}))
    (old / "0_Transformer" / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": 5}))
    kinds = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    modules = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)]
    (old / MODULES).write_text(json.dumps(modules))
    (old / "1_Pooling").mkdir()
    (old / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_max_tokens": True, "word_embedding_dimension": 16})
    )
    (old / "2_Dense").mkdir()
    (old / "2_Dense" / "config.json").write_bytes((tmp_path / "new" / "2_Dense" / "config.json").read_bytes())
    torch.save(model[2].state_dict(), old / "2_Dense" / "pytorch_model.bin")
    (old / ABOUT).write_text(json.dumps({"prompts": {"passage": "dog "}}))
    pair = towers.load(f"hf:{old}", ("text", "text"))
    assert (pair.options["document_prompt"], pair.options["max_length"], "query_prompt" in pair.options) == ("dog ", 5, False)
    wanted = [model.encode(TEXTS_OF), model.encode(TEXTS_OF, prompt="dog ")]
    for tower, embeddings in zip(pair.towers, wanted, strict=True):
        torch.testing.assert_close(encode(tower, TEXTS_OF), torch.as_tensor(embeddings), rtol=0, atol=1e-6)


OTHER_PROMPTS = {"query": "bun gun ", "passage": "dog ", "topic": "fun "}


@pytest.mark.parametrize("prompts", [OTHER_PROMPTS, {"topic": "fun "}], ids=["query", "default"])
def test_modules_and_prompts_of_other_names_survive_training_and_export(encoder, tmp_path, prompts):
    """A model whose embeddings do not have unit length keeps their length, in the run, after continuing and in the export."""
    options = {"prompts": prompts, "default_prompt_name": "topic", "similarity_fn_name": "cosine"}
    model = library(encoder, tmp_path / "model", dense, normalize=False, **options)
    written = json.loads((tmp_path / "model" / ABOUT).read_text())
    pair = towers.load(f"hf:{tmp_path / 'model'}", ("text", "text"))
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    found = [encode(tower, TEXTS_OF) for tower in pair.towers]
    assert not torch.equal(found[0], found[1]) or "query" not in prompts
    towers.save(pair, tmp_path / "run")
    export(towers.load_saved(tmp_path / "run"), "hf", tmp_path / "export")
    export(towers.load(f"hf:{tmp_path / 'export'}", ("text", "text")), "hf", tmp_path / "again")
    for folder in ("run", "export", "again"):
        about = json.loads((tmp_path / folder / ABOUT).read_text())
        documents = {"document": prompts["passage"]} if "passage" in prompts else {}
        both = {} if documents else {"query": "fun ", "document": "fun "}
        assert about == {key: written[key] for key in about} | {"prompts": prompts | documents | both}
        other = type(model)(str(tmp_path / folder), device="cpu")
        assert [type(part) for part in other] == [type(part) for part in model]
        embeddings = torch.as_tensor(other.encode_query(TEXTS_OF)), torch.as_tensor(other.encode_document(TEXTS_OF))
        for ours, theirs in zip(found, embeddings, strict=True):
            assert ((theirs.norm(dim=1) - 1).abs() > 1e-2).all()
            torch.testing.assert_close(ours, torch.nn.functional.normalize(theirs, dim=1), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            torch.as_tensor(other.encode(TEXTS_OF, prompt_name="topic")), torch.as_tensor(other.encode(TEXTS_OF))
        )


@pytest.mark.parametrize("changed", [("", ""), ("gip ", ""), ("", "gip "), ("gip ", "bog ")])
@pytest.mark.parametrize("prompts", [OTHER_PROMPTS, {"topic": "fun "}], ids=["query", "default"])
def test_changed_prompts_are_in_the_files(encoder, tmp_path, prompts, changed):
    model = library(encoder, tmp_path / "model", prompts=prompts, default_prompt_name="topic")
    pair = towers.load(
        f"hf:{tmp_path / 'model'}", ("text", "text"), **dict(zip(("query_prompt", "document_prompt"), changed, strict=True))
    )
    towers.save(pair, tmp_path / "run")
    compare(pair, type(model)(str(tmp_path / "run"), device="cpu"))
    again = towers.load(f"hf:{tmp_path / 'run'}", ("text", "text"))
    assert (again.options.get("query_prompt", ""), again.options.get("document_prompt", "")) == changed
    assert json.loads((tmp_path / "run" / ABOUT).read_text())["prompts"]["topic"] == "fun "


def test_the_prompts_of_both_sides():
    from megabatch_train.towers.sentence_transformer import _prompts

    saved = {"query": "", "document": ""}  # as new versions always write
    assert _prompts({"prompts": {**saved, "query": "q", "passage": "p"}, "default_prompt_name": "query"}) == ("q", "p")
    assert _prompts({"prompts": {"query": "q"}, "default_prompt_name": "query"}) == ("q", "")
    assert _prompts({"prompts": {**saved, "topic": "t"}, "default_prompt_name": "topic"}) == ("t", "t")
    assert _prompts({"prompts": {**saved, "topic": "t"}, "default_prompt_name": None}) == ("", "")
    assert _prompts({}) == ("", "")


def test_a_plain_encoder_logs_the_choice_and_takes_another(encoder, caplog):
    with caplog.at_level("INFO", logger="megabatch"):
        pair = towers.load(f"hf:{encoder}", ("text", "text"))
    assert 'has no modules.json of sentence-transformers, so texts are encoded with pooling = "mean" and max_length = 10' in (
        caplog.text
    )
    other = towers.load(f"hf:{encoder}", ("text", "text"), pooling="cls")
    tokens = pair.first.collate(TEXTS_OF[:2])
    with torch.no_grad():
        states = pair.first.module.eval().model(**tokens).last_hidden_state
    wanted = torch.nn.functional.normalize(states[:, 0], dim=-1)
    torch.testing.assert_close(encode(other.first, TEXTS_OF[:2]), wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(encode(pair.first, TEXTS_OF[:2]), wanted, atol=1e-2)
    with pytest.raises(ValueError, match=r"model_options.pooling must be one of cls, mean, .*, got 'first'"):
        towers.load(f"hf:{encoder}", ("text", "text"), pooling="first")


def test_the_text_side_of_two_encoders(encoder, tmp_path):
    library(encoder, tmp_path / "model", dense, pooling="cls", prompts=PROMPTS)
    vision = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 32, "image_size": 16, "patch_size": 8}
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "config.json").write_text(json.dumps(vision))
    pair = towers.load(f"hf-config:{tmp_path / 'images'}+{tmp_path / 'model'}")
    assert pair.options == {"pooling": "cls", "max_length": 8, "document_prompt": "dog "}
    assert (pair.second.module.head.in_features, pair.second.module.head.out_features) == (6, 512)
    towers.save(pair, tmp_path / "run")
    again = towers.load_saved(tmp_path / "run")
    assert torch.equal(encode(again.second, TEXTS_OF), encode(pair.second, TEXTS_OF))


def write(folder, change):
    """The smallest folder that `read` takes, after a change of its files."""
    files = {
        MODULES: [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1", "type": "sentence_transformers.models.Pooling"},
        ],
        "1/config.json": {"pooling_mode": "cls"},
    }
    for name, content in {**files, **change}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def modules(*kinds):
    return [{"path": str(number) if number else "", "type": kind} for number, kind in enumerate(kinds)]


OWN = "sentence_transformers.models."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1/config.json": {"pooling_mode": ["cls", "max"]}}, r"one pooling of cls, .*, got cls \+ max"),
        ({"1/config.json": {"pooling_mode": "attention"}}, r"one pooling of cls, .*, got attention"),
        ({MODULES: modules(f"{OWN}Transformer", f"{OWN}Pooling", f"{OWN}CNN")}, r"Dense and Normalize after .*, got CNN"),
        ({MODULES: modules(f"{OWN}StaticEmbedding")}, r"must begin with .* Transformer and Pooling, got StaticEmbedding"),
        ({MODULES: modules("evil.Transformer", f"{OWN}Pooling")}, r"got 'evil.Transformer', which is custom code"),
        ({ABOUT: {"model_type": "SparseEncoder"}}, r"must be a SentenceTransformer, got a SparseEncoder"),
        ({ABOUT: {"similarity_fn_name": "dot"}}, r"end with a Normalize module or have cosine similarity, got 'dot'"),
        ({TEXTS: {"query_length": 32}}, r"no query_length in its sentence_bert_config.json, got 32"),
        ({TEXTS: {"transformer_task": "fill-mask"}}, r"last hidden state of its transformer, got the task 'fill-mask'"),
    ],
)
def test_what_cannot_be_represented_is_an_error(tmp_path, change, message):
    assert read(write(tmp_path / "fine", {})).pooling == "cls"
    with pytest.raises(SentenceModelError, match=message):
        read(write(tmp_path / "other", change))


def test_an_activation_is_never_imported(tmp_path):
    folder = write(tmp_path, {MODULES: modules(f"{OWN}Transformer", f"{OWN}Pooling", f"{OWN}Dense")})
    for name in ("os.system", "torch.nn.modules.container.Sequential"):
        config = {"in_features": 4, "out_features": 2, "activation_function": name}
        write(tmp_path, {MODULES: json.loads((folder / MODULES).read_text()), "2/config.json": config})
        with pytest.raises(SentenceModelError, match=r"activation"):
            read(folder)
