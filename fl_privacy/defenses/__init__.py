"""Client-side defenses: functions that return a ``Defense``.

A file ``_NAME.py`` with such a function NAME is exported without a line here; a line below gives type
checkers its signature.
"""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.defenses._ats import ats as ats
    from fl_privacy.defenses._dp_merf import dp_merf as dp_merf
    from fl_privacy.defenses._dp_noise import dp_noise as dp_noise, dp_sgd as dp_sgd, local_dp as local_dp
    from fl_privacy.defenses._fdl_pp import fdl_pp as fdl_pp
    from fl_privacy.defenses._gs_wgan import gs_wgan as gs_wgan
    from fl_privacy.defenses._instahide import instahide as instahide
    from fl_privacy.defenses._pruning import ppdl as ppdl, pruning as pruning, selective_sharing as selective_sharing
    from fl_privacy.defenses._quantization import quantization as quantization
    from fl_privacy.defenses._recup_fl import recup_fl as recup_fl
    from fl_privacy.defenses._refiner import refiner as refiner
    from fl_privacy.defenses._soteria import soteria as soteria, soteria_mixing as soteria_mixing
    from fl_privacy.defenses._split_fed import split_fed as split_fed
    from fl_privacy.defenses._spn import spn as spn
    from fl_privacy.defenses._svt import svt as svt
    from fl_privacy.defenses.dc_dsa_dm import dc as dc, dm as dm, dsa as dsa
    from fl_privacy.defenses.defense import (
        ClientState as ClientState,
        Defense as Defense,
        LocalData as LocalData,
        LocalStep as LocalStep,
        compose as compose,
        none as none,
    )
    from fl_privacy.defenses.nvflare_filters import exclude_vars as exclude_vars, percentile as percentile
else:
    __getattr__, __dir__, __all__ = on_demand(__name__, registers=True)
