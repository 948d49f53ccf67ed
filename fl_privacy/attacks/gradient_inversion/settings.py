"""What a gradient inversion is made of."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from fl_privacy.attacks.gradient_inversion.embeddings import TokenReading
from fl_privacy.attacks.gradient_inversion.objectives import L2, Objective
from fl_privacy.attacks.gradient_inversion.priors import Prior
from fl_privacy.attacks.gradient_inversion.starts import ImageSource, Normal, Projection, Scaling, Space, Start
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import LBFGS, EvolutionStrategy, Optimizer
from fl_privacy.checks import number, one_of, whole

LabelPolicy = Literal["auto", "known", "infer", "optimize"]
"""``known``: those the attacker was told; ``infer``: from the output layer's gradient; ``optimize``: jointly with the
images; ``auto``: those told, else inferred."""

Compile = Literal["auto", "on", "off"]
"""Whether losses and gradients are computed by a program that ``torch.compile`` makes. ``auto``: where the work is
large enough to win back the minutes that this takes. Compiled sums differ from others in their last bits, from which an
attack in float32 goes on to another end; with the same setting it ends the same. ``off`` includes what leaves every bit
as it is: a long attack on few victims on a CPU is run from a recording of its operations, without autograd."""

DType = Literal["float32", "float64"]

_CHOICES = {
    "reading": TokenReading,
    "labels": LabelPolicy,
    "projection": Projection,
    "into_range": Scaling,
    "local_steps": LocalSteps,
    "compile": Compile,
    "dtype": DType,
}


@dataclass(frozen=True, kw_only=True)
class Rearranging:
    """Moves among the iterations of a descent on embeddings of words.

    At each of them ``tries`` orders of the words are compared: two words exchanged, one moved, a sequence moved, a
    beginning put to the end; the one is taken whose mismatch of the gradients plus ``prior`` times the mean negative
    log likelihood under a language model of the attacker's public texts is least, the latter in units of the median by
    which orders are worse than the best of them. Words are judged as they are read, as tokens. One text of a batch goes
    after the other, all victims at once.

    Attributes:
        every: number of iterations between moves.
        burn_in: share of the iterations before the first; with 1 words are moved at the end alone.
        tries: orders that are compared, the present one included.
        prior: weight of the language model.
        last: moves at most of the text that is read at the end, as long as they lead on.
        starts: random first guesses of which the one with the least mismatch is taken, and then as many orders of it.
    """

    every: int = 75
    burn_in: float = 1.0
    tries: int = 200
    prior: float = 0.5
    starts: int = 1
    last: int = 10

    def __post_init__(self) -> None:
        whole("attack.every", self.every, at_least=1, example=75)
        number("attack.burn_in", self.burn_in, at_least=0, at_most=1, example=0.1)
        whole("attack.tries", self.tries, at_least=1, example=200)
        number("attack.prior", self.prior, at_least=0, example=0.2)
        whole("attack.starts", self.starts, at_least=1, example=1)
        whole("attack.last", self.last, at_least=0, example=10)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices that make a published attack; another one is ``dataclasses.replace`` of some of them.

    Attributes:
        objective: distance of gradients.
        optimizer: of the guesses.
        labels: where they come from.
        priors: terms added to the objective.
        start: the first guess.
        space: in which pixels are optimized.
        source: what the images come out of, instead of being optimized pixel by pixel; ``start`` and ``space`` have
            no effect then.
        reading: how the embeddings that are found for the words of a text are read as tokens.
        embedding_norm: weight of the squared difference between the mean length of the embeddings found for the words
            of a text and of those of tokens, as a share of the latter (LAMP, Balunovic et al. 2022).
        moves: of words among the iterations, on texts.
        bounded: numbers of a table stay between the least and the largest that its schema knows.
        counted: categories of a table that no row has, by the first layer's gradient, are left out.
        pooled: the attempts at the rows of a table are put into one order and their median is taken, instead of the
            best of them (TabLeak, Vero et al. 2023); other examples have none.
        evident: whether an attacker that is told of no defense takes what the update shows for it: zeros, few levels,
            empty columns, and otherwise the norm, to which the guess is clipped (GGL, Li et al. 2022, section 4.2).
        projection: brings the images back to [0, 1] after each iteration.
        as_they_come: whether what was found is reported with pixels outside of [0, 1]; else it is clamped, as every
            attacker knows the range of a pixel.
        into_range: how images that were found are brought to [0, 1]; see :data:`Scaling`.
        iterations: of the optimizer.
        restarts: most attempts from different starts. The first that ends below ``accept`` is taken, else the one with
            the least loss.
        enough: a victim has finished when its loss is below this share of the loss of a zero gradient (with ``L2``:
            of the observed gradient's squared norm), which makes it independent of how large gradients are.
        accept: such a share as well; a victim below is not attacked again.
        noise: standard deviation of Gaussian noise on the pixels' gradient.
        local_steps: how several local steps are matched.
        compile: whether the computation is compiled; see :data:`Compile`.
        dtype: of the computation.
        device: of the computation; that of the values sent if ``None``.
        most_victims: in one chunk; found from the free memory if ``None``.
    """

    objective: Objective = field(default_factory=L2)
    optimizer: Optimizer | EvolutionStrategy = field(default_factory=LBFGS)
    labels: LabelPolicy = "auto"
    priors: tuple[Prior, ...] = ()
    start: Start = field(default_factory=Normal)
    space: Space = field(default_factory=Space)
    source: ImageSource | None = None
    reading: TokenReading = "nearest"
    embedding_norm: float = 0.0
    moves: Rearranging | None = None
    bounded: bool = True
    counted: bool = False
    pooled: bool = False
    evident: bool = False
    projection: Projection = "none"
    as_they_come: bool = False
    into_range: Scaling = "clamp"
    iterations: int = 300
    restarts: int = 1
    enough: float = 0.0
    accept: float = 0.0
    noise: float = 0.0
    local_steps: LocalSteps = "unroll"
    compile: Compile = "auto"
    dtype: DType = "float32"
    device: str | None = None
    most_victims: int | None = None

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            whole(f"attack.{name}", getattr(self, name), at_least=1, example=1)
        for name, choices in _CHOICES.items():
            one_of(f"attack.{name}", getattr(self, name), get_args(choices))
