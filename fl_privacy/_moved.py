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
    flower.wrappers=flower.curious
    flower.nodes=flower.strategy
    defenses.importance=defenses.robust_data
    flower.mods.defense_mod=flower.mods.defend
    auditing.regression.comparison=auditing.regression.measurement
    data.transformations.policies=data.transformations.operations
    models.gradients.normalization=models.gradients.convolution
    attacks.adaptive.countermeasures=attacks.adaptive.known_defense
    flower.masked_replies=flower.grids
    data.columns=data.examples
    defenses.condensation=defenses.dc_dsa_dm
    models.pretrained.word_evaluator=models.pretrained.evaluator
    models.gradients.layer_rules=models.gradients.layered
    models.gradients.batch=models.gradients.victims
    models.gradients.sketch=models.gradients.per_example
    attacks.gradient_inversion.table_rows=attacks.gradient_inversion.other_modalities
    attacks.exact.april=attacks.exact.first_layer
    attacks.exact.analytic=attacks.exact.first_layer
    attacks.exact.repeats=attacks.exact.certificate
    attacks.optimizers.cma=attacks.optimizers.first_order
    attacks.malicious.from_layer=attacks.malicious.server_attack
    attacks.feature_inversion.features=attacks.feature_inversion.attack
    attacks.feature_presets=attacks.presets
    attacks.adaptive.bounds=attacks.adaptive.constraints attacks.adaptive.clip=attacks.adaptive.constraints
    attacks.adaptive.estimates=attacks.adaptive.constraints attacks.auto.attempts=attacks.auto.race
    attacks.auto.budget=attacks.auto.sub_attacks attacks.auto.judgment=attacks.auto.race
    attacks.auto.likeliest=attacks.auto.attack attacks.auto.members=attacks.auto.sub_attacks
    attacks.auto.stages=attacks.auto.attack attacks.auto.tables=attacks.auto.other_modalities
    attacks.auto.texts=attacks.auto.other_modalities attacks.exact.batch_statistics=attacks.exact.feature_descent
    attacks.exact.blind_convolution=attacks.exact.convolution attacks.exact.fx_graph=attacks.exact.residual
    attacks.exact.gated_inputs=attacks.exact.convolution attacks.exact.hidden_layer=attacks.exact.first_layer
    attacks.exact.traced=attacks.exact.residual attacks.ggl_gifd=attacks.presets
    attacks.gradient_inversion.adam_step=attacks.gradient_inversion.infer_client
    attacks.gradient_inversion.attackable=attacks.gradient_inversion.targets
    attacks.gradient_inversion.captured=attacks.gradient_inversion.execution
    attacks.gradient_inversion.clients_loss=attacks.gradient_inversion.infer_client
    attacks.gradient_inversion.closed_forms=attacks.gradient_inversion.layer_statistics
    attacks.gradient_inversion.cuda_graph=attacks.gradient_inversion.execution
    attacks.gradient_inversion.matching_targets=attacks.gradient_inversion.preparation
    attacks.gradient_inversion.modality=attacks.gradient_inversion.other_modalities
    attacks.gradient_inversion.network_prior=attacks.gradient_inversion.generator_prior
    attacks.gradient_inversion.noise=attacks.gradient_inversion.evident_defense
    attacks.gradient_inversion.rounds=attacks.gradient_inversion.preparation
    attacks.gradient_inversion.solved_labels=attacks.gradient_inversion.labels
    attacks.gradient_inversion.starts=attacks.gradient_inversion.settings
    attacks.gradient_inversion.table_evidence=attacks.gradient_inversion.other_modalities
    attacks.gradient_inversion.undisclosed=attacks.gradient_inversion.infer_client
    attacks.gradient_inversion.unmixing=attacks.gradient_inversion.grouping
    attacks.inference.canaries=attacks.inference.inference attacks.inference.source=attacks.inference.attribute
    attacks.lamp_tag=attacks.presets attacks.likelihood.laws=attacks.likelihood.channel
    attacks.malicious.imprint_block=attacks.malicious.imprint
    attacks.malicious.own_gradient=attacks.malicious.inconsistent
    attacks.optimizers.base=attacks.optimizers.first_order attacks.text.candidates=attacks.text.token_candidates
    attacks.text.encoder_batches=attacks.text.encoder_assembly attacks.text.entrances=attacks.text.token_evidence
    attacks.text.expected_words=attacks.text.word_evidence attacks.text.first_block=attacks.text.bag_of_words
    attacks.text.peeling=attacks.text.dager attacks.text.spans=attacks.text.token_candidates
    attacks.trees.boxes=attacks.trees.reconstruct attacks.trees.exchanges=attacks.trees.grid
    attacks.trees.ubjson=attacks.trees.model auditing.app.loaded=auditing.app.environment
    auditing.app.drawn=auditing.app.stand_in
    checkpointing=models.unwrap_model cli.leakage=cli.dp_check cli.nodes=cli.main cli.workers=cli.studies
    config.foreign=runs.config.untrusted config.reading=runs.config.parse config=runs.config cores=federation.cores
    data.attributes=data.datasets defenses.policy_search.definition=defenses.policy_search.selection
    deploy=site.deploy dp_check.asked=dp_check.check dp_check.known_noise=dp_check.mechanism
    dp_check.reasons=dp_check.mechanism experiment.candidates=runs.distractors
    experiment.fitted_uploads=auditing.fitted_uploads experiment.inferences=runs.build
    experiment.ladder=auditing.scenarios experiment.ladder_adapters=auditing.scenario_words
    experiment.ladder_members=auditing.scenario_members experiment.ladder_problem=auditing.scenario_problem
    experiment.ladder_scores=auditing.scenario_scores experiment.ladder_words=auditing.scenario_words
    experiment.run_folder=runs.destination experiment.server_reading=runs.server_attack
    experiment.unattacked=runs.distractors_of_app experiment=runs federation.audit=federation.interception_plan
    federation.evaluation=federation.server
    federation.interception.local_batch_norm=federation.interception.infer_plan
    federation.interception.observation_buffer=federation.interception.capture_writer film=types.film
    fitted=attacks.fitted flower._audit=auditing.strategy flower._defend=flower.mods.defend
    flower._defense_mod=flower.mods.defend flower._guard_mod=flower.mods.guard_mod
    flower._train_step=flower.mods.train_step flower.answers=flower.reply_cache flower.app_claims=auditing.app_claims
    flower.audit_report=auditing.strategy_report flower.audited_claims=auditing.strategy_claims
    flower.audited_model=auditing.strategy_model flower.cell=flower.app_process
    flower.dp_subjects=flower.dp_mechanisms flower.forms=flower.reply_cache flower.gate_defense=flower.gate
    flower.inside.loading=flower.inside.identity flower.inside.masks=flower.inside.identity
    flower.kept_norms=flower.curious flower.local_batch_norm=flower.curious flower.malicious=flower.curious
    flower.probe=flower.mods.probe flower.untouched.app=auditing.app.bundle
    flower.untouched.moved=auditing.app.environment flower.untouched.own_files=auditing.app.environment
    flower.untouched=auditing.app foreign_files=files.foreign gate.kernel=site.gate.linux_calls gate=site.gate
    gradients.examples=models.gradients.per_example gradients.fastest=models.gradients.choose_method
    gradients=models.gradients guard=defenses.guard inference=attacks.inference
    interception.kept_norms=federation.interception.infer_plan
    interception.recognition=federation.interception.infer_plan
    interception.waiting=federation.interception.capture_writer interception=federation.interception
    losses=models.losses malicious.reading=attacks.malicious.server_attack malicious=attacks.malicious
    measure.comparison=measure.identification measure.inferred=measure.roc measure.pinned_rows=measure.tables
    measure.spn=measure.distortion measure.trade_off=measure.intervals metrics.controls=measure.distractors
    metrics.looks=measure.descriptors metrics=measure modality=types.modality models.alexnet_vgg=models.small_networks
    models.cut=models.layers models.pretrained.find_words=models.pretrained.evaluator_files
    models.pretrained.generator_files=models.pretrained.generator models.resnet=models.small_networks
    network_files=files.networks packages=checks.packages parallel=federation.parallel pieces=types.modality
    plain_models=models.unwrap_model plan=types.plan policy_search=defenses.policy_search pretrained=models.pretrained
    processes=federation.processes regression=auditing.regression report.benchmark=report.benchmark_page
    report.claims=report.mechanisms report.numbers=report.words report.trade_off_page=report.write
    results.candidates=runs.folder.defense_choice results.counts=measure.counts results.findings=measure.roc
    results.folder=runs.folder.writer results.made=runs.folder.records results.readings=runs.folder.leakage
    results.row_files=runs.folder.pictures results.rule=measure.rule results.survivors=measure.aggregate_leakage
    results=runs.folder runs.folder.environment=runs.folder.identity runs.folder.from_json=runs.folder.records
    runs.folder.row_files=runs.folder.pictures runs.own_data=runs.weights runs.summed_probes=runs.ground_truth
    schema=types.schema shared_gradients=types.user_gradients shared_updates=types.user_gradients
    site.gate.accounting=site.gate.entries tally=federation.cores tapping.copies=auditing.clear_text.copies
    tapping.findings=auditing.clear_text.findings tapping.inventory=auditing.clear_text.inventory
    tapping.spelled=auditing.clear_text.copies tapping=auditing.instrument tied_weights=models.unwrap_model
    transformations=data.transformations trees=attacks.trees types.user_updates=types.user_gradients
    victim_ids=types.victim_ids
"""

MOVED: Mapping[str, str] = dict(pair.split("=") for pair in _NAMES.split())
"""Old name -> new one, within this package; what a package holds moved with it, unless it is named itself."""

IN_SETTINGS = ("guard", "inference", "malicious")
"""Their old names stay in settings, so that a run keeps its hash: no warning."""


class MovedFinder(MetaPathFinder):
    """Finder of moved modules: old names import the same module, with one warning."""

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
    """Let ``import`` find moved modules, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())  # before what would load a moved package's modules a second time
