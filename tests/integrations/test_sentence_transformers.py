"""The losses for sentence-transformers' trainer against its own: 20 steps in float64 give the same weights, to rounding.

Steps of Adam are about the learning rate, 1e-3 for each weight, and weights move by 1e-2 in all; a gradient that differs by
rounding, 1e-16 of its size, moves them by less than 1e-12, also where it is zero but for rounding and Adam divides by 1e-8.
"""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import sentences
from helpers import PATIENCE

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")

# Of other people's packages, on the way into a trainer.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork:RuntimeWarning")

TOLERANCE = 1e-12
MINI = {"mini_batch_size": 7}  # batches have 24 rows
ALL = ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
BOTH = {"directions": ["query_to_doc", "doc_to_query"], "partition_mode": "per_direction"}


def assert_same_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def both_libraries(folder, name, options, hard=0, arguments=()):
    """Texts in the order of the batch, where dropout draws the same numbers."""
    data = sentences.columns(96, hard)
    return [
        sentences.run(folder / library, library, name, {**MINI, **options, **more}, data, dict(arguments))[0]
        for library, more in (("ours", {"sort_by_length": False}), ("theirs", {}))
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "hard", "arguments"),
    [
        ("ranking", {}, 0, {"dropout": 0.1}),
        ("ranking", {"directions": ALL}, 2, {"gradient_accumulation_steps": 3, "max_steps": 7}),
        ("gist", {"margin": 0.05, "temperature": 0.05}, 1, {"dropout": 0.1}),
    ],
)
def test_twenty_steps_of_their_trainer(tmp_path, name, options, hard, arguments):
    assert_same_weights(*both_libraries(tmp_path, name, options, hard, arguments))


# One step of a loss, without a trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sentences.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    return sentences.tiny_model(tmp_path_factory.mktemp("guide"), seed=7)


def features(model, hard=0, rows=10):
    return [model.preprocess(texts) for texts in sentences.columns(rows, hard).values()]


def gradients(loss, inputs, labels=None, factor=1.0):
    loss.zero_grad()
    value = loss(inputs, labels)
    (value * factor).backward()
    return value.detach(), {name: p.grad.clone() for name, p in loss.model.named_parameters() if p.grad is not None}


def assert_same_step(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=0)
    assert found[1].keys() == wanted[1].keys()
    largest = max(gradient.abs().max() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-12 * largest.item())


HARDNESS = [
    {"hardness_mode": mode, "hardness_strength": 3.0} for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
]


@pytest.mark.quick({"hard": 2})
@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"directions": ALL},
        BOTH,
        {"similarity": "dot_score", "scale": 0.7},
        *HARDNESS,
        {**HARDNESS[0], **BOTH},
        {**HARDNESS[1], "directions": ALL[:3]},
        {**HARDNESS[2], "directions": ALL, "similarity": "dot_score", "scale": 0.7},
        {"mini_batch_num_tokens": 30},
    ],
    ids=str,
)
def test_ranking_loss(model, options, hard):
    from sentence_transformers import util

    options = {**MINI, **options}
    if "similarity" in options:
        options["similarity_fct"] = getattr(util, options.pop("similarity"))
    inputs = features(model, hard)
    steps = [gradients(sentences.losses(library)["ranking"](model, **options), inputs) for library in ("ours", "theirs")]
    assert_same_step(*steps)


