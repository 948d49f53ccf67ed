"""Attacks on intercepted updates."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.attacks._refiner_aware import refiner_aware as refiner_aware, refiner_solved as refiner_solved
    from fl_privacy.attacks.attack import ReconstructionAttack as ReconstructionAttack
    from fl_privacy.attacks.auto import AutoAttack as AutoAttack
    from fl_privacy.attacks.exact import (
        AnalyticInversion as AnalyticInversion,
        CocktailParty as CocktailParty,
        ExactInversion as ExactInversion,
    )
    from fl_privacy.attacks.feature_inversion import ModelInversion as ModelInversion
    from fl_privacy.attacks.gradient_inversion.attack import GradientInversion as GradientInversion
    from fl_privacy.attacks.gradient_inversion.sme import SurrogateModel as SurrogateModel
    from fl_privacy.attacks.likelihood import (
        BlindDeconvolution as BlindDeconvolution,
        MaximumAPosteriori as MaximumAPosteriori,
    )
    from fl_privacy.attacks.named import reconstruct as reconstruct
    from fl_privacy.attacks.presets import (
        adam_dlg as adam_dlg,
        ats_attack as ats_attack,
        dlg as dlg,
        ggl as ggl,
        gifd as gifd,
        grad_inversion as grad_inversion,
        idlg as idlg,
        inverting_gradients as inverting_gradients,
        lamp as lamp,
        model_inversion as model_inversion,
        sapag as sapag,
        tableak as tableak,
        tag as tag,
    )
    from fl_privacy.attacks.text import BagOfWords as BagOfWords, Dager as Dager
    from fl_privacy.progress import Progress as Progress, no_progress as no_progress
else:
    __getattr__, __dir__, __all__ = on_demand(__name__, registers=True)
