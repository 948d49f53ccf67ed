"""FDL-PP: private first layers whose convolutions are passport layers."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy import checks
from fl_privacy.defenses._split_fed import Start, draw_own, keep_with_clients, private_modules, split_fed
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part, PrivateLayers
from fl_privacy.errors import UserError
from fl_privacy.models import Front
from fl_privacy.rng import global_stream
from fl_privacy.types import Batch, Tensors


class PassportConv2d(nn.Module):
    """Convolution whose scale and bias are computed from secret passports (Gu et al. 2021, Eq. 24).

    Output is ``gamma * (W * X) + beta`` for input X, with ``gamma = Avg(D(E(W * P_gamma)))``, and beta in the same way
    from P_beta. E and D are linear layers over channels with a leaky ReLU between them; Avg is the mean over positions.

    Args:
        convolution: convolution to replace, whose weight and geometry are kept.
        input_shape: shape (C, H, W) of input and passports.
        hidden: number of outputs of E.
        stored: ``True`` makes gamma and beta parameters, initially 1 and 0, tied to Eq. 24 by a ``penalty``.
    """

    def __init__(
        self, convolution: nn.Conv2d, input_shape: tuple[int, ...], *, hidden: int, stored: bool = False
    ) -> None:
        super().__init__()
        channels, padded = convolution.out_channels, convolution.padding_mode != "zeros"
        self.weight = nn.Parameter(convolution.weight.detach().clone())
        self.encoder = nn.Linear(channels, hidden)
        self.decoder = nn.Linear(hidden, channels)
        self.passport_gamma = nn.Buffer(torch.randn(input_shape))
        self.passport_beta = nn.Buffer(torch.randn(input_shape))
        self.gamma = nn.Parameter(torch.ones(channels)) if stored else None
        self.beta = nn.Parameter(torch.zeros(channels)) if stored else None
        self._pad = convolution._reversed_padding_repeated_twice, convolution.padding_mode
        padding = 0 if padded else convolution.padding
        self._geometry = convolution.stride, padding, convolution.dilation, convolution.groups

    def from_passports(self) -> tuple[Tensor, Tensor]:
        widths, mode = self._pad
        stride, _, dilation, groups = self._geometry
        weight = self.weight.flatten(1)  # (O, C * kernel), with zeros outside the group of a grouped convolution
        if groups > 1:
            weight = torch.block_diag(*weight.chunk(groups))  # type: ignore[no-untyped-call]
        seen = torch.stack([self.passport_gamma, self.passport_beta], 1)
        seen = F.pad(seen, widths, "constant" if mode == "zeros" else mode)
        for axis, (size, step, gap) in enumerate(zip(self.weight.shape[2:], stride, dilation, strict=True), start=2):
            seen = seen.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
        patches = seen.permute(0, 4, 5, 1, 2, 3).flatten(0, 2).flatten(1)  # of both, (C * kernel, 2 * positions)
        codes = torch.addmm(self.encoder.bias[:, None], self.encoder.weight @ weight, patches)
        gamma, beta = self.decoder(F.leaky_relu(codes).view(len(codes), 2, -1).mean(2).T)
        return gamma, beta

    def affine(self) -> tuple[Tensor, Tensor]:
        if self.gamma is None or self.beta is None:
            return self.from_passports()
        return self.gamma, self.beta

    def penalty(self) -> Tensor:
        """Return the squared distance of the trained scale and bias from those computed from the passports.

        It is Eq. 25 of Gu et al. 2021, and 0 if scale and bias are not trained.
        """
        pairs = zip(self.affine(), self.from_passports(), strict=True)
        return torch.stack([(used - made).square().sum() for used, made in pairs]).sum()

    def forward(self, inputs: Tensor) -> Tensor:
        gamma, beta = self.affine()
        stride, padding, dilation, groups = self._geometry
        widths, mode = self._pad
        if mode != "zeros":
            inputs = F.pad(inputs, widths, mode)
        return F.conv2d(inputs, gamma[:, None, None, None] * self.weight, beta, stride, padding, dilation, groups)


def passport_layers(model: nn.Module) -> dict[str, PassportConv2d]:
    """Return by name the convolutions in ``model`` whose scale and bias are computed from secret passports."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PassportConv2d)}


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


