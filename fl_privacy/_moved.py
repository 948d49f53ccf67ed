"""Old module names, for code and settings that still import them."""

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_NAMES = """
    attacks.adaptive.bounds=attacks.adaptive.constraints attacks.adaptive.clip=attacks.adaptive.constraints
    attacks.adaptive.countermeasures=attacks.adaptive.known_defense
    attacks.adaptive.estimates=attacks.adaptive.constraints attacks.auto.attempts=attacks.auto.race
    attacks.auto.budget=attacks.auto.sub_attacks attacks.auto.judgment=attacks.auto.race
    attacks.auto.likeliest=attacks.auto.attack attacks.auto.members=attacks.auto.sub_attacks
    attacks.auto.tables=attacks.auto.other_modalities attacks.auto.texts=attacks.auto.other_modalities
    attacks.exact.analytic=attacks.exact.first_layer attacks.exact.april=attacks.exact.first_layer
    attacks.exact.blind_convolution=attacks.exact.convolution attacks.exact.feature_descent=attacks.exact.attack
    attacks.exact.gated_inputs=attacks.exact.convolution attacks.exact.hidden_layer=attacks.exact.first_layer
    attacks.exact.traced=attacks.exact.residual attacks.feature_inversion.attack=attacks.feature_inversion
    attacks.feature_inversion.features=attacks.feature_inversion attacks.feature_presets=attacks.presets
    attacks.ggl_gifd=attacks.presets attacks.gradient_inversion.adam_step=attacks.gradient_inversion.infer_client
    attacks.gradient_inversion.attackable=attacks.gradient_inversion.targets
    attacks.gradient_inversion.clients_loss=attacks.gradient_inversion.infer_client
    attacks.gradient_inversion.closed_forms=attacks.gradient_inversion.layer_statistics
    attacks.gradient_inversion.modality=attacks.gradient_inversion.other_modalities
    attacks.gradient_inversion.network_prior=attacks.gradient_inversion.generator_prior
    attacks.gradient_inversion.noise=attacks.gradient_inversion.evident_defense
    attacks.gradient_inversion.rounds=attacks.gradient_inversion.preparation
    attacks.gradient_inversion.solved_labels=attacks.gradient_inversion.labels
    attacks.gradient_inversion.starts=attacks.gradient_inversion.settings
    attacks.gradient_inversion.table_evidence=attacks.gradient_inversion.other_modalities
    attacks.gradient_inversion.table_rows=attacks.gradient_inversion.other_modalities
    attacks.gradient_inversion.undisclosed=attacks.gradient_inversion.infer_client
    attacks.inference.canaries=attacks.inference.inference attacks.inference.source=attacks.inference.attribute
    attacks.lamp_tag=attacks.presets attacks.likelihood.laws=attacks.likelihood.channel
    attacks.malicious.imprint_block=attacks.malicious.imprint
    attacks.malicious.own_gradient=attacks.malicious.inconsistent attacks.optimizers.base=attacks.optimizers.first_order
    attacks.optimizers.cma=attacks.optimizers.first_order attacks.text.candidates=attacks.text.token_candidates
    attacks.text.encoder_batches=attacks.text.encoder_assembly attacks.text.entrances=attacks.text.token_evidence
    attacks.text.expected_words=attacks.text.word_evidence attacks.text.first_block=attacks.text.bag_of_words
    attacks.text.peeling=attacks.text.dager attacks.text.spans=attacks.text.token_candidates
    attacks.trees.boxes=attacks.trees.reconstruct attacks.trees.exchanges=attacks.trees.grid
    attacks.trees.ubjson=attacks.trees.model auditing.app.loaded=auditing.app.environment
    auditing.regression.comparison=auditing.regression.measurement cli.leakage=cli.dp_check cli.nodes=cli.main
    cli.train_evaluator=cli.train_networks cli.train_generator=cli.train_networks cli.underway=cli.console
    cli.workers=cli.studies config=runs.config config.foreign=runs.config.untrusted config.reading=runs.config.parse
    cores=federation.cores data.attributes=data.datasets data.columns=data.examples
    data.transformations.operations=data.transformations data.transformations.policies=data.transformations
    defenses.condensation=defenses.dc_dsa_dm deploy=site.deploy dp_check.asked=dp_check.check
    dp_check.reasons=dp_check.mechanism experiment=runs experiment.candidates=runs.distractors
    experiment.fitted_uploads=auditing.fitted_uploads experiment.inferences=runs.build
    experiment.ladder=auditing.scenarios experiment.ladder_adapters=auditing.scenario_words
    experiment.ladder_members=auditing.scenario_members experiment.ladder_problem=auditing.scenario_problem
    experiment.ladder_scores=auditing.scenario_scores experiment.ladder_words=auditing.scenario_words
    experiment.run_folder=runs.run_location experiment.server_reading=runs.server_attack
    experiment.unattacked=runs.distractors federation.audit=federation.rounds federation.evaluation=federation.server
    film=types.film fitted=attacks.fitted flower._audit=auditing.strategy flower._defend=flower.mods.defend
    flower._defense_mod=flower.mods.defend flower._guard_mod=flower.mods.guard_mod
    flower._train_step=flower.mods.train_step flower.answers=flower.reply_cache flower.app_claims=auditing.app_claims
    flower.audit_report=auditing.strategy_report flower.audited_claims=auditing.strategy_claims
    flower.audited_model=auditing.strategy_model flower.cell=flower.app_process flower.dp_subjects=flower.dp_mechanisms
    flower.gate_defense=flower.gate flower.inside.loading=flower.inside.identity
    flower.inside.masks=flower.inside.identity flower.kept_norms=flower.curious flower.malicious=flower.curious
    flower.masked_replies=flower.grids flower.nodes=flower.strategy flower.probe=flower.mods.probe
    flower.untouched=auditing.app flower.untouched.app=auditing.app.bundle
    flower.untouched.moved=auditing.app.environment flower.untouched.own_files=auditing.app.environment
    flower.wrappers=flower.curious foreign_files=files.foreign gate=site.gate gate.kernel=site.gate.linux_calls
    gradients=models.gradients gradients.examples=models.gradients.per_example
    gradients.fastest=models.gradients.choose_method guard=defenses.guard inference=attacks.inference
    interception=federation.interception interception.kept_norms=federation.interception.infer_plan
    interception.recognition=federation.interception.infer_plan
    interception.waiting=federation.interception.capture_writer losses=models.losses malicious=attacks.malicious
    malicious.reading=attacks.malicious.server_attack measure.comparison=measure.identification
    measure.pinned_rows=measure.tables measure.public_images=measure.identification measure.spn=measure.distortion
    measure.trade_off=measure.intervals metrics=measure metrics.controls=measure.distractors
    metrics.looks=measure.descriptors modality=types.modality models.alexnet_vgg=models.small_networks
    models.cut=models.layers models.gradients.batch=models.gradients.victims
    models.gradients.layer_rules=models.gradients.layered models.gradients.normalization=models.gradients.convolution
    models.gradients.sketch=models.gradients.per_example models.pretrained.find_words=models.pretrained.evaluator_files
    models.pretrained.generator_files=models.pretrained.generator
    models.pretrained.word_evaluator=models.pretrained.evaluator models.resnet=models.small_networks
    network_files=files.networks packages=checks.packages parallel=federation.parallel pieces=types.modality
    plain_models=models.unwrap_model plan=types.plan policy_search=defenses.policy_search pretrained=models.pretrained
    processes=federation.processes regression=auditing.regression report.benchmark=report.benchmark_page
    report.claims=report.inferred report.cost=report.settings report.film=report.gallery report.mechanisms=report.ppc
    report.numbers=report.words report.recommendation=report.advice report.rows=report.gallery
    report.terminal=report.headline report.texts=report.gallery report.trade_off_page=report.write results=runs.folder
    results.candidates=runs.folder.defense_choice results.counts=measure.counts results.findings=measure.roc
    results.folder=runs.folder.writer results.readings=runs.folder.leakage results.row_files=runs.folder.pictures
    results.survivors=measure.aggregate_leakage runs.app_captures=runs.attack runs.config._options=runs.config.parse
    runs.config.keys=runs.config.settings runs.config.plugins=runs.config.settings
    runs.folder.environment=runs.folder.identity runs.folder.measured=runs.folder.study
    runs.folder.share=runs.folder.read runs.foreign_app=runs.app runs.own_data=runs.weights
    runs.study_results=runs.study runs.summed_probes=runs.ground_truth schema=types.schema
    shared_gradients=types.user_gradients shared_updates=types.user_gradients site.gate.accounting=site.gate.entries
    tally=federation.cores tapping=auditing.instrument tapping.findings=auditing.clear_text.findings
    tapping.inventory=auditing.clear_text.inventory tied_weights=models.unwrap_model
    transformations=data.transformations trees=attacks.trees victim_ids=types.victim_ids
"""

