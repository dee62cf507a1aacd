"""Settings: a way there and back through TOML, and an error for everything that is not as it should be."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import examples
from megabatch_train import settings
from megabatch_train.settings import SettingsError
from megabatch_train.trainer import config as configs
from megabatch_train.trainer.config import TrainConfig


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    kind: Literal["round", "square"] = "round"
    pair: tuple[float, float] = (0.9, 0.98)


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    size: int | Literal["auto"] = "auto"
    share: int | float = 0.1
    wanted: bool = False
    limit: float | None = None
    sizes: tuple[int, ...] = (1, 2)
    options: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def through_toml(config, path):
    path.write_text(settings.to_toml(settings.table(config)), encoding="utf-8")
    return settings.build(type(config), settings.read(path))


def test_every_kind_of_value_survives_toml(tmp_path):
    config = Outer(
        'a "quoted" \\ name\nin two lines, ünïcode \x7f \x00',
        7,
        0.0,
        True,
        1e-30,
        (),
        {"columns": ["a", "b"], "deep": {"er": {"x": 1.0}}, "a key": -3},
        Inner(float("inf"), "square", (1.0, 0.0)),
    )
    assert through_toml(config, tmp_path / "a.toml") == config
    assert through_toml(Outer(), tmp_path / "b.toml") == Outer()
    assert through_toml(Outer(share=3), tmp_path / "c.toml").share == 3
    assert isinstance(through_toml(Outer(share=1.0), tmp_path / "c.toml").share, float)


@examples(50)
@given(st.text(), st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1))
def test_any_text_and_number_survives_toml(tmp_path_factory, text, number, whole):
    config = Outer(text, whole, number, options={text or "empty": [text, number]})
    assert through_toml(config, tmp_path_factory.mktemp("toml") / "a.toml") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nmae": "x"}, 'nmae is not a setting; did you mean "name"?'),
        ({"inner": {"rat": 1.0}}, 'inner.rat is not a setting; did you mean "rate"?'),
        ({"zzzzzz": 1}, "zzzzzz … name, size, share"),
        ({"inner": {"kind": "squar"}}, 'inner.kind … "round" or "square" … got \'squar\' … "square"?'),
        ({"size": "all"}, "size … got 'all'"),
        ({"size": 1.5}, "size … got 1.5"),
        ({"size": True}, "size … got True"),
        ({"inner": {"rate": "fast"}}, "inner.rate … got 'fast'"),
        ({"wanted": 1}, "wanted … got 1"),
        ({"inner": 3}, "inner … inner.KEY … got 3"),
        ({"inner": {"pair": [1.0]}}, "inner.pair … got [1.0]"),
        ({"sizes": [1, "a"]}, "sizes … got [1, 'a']"),
        ({"options": 1}, "options … got 1"),
    ],
)
def test_errors_name_the_key_what_was_expected_and_what_came(values, message):
    with pytest.raises(SettingsError) as error:
        settings.build(Outer, values)
    assert all(part in str(error.value) for part in message.split(" … ")), error.value


def test_assignments():
    assert settings.assignment("optimizer.lr=3e-3") == {"optimizer": {"lr": 0.003}}
    assert settings.assignment(" a = 5 ") == {"a": 5}
    assert settings.assignment("a=1.0") == {"a": 1.0}
    assert settings.assignment("a=true") == {"a": True}
    assert settings.assignment('a=["x", 2]') == {"a": ["x", 2]}
    assert settings.assignment("a=data/{0..9}.tar") == {"a": "data/{0..9}.tar"}
    assert settings.assignment("a=b=c") == {"a": "b=c"}
    assert settings.assignment("a = b c ") == {"a": "b c "}
    assert settings.assignment('a=" b "') == {"a": " b "}


@pytest.mark.parametrize("prompt", ["query: ", " query:", "  ", "search for \t"])
def test_the_spaces_of_a_prompt_survive_the_command_line_and_the_file(tmp_path, prompt):
    given = settings.assignment(f"model_options.query_prompt={prompt}")
    assert given == {"model_options": {"query_prompt": prompt}}
    (tmp_path / "config.toml").write_text(settings.to_toml(given))
    assert settings.read(tmp_path / "config.toml") == given


def test_assignments_that_are_none():
    for wrong in ("a", "=1", "a..b=1", ""):
        with pytest.raises(SettingsError, match="--set must have the form KEY=VALUE"):
            settings.assignment(wrong)


def test_files_that_are_not_toml(tmp_path):
    with pytest.raises(SettingsError, match=r"No such file: .*none.toml"):
        settings.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(SettingsError, match=r"bad.toml is not a TOML file: "):
        settings.read(tmp_path / "bad.toml")


def test_later_values_win_table_by_table():
    merged = settings.merge({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"c": 3}}, {"a": {"x": 1}})
    assert merged == {"a": {"x": 1}, "b": {"c": 3, "d": 2}}


def test_a_training_config_survives_toml_and_its_recipe_yields(tmp_path):
    config = configs.resolve({})
    assert through_toml(config, tmp_path / "a.toml") == config
    assert (config.data, config.model, config.batch_size, config.epochs) == ("emoji", "small", 512, 28.0)
    assert (config.optimizer.lr, config.schedule.name, config.schedule.warmup_fraction, config.ema) == (
        3e-3,
        "constant",
        0.3,
        0.95,
    )
    assert (config.model_options, config.total_steps(5)) == ({"buckets": 8192}, 140)
    words = configs.resolve({"data": "wordnet"})
    assert (words.batch_size, words.epochs, words.ema, words.model_options) == (1024, 4.0, 0.0, {})
    assert (words.optimizer.lr, words.schedule.name, words.schedule.warmup_steps) == (3e-3, "cosine", 20)
    other = configs.resolve({"model": "open_clip:ViT-B-32"}, {"data": "a.csv", "optimizer": {"lr": 1.0}})
    assert (other.optimizer.lr, other.optimizer.weight_decay, other.epochs) == (1.0, 0.2, 32.0)
    assert configs.resolve({"optimizer": {"lr": 1.0}}).optimizer.weight_decay == 0.1
    for model in ("hf:bert", "open_clip:ViT-B-32@openai"):  # models that start from weights
        tuned = configs.resolve({"model": model, "data": "a.csv"})
        assert (tuned.optimizer.lr, tuned.optimizer.weight_decay, tuned.epochs) == (2e-5, 0.01, 3.0)
    for model in ("hf-config:bert", "open_clip:ViT-B-32", "open_clip:a@b/my.json", "hf:IMAGES+TEXTS"):
        assert configs.resolve({"model": model, "data": "a.csv"}).optimizer.lr == "auto"
    # What is written down is what was used: read again, no recipe changes it.
    assert configs.resolve(settings.read(tmp_path / "a.toml")) == config
    # A warm-up that is given replaces the recipe's, whichever way each of them says it.
    shorter = configs.resolve({"data": "wordnet"}, {"schedule": {"warmup_fraction": 0.2}}).schedule
    assert (shorter.warmup_steps, shorter.warmup_fraction) == (None, 0.2)
    shorter = configs.resolve({"schedule": {"warmup_fraction": 0.2}}, {"schedule": {"warmup_steps": 7}}).schedule
    assert (shorter.warmup_steps, shorter.warmup_fraction) == (7, None)
    with pytest.raises(ValueError, match=r"schedule\.warmup_steps must not be set"):
        configs.resolve({"schedule": {"warmup_fraction": 0.2, "warmup_steps": 7}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batchsize": 3}, 'batchsize is not a setting; did you mean "batch_size"?'),
        ({"batch_size": 1}, "batch_size must be at least 2, because … got 1"),
        ({"chunk_size": 0}, 'chunk_size must be at least 1, or "auto", got 0'),
        ({"epochs": 0}, "epochs must be more than 0, got 0"),
        ({"ema": 1.0}, "ema … got 1.0"),
        ({"precision": "fp16", "parallel": "fsdp"}, 'precision must be "bf16" or "fp32" with parallel "fsdp"'),
        ({"optimizer": {"lr": -1}}, 'optimizer.lr must be "auto" or a finite number above 0, got -1.0'),
        ({"optimizer": {"lr": math.inf}}, 'optimizer.lr must be "auto" or a finite number above 0, got inf'),
        ({"optimizer": {"clip_norm": math.inf}}, "optimizer.clip_norm … got inf"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep must be at least 1, got 0"),
        ({"loss": {"scale": 0}}, "loss.scale must be a finite number above 0, got 0.0"),
    ],
)
def test_training_settings_that_make_no_sense(values, message):
    with pytest.raises(SettingsError) as error:
        configs.resolve(values)
    assert all(part in str(error.value) for part in message.split(" … ")), error.value


def test_every_setting_has_a_default_and_toml_can_hold_it():
    for field_ in dataclasses.fields(TrainConfig):
        assert field_.default is not dataclasses.MISSING or field_.default_factory is not dataclasses.MISSING


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learning_rate", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("weight-decay", "optimizer.weight_decay"),
        ("warmup", "schedule.warmup_steps"),
        ("num_workers", "workers"),
        ("max_grad_norm", "optimizer.clip_norm"),
        ("batchsize", "batch_size"),
    ],
)
def test_unknown_settings_get_a_suggestion_by_meaning(word, meant):
    with pytest.raises(SettingsError, match=f'{word} is not a setting; did you mean "{meant}"'):
        configs.resolve({word: 1})


def test_suggestions_are_settings():
    assert set(configs.MEANINGS.values()) <= set(settings.keys(TrainConfig))


def test_every_setting_is_described():
    found = {setting.key: setting for setting in settings.describe_fields(TrainConfig)}
    assert [key for key, setting in found.items() if not setting.text] == []
    assert found["optimizer.lr"][1:3] == ('a number or "auto"', '"auto"')
    assert found["optimizer.betas"].default == "[0.9, 0.98]"
    assert found["schedule.warmup_steps"][1:3] == ("a whole number", "")
    assert settings.assignment(f"checkpoint.keep={found['checkpoint.keep'].default}") == {"checkpoint": {"keep": 2}}