@pytest.mark.parametrize("hard", [0, 1])
def test_the_symmetric_ranking_loss(model, hard):
    inputs, arguments = features(model, hard), (12.0,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the original says that it is one of the other class
        kinds = [sentences.losses(library)["symmetric"] for library in ("ours", "theirs")]
        steps = [gradients(kind(model, *arguments, **MINI), inputs) for kind in kinds]
    assert_same_step(*steps)
    assert not torch.allclose(steps[0][0], gradients(sentences.losses("ours")["ranking"](model, *arguments, **MINI), inputs)[0])


def long_and_short(rows, width=12):
    """Three columns of tokens, most of them short."""
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.where(torch.rand(rows, generator=generator) < 0.2, width, 1 + torch.arange(rows) % 5)
        ids = torch.randint(5, 25, (rows, width), generator=generator)
        found.append({"input_ids": ids, "attention_mask": (torch.arange(width) < lengths[:, None]).long(), "modality": "text"})
    return found


@pytest.mark.quick({"name": "ranking"})
@pytest.mark.parametrize("name", ["ranking", "gist"])
@pytest.mark.parametrize("options", [MINI, {"mini_batch_num_tokens": 40}], ids=str)
def test_texts_of_similar_length_are_encoded_together(model, guide, name, options):
    tokens = []
    hook = model[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]["input_ids"].numel()))
    counted, steps = [], []
    for library in ("ours", "theirs"):
        arguments = (model, guide) if name == "gist" else (model,)
        steps.append(gradients(sentences.losses(library)[name](*arguments, **options), long_and_short(30)))
        counted.append(sum(tokens))
        tokens.clear()
    hook.remove()
    assert_same_step(*steps)
    assert counted[0] < 0.8 * counted[1]


@pytest.mark.parametrize(
    "unusual", [{"pixel_values": torch.ones(30, 12)}, {"position_ids": [0] * 12}, {"attention_mask": None}]
)
def test_anything_but_padded_tokens_keeps_its_order(unusual):
    from megabatch.integrations.sentence_transformers import _longest_first

    column = long_and_short(30)[0]
    order = _longest_first(column)
    assert order.tolist() != sorted(order.tolist())
    assert _longest_first({**column, **unusual}) is None


@pytest.mark.quick({"hard": 2})
@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin_strategy": "relative", "margin": 0.03},
        {"contrast_anchors": False},
        {"contrast_positives": False, "margin": 0.02},
    ],
    ids=str,
)
def test_gist(model, guide, options, hard):
    inputs = features(model, hard)
    options = {**MINI, "temperature": 0.05, **options}
    steps = [gradients(sentences.losses(library)["gist"](model, guide, **options), inputs) for library in ("ours", "theirs")]
    assert_same_step(*steps)


def test_evaluation_is_the_same_loss(model, guide):
    inputs = features(model, 1)
    for name, more in (("ranking", ()), ("gist", (guide,))):
        with torch.no_grad():
            ours, theirs = (sentences.losses(library)[name](model, *more)(inputs, None) for library in ("ours", "theirs"))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, BOTH])
def test_widths_in_one_pass(model, options):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    widths, weights = [16, 8, 3], [1.0, 0.5, 2.0]
    inputs = features(model)
    ours = sentences.losses("ours")["ranking"](model, **MINI, **options, matryoshka_dims=widths, matryoshka_weights=weights)
    found = gradients(ours, inputs)
    for library in ("theirs", "ours"):  # ours inside their MatryoshkaLoss, too
        inner = sentences.losses(library)["ranking"](model, **MINI, **options)
        assert_same_step(found, gradients(MatryoshkaLoss(model, inner, widths, weights), inputs))


