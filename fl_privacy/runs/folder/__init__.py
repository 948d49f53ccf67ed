"""Write and load the folder of a run."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.measure.counts import Counts as Counts
    from fl_privacy.measure.roc import Finding as Finding, Measure as Measure
    from fl_privacy.runs.folder.defense_choice import Candidate as Candidate
    from fl_privacy.runs.folder.identity import Identity as Identity, describe_environment as describe_environment
    from fl_privacy.runs.folder.ongoing import is_finished as is_finished
    from fl_privacy.runs.folder.pictures import Film as Film, Pair as Pair, Sentence as Sentence, TextFilm as TextFilm
    from fl_privacy.runs.folder.read import (
        PartitionTable as PartitionTable,
        Run as Run,
        find_baseline as find_baseline,
        read_environment as read_environment,
        read_run as read_run,
        read_summary as read_summary,
    )
    from fl_privacy.runs.folder.summary import (
        LeakageResult as LeakageResult,
        Recognized as Recognized,
        Summary as Summary,
        Traced as Traced,
    )
    from fl_privacy.runs.folder.verdict import Verdict as Verdict, verdict_of as verdict_of
    from fl_privacy.runs.folder.writer import RunFolder as RunFolder, folder_name as folder_name
    from fl_privacy.types.victim_ids import Attacker as Attacker
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
