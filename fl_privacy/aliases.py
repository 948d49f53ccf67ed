"""Other names that people type for settings, attacks and their authors, and what each is called here.

A table of meanings: letters alone take ``geiping`` for nothing, and ``local_epochs`` for another word.
"""

import difflib
import re
from collections.abc import Collection, Mapping

OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attack": {
        "auto": ("strongest", "best", "default", "adaptive", "all", "any"),
        "dlg": ("zhu", "deep_leakage", "deep_leakage_from_gradients", "deepleakage", "leakage"),
        "idlg": ("zhao", "improved_dlg", "improved_deep_leakage"),
        "inverting_gradients": (
            *("geiping", "ig", "invg", "invgrad", "inverting_grad", "inverting_gradient", "invertinggrad"),
            *("gradient_inversion", "gradinv", "breaching", "cosine"),
        ),
        "grad_inversion": ("yin", "gradinversion", "see_through_gradients", "stg"),
        "sapag": ("wang",),
        "analytic": ("phong", "rgap", "r_gap", "bias", "first_layer", "closed_form", "linear"),
        "exact": ("spear", "dimitrov", "april", "lu", "zhu_blaschko", "blaschko"),
        "cocktail_party": ("kariyappa", "cpa", "ica"),
        "dager": ("petrov",),
        "bag_of_words": ("melis", "words", "bow"),
        "tag": ("deng",),
        "lamp": ("balunovic",),
        "tableak": ("vero", "tab_leak", "tabular"),
        "ggl": ("li", "generative", "generative_gradient_leakage", "gan", "gi_gip", "gias", "jeon"),
        "gifd": ("fang",),
        "model_inversion": ("gu", "fredrikson", "mi_face"),
        "sme": ("zhu_yao", "surrogate_model_extension", "surrogate"),
        "none": ("off", "no", "false"),
        "server=imprint": ("robbing_the_fed", "rtf", "fowl", "robbing"),
        "server=trap_weights": ("boenisch", "curious_abandon_honesty", "cah"),
        "server=fishing": ("wen",),
        "server=inconsistent": ("pasquini", "eluding"),
        "server=loki": ("zhao_loki",),
        "inference=membership": ("membership", "mia", "lira", "shokri", "carlini"),
        "inference=attribute": ("attribute",),
        "inference=property": ("property",),
    },
    "defense": {
        "dp_noise": ("gaussian", "noise", "gaussian_noise", "laplace", "laplacian", "laplace_noise", "gauss"),
        "dp_sgd": ("dp", "abadi", "opacus", "differential_privacy", "dpsgd", "central_dp"),
        "local_dp": ("ldp", "dp_local"),
        "pruning": ("topk", "top_k", "sparsification", "sparse", "compression", "gradient_pruning", "prune"),
        "quantization": ("quantize", "qsgd", "alistarh", "rounding", "signsgd", "sign", "int8", "one_bit", "1bit"),
        "selective_sharing": ("shokri", "partial_sharing"),
        "soteria": ("sun",),
        "ats": ("gao", "augmentation", "transformation"),
        "instahide": ("huang", "mixup"),
        "refiner": ("fan",),
        "recup_fl": ("cui", "recup"),
        "split_fed": ("thapa", "splitfed", "split"),
        "dc": ("condensation", "dataset_condensation", "distillation"),
        "none": ("off", "no", "false", "undefended"),
        "secure_aggregation=secagg": ("secagg", "secure_aggregation", "bonawitz", "masking"),
        "secure_aggregation=ckks": ("ckks", "homomorphic", "he", "encryption"),
    },
    "model": {
        "lenet": ("cnn", "simple_cnn", "lecun"),
        "convnet": ("conv",),
        "mlp": ("dense", "fc", "feedforward", "linear_net"),
        "logistic": ("linear", "logistic_regression", "logreg", "softmax"),
        "resnet18": ("resnet",),
        "vgg16": ("vgg", "vgg11"),
        "vit": ("transformer", "vision_transformer"),
        "bert_tiny": ("bert", "distilbert", "roberta"),
        "gpt_tiny": ("gpt", "gpt2", "llm", "language_model"),
        "table_mlp": ("tabular", "table", "tabnet"),
        "hf": ("huggingface", "hugging_face", "transformers", "peft"),
    },
    "data": {
        "cifar10": ("cifar",),
        "fashion_mnist": ("fmnist",),
        "femnist": ("emnist", "leaf"),
        "adult": ("census", "income", "uci_adult"),
        "lfw": ("faces",),
        "imagenet": ("imagenet1k", "ilsvrc"),
        "sst2": ("sst", "glue"),
        "tweets": ("twitter",),
        "image_folder": ("folder", "images", "imagefolder", "own", "directory"),
        "table": ("csv", "parquet", "dataframe", "file"),
        "text_folder": ("texts", "text"),
        "heart_disease": ("heart",),
        "breast_cancer": ("wisconsin", "cancer"),
        "german_credit": ("credit", "german"),
    },
    "federation": {
        "fedavg": ("fed_avg", "mcmahan", "federated_averaging", "avg", "fedprox"),
        "fedsgd": ("fed_sgd", "sgd", "gradient"),
    },
    "server": {
        "imprint": ("robbing_the_fed", "rtf", "fowl", "robbing"),
        "trap_weights": ("boenisch", "curious_abandon_honesty", "cah"),
        "fishing": ("wen",),
        "inconsistent": ("pasquini", "eluding"),
        "honest": ("none", "honest_but_curious", "passive"),
    },
    "partition": {
        "dirichlet": ("lda", "non_iid", "noniid", "hsu"),
        "pathological": ("shards", "mcmahan"),
        "iid": ("uniform", "random"),
    },
}
"""Group -> what an option is called here, or what to write instead, -> other names of it: of methods and authors."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "local_lr", "client_lr", "step_size", "eta", "alpha_lr"),
    "epochs": ("local_epochs", "num_epochs", "n_epochs", "client_epochs", "max_epochs", "e"),
    "steps": ("local_steps", "num_steps", "n_steps", "local_iterations", "max_steps"),
    "batch_size": ("batch", "local_batch_size", "bs", "batchsize", "b", "num_examples", "num_images"),
    "iterations": ("steps", "epochs", "max_iterations", "num_iterations", "n_iter", "iters", "max_iter", "iter"),
    "budget": ("iterations", "steps", "epochs", "max_iterations", "evaluations", "time", "effort", "seconds"),
    "restarts": ("trials", "num_restarts", "num_trials", "attempts", "tries", "seeds"),
    "total_variation": ("tv", "tv_weight", "tv_loss", "tv_reg", "total_variation_weight", "tv_lambda"),
    "clients": ("num_clients", "n_clients", "number_of_clients", "num_supernodes", "nodes", "k"),
    "rounds": ("num_rounds", "n_rounds", "num_server_rounds", "global_rounds", "communication_rounds", "t"),
    "fraction": ("fraction_fit", "fraction_train", "participation", "client_fraction", "sample_rate", "c"),
    "aggregation": ("strategy", "aggregator", "aggregate"),
    "root": ("dir", "folder", "path", "data_dir", "directory", "location"),
    "path": ("root", "dir", "folder", "file", "csv", "location", "filename"),
    "target": ("label", "label_column", "target_column", "labels", "class_column"),
    "label_column": ("label", "target", "target_column", "labels"),
    "image_size": ("size", "resolution", "img_size", "height", "width", "resize"),
    "scale": ("sigma", "std", "noise", "noise_scale", "variance", "noise_std", "stddev"),
    "noise_multiplier": ("sigma", "noise", "scale", "std", "noise_scale"),
    "clip_norm": ("clip", "max_grad_norm", "clipping_norm", "clipping", "max_norm", "sensitivity", "clipping_bound"),
    "rate": ("ratio", "sparsity", "prune_ratio", "pruning_rate", "fraction", "amount", "compression"),
    "bits": ("num_bits", "levels", "precision", "bit_width"),
    "share": ("fraction", "ratio", "upload_fraction", "theta"),
    "alpha": ("concentration", "dirichlet_alpha", "beta"),
    "victims": ("num_victims", "n_victims", "num_attacked", "targets", "samples", "num_samples"),
    "seed": ("random_seed", "rng", "random_state"),
    "device": ("gpu", "cuda", "accelerator"),
    "out": ("output", "output_dir", "outdir", "output_folder", "results", "save_dir", "log_dir"),
    "jobs": ("workers", "processes", "n_jobs", "num_workers"),
    "activation": ("act", "nonlinearity"),
    "lora_rank": ("rank", "lora", "r", "lora_r"),
    "max_length": ("seq_len", "sequence_length", "max_len", "max_seq_length", "length", "max_tokens"),
}
"""What a setting is called here -> other names of it, in whatever section has it."""

ELSEWHERE: Mapping[str, str] = {
    "local_epochs": "federation=fedavg federation.plan.epochs",
    "epochs": "federation=fedavg federation.plan.epochs",
    "local_steps": "federation=fedavg federation.plan.steps",
    "steps": "federation=fedavg federation.plan.steps",
    "lr": "federation=fedavg federation.plan.lr",
    "learning_rate": "federation=fedavg federation.plan.lr",
    "optimizer": "federation=fedavg federation.plan.optimizer",
    "momentum": "federation=fedavg federation.plan.momentum",
    "weight_decay": "federation=fedavg federation.plan.weight_decay",
    "local_batch_size": "federation.plan.batch_size",
    "batch_size": "federation.plan.batch_size",
    "clients": "federation.clients",
    "num_clients": "federation.clients",
    "rounds": "federation.rounds",
    "num_rounds": "federation.rounds",
    "num_server_rounds": "federation.rounds",
    "fraction": "federation.fraction",
    "fraction_fit": "federation.fraction",
    "strategy": "federation",
    "algorithm": "federation",
    "dataset": "data",
    "network": "model",
    "net": "model",
    "arch": "model",
    "architecture": "model",
    "root": "data.root",
    "data_dir": "data.root",
    "path": "data.path",
    "iterations": "attack.iterations",
    "restarts": "attack.restarts",
    "budget": "attack.budget",
    "attacker": "attack",
    "epsilon": "privacy.epsilon",
    "delta": "privacy.delta",
    "noise_multiplier": "defense=dp_sgd defense.noise_multiplier",
    "sigma": "defense=dp_noise defense.scale",
    "noise": "defense=dp_noise defense.scale",
    "clip_norm": "defense.clip_norm",
    "max_grad_norm": "defense.clip_norm",
    "alpha": "partition=dirichlet partition.alpha",
    "non_iid": "partition=dirichlet",
    "secagg": "secure_aggregation=secagg",
    "victims": "victims",
    "num_victims": "victims",
    "seed": "seed",
    "gpu": "device=cuda",
    "cuda": "device=cuda",
    "output_dir": "out",
    "malicious": "server",
    "membership": "inference=membership",
    "mia": "inference=membership",
}
"""Name of a setting -> where it is, whatever the section that somebody looks for it in."""

_YEAR = re.compile(r"(_?et_?al)?_?(19|20)?\d\d$")


def meant_by(word: str, allowed: Collection[str], group: str = "", *, above: str | None = None) -> str:
    """Return which of the ``allowed`` names is meant by ``word``, or what to write instead; empty if nothing is.

    By meaning first, then by letters.

    Args:
        word: that somebody typed.
        allowed: names that there are.
        group: ``attack`` of the names of attacks, and so on; empty for names of settings.
        above: section of a setting, empty for none; ``None`` where only ``allowed`` can be meant.
    """
    plain = re.sub(r"[\s.-]+", "_", word.strip().lower())
    names = {plain, _YEAR.sub("", plain) or plain, plain.removesuffix("_attack"), plain.removesuffix("_et_al")}
    for name in allowed:
        if plain == name.lower():
            return name
    table = OPTIONS.get(group, {}) if group else SETTINGS
    for name, others in table.items():
        if (name in allowed or "=" in name) and names & set(others):
            return name
    places = (ELSEWHERE[name] for name in sorted(names) if name in ELSEWHERE)
    free = not group and above is not None and above.partition(".")[0] in ("", "federation")
    if free and (place := next(places, "")):
        return place
    return next(iter(difflib.get_close_matches(word, allowed, n=1)), "")
