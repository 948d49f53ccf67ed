"""``fl-privacy predict``: are a network's examples reconstructible, without data or training?"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fl_privacy.checks import whole
from fl_privacy.cli.completion import Overrides
from fl_privacy.errors import UserError, say


def predict(
    overrides: Overrides = None,
    shape: Annotated[str, typer.Option(help="Channels, height and width of an image, without data=NAME.")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="Number of classes, without data=NAME.")] = 10,
    layers: Annotated[bool, typer.Option("--layers", help="Also print the counts of every layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Predict whether examples can be reconstructed, from the network alone: no data, no training, no attack.

    `model=resnet18 batch_size=8 federation.plan.batch_norm=eval`: the equations of an update are counted against its
    unknowns, layer by layer. The answer is `reconstructible`, `not by these attacks` or `unknown`, with the layer that
    decides. It is a prediction, never a proof of privacy: `fl-privacy attack` tries it. For texts and rows, name data=.
    """
    from fl_privacy.attacks.prediction import PlannedTraining, predict  # noqa: PLC0415
    from fl_privacy.models.gradients import number_of_steps  # noqa: PLC0415
    from fl_privacy.runs.build import build_dataset, build_network, build_network_for, build_plan  # noqa: PLC0415
    from fl_privacy.runs.config import compose_run  # noqa: PLC0415

    asked = overrides or []
    settings = compose_run(asked)
    plan, size = build_plan(settings.federation.plan, settings.model), settings.batch_size
    if any(each.startswith("data=") for each in asked):
        data = build_dataset(settings.data)
        model, form = build_network(settings.model, data, seed=settings.seed), tuple(data.train.input_shape)
    else:
        sizes = shape.split("x")
        if len(sizes) != 3 or not all(each.isdecimal() and 0 < int(each) <= 4096 for each in sizes):
            raise UserError(f"--shape is expected to be CHANNELSxHEIGHTxWIDTH, such as 3x32x32, but got {shape!r}.")
        form = tuple(map(int, sizes))
        whole("--classes", classes, at_least=2, example=10)
        model = build_network_for(settings.model, form, classes, seed=settings.seed)
    steps = 1 if plan.shares == "gradient" else number_of_steps(size, plan)
    optimizer = "sgd" if plan.shares == "gradient" else plan.optimizer
    found = predict(model, form, PlannedTraining(size, plan.batch_norm, steps, optimizer))
    if as_json:
        say(json.dumps(asdict(found), indent=1))
        return
    say(f"{found.outcome}: {found.reason}" + f" The layer that decides is {found.layer}." * bool(found.layer))
    for each in found.layers if layers else ():
        entering = "positive" if each.positive else "of both signs"
        counts = f"{each.unknowns:,} unknowns ({entering}), {each.gradient:,} + {each.outputs:,} equations"
        say(f"{each.name} ({each.kind}): {counts} of gradient and outputs")
