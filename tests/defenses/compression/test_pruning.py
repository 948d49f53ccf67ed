import pytest
import torch
from torch.nn.utils import prune

from fl_privacy.defenses import pruning
from fl_privacy.defenses._pruning import keep_largest, step_scores
from fl_privacy.errors import UserError

from ..harness import clean_gradient, flat, large_update, local_step, run, small_model


def test_global_pruning_is_that_of_torch():
    update = large_update()
    owner = torch.nn.Module()
    for name, t in update.items():
        owner.register_parameter(name.replace(".", "_"), torch.nn.Parameter(t.clone()))
    parameters = [(owner, name.replace(".", "_")) for name in update]
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.8)
    ours = run(pruning(rate=0.8, scope="global"), update, local_step())
    for name, t in ours.items():
        assert torch.equal(t, getattr(owner, name.replace(".", "_")))


def test_layers_are_pruned_by_the_rate_each_and_their_largest_stay():
    for name, t in run(pruning(rate=0.9), large_update(), local_step()).items():
        clean = large_update()[name]
        assert (t != 0).sum() == clean.numel() // 10
        assert clean[t == 0].abs().max() <= clean[t != 0].abs().min()


def test_importance_follows_weight_or_product():
    step = local_step()
    clean = clean_gradient(step)
    for by, importance in (
        ("weight", {n: p.abs() for n, p in step.sent.parameters.items()}),
        ("product", {n: (p * clean[n]).abs() for n, p in step.sent.parameters.items()}),
    ):
        for name, t in run(pruning(rate=0.5, by=by), clean, step).items():
            assert importance[name][t == 0].max() <= importance[name][t != 0].min()


def test_random_pruning_is_uniform_and_differs_between_draws():
    update = {"a": torch.ones(1000)}
    step = local_step()
    kept = torch.stack([run(pruning(rate=0.75, by="random"), update, step)["a"] for _ in range(400)])
    assert (kept.sum(1) == 250).all()
    frequency = kept.mean(0)  # binomial(400, 1/4) / 400: std 0.0217
    assert frequency.std().item() == pytest.approx(0.0217, rel=0.15)
    assert frequency.min() > 0.15
    assert frequency.max() < 0.36


@pytest.mark.parametrize("drop, n, kept", [(0.0, 5, 5), (0.29, 100, 71), (0.99, 10, 1), (0.95, 1, 1), (0.7, 10, 3)])
def test_number_kept_is_exact_even_among_equals(drop, n, kept):
    assert keep_largest({"a": torch.zeros(n)}, drop=drop, scope="layer")["a"].sum() == kept
    assert keep_largest({"a": torch.arange(n)}, drop=drop, scope="global")["a"].sum() == kept


def test_a_broken_update_stays_visibly_broken():
    update = {"a": torch.tensor([1.0, float("nan"), 3.0, 4.0])}
    assert flat(run(pruning(rate=0.75), update, local_step())).isnan().any()


def test_no_tensors_no_error():
    assert run(pruning(rate=0.5, scope="global"), {}, local_step()) == {}


@pytest.mark.parametrize("by", ["integrated_gradients", "shapley"])
def test_importance_by_many_passes_is_seeded_and_keeps_the_most_important(by):
    clean = clean_gradient(local_step())
    once, again = (run(pruning(rate=0.8, by=by, samples=3), clean, local_step()) for _ in range(2))
    assert torch.equal(flat(once), flat(again))
    scores = step_scores(by, clean, local_step(), 3)
    for name, t in once.items():
        kept = t != 0
        assert kept.sum() == t.numel() - int(0.8 * t.numel())
        assert scores[name][kept].min() >= scores[name][~kept].max()


def test_parameters_of_no_neuron_are_ranked_by_the_product():
    step = local_step(
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 6, 3), torch.nn.GroupNorm(2, 6), *small_model()[4:5], torch.nn.Linear(6 * 14 * 14, 5)
        )
    )
    clean = clean_gradient(step)
    found = step_scores("shapley", clean, step)
    assert torch.equal(found["1.weight"], (step.sent.parameters["1.weight"] * clean["1.weight"]).abs())
    assert len(found["0.weight"].unique()) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 1.0},
        {"rate": -0.1},
        {"rate": "x"},
        {"by": "size"},
        {"scope": "all"},
        {"samples": 5},
        {"by": "shapley", "samples": 0},
        {"by": "shapley", "scope": "global"},
    ],
)
def test_bad_options_are_one_line(options):
    with pytest.raises(UserError, match="expected") as error:
        pruning(**options)
    assert "\n" not in str(error.value)
