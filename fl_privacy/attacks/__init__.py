"""Attacks on intercepted updates."""

from fl_privacy.attacks._reconstruct import reconstruct
from fl_privacy.attacks._refiner_aware import refiner_aware
from fl_privacy.attacks._refiner_solved import refiner_solved
from fl_privacy.attacks._tableak import tableak
from fl_privacy.attacks.attack import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.auto import AutoAttack
from fl_privacy.attacks.exact import AnalyticInversion, CocktailParty, ExactInversion
from fl_privacy.attacks.feature_inversion import ModelInversion
from fl_privacy.attacks.feature_presets import model_inversion
from fl_privacy.attacks.ggl_gifd import ggl, gifd
from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.sme import SurrogateModel
from fl_privacy.attacks.lamp_tag import lamp, tag
from fl_privacy.attacks.likelihood import BlindDeconvolution, MaximumAPosteriori
from fl_privacy.attacks.presets import adam_dlg, ats_attack, dlg, grad_inversion, idlg, inverting_gradients, sapag
from fl_privacy.attacks.text import BagOfWords, Dager

__all__ = [
    "AnalyticInversion",
    "AutoAttack",
    "BagOfWords",
    "BlindDeconvolution",
    "CocktailParty",
    "Dager",
    "ExactInversion",
    "GradientInversion",
    "MaximumAPosteriori",
    "ModelInversion",
    "Progress",
    "ReconstructionAttack",
    "SurrogateModel",
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
    "no_progress",
    "reconstruct",
    "refiner_aware",
    "refiner_solved",
    "sapag",
    "tableak",
    "tag",
]
