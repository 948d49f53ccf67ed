"""Settings of a gradient inversion."""

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
"""``known``: those the attacker was given; ``infer``: from the output layer's gradient; ``optimize``: jointly with the
images; ``auto``: those given, else inferred."""

Compile = Literal["auto", "on", "off"]
"""Use of ``torch.compile`` for losses and gradients. ``auto``: if the work is large enough to win back the minutes that
compiling takes. Compiled sums differ in their last bits, from which an attack in float32 goes on to another result; the
same setting gives the same result. ``off`` still records the operations of a long attack on few victims on a CPU and
runs them without autograd, which keeps every bit."""

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

    Each move compares ``tries`` orders of the decoded words: two words exchanged, a word or a sequence moved, a
    beginning put to the end. The best has the least mismatch of gradients plus ``prior`` times the mean negative log
    likelihood under a language model of public texts. The latter is in units of the median difference of orders from
    the best.

    Attributes:
        every: iterations between moves.
        burn_in: share of the iterations before the first move; 1 moves words at the end alone.
        last: most moves at the end, as long as they improve the text.
        starts: random first guesses; the least mismatch is kept, then as many orders of it.
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
    """The choices that make a published attack.

    Attributes:
        source: source of the images instead of pixels; ``start`` and ``space`` then have no effect.
        embedding_norm: weight of the squared difference between the mean length of embeddings and that of tokens, as a
            share of the latter (LAMP, Balunovic et al. 2022).
        bounded: ``True`` keeps numbers of a table within its schema's bounds.
        counted: ``True`` leaves out categories that no row has, by the first layer's gradient.
        pooled: ``True`` takes the median of the attempts at a table's rows, in one order, instead of the best (TabLeak,
            Vero et al. 2023).
        evident: ``True`` if an attacker given no defense uses what the update shows of it: zeros, few levels, empty
            columns, else the norm, to which the guess is clipped (GGL, Li et al. 2022, section 4.2).
        projection: projection to [0, 1] after each iteration.
        as_they_come: ``True`` reports pixels outside of [0, 1].
        into_range: final mapping to [0, 1].
        restarts: most attempts; the first below ``accept`` is taken, else the one with the least loss.
        enough: share of a zero gradient's loss (with ``L2``: of the observed squared norm) below which a victim is
            done.
        accept: such a share, below which a victim is not attacked again.
        noise: standard deviation of Gaussian noise on the pixels' gradient.
        device: device of the computation; ``None``: that of the values sent.
        most_victims: most victims in one chunk; ``None``: found from the free memory.
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
