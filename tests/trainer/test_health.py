"""Runs that learn nothing warn, then end with an error; runs that learn do neither."""

import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F

import runs
from megabatch_train.evaluation.results import read_run
from megabatch_train.trainer import health
from megabatch_train.trainer.health import Health, PairStatistics, StepSummary, TrainingFailedError, pair_statistics
from megabatch_train.trainer.run import MetricsFile

HEALTHY = StepSummary(3.0, 1.0, 14.0, PairStatistics(0.5, 0.1))
COLLAPSED = HEALTHY._replace(statistics=PairStatistics(1e-4, 0.0))
CHANCE = HEALTHY._replace(statistics=PairStatistics(0.5, 0.001))


def make_health(warm_up=10, batch_size=64):
    return Health(batch_size=batch_size, max_scale=100.0, warm_up=warm_up, highest_rate=5e-4)


def watch(*steps, warm_up=10, batch_size=64):
    """Health after these steps, and the warnings by step."""
    watching, warnings = make_health(warm_up, batch_size), {}
    for number, step in enumerate(steps, 1):
        if found := watching.check(number, step):
            warnings[number] = found
    return watching, warnings


@pytest.mark.parametrize("unit", [True, False])
def test_statistics_are_means_of_cosines(unit):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(9, 5, generator=generator, dtype=torch.float64) + 1 for _ in range(2))
    x, y = (F.normalize(side, dim=1) * (1 if unit else 3) for side in (x, y))
    others = ~torch.eye(9, dtype=torch.bool)
    count, first, second, advantage = (pair_statistics(x, y) / 9).tolist()
    normal = [F.normalize(side, dim=1) for side in (x, y)]
    assert count == 1
    for found, side in ((first, normal[0]), (second, normal[1])):
        assert found == pytest.approx(1 - (side @ side.T)[others].mean().item(), rel=1e-5)
    products = normal[0] @ normal[1].T
    assert advantage == pytest.approx((products.diagonal().mean() - products[others].mean()).item(), rel=1e-4)
    assert health.average_statistics([9.0, 9 * first, 9 * second, 9 * advantage]) == pytest.approx(
        ((first * second) ** 0.5, advantage)
    )


@pytest.mark.parametrize("pairs", [0, 1])
def test_a_rank_with_fewer_than_two_pairs_has_no_statistics(pairs):
    assert pair_statistics(torch.ones(pairs, 3), torch.ones(pairs, 3)).tolist() == [0.0] * 4
    assert all(math.isnan(value) for value in health.average_statistics([0.0] * 4))


def test_equal_embeddings_in_half_precision_have_no_spread():
    same = F.normalize(torch.randn(1, 64), dim=1).bfloat16().expand(100, 64)
    assert health.average_statistics(pair_statistics(same, same).tolist()).spread < 1e-6


def test_a_collapse_is_reported_within_a_few_steps_and_ends_the_run_later():
    watching, warnings = watch(*[HEALTHY] * 8, *[COLLAPSED] * 6)
    assert list(warnings) == [13]
    assert "step 13: the embeddings have collapsed" in warnings[13][0]
    assert "5.0e-04" in warnings[13][0]
    assert "the warm-up has 10 steps" in warnings[13][0]
    assert watching.failure() is None
    watching, warnings = watch(*[HEALTHY] * 8, *[COLLAPSED] * health.PATIENCE["collapse"].end)
    assert len(warnings) == 1
    assert "collapsed" in watching.failure()
    assert watching.conclude() == []  # the warning was given before
    assert "collapsed" in watching.final_failure(58)
    assert watching.problems == warnings[13]


def test_embeddings_that_are_nearly_the_same_at_first_have_the_warm_up_to_spread():
    """As those of some trained text models: a run that ends before its rate has risen would be a false alarm."""
    narrow = COLLAPSED._replace(statistics=PairStatistics(0.005, 0.001))
    watching, warnings = watch(*[narrow] * 70, *[HEALTHY] * 30, warm_up=70)
    assert (warnings, watching.failure(), watching.final_failure(100)) == ({}, None, None)
    # Embeddings that lose most of a small spread have collapsed.
    _, warnings = watch(*[narrow] * 20, *[COLLAPSED] * 10, warm_up=70)
    assert list(warnings) == [25]
    # After the warm-up it counts that the logits are flat.
    watching, warnings = watch(*[narrow] * 120, warm_up=70)
    assert list(warnings) == [75]
    assert "collapsed" in watching.failure()


@pytest.mark.parametrize("last", [COLLAPSED, HEALTHY._replace(gradient_norm=0.0)])
def test_a_run_that_ends_before_the_first_warning_is_warned_about_and_fails(last):
    watching, warnings = watch(HEALTHY, last)
    assert warnings == {}
    (warning,) = watching.conclude()
    assert "collapsed" in warning or "all gradients are zero" in warning
    assert watching.final_failure(2) == warning
    assert watching.conclude() == [], "the warning was given before"


