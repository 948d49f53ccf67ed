"""The published attacks, with the values of their papers; ``dataclasses.replace`` makes others of them.

Each takes what its paper varies, and the options of :class:`GradientOptions` or :class:`FeatureOptions`.
"""

from fl_privacy.attacks.presets.deep_leakage import adam_dlg, dlg, idlg, sapag
from fl_privacy.attacks.presets.features import model_inversion
from fl_privacy.attacks.presets.generative import ggl, gifd
from fl_privacy.attacks.presets.inverting import ats_attack, grad_inversion, inverting_gradients
from fl_privacy.attacks.presets.options import FeatureOptions, GenerativeOptions, GradientOptions, vary
from fl_privacy.attacks.presets.refiner import refiner_aware
from fl_privacy.attacks.presets.text import lamp, tag

__all__ = [
    "FeatureOptions",
    "GenerativeOptions",
    "GradientOptions",
    "adam_dlg",
    "ats_attack",
    "dlg",
    "ggl",
    "gifd",
    "grad_inversion",
    "idlg",
    "inverting_gradients",
    "lamp",
    "model_inversion",
    "refiner_aware",
    "sapag",
    "tag",
    "vary",
]
