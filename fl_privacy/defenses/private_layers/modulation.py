"""FDL-PP: a private front modulated by secret passports."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.defenses.private_layers.passports import PassportConv2d, passport_penalty, replace_module
from fl_privacy.defenses.private_layers.split import Start, draw_own, keep_with_clients, private_modules, split_fed
from fl_privacy.effects import Part, PrivateLayers
from fl_privacy.errors import UserError
from fl_privacy.models import Front
from fl_privacy.rng import global_stream
from fl_privacy.types import Batch, Tensors

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


def fdl_pp(
    *,
    private: Sequence[str] | None = None,
    start: Start = "own",
    private_passes: int = 1,
    form: Literal["functional", "penalized"] = "functional",
    penalty: float = 1.0,
    hidden: int | None = None,
) -> Defense:
    """Private layers whose convolutions are passport layers (Gu et al. 2021, Algorithm 5).

    The output of each private convolution is scaled and shifted by gamma and beta, which an autoencoder makes of the
    convolution's weights and the client's secret passports, drawn from N(0, 1) in the shape of the layer's input;
    see ``passports.PassportConv2d``. Normalization layers among the private ones give way to
    it: a public one directly behind a passport would undo what it does. Weights, autoencoder and passports never leave
    the client.

    Args:
        private: names of the modules that are kept; ``None`` is the first convolution or linear layer and the
            normalization directly behind it.
        start: initial values of the private convolutions, ``own`` to each client or ``shared`` by all.
        private_passes: over a client's examples at the end of each round, which train the private part alone.
        form: ``functional`` computes gamma and beta in every pass (Eq. 24); ``penalized`` trains them as parameters
            whose distance to these functions is added to the loss (Eq. 25), as the paper does (Eq. 26), which keeps
            gamma small and the accuracy in long trainings.
        penalty: weight of that term.
        hidden: outputs of the encoder; ``None`` is half the channels of the convolution.
    """
    checks.one_of("defense.form", form, ("functional", "penalized"))
    checks.number("defense.penalty", penalty, above=0, example=1.0)
    if hidden is not None:
        checks.whole("defense.hidden", hidden, at_least=1, example=32)
    split = split_fed(private=private, start=start, private_passes=private_passes)
    choose = partial(_chosen, private=private)
    hook = keep_with_clients(choose)
    draw = draw_own(hook)

    def install(model: nn.Module, state: ClientState, rng: torch.Generator) -> nn.Module:
        if state.input_shape is None:
            raise UserError(
                "FDL-PP expects a client that knows the shape of its images, but got none; use ClientState.of_images."
            )
        own = draw(model, state, rng) if start == "own" else copy.deepcopy(model)
        with global_stream(rng):
            _install_passports(own, choose(own), state.input_shape, hidden=hidden, stored=form == "penalized")
        return own

    @contextmanager
    def tie(model: nn.Module, values: Tensors, batch: Batch) -> Iterator[Callable[[Tensor], Tensor]]:
        yield lambda loss: loss + penalty * passport_penalty(model, values)

    return replace(
        split,
        parts=(Part("fdl_pp", {**split.parts[0].settings, "form": form}, PrivateLayers()),),
        private=(hook,),
        model=(install,),
        loss=(tie,) if form == "penalized" else (),
    )


def _install_passports(
    model: nn.Module, private: Sequence[str], input_shape: tuple[int, ...], *, hidden: int | None, stored: bool
) -> None:
    convolutions = _private_convolutions(model, private)
    shapes = _input_shapes(model, convolutions, input_shape)
    for name, convolution in convolutions.items():
        width = hidden or max(1, convolution.out_channels // 2)
        layer = PassportConv2d(convolution, shapes[name], hidden=width, stored=stored)
        replace_module(model, name, layer.to(convolution.weight.device))
    for name, module in _below(model, private):
        if isinstance(module, NORMS):
            replace_module(model, name, nn.Identity())


def _chosen(model: nn.Module, *, private: Sequence[str] | None) -> list[str]:
    chosen = private_modules(model, private)
    if private is not None:
        return chosen
    leaves = [name for name, module in model.named_modules() if next(module.children(), None) is None]
    behind = leaves[leaves.index(chosen[0]) + 1 :][:1]
    return chosen + [name for name in behind if isinstance(model.get_submodule(name), NORMS)]


def _private_convolutions(model: nn.Module, chosen: Sequence[str]) -> dict[str, nn.Conv2d]:
    found = {name: module for name, module in _below(model, chosen) if isinstance(module, nn.Conv2d)}
    if not found:
        raise UserError(
            f"FDL-PP expects a convolution among the private modules, but {', '.join(chosen) or 'nothing'} has none;"
            " name one in defense.private, or use defense=split_fed."
        )
    return found


def _below(model: nn.Module, chosen: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    everything = list(model.named_modules())
    return ((n, m) for n, m in everything if any(n == c or n.startswith(f"{c}.") for c in chosen))


@torch.no_grad()
def _input_shapes(model: nn.Module, layers: Collection[str], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """(C, H, W) of what enters each of ``layers``, as a black image shows."""
    black = next(model.parameters()).new_zeros(1, *shape)
    return {name: tuple(Front(model.eval(), name)(black).shape[1:]) for name in layers}
