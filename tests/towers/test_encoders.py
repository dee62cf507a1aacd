"""Bidirectional encoders without padding: the embeddings and gradients of each text alone, and of the original library."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import encoders
import megabatch as mb
from encoders import FAMILIES, LONGEST, alone, encoder, gradients
from megabatch.world import World
from megabatch_train import settings, towers
from megabatch_train.data import load as data
from megabatch_train.evaluation import encode
from megabatch_train.towers import tower as blocks
from megabatch_train.towers.layers import packed as packed_texts
from megabatch_train.towers.sentence_transformer import TextEncoder
from megabatch_train.trainer import config as configs
from megabatch_train.trainer.loop import Trainer

pytest.importorskip("transformers", minversion="5", reason='pip install "megabatch[huggingface]"')

LENGTHS = [7, 1, LONGEST, 12, 3, LONGEST]
POOLED = [
    ("cls", LENGTHS),
    ("mean", LENGTHS),
    ("last", LENGTHS),
    ("max", LENGTHS),
    ("mean", [1]),
    ("mean", [9]),
    ("mean", [5, 5]),
]


def same_gradients(found, wanted, tolerance):
    """Relative to the largest gradient, because keys have biases whose exact gradients are 0."""
    assert found.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max().item()
        assert error <= tolerance * largest, f"{name}: {error / largest}"


def tolerance_of(family):
    """ModernBERT rotates queries and keys in float32. All other operations are in float64."""
    return 1e-6 if family == "modernbert" else 1e-11


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_are_the_padded_ones_and_each_text_alone(family):
    weights, tolerance = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), tolerance_of(family)
    for pooling, lengths in POOLED:
        found = {}
        for way in ("packed", "padded", "alone"):
            made = encoder(family, pooling, packed=way == "packed")
            inputs = encoders.texts(lengths)
            embeddings = alone(made.model, inputs, pooling) if way == "alone" else made(**inputs)
            (embeddings @ weights).square().sum().backward()
            found[way] = embeddings.detach(), gradients(made)
        for way in ("packed", "padded"):
            torch.testing.assert_close(found[way][0], found["alone"][0], rtol=0, atol=tolerance)
            same_gradients(found[way][1], found["alone"][1], tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_by_name_are_packed_and_have_the_librarys_embeddings(family, tmp_path):
    """With an empty text, one word, and texts longer than the limit."""
    library = pytest.importorskip("sentence_transformers", reason='pip install "megabatch[sentence-transformers]"')
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    encoders.save(family, tmp_path / "base")
    transformer = Transformer(str(tmp_path / "base"), max_seq_length=LONGEST)
    model = library.SentenceTransformer(modules=[transformer, Pooling(16, "mean"), Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    written = ["w1 w2 w3", "", "w7", " ".join(f"w{i % 50}" for i in range(3 * LONGEST)), "w5 <pad> w9", "w4 w4"]
    wanted = torch.as_tensor(model.encode(written))
    pair = towers.load(f"hf:{tmp_path / 'model'}", ("text", "text"))
    assert pair.first.module.packed
    torch.testing.assert_close(encode(pair.first, written), wanted, rtol=0, atol=2e-6)
    for text, embedding in zip(written, wanted, strict=True):
        torch.testing.assert_close(encode(pair.first, [text])[0], embedding, rtol=0, atol=2e-6)
    padded = towers.load(f"hf:{tmp_path / 'model'}", ("text", "text"), packed=False)
    assert not padded.first.module.packed
    assert padded.first.module.model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(encode(padded.first, written), wanted, rtol=0, atol=2e-6)
    excluded = towers.load(f"hf:{tmp_path / 'model'}", ("text", "text"), query_prompt="w3 ", include_prompt=False)
    assert not excluded.first.module.packed


def dense(query, document):
    return F.cross_entropy(7 * query @ document.T, torch.arange(len(query)))


@pytest.mark.parametrize(
    ("family", "changes", "budget"),
    [
        ("bert", {}, None),
        ("modernbert", {"checkpointing": True}, 20000),
        ("roberta", {"lora": 2, "checkpointing": True}, "all"),
        ("modernbert", {"lora": 2, "pooling": "cls"}, None),
    ],
)
def test_a_cached_step_is_the_plain_step(family, changes, budget):
    if "lora" in changes:
        pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    generator = torch.Generator().manual_seed(1)
    inputs = [encoders.texts(torch.randint(1, LONGEST, (9,), generator=generator), seed) for seed in (1, 2)]
    plain = encoder(family, packed=False, **{**changes, "checkpointing": False})
    wanted = dense(*(plain(**one) for one in inputs))
    wanted.backward()
    cached = encoder(family, **changes)
    loss_fn = partial(mb.info_nce_loss, scale=7.0)
    loss = mb.cached_backward(loss_fn, [(cached, one) for one in inputs], chunk_size=2, budget=budget)
    tolerance = tolerance_of(family)
    assert abs(loss.item() - wanted.item()) <= 10 * tolerance
    same_gradients(gradients(cached), gradients(plain), tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_one_compilation_serves_every_number_and_length_of_texts(family, monkeypatch):
    """ModernBERT has three kinds of layers: the first one, and layers with and without a window."""
    monkeypatch.setattr(blocks, "COMPILER_OPTIONS", {"backend": "aot_eager"})
    compiled, plain = encoder(family), encoder(family)
    assert blocks.compile_towers([compiled, compiled], World.of(None, torch.device("cpu")))
    torch._dynamo.utils.counters.clear()
    loss_fn = partial(mb.info_nce_loss, scale=7.0)
    try:
        for step, (count, chunk_size) in enumerate(((6, 6), (8, 4), (11, 3))):  # a chunk of one text is compiled apart
            inputs = [encoders.texts([LONGEST - i for i in range(count)], seed) for seed in (1, 2)]
            for module in (compiled, plain):
                module.zero_grad()
                with blocks.compiler_settings(strict=True):
                    mb.cached_backward(loss_fn, [(module, one) for one in inputs], chunk_size=chunk_size)
            same_gradients(gradients(compiled), gradients(plain), tolerance_of(family))
            if step == 0:
                first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == first
    finally:
        torch._dynamo.reset()


def test_a_run_of_packed_texts_is_the_run_of_padded_texts(tmp_path):
    """Weights after three steps with checkpointing and chunks of two texts, in float32."""
    encoders.save("modernbert", tmp_path / "base")
    lines = [{"query": f"w{i}", "document": " ".join(f"w{i + j}" for j in range(1 + i % 7))} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = {}
    for packed in (True, False):
        given = {"data": str(tmp_path / "pairs.jsonl"), "model": f"hf:{tmp_path / 'base'}", "batch_size": 10, "chunk_size": 2}
        given |= {"steps": 3, "loss": {"name": "info_nce"}, "optimizer": {"lr": 1e-3}, "precision": "fp32"}
        given |= {"model_options": {"packed": packed}, "memory": {"graphs": 0.0, "checkpointing": "on"}}
        config = configs.resolve(settings.merge({}, given))
        dataset = data.load(config.data)
        pair = towers.load(config.model, dataset.sides, **config.model_options)
        before = {name: p.detach().clone() for name, p in pair.first.module.named_parameters()}
        trainer = Trainer(config, pair, dataset, tmp_path / str(packed))
        trainer.fit()
        found[packed] = {name: p.detach() - before[name] for name, p in pair.first.module.named_parameters()}
    largest = max(change.abs().max().item() for change in found[False].values())
    assert largest > 1e-3
    same_gradients(found[True], found[False], 1e-3)


@pytest.mark.parametrize("packed", [True, False])
def test_the_longest_text_of_a_model_that_numbers_positions_from_the_padding_id_on(tmp_path, packed):
    config = encoder("roberta", "mean").model.config
    config.save_pretrained(tmp_path)
    longest = config.max_position_embeddings - config.pad_token_id - 1
    with pytest.raises(ValueError, match=f"max_length must be from 1 to {longest} tokens, got {longest + 1}"):
        towers.load(f"hf-config:{tmp_path}", ("text", "text"), max_length=longest + 1, packed=packed)
    tower = towers.load(f"hf-config:{tmp_path}", ("text", "text"), max_length=longest, packed=packed).first
    assert tower.collate([tower.prepare("word " * 999, None)])["input_ids"].shape == (1, longest)
    assert encode(tower, ["word " * 999]).isfinite().all()


def test_models_that_cannot_be_packed_are_padded(tmp_path):
    """MPNet adds a bias to the logits of attention, which variable-length attention does not support."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet", **encoders.SIZES}))
    assert not towers.load(f"hf-config:{tmp_path}", ("text", "text")).first.module.packed
    with pytest.raises(ValueError, match=r"packed must be false or not set for .* attention of PyTorch"):
        towers.load(f"hf-config:{tmp_path}", ("text", "text"), packed=True)