MOVED: Mapping[str, str] = dict(pair.split("=") for pair in _NAMES.split())
"""Old name -> new one, within this package; what a package holds moved with it, unless it is named itself."""

IN_SETTINGS = ("guard", "inference", "malicious")
"""Their old names stay in settings, so that a run keeps its hash: no warning."""


class MovedFinder(MetaPathFinder):
    """Import finder by which old module names import the moved module, with one warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (new := new_name(fullname)) is None:
            return None
        if fullname.split(".")[1] not in IN_SETTINGS:
            warnings.warn(
                f"{fullname} is {new} now; the old name goes with version 0.4.", DeprecationWarning, stacklevel=2
            )
        return ModuleSpec(fullname, _Alias(new), origin=getattr(find_spec(new), "origin", None), is_package=True)


class _Alias(Loader):
    def __init__(self, new: str) -> None:
        self.new = new

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.new)


def new_name(fullname: str) -> str | None:
    """Return the new name of module ``fullname``; ``None`` if it never moved."""
    package, _, name = fullname.partition(".")
    if package != __package__ or not name:
        return None
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (new := MOVED.get(".".join(parts[:length]))) is not None:
            return ".".join([package, new, *parts[length:]])
    return None


def answer_to_old_names() -> None:
    """Install the import finder for moved modules, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())  # before what would load a moved package's modules a second time
