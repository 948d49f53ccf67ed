"""The published attacks: what each puts into :class:`GradientInversion`, with the defaults of its paper.

Options that all have: ``labels`` (see :data:`LabelPolicy`), ``restarts`` (most attempts from different starts),
``start`` (a name of :data:`fl_privacy.attacks.gradient_inversion.initialization.STARTS`), ``layers`` (weights of
tensors by name pattern, 0 mutes), ``local_steps`` (how updates of several local steps are matched), ``compile`` (see
:data:`fl_privacy.attacks.gradient_inversion.settings.Compile`), ``dtype`` and ``device``.
"""

from fl_privacy.attacks.presets.ats import ats
from fl_privacy.attacks.presets.deep_leakage import adam_dlg, dlg, idlg
from fl_privacy.attacks.presets.grad_inversion import grad_inversion
from fl_privacy.attacks.presets.inverting import inverting_gradients
from fl_privacy.attacks.presets.model_inversion import model_inversion
from fl_privacy.attacks.presets.refiner_aware import refiner_aware
from fl_privacy.attacks.presets.sapag import sapag

__all__ = [
    "adam_dlg",
    "ats",
    "dlg",
    "grad_inversion",
    "idlg",
    "inverting_gradients",
    "model_inversion",
    "refiner_aware",
    "sapag",
]