def test_a_short_run_whose_embeddings_never_had_a_spread_does_not_fail():
    watching, _ = watch(*[COLLAPSED] * 3, warm_up=1)
    assert (watching.conclude(), watching.final_failure(3)) == ([], None)


def test_a_small_scale_is_not_called_a_collapse():
    watching, warnings = watch(*[HEALTHY._replace(scale=1e-3)] * 50)
    assert ["the scale of the logits is 1.0e-03" in warning for warning in warnings[5]] == [True]
    assert "loss.scale" in watching.failure()


def test_a_run_that_recovers_says_so_and_does_not_fail():
    watching, warnings = watch(HEALTHY, *[COLLAPSED] * 20, *[HEALTHY] * 79)
    assert list(warnings) == [6, 22]
    assert "is gone" in warnings[22][0]
    assert watching.failure() is None
    assert (watching.conclude(), watching.final_failure(100), watching.problems) == ([], None, [])


def test_a_loss_at_chance_counts_after_the_warm_up():
    watching, warnings = watch(*[CHANCE] * 100, warm_up=40)
    assert warnings == {}
    assert ["at chance" in warning for warning in watching.conclude()] == [True]
    assert "at chance" in watching.final_failure(100)  # the run has ended, and its model is of no use
    _, warnings = watch(*[CHANCE] * 120, warm_up=40)
    assert list(warnings) == [115]
    watching, _ = watch(*[CHANCE] * (90 + health.PATIENCE["chance"].end), warm_up=40)
    assert "at chance" in watching.failure()
    # Noise of single steps around a small advantage is no chance.
    noisy = [CHANCE._replace(statistics=PairStatistics(0.5, 0.01 * (1 + 5 * (-1) ** number))) for number in range(300)]
    watching, warnings = watch(*noisy)
    assert (warnings, watching.conclude(), watching.final_failure(300)) == ({}, [], None)


def test_small_batches_are_averaged_over_more_steps():
    """Their noise would look like chance in 25 steps, although matches are 0.1 nats more similar."""
    low, high = (CHANCE._replace(statistics=PairStatistics(0.5, advantage / 14)) for advantage in (-0.2, 0.7))
    steps = [*[high] * 30, *[low] * 60] * 5  # means of 25 steps are between -0.2 and 0.7
    watching, warnings = watch(*steps, batch_size=4)
    assert (warnings, watching.conclude(), watching.final_failure(450)) == ({}, [], None)
    _, warnings = watch(*steps, batch_size=64)
    assert warnings != {}
    watching, warnings = watch(*[CHANCE] * 450, batch_size=4)
    assert list(warnings) == [424]  # 1,600 pairs, and the steps until the warning
    assert "at chance" in watching.final_failure(450)


def test_a_short_run_at_chance_is_warned_about_but_does_not_fail():
    watching, _ = watch(*[CHANCE] * 60)
    assert "at chance" in watching.conclude()[0]
    assert watching.final_failure(60) is None
    assert "at chance" in watching.final_failure(100)  # 40 steps were before the run was resumed


def test_gradients_of_zero_and_losses_that_are_not_finite():
    watching, warnings = watch(*[HEALTHY._replace(gradient_norm=0.0)] * 50)
    assert "all gradients are zero" in warnings[3][0]
    assert "all gradients are zero" in watching.failure()
    watching, warnings = watch(*[HEALTHY._replace(loss=math.nan)] * 50)
    assert "is not finite" in warnings[15][0]
    assert "is not finite" in watching.failure()


def test_a_scale_at_its_limit_in_every_step_is_reported_at_the_end():
    at_limit = HEALTHY._replace(scale=100.0)
    watching, _ = watch(*[at_limit] * 30)
    assert ["loss.max_scale = 100" in message for message in watching.conclude()] == [True]
    assert watching.final_failure(100) is None
    below = HEALTHY._replace(scale=99.0)
    watching, _ = watch(below, below, *[at_limit] * 28)  # a scale above the limit is clamped, and may fall in the first steps
    assert ["in 28 of 30 steps" in message for message in watching.conclude()] == [True]
    assert watch(*[HEALTHY] * 8, *[at_limit] * 30)[0].conclude() == []


def test_a_model_that_has_fitted_its_data_may_have_no_gradient():
    fitted = StepSummary(0.0, 0.0, 100.0, PairStatistics(0.9, 0.9))
    watching, warnings = watch(*[fitted] * 60)
    assert (warnings, watching.failure()) == ({}, None)