def test_rows_with_the_same_label_are_not_negatives(model):
    """Against the dense formula, with −inf where labels are equal."""
    inputs, labels = features(model), torch.tensor([0, 1, 2, 0, 4, 5, 1, 0, 8, 9])
    loss = sentences.losses("ours")["ranking"](model, **MINI, labels_are_ids=True)
    found = gradients(loss, inputs, labels)
    model.zero_grad()
    query, key = (torch.nn.functional.normalize(model(dict(part))["sentence_embedding"], dim=1) for part in inputs)
    same = (labels[:, None] == labels) & ~torch.eye(10, dtype=torch.bool)
    logits = (20 * query @ key.T).masked_fill(same, -torch.inf)
    wanted = torch.nn.functional.cross_entropy(logits, torch.arange(10))
    wanted.backward()
    assert_same_step(found, (wanted.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    with pytest.raises(ValueError, match=r'labels must be given .* column "label"'):
        loss(inputs, None)


def test_the_learned_scale_has_the_gradient_of_the_formula(model):
    """Also through the hardness, which depends on it nowhere; and with the factor that a trainer puts before backward."""
    inputs = features(model, 1)
    for options in ({}, HARDNESS[2]):
        loss = sentences.losses("ours")["ranking"](model, **MINI, **options, learn_temperature=True)
        _, wanted_of_model = gradients(loss, inputs, factor=0.25)
        slope = loss.learned_scale.bias.grad.double()
        step = 1e-3
        values = [
            sentences.losses("theirs")["ranking"](model, scale=20 * factor, **MINI, **options)(inputs, None).item()
            for factor in (1 + step, 1 - step)
        ]
        numerical = 0.25 * (values[0] - values[1]) / (torch.log(torch.tensor((1 + step) / (1 - step), dtype=torch.float64)))
        torch.testing.assert_close(slope, numerical, rtol=1e-4, atol=0)  # the parameter is float32, the quotient 1e-6 off
        plain = gradients(sentences.losses("theirs")["ranking"](model, **MINI, **options), inputs, factor=0.25)[1]
        # exp(log 20) in float32
        largest = max(gradient.abs().max() for gradient in plain.values()).item()
        for name, gradient in plain.items():
            torch.testing.assert_close(wanted_of_model[name], gradient, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["ranking", "gist"])
def test_the_trainer_moves_the_temperature(tmp_path, name):
    options = {**MINI, "learn_temperature": True, **({"temperature": 0.05} if name == "gist" else {})}
    data = sentences.columns(96)
    _, loss = sentences.run(tmp_path, "ours", name, options, data, {"max_steps": 3, "weight_decay": 100.0, "warmup_steps": 0})
    moved = (loss.learned_scale.bias.detach().exp() - 20).abs().item()
    assert 1e-3 < moved < 1, "steps of 1e-3 on its logarithm, and no decay towards 0"


def test_the_scale_stays_in_bounds(model):
    loss = sentences.losses("ours")["ranking"](model, scale=99.0, learn_temperature=True)
    with torch.no_grad():
        loss.learned_scale.bias += 1
    loss(features(model), None)
    torch.testing.assert_close(loss.learned_scale.bias.detach().exp(), torch.tensor(100.0))


def test_what_is_refused(model):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    kind = sentences.losses("ours")["ranking"]
    with pytest.raises(ValueError, match=r"similarity_fct .* got euclidean"):
        kind(model, similarity_fct=__import__("sentence_transformers").util.euclidean_sim)
    with pytest.raises(ValueError, match=r"directions must be .* got .*joint"):
        kind(model, directions=("query_to_doc", "doc_to_query"), matryoshka_dims=[8, 16])
    with pytest.raises(ValueError, match=r"hardness_mode .* matryoshka_dims"):
        kind(model, matryoshka_dims=[8, 16], **HARDNESS[0])
    with pytest.raises(ValueError, match=r"matryoshka_dims .* hard negatives"):
        kind(model, matryoshka_dims=[8, 16])(features(model, 1), None)
    with pytest.raises(ValueError, match=r"hardness_mode must be None or .*doc_to_doc"):
        kind(model, directions=ALL, **HARDNESS[0])(features(model, 1), None)
    with pytest.raises(ValueError, match=r"learn_temperature .* MatryoshkaLoss"):
        MatryoshkaLoss(model, kind(model, learn_temperature=True), [8, 16])(features(model), None)
    with pytest.raises(ValueError, match="max_scale must be at least"):
        kind(model, scale=200.0, learn_temperature=True)


def test_a_model_with_a_vector_for_each_token_is_refused(model):
    from sentence_transformers import MultiVectorEncoder

    many = MultiVectorEncoder(modules=[model[0]], device="cpu")
    losses = sentences.losses("ours")
    message = r"must return one vector for each text, got MultiVectorEncoder"
    with pytest.raises(TypeError, match=rf"^model {message}"):
        losses["ranking"](many)
    with pytest.raises(TypeError, match=rf"^model {message}"):
        losses["gist"](many, model)
    with pytest.raises(TypeError, match=rf"^guide {message}"):
        losses["gist"](model, many)


def test_under_autocast(model):
    """Similarities are then of rounded embeddings; each library rounds elsewhere, by 2⁻⁸ of a similarity of at most 20."""
    inputs = features(model, 1)
    values = []
    for library in ("ours", "theirs"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sentences.losses(library)["ranking"](model, **MINI)(inputs, None)
        model.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        values.append(loss.detach().double())
    torch.testing.assert_close(*values, rtol=0, atol=2 * 20 * 2**-8)


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "sentence_transformers" or name == "megabatch.integrations.sentence_transformers":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "megabatch\[sentence-transformers\]"'):
        import megabatch.integrations.sentence_transformers  # noqa: F401


def test_the_model_card_has_its_settings(model):
    settings = sentences.losses("ours")["ranking"](model, learn_temperature=True, matryoshka_dims=[16, 4]).get_config_dict()
    assert settings["scale"] == 20.0
    assert settings["learn_temperature"] is True
    assert settings["matryoshka_dims"] == [16, 4]


# Two processes


GATHERED = {**MINI, "gather_across_devices": True}
HALF = {"per_device_train_batch_size": 12}
SHORT = {**HALF, "max_steps": 4}
TWO_RANKS = [
    ("theirs", "ranking", GATHERED, 1, HALF),
    ("ours", "ranking", GATHERED, 1, HALF),
    ("theirs", "gist", {**GATHERED, "temperature": 0.05, "contrast_anchors": False}, 0, SHORT),
    ("ours", "gist", {**GATHERED, "temperature": 0.05, "contrast_anchors": False}, 0, SHORT),
    ("ours", "gist", {**GATHERED, "temperature": 0.05}, 0, SHORT),
    ("ours", "ranking", {**GATHERED, "learn_temperature": True, **HARDNESS[0]}, 1, {**SHORT, "gradient_accumulation_steps": 2}),
]


@pytest.mark.long
@pytest.mark.thorough
def test_two_processes(tmp_path):
    """As theirs in two processes, and as one process with both halves of each batch: there the trainer deals the same rows.

    Theirs with a guide contrasts anchors of one process alone; ours is then what theirs is in one process.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([os.path.abspath("src"), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    sentences.write_model(tmp_path / "model")
    sentences.write_model(tmp_path / "guide", seed=7)
    call = [*launcher, sentences.__file__, str(tmp_path), json.dumps(TWO_RANKS)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-5000:]
    found = torch.load(tmp_path / "found.pt")
    assert_same_weights(found[1][0], found[0][0])
    assert_same_weights(found[3][0], found[2][0])
    options = {**MINI, "temperature": 0.05}
    weights, _ = sentences.run(tmp_path / "whole", "theirs", "gist", options, sentences.columns(96), {"max_steps": 4})
    assert_same_weights(found[4][0], weights)
    data = sentences.columns(96, 1)
    options = {**MINI, "learn_temperature": True, **HARDNESS[0]}
    weights, loss = sentences.run(
        tmp_path / "one", "ours", "ranking", options, data, {"max_steps": 4, "gradient_accumulation_steps": 2}
    )
    torch.testing.assert_close(found[5][1], loss.learned_scale.bias.detach(), rtol=1e-6, atol=0)
    for name, value in weights.items():
        torch.testing.assert_close(found[5][0][name], value, rtol=0, atol=1e-6)  # the scale is float32
