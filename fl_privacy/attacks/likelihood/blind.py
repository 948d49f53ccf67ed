"""Reconstruct images behind an unknown private first convolution by blind deconvolution.

The convolution's outputs, inferred from public layers' gradients, are an unknown linear map of the image's patches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.attack import Report, timely
from fl_privacy.attacks.feature_inversion import Recovery
from fl_privacy.attacks.gradient_inversion import attack, evident_defense, grouping, objectives, settings
from fl_privacy.attacks.gradient_inversion.labels import choose_labels
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, expect_images
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.attacks.pixel_prior import learn_prior
from fl_privacy.checks import whole
from fl_privacy.errors import UserError
from fl_privacy.models import Front, cut_layer
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.layers import behind_activation, called_layers
from fl_privacy.types import Batch, Observation, Reconstruction

_FEWEST = 50  # least number of public images for a prior
_FLAT = 1e-3  # ridge of the unknown map, in squared units of a normalized pixel
_SLACK, _NOISE, _SHRINKS = 0.5, 0.02, 0.8  # first and last deviation of features from their fit, factor of a turn
_TRIED, _KEPT = 15, 2  # turns after which only the best attempts at an image are kept, and their number
_COMPONENTS = 150  # number of the prior's components that are solved for
_OUTSIDE, _MISFIT, _UNLIKELY = 1.0, 50.0, 0.02  # weights of pixels beyond [0, 1], misfit and prior to compare starts

UNDONE: Mapping[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Tanh: lambda values: torch.atanh(values.clamp(-0.9993, 0.9993)),
    nn.Sigmoid: lambda values: torch.logit(values.clamp(0.0005, 0.9995)),
    nn.Identity: lambda values: values,
    nn.ReLU: lambda values: values,
    nn.LeakyReLU: lambda values: values,
}
"""Inverses of activations. That of a ReLU holds for active outputs only; other inputs were at most 0."""


@dataclass(frozen=True, eq=False)
class PrivateConvolution:
    """A model's first convolution, whose geometry is known and whose weights clients keep private."""

    name: str
    layer: str  # name of the public layer that the features enter
    geometry: Mapping[str, Any]
    activation: nn.Module | None
    entering: Front  # affine map from images (N, C, H, W) to the convolution's inputs

    @classmethod
    def of(cls, model: nn.Module, observation: Observation) -> "PrivateConvolution":
        """Find the first convolution; ``NotAttackableError`` unless it is the only layer that is not uploaded."""
        shape, public = tuple(observation.input_shape), observation.sent.parameters
        layers = called_layers(model, shape)
        try:
            cut, behind = cut_layer(model, shape, public), behind_activation(model, shape, public)
        except UserError as error:
            raise NotAttackableError(str(error)) from error
        first = layers[0]
        convolution = model.get_submodule(first)
        private = layers.index(cut) == 1 and not any(name.startswith(f"{first}.") for name in public)
        weight = dict(convolution.named_parameters()).get("weight")
        if not private or weight is None or weight.dim() != 4:
            raise NotAttackableError("One private convolution is expected, but more is private; use attack=auto.")
        if cut != behind:
            raise NotAttackableError(
                "A public layer right behind the private one is expected, but got pooling; use attack=auto."
            )
        return cls(first, cut, _geometry(convolution), _activation(model, first, cut), Front(model, first))

    def patches(self, images: Tensor) -> Tensor:
        return F.unfold(self.entering(images), **self.geometry)

    def undone(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (N, O, H, W) before the activation and a mask, ``False`` where a ReLU hides them."""
        kind = nn.Identity if self.activation is None else type(self.activation)
        known = features > 1e-3 if isinstance(self.activation, nn.ReLU) else torch.ones_like(features, dtype=torch.bool)
        if isinstance(self.activation, nn.LeakyReLU):
            return torch.where(features < 0, features / self.activation.negative_slope, features), known
        return UNDONE[kind](features), known


def _geometry(convolution: nn.Module) -> Mapping[str, Any]:
    weight = convolution.weight
    assert isinstance(weight, Tensor)
    stride, padding, dilation = (getattr(convolution, name, None) for name in ("stride", "padding", "dilation"))
    if (own := getattr(convolution, "_geometry", None)) is not None:
        stride, padding, dilation = own[:3]
    groups = getattr(convolution, "groups", 1)
    if not all(isinstance(value, tuple) for value in (stride, padding, dilation)) or groups != 1:
        raise NotAttackableError("A private ungrouped convolution is expected, but got another; use attack=auto.")
    return {"kernel_size": tuple(weight.shape[2:]), "stride": stride, "padding": padding, "dilation": dilation}


def _activation(model: nn.Module, first: str, cut: str) -> nn.Module | None:
    """Return the activation between layers ``first`` and ``cut``, if any; ``NotAttackableError`` if not invertible."""
    leaves = {name: module for name, module in model.named_modules() if name and next(module.children(), None) is None}
    names = list(leaves)
    between = names[names.index(first) + 1 : names.index(cut)] if first in names and cut in names else []
    found = [leaves[name] for name in between if not isinstance(leaves[name], nn.Identity)]
    if len(found) > 1 or any(type(module) not in UNDONE for module in found):
        kinds = ", ".join(type(module).__name__ for module in found)
        raise NotAttackableError(f"An invertible private activation is expected, but got {kinds}; use attack=auto.")
    return found[0] if found else None


def _matching() -> attack.GradientInversion:
    return attack.GradientInversion(
        objective=objectives.Cosine(per_layer=True, epsilon=1e-12),
        optimizer=LBFGS(inner=20, line_search="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0),
        start=settings.Constant(value=0.5),
        iterations=20,
        labels="auto",
        compile="off",
    )


@dataclass(frozen=True, kw_only=True)
class BlindDeconvolution(grouping.GroupAttack):
    """Attack on images whose clients keep the first convolution's weights private; its geometry is known.

    The inputs of the first public layer are inferred from the public gradients
    (:class:`fl_privacy.attacks.feature_inversion.Recovery`). Alternating least squares then solve for the convolution
    and for the image. They start from the mean and single public images of the class, and from the first principal
    component of the inferred inputs. The prior is normal with mean and covariance of public images. With fewer than 50
    public images, the principal component itself is returned; its sign and contrast are unknown.
    """

    of_rounds = "last"

    turns: int = 60  # number of turns of alternating least squares
    starts: int = 4  # number of public images of the class among the starts
    recovery: Recovery = field(init=False, default_factory=lambda: Recovery(matching=_matching()))

    def __post_init__(self) -> None:
        whole("attack.turns", self.turns, at_least=1, example=60)
        whole("attack.starts", self.starts, at_least=0, example=8)

    def see(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        return evident_defense.undo_evident_defenses(observations)

    def solve(self, group: grouping.Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        return self.solved_once(self._solve, group, seed, report)

    def _solve(self, group: grouping.Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        expect_images(first)
        if first.upload.num_examples != 1:
            raise NotAttackableError("Updates of one image each are expected, but got larger batches; use attack=auto.")
        device = next(iter(first.sent.parameters.values())).device
        evaluating = replace(first.plan, batch_norm="eval")
        model = frozen_copy(first.model, first.assumed(), evaluating, device=device, dtype=torch.float64)
        private = PrivateConvolution.of(model, first)
        observations = list(group.observations.values())
        labels = torch.stack([_label(o, model, seed) for o in observations])
        found = self.recovery(
            observations,
            Front(model, private.layer),
            seed=seed,
            progress=lambda done, total: report(0.8 * done / max(1, total)),
        )
        results = {
            position: grouping.failed(o, features)
            for (position, o), features in zip(group.observations.items(), found, strict=True)
            if isinstance(features, str)
        }
        rows = [row for row, features in enumerate(found) if isinstance(features, Tensor)]
        if rows:
            features = torch.cat([found[row] for row in rows]).to(device, torch.float32)  # type: ignore[misc]
            model = frozen_copy(first.model, first.assumed(), evaluating, device=device, dtype=torch.float32)
            private = PrivateConvolution.of(model, first)
            images = self._deconvolved(private, features, labels[rows], first)
            positions, has_prior = list(group.observations), _has_prior(first)
            for row, image in zip(rows, images, strict=True):
                results[positions[row]] = Reconstruction(
                    id=observations[row].id,
                    batch=Batch(image[None].float().cpu(), labels[row][None].cpu()),
                    countermeasures=(_BY_TURNS if has_prior else _BY_COMPONENT,),
                    member="blind deconvolution" if has_prior else "principal component of features",
                )
        return results

    def _deconvolved(self, private: PrivateConvolution, features: Tensor, labels: Tensor, first: Observation) -> Tensor:
        shape, known_public = tuple(first.input_shape), first.knowledge
        put_out, known = private.undone(features)
        if not _has_prior(first):
            # bring each of ``images`` (V, N), of unknown scale, to [0, 1]; most images have dark edges
            images = _principal_image(put_out, shape)
            images = images * torch.where(
                images.median(1, keepdim=True).values > images.mean(1, keepdim=True), -1.0, 1.0
            )
            low, high = images.amin(1, keepdim=True), images.amax(1, keepdim=True)
            return ((images - low) / (high - low).clamp_min(1e-9)).view(-1, *shape)
        assert known_public.public_images is not None
        prior = learn_prior(known_public.public_images, known_public.public_labels, first.num_classes).to(features)
        means, which = prior.of(labels)
        found = torch.empty(len(features), *shape).to(features)
        for kind in which.unique().tolist():  # type: ignore[no-untyped-call]
            rows = (which == kind).nonzero().flatten()
            basis = prior.bases[kind][:_COMPONENTS]
            starts = self._starts(private, put_out[rows], labels[rows], means[rows], first)
            problem = Deconvolution(private, basis, means[rows], put_out[rows].flatten(2), known[rows].flatten(2))
            found[rows] = problem.solve(starts, self.turns, shape)
        return found.clamp(0, 1)

    def _starts(
        self, private: PrivateConvolution, put_out: Tensor, labels: Tensor, means: Tensor, first: Observation
    ) -> Tensor:
        shape, known = tuple(first.input_shape), first.knowledge
        component = _principal_image(put_out, shape)
        spread = 0.25 * component / component.std(1, keepdim=True).clamp_min(1e-9)
        starts = [means, means + spread, means - spread]
        images, classes = known.public_images, known.public_labels
        assert images is not None
        every = torch.arange(len(images))
        of_class = [every if classes is None else every[(classes == int(label)).cpu()] for label in labels]
        for number in range(self.starts):
            picked = [int(own[number % len(own)]) if len(own) else number % len(every) for own in of_class]
            starts.append(images[picked].flatten(1).to(means))
        return torch.stack(starts, 1)


def _has_prior(first: Observation) -> bool:
    public = first.knowledge.public_images
    return public is not None and len(public) >= _FEWEST


def _label(observation: Observation, model: nn.Module, seed: int) -> Tensor:
    try:
        found, _ = choose_labels(observation, "auto", model, loss_scale=observation.plan.loss_scale, seed=seed)
    except NotAttackableError:
        found = None
    if found is None:
        return torch.tensor(0)
    return (found.argmax(-1) if found.dim() == 2 else found)[0].cpu()


def _principal_image(put_out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return V flat images of ``shape``: the first principal component of the outputs ``put_out`` (V, O, h, w)."""
    maps = put_out.flatten(2) - put_out.flatten(2).mean(2, keepdim=True)
    _, _, directions = torch.linalg.svd(maps, full_matrices=False)
    first = directions[:, 0].view(len(maps), 1, *put_out.shape[2:])
    return F.interpolate(first, shape[1:], mode="bicubic").expand(-1, shape[0], -1, -1).flatten(1)


@dataclass(frozen=True, eq=False)
class Deconvolution:
    """Blind deconvolution: ``put_out = W patches(image) + b`` is solved for the private layer's W, b and V images."""

    private: PrivateConvolution
    basis: Tensor  # (M, N) of the images' prior
    means: Tensor  # (V, N)
    put_out: Tensor  # (V, O, P) outputs of the private convolution at P positions
    known: Tensor  # (V, O, P) ``True`` if known; the others were at most 0

    def solve(self, starts: Tensor, turns: int, shape: tuple[int, ...]) -> Tensor:
        still = self.private.patches(torch.zeros(1, *shape).to(self.means))
        moves = self.private.patches(self.basis.view(-1, *shape)) - still
        # memory fits the Jacobian of one image's attempts
        return torch.stack([self._solved(row, some, turns, shape, moves) for row, some in enumerate(starts)])

    def _solved(self, row: int, starts: Tensor, turns: int, shape: tuple[int, ...], moves: Tensor) -> Tensor:
        mean = self.means[row]
        z = (starts - mean) @ self.basis.T / self.basis.square().sum(1).clamp_min(1e-12)
        put_out = self.put_out[row] / self.put_out[row].std().clamp_min(1e-9)
        turn = Turn(
            mean_patches=self.private.patches(mean.view(1, *shape)),
            moves=moves,
            put_out=put_out,
            known=self.known[row],
            filled=put_out.expand(len(starts), -1, -1),
        )
        std = _SLACK
        for number in timely(range(turns)):
            std = _NOISE + _SHRINKS * (std - _NOISE)
            z, turn, misfit = turn.taken(z, std)
            if number == _TRIED:
                best = self._loss(mean, z, misfit).argsort()[:_KEPT]
                z, turn, misfit = z[best], replace(turn, filled=turn.filled[best]), misfit[best]
        best = self._loss(mean, z, misfit).argmin()
        return (mean + z[best] @ self.basis).view(shape)

    def _loss(self, mean: Tensor, z: Tensor, misfit: Tensor) -> Tensor:
        images = mean + z @ self.basis
        outside = (images - images.clamp(0, 1)).square().sum(1)
        loss: Tensor = _OUTSIDE * outside + _MISFIT * misfit + _UNLIKELY * z.square().sum(1)
        return loss.nan_to_num(torch.inf)


@dataclass(frozen=True, eq=False)
class Turn:
    """State of alternating least squares between two turns, for S attempts at an image."""

    mean_patches: Tensor  # (1, K, P) of the prior's mean
    moves: Tensor  # (M, K, P) change by each coefficient
    put_out: Tensor  # (O, P) outputs of the private convolution: O channels, P positions, standard deviation 1
    known: Tensor  # (O, P) ``True`` for outputs that are known
    filled: Tensor  # (S, O, P) outputs, with each attempt's fit in place of unknown ones

    def taken(self, z: Tensor, std: float) -> tuple[Tensor, "Turn", Tensor]:
        """Take one turn: fit the convolution, then the images' coefficients ``z`` (S, M) of the prior's components.

        Return the new coefficients, the state for the next turn, and the mean squared misfits (S,) of the outputs.
        ``std``: assumed standard deviation of the outputs from the fit.
        """
        ones = torch.ones(len(z), 1, self.moves.shape[2]).to(z)
        patches = torch.cat([self.mean_patches + torch.einsum("sm,mkp->skp", z, self.moves), ones], 1)
        gram = patches @ patches.mT + _FLAT * torch.eye(patches.shape[1]).to(z)
        weight = torch.linalg.solve(gram, patches @ self.filled.mT).mT
        base = weight[:, :, :-1] @ self.mean_patches + weight[:, :, -1:]
        jacobian = torch.einsum("sck,mkp->smcp", weight[:, :, :-1], self.moves).flatten(2)
        left, identity = (self.filled - base).flatten(1), torch.eye(z.shape[1]).to(z)
        normal = jacobian @ jacobian.mT + std**2 * identity
        z = torch.linalg.solve(normal, jacobian @ left[:, :, None]).squeeze(2)
        fitted = base + torch.einsum("smq,sm->sq", jacobian, z).view_as(base)
        filled = torch.where(self.known, self.put_out, fitted.clamp(max=0.0))
        return z, replace(self, filled=filled), (filled - fitted).square().mean((1, 2))


_BY_TURNS = (
    "It finds what the private layer puts out by the gradients of the public ones, and the unknown layer together with"
    " the image (blind deconvolution), which is drawn to public images."
)
_BY_COMPONENT = (
    "It finds what the private layer puts out by the gradients of the public ones, and takes its first principal"
    " component over the channels for the image."
)
