"""The folder of a run: what is recorded while it goes on, and how it is read back."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.results.candidates import Candidate as Candidate
    from fl_privacy.results.counts import Counts as Counts
    from fl_privacy.results.environment import describe_environment as describe_environment
    from fl_privacy.results.findings import Finding as Finding
    from fl_privacy.results.findings import Measure as Measure
    from fl_privacy.results.folder import RunFolder as RunFolder
    from fl_privacy.results.folder import folder_name as folder_name
    from fl_privacy.results.identity import Identity as Identity
    from fl_privacy.results.node_cost import append_node_cost as append_node_cost
    from fl_privacy.results.ongoing import is_finished as is_finished
    from fl_privacy.results.pictures import Film as Film
    from fl_privacy.results.pictures import Pair as Pair
    from fl_privacy.results.pictures import Sentence as Sentence
    from fl_privacy.results.pictures import TextFilm as TextFilm
    from fl_privacy.results.read import (
        Baseline as Baseline,
    )
    from fl_privacy.results.read import (
        PartitionTable as PartitionTable,
    )
    from fl_privacy.results.read import (
        Run as Run,
    )
    from fl_privacy.results.read import (
        find_baseline as find_baseline,
    )
    from fl_privacy.results.read import (
        read_environment as read_environment,
    )
    from fl_privacy.results.read import (
        read_run as read_run,
    )
    from fl_privacy.results.read import (
        read_summary as read_summary,
    )
    from fl_privacy.results.readings import Reading as Reading
    from fl_privacy.results.summary import (
        Leakage as Leakage,
    )
    from fl_privacy.results.summary import (
        Recognized as Recognized,
    )
    from fl_privacy.results.summary import (
        Summary as Summary,
    )
    from fl_privacy.results.summary import (
        Traced as Traced,
    )
    from fl_privacy.results.verdict import Verdict as Verdict
    from fl_privacy.results.verdict import verdict_of as verdict_of
    from fl_privacy.victim_ids import Attacker as Attacker
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
