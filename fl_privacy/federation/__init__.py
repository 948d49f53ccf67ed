"""Federated rounds without a framework: clients, server, interception."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.federation.client import (
        Client as Client,
        ClientSource as ClientSource,
        Personalized as Personalized,
    )
    from fl_privacy.federation.replay import Replay as Replay, examples_behind as examples_behind
    from fl_privacy.federation.replies import Failure as Failure, attempt as attempt
    from fl_privacy.federation.rounds import (
        Audit as Audit,
        Probe as Probe,
        Round as Round,
        RoundReport as RoundReport,
        audited_rounds as audited_rounds,
        plain_rounds as plain_rounds,
        run_all as run_all,
        spread_probes as spread_probes,
    )
    from fl_privacy.federation.server import (
        Evaluation as Evaluation,
        Server as Server,
        ServerPlan as ServerPlan,
        evaluate_model as evaluate_model,
        upload_bytes as upload_bytes,
    )
    from fl_privacy.federation.training import (
        LocalResult as LocalResult,
        local_update as local_update,
        private_names as private_names,
        public_state as public_state,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