def test_windows_of_another_size_are_noticed():
    """A model whose windows differ from the windows of `varlen_attn` is not packed. The check has texts beyond the window."""
    for change, packed in ((0, True), (1, False)):
        made = TextEncoder(encoders.model("modernbert")).double()
        for layer in made.model.layers:
            if layer.attn.sliding_window is not None:
                layer.attn.sliding_window += change
        assert made.pack() is packed
        assert made.packed is packed
    states = torch.zeros(1, 2, 4, 8)
    options = {"cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4}
    with pytest.raises(NotImplementedError, match="does not support a mask of the model"):
        packed_texts.attention(torch.nn.Module(), states, states, states, torch.ones(1, 1, 4, 4), **options)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (False, 3), (True, None), (True, 3)])
def test_attention_with_dropout_calls_an_operator_that_has_gradients(monkeypatch, causal, window):
    """On the "meta" device, which has the operator's shapes and derivatives, and no values."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # the device has no autocast
    limits = torch.empty(4, dtype=torch.int32, device="meta")
    parts = [torch.empty(1, 2, 20, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    module = torch.nn.Module()
    module.is_causal = causal
    options = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": 9, "sliding_window": window, "scaling": 0.3}
    output, _ = packed_texts.attention(module, *parts, None, dropout=0.1, **options)
    assert (output.shape, type(output.grad_fn).__name__) == ((1, 20, 2, 8), "UnsqueezeBackward0")
    assert type(output.grad_fn.next_functions[0][0]).__name__ == "FlashAttentionBackward0"
    output.sum().backward()
    assert all(part.grad.shape == part.shape for part in parts)
