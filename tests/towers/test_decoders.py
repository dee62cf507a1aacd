"""Decoders as towers: pooling, padding on either side, packed texts, LoRA, checkpointing, frozen layers, over ranks."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import decoders
import megabatch as mb
from decoders import Loss, Way, decoder
from megabatch.world import World
from megabatch_train import towers
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from megabatch_train.towers.layers import packed as packed_texts
from megabatch_train.towers.sentence_transformer import POOLINGS, TextEncoder
from megabatch_train.towers.tower import LoraConfig
from megabatch_train.trainer import build
from ranks import CountedReduceScatter

pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')

QUERIES, NEGATIVES = 7, 4
TEXTS = ["one two three", "", "a b c d e f", "one"]


def needs_peft():
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')


def same(found, wanted):
    assert found[1].keys() == wanted[1].keys()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=1e-11)
    for name, gradient in wanted[1].items():
        assert gradient.abs().max() > 1e-8, name
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.quick({"budget": 20000}, {"budget": "all"})
@pytest.mark.parametrize(
    ("way", "budget"),
    [
        (Way(lora=2, packed=True, checkpointing=True), None),
        (Way(lora=2, packed=True, pooling="mean"), 20000),
        (Way(packed=True, checkpointing=True, left=True), "all"),
        (Way(checkpointing=True, left=True, pooling="mean"), 20000),
        (Way(packed=True, frozen=2), None),
        (Way(left=True), None),
    ],
    ids=str,
)
def test_a_cached_step_of_a_decoder_is_the_plain_step(way, budget):
    if way.lora:
        needs_peft()
    wanted = decoders.plain(dataclasses.replace(way, left=False), QUERIES, NEGATIVES)
    encoder = decoder(way)
    inputs = decoders.batch(QUERIES, NEGATIVES, way.left)
    loss = mb.cached_backward(Loss(), [(encoder, one) for one in inputs], chunk_size=2, budget=budget)
    same((loss, decoders.gradients(encoder)), wanted)


def test_dropout_of_adapters_is_the_same_in_all_passes():
    """Four passes: without a graph, with it, and again for both checkpoints; a wrong one would change the gradient."""
    needs_peft()
    found = []
    for budget in ("all", None):
        encoder = decoder(Way(lora=2, packed=True, checkpointing=True, dropout=0.5)).train()
        torch.manual_seed(5)
        inputs = decoders.batch(QUERIES, NEGATIVES)
        found.append((mb.cached_backward(Loss(), [(encoder, one) for one in inputs], chunk_size=2, budget=budget), encoder))
    same((found[1][0], decoders.gradients(found[1][1])), (found[0][0], decoders.gradients(found[0][1])))


def on_rank(group, rank, way, counts, offload, budget):
    """A step as one rank: gradients, and how often each parameter group of FSDP2 is reduced."""
    encoder = decoder(way)
    world = World(torch.device("cpu"), group)
    (called,) = build.wrap([encoder], [None], world, "fsdp", offload=offload)
    queries, second = decoders.batch(sum(counts[0]), sum(counts[1]), way.left)
    begin, end = (sum(counts[0][: rank + i]) for i in (0, 1))
    hard = [sum(counts[0]) + sum(counts[1][: rank + i]) for i in (0, 1)]
    own = torch.cat([torch.arange(begin, end), torch.arange(*hard)])
    inputs = decoders.part(queries, slice(begin, end)), decoders.part(second, own)
    with CountedReduceScatter() as counted:
        loss = mb.cached_backward(Loss(group), [(called, one) for one in inputs], chunk_size=2, budget=budget)
    return loss, decoders.gradients(encoder), counted.calls


@pytest.mark.thorough  # three processes import transformers and PEFT
@pytest.mark.parametrize(
    ("way", "offload", "budget", "reductions"),
    [
        (Way(lora=2, packed=True, checkpointing=True), False, None, 3),  # one for each layer; the rest has no adapters
        (Way(packed=True, frozen=2, checkpointing=True), True, None, 1),
        (Way(lora=2, pooling="mean"), True, "all", 3),
        (Way(packed=True, left=True), False, 20000, 4),
    ],
    ids=str,
)
def test_three_ranks_with_sharded_weights_are_one(pool, way, offload, budget, reductions):
    needs_peft()
    counts = ([4, 1, 2], [0, 3, 1])
    answers = pool.run(on_rank, 3, way, counts, offload, budget)
    wanted = decoders.plain(dataclasses.replace(way, left=False), QUERIES, NEGATIVES)
    loss = sum(answer[0] for answer in answers) / len(answers)
    for answer in answers:
        same((loss, answer[1]), wanted)
        assert answer[2] == reductions


# Towers by name


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **decoders.SIZES}))
    return tmp_path


@pytest.fixture
def pretrained(tmp_path):
    return saved(tmp_path / "pretrained")


def saved(folder, **sizes):
    """A decoder in bfloat16 with a tokenizer that pads on the left, has no padding token, and no tokens for an empty text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModel, PreTrainedTokenizerFast, Qwen3Config

    words = {word: i for i, word in enumerate(["<end>", "<unknown>", "one", "two", "three", "a", "b", "c"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unknown>", padding_side="left")
    tokenizer.save_pretrained(folder)
    AutoModel.from_config(Qwen3Config(**decoders.SIZES | sizes)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def trained(pair):
    """The pair with adapters that do something."""
    for name, parameter in pair.first.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return pair


def test_decoders_by_name_pool_the_last_token_and_pack(config):
    pair = towers.load(f"hf-config:{config}", ("text", "text"), query_prompt="query: ")
    encoder = pair.first.module
    assert pair.second.module is encoder
    assert (encoder.causal, encoder.pooling, encoder.packed) == (True, "last", True)
    found = encode(pair.second, TEXTS)
    assert found.isfinite().all()
    torch.testing.assert_close(encode(pair.first, TEXTS), encode(pair.second, [f"query: {text}" for text in TEXTS]))
    packed = {}
    for encoder.pooling in POOLINGS:
        packed[encoder.pooling] = encode(pair.second, TEXTS)
    encoder.pad()
    for encoder.pooling in POOLINGS[::-1]:
        torch.testing.assert_close(encode(pair.second, TEXTS), packed[encoder.pooling], rtol=1e-4, atol=1e-6)
    encoder.pooling = "last"
    torch.testing.assert_close(encode(pair.second, TEXTS), found, rtol=1e-4, atol=1e-6)
    assert encoder.model.config._attn_implementation == "sdpa"
    for options in ({"pooling": "mean"}, {"packed": False}):
        changed = towers.load(f"hf-config:{config}", ("text", "text"), **options)
        changed.first.module.load_state_dict(encoder.state_dict())
        assert (changed.first.module.pooling, changed.first.module.packed) == ("mean", True) if "pooling" in options else True
        close = torch.allclose(encode(changed.second, TEXTS), found, rtol=1e-4, atol=1e-5)
        assert close == ("packed" in options)
    for options, message in (
        ({"pooling": "first"}, r"model_options.pooling must be one of cls, mean, .*, got 'first'"),
        ({"packed": 1}, r"model_options.packed must be true or false, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            towers.load(f"hf-config:{config}", ("text", "text"), **options)


@pytest.mark.parametrize("fault", ["texts meet", "refused"])
def test_decoders_whose_texts_meet_are_not_packed(fault, monkeypatch):
    """In bfloat16, where rounding hides a small difference from padded texts."""
    encoder = TextEncoder(decoder(Way()).model).bfloat16()
    states = packed_texts.Packed.states

    def meeting(packed, *args):
        if fault == "refused":
            raise ValueError("cannot keep packed sequences apart")
        found = states(packed, *args)
        return found + 0.02 * found.roll(1, 0)

    monkeypatch.setattr(packed_texts.Packed, "states", meeting)
    assert not encoder.pack()
    assert encoder(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)).isfinite().all()


@pytest.mark.thorough
def test_a_packed_decoder_in_onnx(config, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason='pip install "megabatch[onnx]"')
    pair = towers.load(f"hf-config:{config}", ("text", "text"))
    export(pair, "onnx", tmp_path)  # compares the embeddings
    assert (tmp_path / "text.onnx").is_file()
    assert pair.first.module.packed


def layer(causal):
    made = torch.nn.Module()
    made.is_causal = causal
    return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_is_that_of_each_text_alone(window, causal):
    """Against a softmax over the tokens of one text, with fewer heads of keys, a scale of its own and a sliding window."""
    lengths, heads, width = [4, 1, 9], 4, 5
    limits = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(lengths), width, dtype=torch.float64, generator=generator) for h in (heads, 2, 2))
    options = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": limits, "max_length_q": max(lengths)}
    for part in (q, k, v):
        part.requires_grad_()
    found, _ = packed_texts.attention(layer(causal), q, k, v, None, **options)
    gradients = torch.autograd.grad(found.square().sum(), (q, k, v))
    expected = torch.empty_like(found)
    for start, end in zip(limits[:-1].tolist(), limits[1:].tolist(), strict=True):
        own = [part[0, :, start:end].repeat_interleave(heads // part.shape[1], 0) for part in (q, k, v)]
        number = torch.arange(end - start)
        behind = number[:, None] - number
        seen = (behind >= 0) | (not causal)
        seen &= behind.abs() < (window or 100)
        weights = (0.3 * own[0] @ own[1].transpose(1, 2)).masked_fill(~seen, -torch.inf).softmax(-1)
        expected[0, start:end] = (weights @ own[2]).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-11)
    with pytest.raises(NotImplementedError, match="attention of packed texts does not support softcap"):
        packed_texts.attention(torch.nn.Module(), q, k, v, None, softcap=30.0, **options)


def reference(
    query, key, value, limits, other, longest, most, *, scale=None, window_size=(-1, -1), is_causal=False, enable_gqa=False
):
    """`torch.nn.attention.varlen.varlen_attn` by its documentation, text by text."""
    assert limits is other
    assert (longest, most) == (int(limits.diff().max()),) * 2
    assert enable_gqa or query.shape[1] == key.shape[1]
    found = torch.empty_like(query)
    for start, end in zip(limits[:-1].tolist(), limits[1:].tolist(), strict=True):
        q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))
        k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, v))
        behind = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = (-1, 0) if is_causal else window_size
        seen = ((behind <= left) | (left < 0)) & ((-behind <= right) | (right < 0))
        scores = (q @ k.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        found[start:end] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("known", [("is_causal",), ("scale", "window_size"), ("scale", "window_size", "enable_gqa")], ids=str)
def test_each_version_of_pytorchs_attention_is_called_as_it_wants(monkeypatch, known, window, causal):
    def called(*args, **options):
        assert set(options) <= set(known)
        return reference(*args, **options)

    monkeypatch.setattr(packed_texts, "varlen", SimpleNamespace(varlen_attn=called))
    monkeypatch.setattr(packed_texts, "ARGUMENTS", frozenset(known))
    monkeypatch.setattr(packed_texts, "HALF", (torch.float64,))
    limits = torch.tensor([0, 4, 5, 14], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 14, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
    options = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": limits, "max_length_q": 9}
    wanted, _ = packed_texts.attention(layer(causal), q, k, v, None, **options)
    found, _ = packed_texts.attention(layer(causal), q, k, v, None, cu_seq_lens_k=limits, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_weights_to_be_trained_are_float32_and_empty_texts_have_a_token(pretrained):
    pair = towers.load(f"hf:{pretrained}", ("text", "text"))
    assert {p.dtype for p in pair.first.module.parameters()} == {torch.float32}
    inputs = pair.first.collate(TEXTS)
    assert inputs["attention_mask"].sum(1).tolist() == [3, 1, 6, 1]
    assert inputs["attention_mask"][:, 0].all()  # padded on the right
    assert pair.first.collate([""])["input_ids"].tolist() == [[0]]
    assert encode(pair.first, TEXTS).isfinite().all()


# LoRA


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_are_saved_as_peft_and_transformers_read_them(config, tmp_path, merge):
    needs_peft()
    from peft import PeftModel
    from transformers import AutoConfig, AutoModel

    pair = trained(towers.load(f"hf-config:{config}", ("text", "text"), lora=LoraConfig(3, merge=merge)))
    encoder, out = pair.first.module, tmp_path / "out"
    assert {name.split(".")[-3] for name, p in encoder.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    wanted = encode(pair.first, TEXTS)
    towers.save(pair, out)
    again = towers.load_saved(out)
    torch.testing.assert_close(encode(again.first, TEXTS), wanted, rtol=1e-4, atol=1e-6)
    assert (again.lora is None) == merge
    if merge:
        read = AutoModel.from_pretrained(out)
    else:
        base = AutoModel.from_config(AutoConfig.from_pretrained(config))
        frozen = {key: value for key, value in encoder.model.state_dict().items() if "lora_" not in key}
        base.load_state_dict({key.replace(".base_layer.", "."): value for key, value in frozen.items()})
        read = PeftModel.from_pretrained(base, out / "first").merge_and_unload()
    inputs = pair.first.collate([pair.first.prepare(text, None) for text in TEXTS])
    torch.testing.assert_close(TextEncoder(read).eval()(**inputs), wanted, rtol=1e-4, atol=1e-6)


def test_adapters_of_a_model_with_a_name_are_all_that_is_saved(pretrained, tmp_path):
    needs_peft()
    pair = trained(towers.load(f"hf:{pretrained}", ("text", "text"), lora=LoraConfig(2, targets=("q_proj", "down_proj"))))
    parameters = dict(pair.first.module.named_parameters())
    assert {p.dtype for p in parameters.values() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in parameters.values() if not p.requires_grad} == {torch.bfloat16}
    wanted = encode(pair.first, TEXTS)
    place = towers.save(pair, tmp_path / "out")
    learned = sum(p.numel() * 4 for p in parameters.values() if p.requires_grad)
    assert learned < place.stat().st_size < learned + 6000
    assert json.loads((tmp_path / "out" / "first" / "adapter_config.json").read_text())["r"] == 2
    again = towers.load_saved(tmp_path / "out")
    assert torch.equal(encode(again.first, TEXTS), wanted)
    assert again.lora == pair.lora
    exported = tmp_path / "exported"
    export(pair, "hf", exported)  # adapters added to the weights
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason='pip install "megabatch[sentence-transformers]"'
    )
    model = sentence_transformers.SentenceTransformer(str(exported), device="cpu", model_kwargs={"dtype": torch.float32})
    found, some = torch.as_tensor(model.encode(TEXTS)), [0, 2, 3]  # an empty text has a token here, and none there
    torch.testing.assert_close(found[some], wanted[some].float(), rtol=2e-2, atol=2e-2)  # weights are rounded to bfloat16


def test_settings_of_lora_that_cannot_be(config, pretrained, monkeypatch):
    needs_peft()
    for given, message in (
        ({"rank": -1}, "lora.rank must be at least 0"),
        ({"rank": 2, "alpha": 0.0}, "lora.alpha must be more than 0"),
        ({"rank": 2, "dropout": 1.0}, "lora.dropout must be at least 0 and less than 1"),
        ({"quantize": "int8"}, "lora.quantize must not be set without lora.rank"),
        ({"targets": ("q_proj",)}, "lora.targets must not be set without lora.rank"),
        ({"rank": 2, "quantize": "nf4", "merge": True}, "lora.merge must be false with lora.quantize"),
    ):
        with pytest.raises(ValueError, match=message):
            LoraConfig(**given)
    sides = ("text", "text")
    with pytest.raises(ValueError, match=r"lora.targets must be endings of names of linear layers, here down_proj, gate_proj"):
        towers.load(f"hf-config:{config}", sides, lora=LoraConfig(2, targets=("nowhere",)))
    with pytest.raises(ValueError, match=r"lora.targets must be endings of names of .* got quary, which no layer has"):
        towers.load(f"hf-config:{config}", sides, lora=LoraConfig(2, targets=("q_proj", "quary")))
    with pytest.raises(ValueError, match=r'lora.rank must be 0 for "small"'):
        towers.load("small", sides, lora=LoraConfig(2))
    with pytest.raises(ValueError, match=r'lora.quantize must be "none" for models "hf-config:"'):
        towers.load(f"hf-config:{config}", sides, lora=LoraConfig(2, quantize="int8"))
    monkeypatch.setattr("megabatch.extras.is_installed", lambda name: False)
    with pytest.raises(ModuleNotFoundError, match=r'lora.quantize = "nf4" needs the package "bitsandbytes"'):
        towers.load(f"hf:{pretrained}", sides, lora=LoraConfig(2, quantize="nf4"))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_quantised_weights_stay_near_and_adapters_learn(tmp_path, how):
    needs_peft()
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    pretrained = saved(tmp_path, hidden_size=64, intermediate_size=128, head_dim=32)  # on a CPU, nf4 takes multiples of 32
    whole = encode(towers.load(f"hf:{pretrained}", ("text", "text")).first, TEXTS)
    pair = towers.load(f"hf:{pretrained}", ("text", "text"), lora=LoraConfig(2, quantize=how))
    assert (encode(pair.first, TEXTS) * whole).sum(1).min() > 0.9
    inputs = pair.first.collate(TEXTS)
    mb.cached_backward(lambda x, y: mb.info_nce_loss(x, y, scale=5.0), [(pair.first.module, inputs)] * 2, chunk_size=2)
    assert all(p.grad is not None for p in pair.parameters() if p.requires_grad)
