"""One short command for each part that computes: attacks, defenses, servers, inference, models, studies, backends."""

from pathlib import Path

CONF = Path(__file__).parents[2] / "conf"

_ATTACK = "attack data=mnist_mini model=lenet_dlg victims=2"
_RUN = "run data=mnist_mini model=lenet5 federation.clients=2 federation.rounds=2 evaluate_every=2 baseline=false"
_DEFENDED = f"{_RUN} victims=2 attack=inverting_gradients attack.iterations=3"
_TEXT = "attack data=text_folder data.root={texts} data.vocabulary_size=100 victims=2"
_BERT = f"{_TEXT} model=bert_tiny"
_TAGGED = f"{_TEXT} attack=tag attack.iterations=3"
_NEXT_TOKENS = f"{_TEXT} data.target=next_token data.tokenizer=words attack=dager"
_TABLE = "attack data=breast_cancer victims=2 batch_size=3 attack=tableak attack.iterations=3 attack.restarts=2"
_ROWS = "attack data=breast_cancer model=table_mlp victims=2 batch_size=3"
_MODEL = "attack data=mnist_mini data.image_size=32 victims=1 attack=idlg attack.iterations=2"
_SMALL = "defense.networks=1 defense.outer_steps=1 defense.real_batch=4 defense.images_per_class=1 defense.width=8"

_BOUNDED = "attack.iterations=3"
_ATTACKS = {
    "analytic": _ATTACK.replace("lenet_dlg", "mlp"),
    "auto": _ATTACK,
    "bag_of_words": _BERT,
    "blind_deconvolution": f"{_ATTACK} defense=split_fed threat_model=strongest",
    "cocktail_party": f"{_ATTACK.replace('lenet_dlg', 'mlp')} batch_size=4",
    "dager": _BERT,
    "exact": _ATTACK.replace("lenet_dlg", "mlp"),
    "ggl": f"{_ATTACK} {_BOUNDED} attack.generator={{generator}}",
    "ggl_refiner": f"{_ATTACK} {_BOUNDED} attack.generator={{generator}}",
    "gifd": f"{_ATTACK} {_BOUNDED} attack.generator={{generator}}",
    "lamp": f"{_BERT} {_BOUNDED} attack.starts=2 attack.prior=0",
    "sme": f"{_ATTACK} {_BOUNDED} federation=fedavg",
    "tableak": f"{_ROWS} {_BOUNDED} attack.restarts=2",
    "tableak_paper": f"{_ROWS} {_BOUNDED} attack.restarts=2",
    "tag": f"{_BERT} {_BOUNDED}",
}
_DEFENSES = {
    **{f"{name}_paper": f"{_DEFENDED} {_SMALL}" for name in ("dc", "dsa")},
    "dm_paper": f"{_DEFENDED} defense.iterations=2 defense.real_batch=4 defense.images_per_class=1 defense.width=8",
    "recup_fl": _DEFENDED.replace("mnist_mini", "mnist_parity"),
}
_INFERENCE = {"attribute": _RUN.replace("mnist_mini", "mnist_parity")}
_SERVERS = {"membership_trap": f"{_RUN.replace('lenet5', 'mlp')} attack=none inference=membership"}
_MODELS = {
    "bert_mini": _TAGGED,
    "bert_tiny": _TAGGED,
    "fl_tabular": _TABLE,
    "gpt_tiny": _NEXT_TOKENS,
    "lm_transformer": _NEXT_TOKENS,
    "logistic": _TABLE,
    "resnet_table": _TABLE,
    "table_mlp": _TABLE,
}
_WITHOUT = {"custom", "hf", "minilm", "none", "honest", "off"}
"""Options that are nothing to run, or need files that are not in the package."""


def _commands(group: str, key: str, special: dict[str, str], usual: str) -> dict[str, str]:
    names = sorted(f.stem for f in (CONF / group).glob("*.yaml") if f.stem not in _WITHOUT)
    return {f"{group}-{name}": f"{special.get(name, usual)} {key}={name}" for name in names}


COMMANDS = {
    **_commands("attack", "attack", _ATTACKS, f"{_ATTACK} {_BOUNDED}"),
    **_commands("defense", "defense", _DEFENSES, _DEFENDED),
    **_commands("inference", "inference", _INFERENCE, f"{_RUN} attack=none"),
    **_commands("server", "server", _SERVERS, "attack data=mnist_mini model=mlp victims=2"),
    **_commands("model", "model", _MODELS, _MODEL),
    "adaptive": f"{_ATTACK} {_BOUNDED} attack=inverting_gradients defense=pruning threat_model=adaptive",
    "compiled": f"{_ATTACK} {_BOUNDED} attack=inverting_gradients attack.compile=on",
    "flower": f"{_DEFENDED} backend=flower",
    "ray": f"{_DEFENDED} backend=ray backend.num_cpus=1 backend.num_gpus=0.5 backend.actors=2",
    "search-policies": "search-policies policies=4 images_per_class=1 points=2 accuracy_draws=1 accuracy_images=8",
    "train-evaluator": "train-evaluator widths=[2,2,2] epochs=1 images=40 data.image_size=8",
    "shards": f"{_ATTACK} {_BOUNDED} attack=idlg attack.shards=2",
}
"""Name -> words of ``fl-privacy``; ``{texts}`` is a folder of texts, ``{generator}`` a generator's file."""
