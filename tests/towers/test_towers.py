"""Towers: embeddings that depend on nothing but the sample, inputs that are replayed, names that mean something."""

import json

import pytest
import torch

import megabatch as mb
from megabatch_train import towers
from megabatch_train.data.dataset import Dataset
from megabatch_train.data.media import images
from megabatch_train.data.media.images import AUGMENT_NUMBERS, Augmentation, leave_unchanged
from megabatch_train.evaluation import embed, encode, evaluate
from megabatch_train.towers import small
from megabatch_train.towers.small import SmallConfig

TINY = {"width": 16, "image_size": 16, "channels": (8, 16), "blocks": 1, "buckets": 512}
COLOURS = {
    "red": (250, 20, 20),
    "green": (20, 250, 20),
    "blue": (20, 20, 250),
    "yellow": (240, 240, 10),
    "grey": (120, 120, 120),
}


class Squares(Dataset):
    """Each colour a few times, at other places."""

    def __len__(self):
        return 3 * len(COLOURS)

    def read(self, index, side):
        name = list(COLOURS)[index % len(COLOURS)]
        if side == 1:
            return f"a {name} square"
        image = torch.full((3, 20, 24), 255, dtype=torch.uint8)
        place = 2 + index // len(COLOURS)
        image[:, place : place + 12, place : place + 12] = torch.tensor(COLOURS[name], dtype=torch.uint8)[:, None, None]
        return image

    def name(self, index):
        return self.read(index, 1)

    def ids(self, indices):
        return torch.as_tensor(indices) % len(COLOURS)