class _Penalty(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        return torch.stack([layer.penalty() for layer in passport_layers(self.model).values()]).sum()


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
    """Keep some layers on the client, with passport layers for convolutions (FDL-PP, Gu et al. 2021, Algorithm 5).

    Private convolutions become ``PassportConv2d``: an autoencoder maps secret passports from N(0, 1) to the scale gamma
    and the bias beta of its output. Private normalization layers, which would undo a passport, are removed. Weights,
    autoencoder and passports never leave the client.

    Args:
        private: names of the private modules; ``None`` takes the first convolution or linear layer, and its
            normalization.
        start: initial values of the private convolutions: ``own`` to each client or ``shared`` by all.
        private_passes: passes over the client's examples at the end of each round that train only the private part.
        form: ``functional`` computes gamma and beta from passports (Eq. 24). ``penalized`` trains gamma and beta, and
            penalizes their distance from those of the passports (Eq. 25). The paper has this (Eq. 26); it keeps the
            accuracy.
        penalty: weight of the penalty.
        hidden: number of outputs of the autoencoder's first layer; ``None`` takes half the channels of the convolution.
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
                "FDL-PP is expected to get the shape of the client's images, but got none; use ClientState.of_images."
            )
        own = draw(model, state, rng) if start == "own" else copy.deepcopy(model)
        with global_stream(rng):
            _install_passports(own, choose(own), state.input_shape, hidden=hidden, stored=form == "penalized")
        return own

    @contextmanager
    def tie(model: nn.Module, values: Tensors, batch: Batch) -> Iterator[Callable[[Tensor], Tensor]]:
        named = {f"model.{name}": value for name, value in values.items()}
        yield lambda loss: loss + penalty * functional_call(_Penalty(model), named, ())

    part, ties = Part("fdl_pp", {**split.parts[0].settings, "form": form}, PrivateLayers()), form == "penalized"
    return replace(split, parts=(part,), private=(hook,), model=(install,), loss=(tie,) if ties else ())


def _install_passports(
    model: nn.Module, private: Sequence[str], input_shape: tuple[int, ...], *, hidden: int | None, stored: bool
) -> None:
    below = {n: m for n, m in model.named_modules() if any(n == c or n.startswith(f"{c}.") for c in private)}
    convolutions = {name: module for name, module in below.items() if isinstance(module, nn.Conv2d)}
    if not convolutions:
        raise UserError(
            f"FDL-PP is expected to have a private convolution, but got {', '.join(private) or 'nothing'} without;"
            " name one in defense.private, or use defense=split_fed."
        )
    black = next(model.parameters()).new_zeros(1, *input_shape)
    with torch.no_grad():
        shapes = {name: tuple(Front(model.eval(), name)(black).shape[1:]) for name in convolutions}
    for name, convolution in convolutions.items():
        width = hidden or max(1, convolution.out_channels // 2)
        layer = PassportConv2d(convolution, shapes[name], hidden=width, stored=stored)
        replace_module(model, name, layer.to(convolution.weight.device))
    for name, module in below.items():
        if isinstance(module, NORMS):
            replace_module(model, name, nn.Identity())


def _chosen(model: nn.Module, *, private: Sequence[str] | None) -> list[str]:
    chosen = private_modules(model, private)
    if private is not None:
        return chosen
    leaves = [name for name, module in model.named_modules() if next(module.children(), None) is None]
    behind = leaves[leaves.index(chosen[0]) + 1 :][:1]
    return chosen + [name for name in behind if isinstance(model.get_submodule(name), NORMS)]