def test_a_resumed_run_remembers_its_problems():
    watching, _ = watch(HEALTHY, *[COLLAPSED] * health.PATIENCE["collapse"].end)
    again = make_health(warm_up=100)
    again.restore(json.loads(json.dumps(watching.state())))
    assert "collapsed" in again.final_failure(51)
    assert again.problems == watching.problems
    assert again.failure() is None  # another rate has time to help
    assert again.check(52, COLLAPSED) == []  # the warning was given before
    assert "collapsed" in again.final_failure(52)
    assert "is gone" in again.check(53, HEALTHY)[0]
    assert again.final_failure(53) is None


ONE_IMAGE = {"augment": False, "schedule": {"warmup_steps": 0}}


class OneImage(runs.Numbers):
    """Every row has the same image."""

    def read(self, index, side):
        return super().read(0 if side == 0 else index, side)


def test_a_run_with_one_image_ends_with_an_error_and_a_checkpoint(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(health.PATIENCE, "collapse", health.Patience(2, 4))
    seen = runs.Memory()
    made = runs.trainer(tmp_path, ONE_IMAGE | {"steps": 9}, data=OneImage(), observers=[seen])
    with pytest.raises(TrainingFailedError, match=r"ends after step 4 of 9, .* collapsed.*continues after step 4"):
        made.fit()
    assert (tmp_path / "checkpoints" / "step_00000004").is_dir()
    assert "step 2: the embeddings have collapsed" in caplog.text
    assert [("problem" in record) for record in seen.records] == [False, True, False, False]
    assert seen.calls[-1] == ("finish", 4)
    caplog.clear()
    again = runs.trainer(tmp_path, ONE_IMAGE | {"steps": 9}, data=OneImage())
    assert again.resume()
    assert "the run had this problem when it was saved: step 2: the embeddings have collapsed" in caplog.text
    with pytest.raises(TrainingFailedError, match="ends after step 6 of 9"):
        again.fit()


def test_collapse_warn_trains_to_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(health.PATIENCE, "collapse", health.Patience(2, 4))
    made = runs.trainer(tmp_path, ONE_IMAGE | {"steps": 9, "collapse": "warn"}, data=OneImage())
    made.fit()
    assert made.step == 9
    assert "collapsed" in caplog.text


def test_a_run_that_ends_collapsed_saves_its_model_and_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(health.PATIENCE, "collapse", health.Patience(2, 40))
    made = runs.trainer(tmp_path, ONE_IMAGE | {"steps": 5}, data=OneImage())
    with pytest.raises(TrainingFailedError, match=r"its model is of no use: .*collapsed"):
        made.fit()
    assert made.step == 5
    assert (tmp_path / "model.safetensors").is_file()
    again = runs.trainer(tmp_path, ONE_IMAGE | {"steps": 5}, data=OneImage())
    assert again.resume()
    with pytest.raises(TrainingFailedError, match="its model is of no use"):
        again.fit()


def test_a_run_that_learns_is_not_warned_about(tmp_path, caplog):
    seen = runs.Memory()
    runs.trainer(tmp_path, {"steps": 60, "checkpoint": {"every": 1000}}, observers=[seen]).fit()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert seen.records[-1]["advantage"] > 1
    assert 0 < seen.records[-1]["spread"] < 2
    assert not any("problem" in record for record in seen.records)


def test_a_run_resumed_with_fewer_steps_than_it_has_is_refused(tmp_path):
    runs.trainer(tmp_path, {"steps": 4}).fit()
    with pytest.raises(
        ValueError, match="steps must be at least 4, because the checkpoint was saved after so many steps, got 2"
    ):
        runs.trainer(tmp_path, {"steps": 2}).resume()


def test_a_loss_that_is_not_finite_is_in_the_metrics(tmp_path):
    made = runs.trainer(tmp_path, {"steps": 4}, observers=[MetricsFile()])
    with torch.no_grad():
        made.pair.first.module.hidden.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError):
        made.fit()
    (problem,) = read_run(tmp_path).problems
    assert "the loss of step 1 is nan" in problem


@pytest.mark.thorough
def test_two_ranks_end_together(tmp_path, pool):
    found = pool.run(collapsed_on_rank, 2, tmp_path)
    assert len(set(found)) == 1
    assert "ends after step 50 of 60" in found[0]


def collapsed_on_rank(group, rank, folder):
    from megabatch.world import World

    world = World(torch.device("cpu"), group)
    changes = ONE_IMAGE | {"steps": 60, "checkpoint": {"every": 1000}}
    made = runs.trainer(folder, changes, data=OneImage(), world=world)
    with pytest.raises(TrainingFailedError) as error:
        made.fit()
    return str(error.value)