@pytest.fixture
def one_thread():
    """For many tiny operations on a machine that has other work, where threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_small_towers_learn_what_they_are_shown_and_evaluate_says_so():
    torch.manual_seed(0)
    pair, data = towers.load("small", **TINY), Squares()
    optimizer = torch.optim.AdamW(pair.parameters(), lr=3e-3)
    chosen = list(range(len(data)))
    losses = []
    for epoch in range(25):
        inputs = [(t.module, data.source(chosen, side, t, epoch=epoch)) for side, t in enumerate(pair.towers)]
        losses.append(mb.cached_backward(lambda x, y: mb.clip_loss(x, y, 10.0, ids=data.ids(chosen)), inputs, chunk_size=4))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 3
    images, names = embed(pair.first, data, 0, range(5)), encode(pair.second, [data.name(i) for i in range(5)])
    assert (images @ names.T).argmax(1).tolist() == list(range(5))
    found = evaluate(pair, data)
    assert found["num_samples"] == 15
    assert found["num_failed"] == 0
    # Captions that are equal come in the order of their index, so the right one is among the first three.
    assert found["image_to_text_R@5"] == 1
    assert pair.first.module.training  # as before


@pytest.mark.parametrize("kind", [0, 1])
def test_an_embedding_depends_on_its_sample_alone(kind):
    torch.manual_seed(0)
    tower = towers.load("small", **TINY).towers[kind]
    tower.module.double()
    data = Squares()
    samples = [tower.prepare(data.read(i, kind), None) for i in range(7)]
    tower.module.eval()

    def embedded(chosen):
        inputs = tower.collate(chosen)
        inputs = {k: v if v.dtype == torch.int64 else v.double() for k, v in inputs.items()} if kind else inputs.double()
        return tower.module(**inputs) if kind else tower.module(inputs)

    together = embedded(samples)
    torch.testing.assert_close(together, torch.cat([embedded([sample]) for sample in samples]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(7, dtype=torch.float64))


def test_text_without_words_has_a_finite_embedding():
    tower = towers.load("small", **TINY).second
    assert encode(tower, ["", "   ", "!?", "日本"]).isfinite().all()


def test_n_grams_are_the_same_in_every_process_and_tell_words_apart():
    assert small.n_grams("Cat", 1 << 15, (3,)).tolist() == small.n_grams("cat", 1 << 15, (3,)).tolist()
    cat, education = (set(small.n_grams(text, 1 << 30, (3,)).tolist()) for text in ("cat", "education"))
    assert len(cat) == 4  # <cat>, <ca, cat, at>
    assert len(cat & education) == 1  # cat in the middle
    assert small.n_grams("a", 1 << 15, ()).tolist() == [29968]  # Python's own hash would change from run to run


def test_augmentation_of_nothing_changes_nothing():
    images = torch.randint(0, 256, (3, 3, 9, 9), dtype=torch.uint8)
    nothing = Augmentation(zoom=0, stretch=0, shift=0, turn=0, brightness=0, contrast=0, saturation=0, hue=0)
    numbers = torch.rand(3, AUGMENT_NUMBERS) * 2 - 1
    torch.testing.assert_close(nothing.apply(images, numbers), leave_unchanged(images), atol=1e-5, rtol=0)


def test_augmentation_moves_and_colours_as_it_says():
    image = torch.full((1, 3, 20, 20), 255, dtype=torch.uint8)
    image[:, :, 8:12, 8:12] = torch.tensor([200, 30, 30], dtype=torch.uint8)[:, None, None]
    off = {"zoom": 0, "stretch": 0, "shift": 0, "turn": 0, "brightness": 0, "contrast": 0, "saturation": 0, "hue": 0}
    numbers = torch.zeros(1, AUGMENT_NUMBERS)

    def changed(number, value=1.0, **how):
        numbers.zero_()[0, number] = value
        return Augmentation(**{**off, **how}).apply(image, numbers)[0]

    darkness = lambda result: 1 - result[1]  # noqa: E731
    right = darkness(changed(2, shift=0.2))  # looks 4 pixels further right, so the square is further left
    assert right.sum(0).argmax() == 4
    assert torch.allclose(right.sum(), darkness(changed(9)).sum(), rtol=1e-4)
    assert darkness(changed(0, zoom=0.5)).sum() < darkness(changed(9)).sum()  # looks at more, so it is smaller
    assert darkness(changed(0, -1.0, zoom=0.5)).sum() > darkness(changed(9)).sum()
    grey = changed(8, -1.0, saturation=1.0)[:, 10, 10]
    assert grey.max() - grey.min() < 1e-5
    assert changed(6, brightness=0.1)[:, 10, 10].tolist() == pytest.approx([200 / 255 + 0.1, 30 / 255 + 0.1, 30 / 255 + 0.1])
    turned = changed(9, hue=1 / 3)[:, 10, 10]
    assert turned.argmax() != 0  # a third of the circle: red is another colour
    assert turned.sum().item() == pytest.approx(260 / 255, rel=1e-3)
    mirrored = Augmentation(**off, flip=True).apply(image.roll(3, 3), torch.ones(1, AUGMENT_NUMBERS))
    torch.testing.assert_close(mirrored[0], leave_unchanged(image.roll(3, 3)).flip(3)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 1, 300), (3, 200, 3)])
def test_small_images_are_brought_to_size(shape):
    assert images.fit_to_square(torch.randint(0, 256, shape, dtype=torch.uint8), 8).shape == (3, 8, 8)


def test_gradients_of_small_images_have_the_strides_of_their_weights():
    """DDP warns of others, which a convolution makes of channels-last images where a kernel has dimensions of length 1."""
    torch.manual_seed(0)
    tower = small.SmallImageTower(SmallConfig(width=16, channels=(8, 16), blocks=1))
    images = torch.randn(3, 3, 32, 32)
    tower(images)[:, 0].sum().backward()
    assert {name for name, p in tower.named_parameters() if p.grad.stride() != p.stride()} == set()
    convolution, plain = tower.features[0], torch.nn.Conv2d(3, 8, 6, stride=4, padding=1)
    plain.load_state_dict(convolution.state_dict())
    for layer in (convolution, plain):
        layer.zero_grad()
        layer(images).square().sum().backward()
    assert torch.equal(convolution.weight.grad, plain.weight.grad)


def test_names_that_mean_nothing_list_what_is_possible():
    for spec in ("large", "open_clip:", "hf", ""):
        with pytest.raises(ValueError, match=r"Possible are: small .*open_clip:MODEL.*hf:NAME.*hf-config:FOLDER"):
            towers.load(spec)
    with pytest.raises(ValueError, match=r"model_options\.width must not be set for 'hf:x'; possible are: .*image_size"):
        towers.load("hf:x", width=3)
    first, second = towers.load("small", ("text", "text"), **TINY).towers
    assert first is second
    assert SmallConfig().image_size == towers.load("small").first.prepare(Squares().read(0, 0), None)[0].shape[-1]


def test_open_clip_is_what_open_clip_computes():
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    torch.manual_seed(0)
    pair, data = towers.load("open_clip:ViT-S-32-alt"), Squares()
    model = pair.first.module.model
    assert pair.first.module is pair.second.module
    assert pair.logit_scale == pytest.approx(1 / 0.07, rel=1e-5)
    images, names = embed(pair.first, data, 0, range(2)), encode(pair.second, ["a red square", ""])
    transform = open_clip.image_transform(model.visual.image_size, is_train=False)
    from megabatch_train.data.media.images import to_pillow

    expected = torch.stack([transform(to_pillow(data.read(i, 0))) for i in range(2)])
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(images, model.encode_image(expected, normalize=True), rtol=1e-4, atol=1e-5)
        tokens = open_clip.get_tokenizer("ViT-S-32-alt")(["a red square", ""])
        torch.testing.assert_close(names, model.encode_text(tokens, normalize=True), rtol=1e-4, atol=1e-5)
    source = data.source(range(3), 0, pair.first, seed=1)
    first, second = (next(source.chunks([(0, 3)], None))["image"].clone() for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, next(data.source(range(3), 0, pair.first, seed=2).chunks([(0, 3)], None))["image"])
    with pytest.raises(ValueError, match="model must have towers for text and text, got 'open_clip"):
        towers.load("open_clip:ViT-S-32-alt", ("text", "text"))
    with pytest.raises(ValueError, match=r"open_clip has no model vit-b; did you mean ViT-B-32 or ViT-B-16"):
        towers.load("open_clip:vit-b")
    with pytest.raises(ValueError, match=r"ViT-B-32 has no weights opanai, and there is no such file; did you mean openai\?"):
        towers.load("open_clip:ViT-B-32@opanai")


def test_weights_that_cannot_be_fetched_are_a_sentence(monkeypatch):
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')

    def no_network(*arguments, **options):
        raise RuntimeError("Failed to download weights\nand more")

    monkeypatch.setattr(open_clip, "create_model_and_transforms", no_network)
    with pytest.raises(OSError, match=r"the weights openai of ViT-B-32 could not be loaded; .* Failed to download weights$"):
        towers.load("open_clip:ViT-B-32@openai")


def test_a_transformers_encoder_from_a_config_downloads_nothing(tmp_path):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 32, "vocab_size": 99, "max_position_embeddings": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = towers.load(f"hf-config:{tmp_path}", ("text", "text"))
    texts = ["one two", "", "a text of very many words indeed that has to be cut off somewhere", "one two"]
    found = encode(pair.first, texts)
    assert found.shape == (4, 16)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], found[3])
    torch.testing.assert_close(encode(pair.first, texts[:1])[0], found[0], rtol=1e-4, atol=1e-6)  # padding does not count
    with pytest.raises(ValueError, match=r"must be a folder with a config.json, got"):
        towers.load("hf-config:nowhere", ("text", "text"))
