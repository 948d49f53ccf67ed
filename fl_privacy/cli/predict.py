"""Predict from a network alone whether examples can be reconstructed: ``fl-privacy predict``."""

import json
from dataclasses import asdict
from operator import attrgetter
from typing import Annotated

import typer

from fl_privacy.checks import whole
from fl_privacy.cli.completion import Overrides
from fl_privacy.errors import UserError, say

_JUDGED = {
    **{"defense": "none", "server": "honest", "secure_aggregation": "none", "weights": None, "captured": None},
    "threat_model.observer": "server",
}
"""Settings that predictions ignore -> usual values."""


def predict(
    overrides: Overrides = None,
    shape: Annotated[str | None, typer.Option(help="Size of images without data=NAME; default: 3x32x32.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes without data=NAME; default: 10.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the counts of every layer.")] = False,
) -> None:
    """Predict whether examples can be reconstructed, from the network alone: no data, no training, no attack.

    Example: `model=resnet18 batch_size=8 federation.plan.batch_norm=eval`. The equations of an update are counted
    against its unknowns, layer by layer. The answer is `reconstructible`, `not by these attacks` or `unknown`, with the
    layer that decides. It is for undefended uploads and proves nothing; `fl-privacy attack` tries it. Texts and rows
    need data=.
    """
    from fl_privacy.attacks.prediction import PlannedTraining, predict  # noqa: PLC0415
    from fl_privacy.models.gradients import number_of_steps  # noqa: PLC0415
    from fl_privacy.runs.build import build_dataset, build_network, build_network_for, build_plan  # noqa: PLC0415
    from fl_privacy.runs.config.compose import compose_run, override_keys  # noqa: PLC0415

    asked = overrides or []
    settings = compose_run(asked)
    for name, usual in _JUDGED.items():
        if (given := settings.choices.get(name, attrgetter(name)(settings))) != usual:
            raise UserError(
                f"{name} is expected to be left out, since an initial network is judged without it, but got"
                f" {name}={given}; try it by `fl-privacy attack`."
            )
    plan, size = build_plan(settings.federation.plan, settings.model), settings.batch_size
    if any(key.partition(".")[0] in ("data", "experiment") for key in override_keys(asked)):
        if shape is not None or classes is not None:
            raise UserError("--shape and --classes are expected without data=, but got both; leave them out.")
        data = build_dataset(settings.data)
        model, form = build_network(settings.model, data, seed=settings.seed), tuple(data.train.input_shape)
    else:
        sizes = (shape or "3x32x32").split("x")
        if len(sizes) != 3 or not all(each.isdecimal() and 0 < int(each) <= 4096 for each in sizes):
            raise UserError(f"--shape is expected to be CHANNELSxHEIGHTxWIDTH, but got {shape!r}; try 3x32x32.")
        form, number = tuple(map(int, sizes)), 10 if classes is None else classes
        whole("--classes", number, at_least=2, example=10)
        model = build_network_for(settings.model, form, number, seed=settings.seed)
    for name in plan.held(name for name, _ in model.named_parameters()):
        model.get_parameter(name).requires_grad_(False)
    steps = 1 if plan.shares == "gradient" else number_of_steps(size, plan)
    optimizer = "sgd" if plan.shares == "gradient" else plan.optimizer
    found = predict(model, form, PlannedTraining(size, plan.batch_norm, steps, optimizer))
    said = f"{found.outcome}: {found.reason}" + f" The layer that decides is {found.layer}." * bool(found.layer)
    say(json.dumps(asdict(found), indent=1) if as_json else said)
