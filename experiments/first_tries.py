"""Public Flower projects that nothing was tuned to, audited by one and the same command, first try, nothing edited.

    python experiments/first_tries.py --apps FOLDER [--only NAME ...] [--out FOLDER] [--python PYTHON]

FOLDER holds a checkout of each repository, ``OWNER+NAME``, at the commit that its row says; none of their code is kept
here. PYTHON has the packages that ``fl-privacy audit --check`` lists as missing. Rows are in
``experiments/rows/first_tries``; ``experiments/third_party_apps.py --table`` writes them into docs/third_party_apps.md.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flower_examples import ended, is_measured, lines_of, uploaded, why_none, without_places
from row_file import RowFile

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows" / "first_tries"
COMMAND = "audit --sandbox --stand-in --nodes 3 --victims 4 --seconds 60"

CELL = re.compile(r"[^\s\"]*fl-privacy-cell-\w+[^\s\":]*")
"""A folder in the sandbox of an audit."""

PACKAGES = re.compile(r"[^\s\"(]*/site-packages/")

FIELDS = ("headline", "tone", "models", "findings", "rungs", "survivors", "problems", "notes")
"""Fields of an audit's record that a row keeps."""

FIRST: Mapping[str, tuple[str, str, str]] = {
    "GabDonzelli/Federated_learning_wFlower": ("4cbdbdab60", "", "pictures"),
    "KaramveerSidhu/flwr-app": ("6e8ecd0b71", "", "an app"),
    "MurtonN/Federated-Learning-Research-UW-Platteville": ("8025e01de7", "", "research"),
    "NabilDjelloudi/masteriales": ("ace597dd95", "", "thesis"),
    "alhu22/Fedarated_learning": ("144c3dfec5", "", "an app"),
    "dev-andalib/FLWR": ("0dd7ff841b", "FL/fedavgids", "intrusion detection"),
    "nozzolillo01/battery-aware-federated-learning": ("f738aaa878", "", "pictures, batteries"),
    "sebin-maret/federated-learning-cloud": ("ac1f846862", "", "cloud"),
    "sihamshm/federated-generalization-generative": (
        "44f2322567",
        "federated_learning_logistic_regression",
        "logistic regression",
    ),
    "thanhpro09022004-afk/FederatedLearning": ("cf88faff89", "", "an app"),
    "tkhs-dev/semi-flower": ("9fe985f584", "", "semi-supervised"),
    "vleps59/UAV-FL": ("213a5e5558", "", "drones"),
    "yagnesh1708/FDL-FLOWER": ("827cab915f", "", "an app"),
    "Derkora/Federated-Learning-in-Facial-Recognition-Based-Attendance-System": ("3b8330f6af", "", "faces"),
    "Hanbat-IoT/Lab2": ("c13da7ef0f", "", "internet of things"),
    "Iruos8805/Federated-Learning-based-Heart-Disease-Prediction": ("892c59f104", "", "rows of patients"),
    "Iryvern/FML2": ("a096ab170b", "", "an app"),
    "RohanPhutke/privacy-resilient-afl": ("85eb438b4c", "", "asynchronous training"),
    "Shyam5323/Mura_Federated": ("067acaf1eb", "", "X-rays"),
    "StavanRKhobare/Explainable-Federated-Learning-Framework-for-Early-Epidemic-Forecasting": (
        "cd2315ee2d",
        "",
        "epidemics",
    ),
    "Volpix28/Federated_ML": ("ef6bcbc3ba", "", "an app"),
    "YoshidaR3n/FL_poison": ("433bddf952", "", "poisoning"),
    "abhisek-dhungel/federated-ecg-fl": ("d7c80b5608", "", "electrocardiograms"),
    "birnbaum/flwr-lowcarb": ("8edf376218", "", "energy"),
    "candido05/Federated-Learning": ("012e629e63", "", "an app"),
    "choi328328/FederatedPLP": ("c612445b58", "", "patients' records"),
    "darshm1029/FLower": ("067cee6d09", "", "an app"),
    "ganguls/Federated-Learning-for-Secure-Finance-System": ("0c5b9dad32", "", "fraud"),
    "h3dema/fedl": ("ca7fd54e91", "", "an app"),
    "jiyeone99/flower_fl": ("9bce88c923", "", "an app"),
    "labdaps/federated-learning-for-health-in-a-multicentric-sample-of-hospitals": ("e89616ed9c", "", "hospitals"),
    "selhadi88/FedShield-IDS": ("c02a3cf7c4", "", "intrusion detection"),
}
"""The first draw, whose kinds of errors were mended: OWNER/NAME -> commit, folder of the app, and what it is about."""

SECOND: Mapping[str, tuple[str, str, str]] = {
    "iammaryam24/Federated-Learning-Simulation-using-Flower-FLwr-": ("238802d19b", "", "a simulation"),
    "tanishqsharmaa/Privacy-Preserving-Federated-Learning-for-Cross-Hospital-NCD-Risk-Prediction": (
        "ee1fa148b2",
        "",
        "risks of patients",
    ),
    "LCS-FS/RAMPART-FL": ("e79223e927", "", "intrusion detection"),
    "Key-Laboratory-of-Big-Data-Security/federated-learning-flwr-demo": ("432dfb7030", "", "a demonstration"),
    "Lings23/FL": ("0b325ef37c", "", "an app"),
    "nisalhemadasa/byzfedau": ("4faa1e349f", "", "Byzantine clients"),
    "omerahat/Federated-Learning-with-Flower": ("ee924266f8", "", "an app"),
    "waynenng/licfl-flower-tensorflow": ("ee42c5842d", "", "TensorFlow"),
    "SHIVOGOJOHN/Flower-Federated-Learning": ("20515d3632", "", "an app"),
    "todor-slavov/fl-simulations-and-scheduling": ("890141471d", "", "schedules of clients"),
    "Hans0124SG/flower-fl-oct": ("f0526e4c2d", "", "scans of eyes"),
    "nxhxl000/ddl": ("aecdda42a9", "", "an app"),
    "ericbanzuzi/hybrid-ffl-algorithms": ("1b8f571d66", "", "fairness"),
    "marcoajt/Flower_FL_Pytorch_Simulation": ("c13fa6359a", "", "a simulation"),
    "startlingadama/Federated-Learning-with-Flower": ("a96bb27c35", "", "an app"),
    "FREDERICO23/Flower-federated-Learning": ("8d760c9a42", "", "an app"),
    "fahim-mle/flower_fl_simulation": ("aad2ad71b7", "fl-simulation-app", "a simulation"),
    "ludovicopassari/federated_urban_audio_classification": ("6b07b080a1", "", "sounds"),
    "jun-simons/KFFL-Flower": ("6842968fe8", "", "fairness"),
    "anvithh/Flower-Federated-Learning-on-MNIST": ("fc588d21b1", "", "digits"),
    "dxv2k/IT3001-Federated-Learning-with-Flower": ("14d4ab7506", "", "a thesis"),
    "vaseline555/Federated-Learning-with-Flower": ("a9b73b1211", "", "several data sets"),
    "srv48/mcp_federated_diff_privacy": ("17fe1b812a", "", "differential privacy"),
    "byekang/federated-learning-with-flower": ("0383f3b384", "", "an app"),
    "HoTuanLong/federated-learning-flower": ("8468d47bf3", "", "an app"),
    "tno-enershare/Federated-Learning-with-Flower-Framework-": ("1c615a8ffa", "", "energy"),
    "hamza-karim/Topology-Aware-Federated-Learning-for-Cyber-Physical-Intrusion-Detection-in-DER": (
        "41f7090871",
        "",
        "intrusion detection",
    ),
    "shine-tech-ops/federated_learning": ("dd516828b6", "", "a platform"),
    "snownighter/Federated-Learning-Flwr": ("2ecc1c0c86", "", "several apps"),
    "abtin4079/flwr-vmunet-v2-simulation-scratch": ("17e2c690a3", "", "segmentation"),
}
"""The second draw, as above: drawn before any of them was run, and run once."""

THIRD: Mapping[str, tuple[str, str, str]] = {
    "shriabhishek251/ps30-federated-ai": ("9436937799", "", "an app"),
    "Meta-Collab/MetaCollab": ("34e778ea83", "", "a platform"),
    "D1M1S4N/ftl-project": ("2b2daa0704", "", "transfer learning"),
    "CS-26-DAT-6-07/FL-Topology-Emulation": ("d404bf6d2e", "", "topologies"),
    "colindsouza777/FL-flower-framework": ("6c4ddbd0fe", "", "several apps"),
    "arpit35/sga_momentum_degradation": ("4260ca669d", "", "unlearning"),
    "Hasan-N-Mahmud/FL-training": ("d8e62d7778", "", "an app"),
    "XIAxuanzheFrancis/property-inference-attack-in-FL-flower": ("c83a7e6765", "", "property inference"),
    "GeorgStag/flwr-example": ("37a8c49bd4", "", "an example"),
    "Prashant-ambati/Federated-Learning-for-Privacy-Preserving-Image-Classification": ("e9effeb4ea", "", "pictures"),
    "htn274/Flower_FL_examples": ("8eaf381161", "", "several apps"),
    "hamza-karim/Federated-Learning-Flower": ("21d8a0adc3", "", "time series"),
    "pepemangrich/TCC_MLOps_Drift_Detection_Federated": ("ddb1360ee8", "", "drift"),
    "punketeee/thesis2": ("719c247766", "", "a thesis"),
    "chen-rz/SFL-Flower-Simulation": ("f561e0d50e", "", "split learning"),
    "suparna-here-123/Flower-FL": ("2d0090b177", "", "several apps"),
    "slaicha/incentives": ("dc5b4c758b", "", "incentives"),
    "KaiserRichard/flower-federated-learning": ("73e5b48ba1", "", "an app"),
    "Moltas18/FederatedLearning": ("0e7ddccb3f", "", "several apps"),
    "nam21-12-06/Federated-Learning-with-Framework-Flower": ("08890ce627", "", "an app"),
    "kayeewww/PromptFl-Flower": ("fe694e3665", "", "prompts"),
    "nepal-manjil32/flwr-federated": ("eacfb165ab", "", "an app"),
    "denpalrius/bft-federated-learning": ("2a52bab90d", "", "Byzantine clients"),
    "CS-26-DAT-6-07/Xceptionally-Cyclic": ("33be658f12", "", "topologies"),
}
"""The third draw, drawn with the second, to be run once after kinds of errors of that were mended."""

FOURTH: Mapping[str, tuple[str, str, str]] = {
    "Hafizamariaiqbal/Federated-Learning-with-LLMs-using-Flower": ("228a6df17c", "", "a language model"),
    "zheng-tianyuan/fairness-flwr": ("9893fb8eac", "", "fairness"),
    "deepakHonakeri05/Flwr-and-Clara": ("5c2b85fa10", "", "several apps"),
    "dduy277/flwr_ml": ("4950d13c44", "flwr-sklearn-logisticregression", "several apps"),
    "yonetaniryo/flwr_leaf": ("6dbde12080", "", "handwriting"),
    "PrudhviGudla/Federated-Learning-Recommendation-System-using-Flower": ("7bc8a85371", "", "a recommender"),
    "ZeeshanGeoPk/federated-leaning-with-flower-library": ("73682dbb0c", "", "an app"),
    "bbj-lab/fms-ehrs-flwr": ("3b3c6ad969", "", "health records"),
    "ThiagoDSL/flwr_cnn_pfg": ("d07351340b", "", "pictures"),
    "shubham148-st/FedL-with-FLWR": ("7418883a72", "", "an app"),
    "yaYa13360/flwr_aidms": ("25b0a915c5", "", "an app"),
    "Audris-A/FL-for-battery-RUL-with-Flower-framework": ("4719713342", "", "batteries"),
    "Open-Edge-Robotics/A.CloudAI-fl-flower": ("37e7e13328", "", "an app"),
    "TianyueChu/vertical-fl-flwr": ("c5c518c610", "", "vertical"),
    "an-am/flower-fed-learning": ("e8297ce7f6", "flower-fed-learning", "an app"),
    "nepiskopos/simple_ids_with_flwr_iec104": ("fd11ce8437", "", "intrusion detection"),
    "ipremuzic/flowerFL": ("d806513abc", "", "an app"),
    "helios190/FL-Demo-With-Flower": ("33add9041e", "", "a demonstration"),
    "aybarsyazici/flwr-scholeai": ("a35eb28f41", "", "an app"),
    "amalkrishna0/FlowerFL-Privacy": ("923c621c91", "", "privacy"),
    "Intaniamp/flwr_test": ("6ec86f8a7d", "quickstart-pytorch", "an app"),
    "ntekath/Flwr-ProjektNetworkTraffic": ("31d259786d", "", "network traffic"),
    "ingjeanchen/flowerFL_test": ("096c024fc2", "", "a test"),
    "Debanu07/federated-learning-flwr-flare": ("2927c5e5b0", "", "an app"),
    "ritvika-sonawane/flwr-embedded-example": ("86522a6f20", "", "an example"),
    "lumiawjf/Indoor-Location-with-Flwr": ("3abf709d3a", "", "indoor positions"),
    "Sophie-X31/FedGPT-flwr": ("996ad964c8", "", "a language model"),
    "mingyi850/lamp-flwr": ("b6b3d1c358", "", "an app"),
    "aneesh-aparajit/flwr-tutorial": ("7792699220", "", "a tutorial"),
    "adwaykanhere/Flwr-nnUNet": ("e5aac2e95b", "", "segmentation"),
}
"""The fourth draw: names that speak of Flower, shuffled by a seed; the first thirty that import and start it."""

FIFTH: Mapping[str, tuple[str, str, str]] = {
    "ibrahim-Cypher10/TraceFL-Flower-Baseline": ("54a0703bc5", "", "where a prediction comes from"),
    "matheusprv/Flower_Federated_Learning": ("49d45182f4", "", "an app"),
    "Aria-Kalantari/Federated-Learning-System-Implementation-with-Flower": ("189f50385c", "", "an app"),
    "justinyang-jy/flwr-test-pb": ("6e3f26574f", "", "an app"),
    "teodorakocic/FL_Flower": ("74695ce544", "", "an app"),
    "nclabteam/flwr-multi-node-simulations": ("85e168108b", "", "an app"),
    "abtin4079/vmnet-v2-flwr": ("c8f238d664", "", "segmentation"),
    "shubham148-st/FedL-with-FLWR-transformers-": ("2c47136ccf", "", "transformers"),
    "shaz01/metricdp-flower-pytorch": ("67d55427b0", "", "differential privacy"),
    "VictorHidalgoUCLM/VictorHidalgoFLWR": ("5cbbae7c3e", "", "an app"),
    "rfdickerson/flower_federated_skin": ("efea0b649c", "", "pictures of skin"),
    "btwitsutkarsh/FL-Basics-using-pytorch-flwr": ("6d8625a625", "", "basics"),
    "Shubhamsgupta24/DualMetric-AdaptiveFL_flower_federated-learning": ("8cddf269f7", "", "an app"),
    "n45os/flwr_attacks": ("21b6426756", "", "attacks"),
    "priyankagour022/fl-human-detection-with-flower": ("6621243672", "", "people in pictures"),
    "Shankhanil/Flower-demo": ("848b9fe201", "", "a demonstration"),
    "ai4os/ai4-flwr": ("3943747f46", "", "an app"),
    "yuanchi-cheng/flowerFL_test": ("3945363a28", "", "an app"),
    "Pradyumna-SV/Federated-Leearning-Flower-Simulation": ("2afbc606ac", "", "an app"),
    "hoangducanh1865/flower-tutorial": ("edb504f55d", "", "a tutorial"),
    "shakibyzn/fl_with_dp_using_flwr": ("adf504cfe5", "", "differential privacy"),
    "i-anubhav-anand/Fed_learning_flower": ("cb5da8fef7", "", "an app"),
    "Rafi-Srayoui/Federated-Reinforcement-learning-IDS-With-Flower.AI": ("c93ae8682d", "", "reinforcement learning"),
    "zerroukines/FL-simulation-without-compression": ("8b02db6743", "", "an app"),
    "SBriguglio/FlowerFL_Test": ("ebc16c8408", "", "an app"),
    "sancarlim/flower_fedopt_debug": ("7f9c4d93c9", "", "an app"),
    "EzyHow/testing-flower-simulation": ("1fa36cc33a", "", "an app"),
    "kim-hyeon-gi/FL_flower": ("0902df5ab9", "", "an app"),
    "SohaibAShah/Flower-Tutorials": ("4f28fc6c9a", "my-first-app", "a tutorial"),
    "dstripelis/aws_flwr_demo": ("a9f8f5947e", "", "a demonstration"),
}
"""The fifth draw, by a rule written before any was run: names that speak of Flower, none audited before, in lower case
sorted and shuffled by ``random.Random(86)``; the first thirty that import and start Flower, without its copies."""

SIXTH: Mapping[str, tuple[str, str, str]] = {
    "sonhm3029/Flower-Federated-Learning-System": ("98bfaf6a16", "", "an app"),
    "jack139/flwr_test": ("5059271dfd", "", "a test"),
    "SYK3S999/FL-simulation-using-flower-pytorch": ("8748a9d0a0", "", "a simulation"),
    "nepal-manjil32/flwr-app": ("f2640f958e", "", "an app"),
    "Twinte/FL_Flower_CIFAR10": ("219b370162", "", "pictures"),
    "asmeerasif22/Federated-Learning-with-Flower": ("dbabce872c", "", "an app"),
    "dunkedolmer/federated-learning-flower": ("9b621eaac4", "", "an app"),
    "Mathugo/flower_federated_learning": ("6f47ea3493", "", "an app"),
    "ruibinliu/flwr-experiment": ("4fb351c2d1", "", "experiments"),
    "vaishshirsekar31/Federated-Learning-with-Flower-PyTorch-MNIST-Classification": ("e0aadea8c1", "", "digits"),
    "tranlamm/federated_learning_flower": ("fdde570ffd", "", "an app"),
    "Liu-KM/flwr_demo": ("2a5587ad88", "", "a demonstration"),
    "moh-a-abde/Federated-Learning-Flower": ("ff43d59f11", "", "an app"),
    "AierLab/flower-fl-local-training-isolation-framework": ("ff0d5ad848", "", "isolation"),
    "Qwerci/flwr_learning": ("1191413fa6", "", "an app"),
    "primetimetank21/fed-learning-with-flower": ("37ac37d126", "", "an app"),
    "jafermarq/flower-fl-summer-school": ("35a813210f", "advanced_messageapi", "a course"),
    "ps-yduck/flwr-server": ("202895f45d", "", "an app"),
    "Manoj-2702/PoseSync-Flower-Federated-Learning-for-Yoga-Poses": ("771c68e67f", "", "yoga poses"),
    "dreaminate/tft_flwr": ("797f0fda4a", "flwr_tft", "time series"),
    "Jencheng1/flower-federatedlearning": ("3344bc1d8f", "", "an app"),
    "agapebondservant/flower-federated-learning": ("c0dbd051e4", "", "an app"),
    "houpc0116/flower_federated_Learning": ("044ad31f36", "", "an app"),
    "celestial-d/SplitFed_flwr": ("2c5c1672de", "", "split learning"),
    "sdodlapati3/flower-federated-learning": ("d7d8e3d7fa", "examples/flower-basics", "an app"),
    "akashajagekar54/flower-federated-energy": ("d838cc0f84", "", "energy"),
    "arnogeimer/flwr-contributions": ("ee2b2b1f31", "", "contributions"),
    "musicboy9/flwr_custom": ("fff455f5e0", "", "a changed Flower"),
    "JoeyHanma69/FederatedLearning-FlowerAI-": ("6d4bb8a8a9", "", "an app"),
    "QVQZZZ/HeFlwr": ("c866ec9ac8", "", "heterogeneous clients"),
}
"""The sixth draw, by the rule of the fifth with ``random.Random(96)``, over further names; the folder is that of the
shallowest pyproject.toml with an app."""

SEVENTH: Mapping[str, tuple[str, str, str]] = {
    "tobias-zorzetto/flower-sim": ("c4d8d0d0cb", "", "a simulation"),
    "gachon-CCLab/Health_Flower_Client_3": ("4596e4617a", "", "health"),
    "Giuse1/flower_simplified": ("cce5cab846", "", "an app"),
    "rockh3x/Federated-MNIST-Classification-using-Flower-with-TensorFlow": ("1d20b49fb4", "", "digits"),
    "ALSConde/flower-test": ("a8f5a340fe", "", "a test"),
    "ParthawGoswami/Flower-framework-implementation-on-CloudLab-": ("0dbff39944", "", "an app"),
    "gachon-CCLab/Health_Flower_Server": ("b059f701c3", "", "health"),
    "michael-j-cho/flower-pytorch-android-client": ("1df036efda", "", "phones"),
    "IoTFedLab/flower-server": ("c825c2561a", "", "internet of things"),
    "xiaojunxu/colink-unifed-flower": ("b50be92365", "", "a bridge to CoLink"),
    "Halinee/Flower_example": ("38af24bd11", "", "an example"),
    "lucacorbucci/FlowerFLTemplate": ("986fac10c6", "", "a template"),
    "anees-amir/Flower-Simulations": ("10169bdd69", "", "simulations"),
    "ParthawGoswami/Federated-Vehicular-Network-FVN-in-Flower-framework": ("5afe148434", "", "vehicles"),
    "kvu228/FlwrBC": ("76d13e8870", "", "blockchain"),
    "deepakHonakeri05/Flwr": ("aecc52a7c4", "", "an app"),
    "utk-mat/Flower_Simulation_FL": ("5f536b7141", "", "a simulation"),
    "waggle-sensor/Simple_Flower_Example": ("7a45479183", "", "an example"),
    "Fusion-Linux/flower_simulation": ("67bfaf58af", "", "a simulation"),
    "phrp720/flower-testbed": ("61b5f706f9", "", "a platform"),
    "patselle/flower_client": ("18685c2da7", "", "an app"),
    "JM3L0/Flower-Simulacao-Seguranca": ("9e16623725", "quickstart-pytorch", "security"),
    "pedroarlima/Flower-TensorFlow": ("97fc94cf41", "", "TensorFlow"),
    "OpenMined/syft-flwr": (
        "9e88d3706b",
        "notebooks/federated-analytics-diabetes/fed-analytics-diabetes",
        "a bridge to PySyft",
    ),
    "Wang-Yan-Hao/Flower_client_selection_implement": ("8aecd873f2", "", "choice of clients"),
    "junaidanjum0916/Natural-Disaster-Identification-Using-Flower": ("467212ae60", "", "disasters"),
    "usamazf/flower-baseline": ("c0fef09dad", "", "a baseline"),
    "vishalsg42/flwr-monitioring-sample-app": ("2885e5fd17", "", "monitoring"),
    "nymeria-42/dfanalyzer-with-flower": ("0437d310b1", "", "provenance"),
    "lidijaf/Flower-based_FL_tool": ("3a43b40492", "", "a platform"),
}
"""The seventh draw, by the rule of the fifth with ``random.Random(106)``, over names found since; the folder is that of
the shallowest pyproject.toml with an app."""

EIGHTH: Mapping[str, tuple[str, str, str]] = {
    "laraw02/pytorch_federated_flower": ("85a08805d6", "", "PyTorch"),
    "BenCheng2/flowerai_llm_attempt": ("10650ef0ae", "fedobd", "a language model"),
    "laraw02/tensorflow_federated_flower": ("847d4e8793", "", "TensorFlow"),
    "Rams901/flower-client-selection": ("2b0206316a", "", "choice of clients"),
    "GhadeerBesani/flwr": ("40a0abc5d6", "", "an app"),
    "cirquit/flower-quickstart": ("f5014afa5b", "", "a start"),
    "Inpyo-Hong/fed_flower_assignment": ("5821e6da6b", "", "an assignment"),
    "csb30/flower_client_server": ("7dfba2a325", "", "an app"),
    "slope119/Byzantine-Attacks-on-Flower-Framework": ("031aa49292", "quickstart-pytorch", "Byzantine clients"),
    "awasali14/Federated-Learning-using-flower": ("7a1517ce3d", "", "an app"),
    "auruo4ever/flower_tutorial": ("faded568e5", "", "a tutorial"),
    "TianyueChu/FedFlower": ("c241abd461", "", "an app"),
    "Yann-j3/FedLearn-Flower-Docker": ("4b76450ac1", "", "containers"),
    "JeanHuit/flwr": ("ef35cffa0c", "", "an app"),
    "SteGala/Flower-demo": ("7943c90c7d", "", "a demonstration"),
    "ArubaKube/flower-demo": ("27dd3afa46", "demo", "a demonstration"),
    "nur-devolvedai/flower-server": ("852126833c", "", "a server"),
    "tlili-zohra/Fraud-detection-in-honey-with-the-FLOWER-framework": ("38d4dad85c", "", "fraud in honey"),
    "dreaminate/flwrs": ("838e13da9e", "", "an app"),
    "co-DE-mon/UltraFlwr": ("ae4bbe3b75", "", "an app"),
    "rikum216/system_using_flower": ("a829cb5a83", "", "a system"),
    "xujiangyu/fed_flower": ("196cd9992d", "", "an app"),
    "gachon-CCLab/Flower_Server": ("1f231ac703", "", "a server"),
    "soubihabdenour/fl_with_flower": ("ace6c83f81", "", "an app"),
    "riveSunder/fed_ml_flower_demo": ("2010571305", "", "a demonstration"),
    "mascalmeida/flower-tutorial": ("1aa3375bfe", "", "a tutorial"),
    "mahinuralam/flower-llm-finetune-challenge": ("ab20bfc0fa", "flower-finance", "a language model"),
    "GPikra/smpc-flower-poc": ("5706777693", "", "secure computation"),
    "Palpatineli/nvflwr-nnunet": ("c5e65c1aff", "fednnunet", "segmentation"),
    "patselle/flower_server": ("471787ba88", "", "a server"),
}
"""The eighth draw: the order of names of the seventh, continued; the first thirty that import and start Flower, without
its copies. Nobody read or ran them before they were listed."""

NINTH: Mapping[str, tuple[str, str, str]] = {
    "adap/flower/baselines/dasha": ("fdef7afb1d", "", "variance reduction"),
    "adap/flower/baselines/depthfl": ("fdef7afb1d", "", "networks of several depths"),
    "adap/flower/baselines/fedavgm": ("fdef7afb1d", "", "server momentum"),
    "adap/flower/baselines/fedbn": ("fdef7afb1d", "", "batch norm at home"),
    "adap/flower/baselines/feddebug": ("fdef7afb1d", "", "faults of clients"),
    "adap/flower/baselines/fedmeta": ("fdef7afb1d", "", "meta-learning"),
    "adap/flower/baselines/fedmlb": ("fdef7afb1d", "", "distillation"),
    "adap/flower/baselines/fednova": ("fdef7afb1d", "", "normalized averages"),
    "adap/flower/baselines/fedpara": ("fdef7afb1d", "", "low-rank layers"),
    "adap/flower/baselines/fedper": ("fdef7afb1d", "", "personal layers"),
    "adap/flower/baselines/fedpft": ("fdef7afb1d", "", "features of a frozen network"),
    "adap/flower/baselines/fedprox": ("fdef7afb1d", "", "stragglers"),
    "adap/flower/baselines/fedrep": ("fdef7afb1d", "", "personal heads"),
    "adap/flower/baselines/fedstar": ("fdef7afb1d", "", "sounds"),
    "adap/flower/baselines/fedvssl": ("fdef7afb1d", "", "video"),
    "adap/flower/baselines/fedwav2vec2": ("fdef7afb1d", "", "speech"),
    "adap/flower/baselines/fjord": ("fdef7afb1d", "", "widths of networks"),
    "adap/flower/baselines/flanders": ("fdef7afb1d", "", "poisoned models"),
    "adap/flower/baselines/floco": ("fdef7afb1d", "", "linear modes"),
    "adap/flower/baselines/heterofl": ("fdef7afb1d", "", "widths of networks"),
    "adap/flower/baselines/hfedxgboost": ("fdef7afb1d", "", "trees"),
    "adap/flower/baselines/moon": ("fdef7afb1d", "", "contrast of models"),
    "adap/flower/baselines/niid_bench": ("fdef7afb1d", "", "benchmark of partitions"),
    "adap/flower/baselines/statavg": ("fdef7afb1d", "", "intrusion detection"),
    "adap/flower/baselines/tamuna": ("fdef7afb1d", "", "compression"),
    "adap/flower/baselines/flwr_baselines/adaptive_federated_optimization": (
        "fdef7afb1d",
        "flwr_baselines/publications/adaptive_federated_optimization",
        "adaptive servers",
    ),
    "adap/flower/baselines/flwr_baselines/fedavg_mnist": (
        "fdef7afb1d",
        "flwr_baselines/publications/fedavg_mnist",
        "digits",
    ),
    "adap/flower/baselines/flwr_baselines/leaf": (
        "fdef7afb1d",
        "flwr_baselines/publications/leaf/femnist",
        "handwriting",
    ),
}
"""The ninth draw: all of Flower's baselines at one commit, each a folder of its own. Nobody ran them before they were
listed."""

TENTH: Mapping[str, tuple[str, str, str]] = {
    "alvieupnext/BrainAgeFederated": ("52491ea897", "", "ages of brains"),
    "CaptainLento/Federated-Learning": ("96d0039513", "Project", "an app"),
    "stoille/FedRecPolicyEval": ("288d2224eb", "", "recommendations"),
    "jabrathehutt/petnewest": ("72c4105db6", "", "pets"),
    "Encore7/FedRRT_CD": ("2d913da2dc", "", "drift"),
    "sbaldasty/heracleum": ("b6f59a6d16", "", "poisoning"),
    "sschwarz96/flwr-picai-training": ("b7dc964a83", "", "scans of prostates"),
    "msicilia/openmined-fl-flower": ("5d906e5949", "simple-classifier", "a tutorial"),
    "LukasXperiaZ/FL-free-rider-benchmark": ("66e48931e9", "", "free riders"),
    "Efficient-Computing-Lab/WAFL25-RobustFL": ("2b37214069", "", "robustness"),
    "heyyubov/medical-imaging-fl": ("986af84d4b", "", "medical pictures"),
    "jkkim401/Memristor_FLLM": ("4c98daf8a5", "", "a language model"),
    "ivelin/zk0": ("516545f576", "", "robots"),
    "MCAyd/Flower-Federated-Learning-Object-Detection-MSCOCO": ("784aaa3608", "", "detection of objects"),
    "ClementFrassier/federated_learning": ("750b8b5c94", "", "an app"),
    "Gopikaponnusamy/Privacy-Preserving-Stroke-Prediction-using-Federated-Learning": ("1bc958106d", "", "strokes"),
    "hadihabibtabar/these": ("c12b684ae5", "", "a thesis"),
    "p3jitnath/climate-rl-fedRL": ("e7eeecd642", "", "reinforcement learning, climate"),
    "ANSH-GIT77/Federated-ECG-POC": ("f091ada0b8", "", "electrocardiograms"),
    "palman2003/FedSales-Webapp": ("a2088369bd", "", "sales"),
    "Lalith1612/Federated_learning": ("dab724dbf2", "", "an app"),
    "Miha200101/BigData_FederatedLearning": ("bf3da8f41b", "", "big data"),
    "hyu-iot/federated-learning": ("a473693d05", "", "internet of things"),
    "alan-lira/flowering": ("e8d86ffd25", "", "an app"),
    "PulockDas/medical_fl_pidl": ("d55b2960be", "", "medical pictures"),
    "fceccucci/OptML-Project": ("37497f94d6", "", "optimizers"),
    "IDSIA/FPLIER": ("c2f74279ee", "", "gene expression"),
    "IagooB/federated_test": ("b526bf074e", "", "an app"),
    "owkin/flower-fedeca": ("8cbfc6d887", "", "survival analysis"),
    "thewillyan/pldp-bo": ("79ab022302", "", "local differential privacy"),
}
"""The tenth draw: shuffled from repositories that a search of names and paths listed, by a rule written before."""

ELEVENTH: Mapping[str, tuple[str, str, str]] = {
    "Perry-igdtuw/FL-XAI-IDS": ("245334b678", "", "intrusion detection"),
    "siddharthr050106/Browser-Based-Exam-Proctoring-System": ("a42698f031", "", "exams"),
    "janvandermeulen/rp": ("3fb156b8d2", "", "research"),
    "lujames13/BFL-optimistic-poison-defend-2": ("ddcf60f2a8", "", "blockchain"),
    "gangmingangmingangmin/fl_project": ("e7106890d8", "", "an app"),
    "CodebyDeshma-27/FedShield": ("2bd6f27664", "", "fraud"),
    "sriramkv3010/NAFO": ("9efda33fbe", "", "an app"),
    "KL-DL-ML/federated-learning-autoencoder-anomaly-detection": ("e40e327e86", "", "power systems"),
    "Dupahar/Prometheus-Siren-pro": ("b101355397", "", "web security"),
    "a4anthony/fraud-detection-fl": ("c417c44584", "", "fraud, a thesis"),
    "Adityaparab25a/federated-learn-sentiment-flower": ("e596a4424b", "", "sentiment of texts"),
    "Furqanameen/iot-ddos-detection": ("6f0f1d9a66", "", "internet of things"),
    "JingWu321/DCS-2": ("92019da597", "", "gradient leakage"),
    "Hasini-Kotha/Fed_Knowledge_graph_agentic_platform": ("9bd47a6ce0", "", "knowledge graphs"),
    "SalmonStar/Federated-Learning-lab": ("d4f12c39ec", "", "TensorFlow"),
    "dev-rafaelmachado/pre-tcc-bms-fl": ("412e55cd07", "", "regression, a thesis"),
    "Bubblevan/WPTCN": ("e5fc285c57", "", "time series"),
    "ahmayun/protoken": ("bddc44a396", "", "a language model"),
    "WearTheClo/PiXTime": ("564c6464c3", "", "time series"),
    "drvshavva/ACIncome_bias_fl": ("4cbca4ab84", "", "incomes, fairness"),
    "OmarTawad/FL_PPO_PRJ": ("cf5b47c158", "", "reinforcement learning"),
    "The-AtlasIAns-HackAI-2026/challenge-notebooks": ("030b882317", "", "challenges"),
    "CosmicPegasus07/FedTraj-Prediction": ("7287ebc619", "", "vehicles, graphs"),
    "Optimo-ai/Federado": ("e8461fccd6", "", "credit scores"),
    "ari-dasci/S-RFOut": ("e54d6dbc43", "", "backdoors"),
    "akusok/federated-elm": ("93c44aacf7", "", "extreme learning machines"),
    "sthuthii/skin_cancer_detection": ("5ccc4300fe", "", "pictures of skin"),
    "ChaseSecurity/Fostering_Cyber_Threat_Detection_Through_FL": ("c341c0504d", "", "cyber threats"),
    "drorasaf/FLNotify": ("dd9da66866", "", "a thesis"),
    "kampuzzle/Sistemas-Distribuidos": ("5e41110ab6", "", "a course"),
}
"""The eleventh draw: thirty projects chosen by a rule that was written before any of them was seen.

Candidates were all repositories that ten searches of code and nine exact paths of files, such as ``fl/client.py``,
listed. Paths that listed a project of the tenth draw were dropped after the search. Repositories that this project
names, or whose names are those of earlier draws, were left out. The others were sorted in lower case and shuffled by
``random.Random(1130)``. The first thirty whose Python files import and start Flower were taken, without copies of
Flower or of one another, at most one of each owner. None has Flower's app format. Nobody read their code before the
first try, but the searches showed one file of Adityaparab25a/federated-learn-sentiment-flower and one of
kampuzzle/Sistemas-Distribuidos. The checkouts lack files of 4 MiB and more, which the store of repositories lacks.
"""

TWELFTH: Mapping[str, tuple[str, str, str]] = {
    "FedFlw/Federated_YOLO_training-": ("ee90fed499", "", "detection of objects"),
    "davszi/fedlab-flower": ("bea6da6c07", "", "an app"),
    "jesus-333/federated_experiments": ("1ce717c059", "", "several apps"),
    "CambridgeCIA/FedMAP": ("eac722ab94", "", "personal models"),
    "chiranthanHY/Privacy-Preserving-Cancer-Detection-using-Federated-Learning-with-Synthetic-Data-Augmentation": (
        "40bf4ab5a6",
        "federated_learning",
        "scans of chests",
    ),
    "nozzolillo01/fl-framework": ("c991805811", "", "batteries"),
    "SohamRatnaparkhi/fed-llm-fintuning-and-blockchain": ("bf13b8556c", "", "a language model"),
    "ahmshaheer/fModel": ("c76369be45", "", "an app"),
    "haoyuan-l/FedBasic": ("ef47370773", "", "a template"),
    "cumtlax/fd": ("eccadec929", "", "a tutorial"),
    "dibyajyoti-mandal/SMPC-based-async-FL": ("c901bcf43f", "", "asynchronous training"),
    "elitay152/Blockchain_Assisted_Federated_Learning_Simulation": ("53ecd940f4", "", "blockchain"),
    "greatoluwanifemi55-lang/plant-disease-detection-system": (
        "7a451ac03a",
        "federated_learning",
        "diseases of plants",
    ),
    "jonagirre19/FL_ids": ("dbd3b80f6b", "", "intrusion detection"),
    "nxhxl000/fl-web-service": ("9c505dc887", "fl_app", "a platform"),
    "harshakolachala/Intrusion-Detection-System": ("fb4c7c0178", "", "intrusion detection"),
    "TongXuanVu/SDNFL-IDS": ("08b2ca9005", "", "intrusion detection"),
    "Nikoss96/vkr_dump": ("f8e9cf8645", "", "a thesis"),
    "Aprilmhx/FlowerAI-on-image-classification": ("f4c4fde7af", "", "pictures"),
    "tungmv/fl-ids": ("0e8a27f31c", "", "intrusion detection"),
    "Ritesh1147/Traffic": ("27c5c9d6df", "", "reinforcement learning, traffic"),
    "anudeepsekhar/Federated_learning_project": ("03ed458efd", "", "an app"),
    "SergilGG/federated-iot-ids-edge-emulation": ("f8a81aaaa3", "", "internet of things"),
    "SharjeelNadir/federated-health-mlops": ("9a9e44fdb3", "", "risks of patients"),
    "Swami5158/hb-fl-ids": ("ac1af832f2", "", "intrusion detection"),
    "oqadiSAK/fl-fer": ("6ee36acdb7", "", "faces"),
    "MasroorRehan2003/Federated-Health-Mlops-System": ("b8d80328fb", "", "risks of patients"),
    "JJieCui/cloud-edge-ai4i-system": ("9c2a6c6c3f", "", "industry"),
    "Gen3ratorX/Federated-Health-Learning-model": ("701880cd81", "", "risks of patients"),
    "afanatif/federated-health-risk-mlops": ("a2b454c34a", "", "risks of patients"),
}
"""The twelfth draw: fifteen projects with Flower's app format, then fifteen without, by a rule written beforehand.

The candidates with the format were all repositories that 49 exact paths of files, such as ``my_app/client_app.py``,
listed. Those without were listed by six other paths, such as ``simulation/client.py``, and by seven parts of names,
such as ``fl-ids``. A term was dropped if it listed a project of draw 10 or 11, or more repositories than one listing
shows. All of Flower's baselines with the format had been drawn before. Repositories that this project names, or whose
names are those of earlier draws, were left out. Each list was sorted in lower case and shuffled by
``random.Random(1230)``. The first fifteen of each whose Python files import and start Flower, in the format of their
list, were taken, at most one of each owner. A copy was to be skipped, but there was none: 80 % of the lines of the
files that import Flower are in one of Flower's examples or baselines, in a project of draw 10 or 11, or in one taken
before. Nobody read their code before the first try; the searches showed names only. The checkouts lack files of 4 MiB
and more, which the store of repositories lacks.
"""

THIRTEENTH: Mapping[str, tuple[str, str, str]] = {
    "TrungNhan23/BackDoor-Attack-with-fedGAN-in-edge-computing": ("0c10371731", "federated-learning", "backdoors"),
    "mirzuKHAN/fl-resource-aware": ("67cf8788c6", "", "resources of clients"),
    "bagnatarik/federated-text-classification": ("0abcc3d0e1", "fl-project", "texts"),
    "i220504/fedops": ("8a00632cfd", "", "operations"),
    "Astesiatop1/EECE5643": ("22637255d0", "quickstart-pytorch", "a course"),
    "dann1erel/federative_learning": ("a68274dff8", "quickstart-pytorch", "an app"),
    "41243117/Federated_Learning-Reinforcement_Learning-Kmeans": ("a12d737710", "", "reinforcement learning"),
    "gubertoli/nist-ppfl-mia": ("c637c00f63", "fl", "membership inference"),
    "ryoyamamura-2025/federated-learning-system": ("22cac2fa94", "", "an app"),
    "skripsi-koecheng/sasa-try-distilbert-agnews": ("a05162bcb2", "quickstart-pytorch", "a thesis, texts"),
    "namnt1204/New-FedEraser": ("135ce78f30", "quickstart-pytorch", "unlearning"),
    "schroe-ja/flower-ai-mcu": ("dab144842d", "flower", "microcontrollers"),
    "adityak714/toyproblem-af-classification": ("8e43824b9d", "federated", "electrocardiograms"),
    "rathull/fl-demo": ("523b5ecdc8", "", "a demonstration"),
    "proxyfixis/autoFL_tasks": ("ab7020ec2b", "quickstart-pytorch", "several apps"),
    "ishaq34245/Gwing-Internship-Federated-Sentiment-Analysis": ("bbdbec2f35", "", "sentiment of texts"),
    "GoktugOcal/natadapt-x-flower": ("53f8d9e63c", "", "compressed networks"),
    "mirqr/FedAD": ("a7ea77df7a", "", "anomalies"),
    "mapeke/privacy-preserving-fl-healthcare-iot": ("8fe68b5c5a", "", "health, internet of things"),
    "dupenodi/fhe-disease-prediction": ("0d5d37de52", "", "encryption, diseases"),
    "Nishank-DV/heart-disease-prediction": ("e1aed6e006", "", "heart disease"),
    "Anshuu0046/Federated_Learning_Algorithmic_Trading_System": ("fbdcf02640", "", "trading"),
    "BI22160508/Federated-Credit-Card-Fraud-Detection": ("e70b210efb", "", "fraud"),
    "FL-Healthcare/embryo-mnist": ("469fd55a2f", "", "pictures of embryos"),
    "ameorazlan/sdc_fork": ("42202cb475", "", "cars"),
    "student-TitliPanja/stress-AI": ("879e344e49", "", "stress"),
    "kkmehhh/Federated-Brain-Tumor-Detection": ("6daf97a2a0", "", "brain tumors"),
    "Manjusha-26/HIMAS-MLOps-POC": ("7d26c280e0", "", "hospitals"),
    "Criscarr26/federated-fraud-detection": ("d99a5f1836", "", "fraud"),
    "aravinthakshan/federated-recommendation": ("26d56f1498", "", "recommendations"),
}
"""The thirteenth draw: fifteen projects with Flower's app format, then fifteen without, by a rule written beforehand.

The rule is that of the twelfth draw with other terms. The candidates with the format were all repositories that exact
paths of files listed: 11 such as ``myapp/server_app.py``, nine such as ``flower/pyproject.toml``, and two parts of
names, such as ``fl-flwr``. Those without were listed by eight other paths, such as ``federated_client.py``, and by ten
parts of names, such as ``federated-heart``. A term was dropped if it listed a project of draws 10 to 12, or more
repositories than one listing shows; two terms were dropped for the names that they listed. Repositories that this
project names, or whose names are those of earlier draws, were left out. Each list was sorted in lower case and shuffled
by ``random.Random(1330)``. The first fifteen of each whose Python files import and start Flower, in the format of their
list, were taken, at most one of each owner. One copy was skipped. Nobody read their code before the first try; the
searches showed names only. The checkouts lack files of 4 MiB and more, which the store of repositories lacks.
"""

HEADS = ("", "baf5cf03", "ba94e85d", "fed08622", "4b16fbc6", "538d4a92", "d6aee7a8", "73d2fa99", "09c74a80", "7a96f0a3")
"""Versions on which projects since the sixth draw were first tried, in this order; "" is not recorded."""

WRONG: Mapping[str, str] = {
    "yonetaniryo/flwr_leaf": "it has no app format, so that nothing is missing in its pyproject.toml",
    "Audris-A/FL-for-battery-RUL-with-Flower-framework": "the module is its own, and no package",
    "yaYa13360/flwr_aidms": "no package index has one of that name",
    "ipremuzic/flowerFL": "it asked clients, by parameters of an earlier Flower",
    "ritvika-sonawane/flwr-embedded-example": "it writes that file, and its folder is missing",
    "aneesh-aparajit/flwr-tutorial": "it names an argument that `--stand-in` takes by place alone, an error of ours",
    "helios190/FL-Demo-With-Flower": "the time of this script was over, not the attacks",
    "ibrahim-Cypher10/TraceFL-Flower-Baseline": "Flower has moved these names, and nothing is to be installed",
    "matheusprv/Flower_Federated_Learning": "pixels enter the network in bytes, and no words do",
    "Aria-Kalantari/Federated-Learning-System-Implementation-with-Flower": "its notebooks start simulations",
    "Pradyumna-SV/Federated-Leearning-Flower-Simulation": "the arrays are the model's; an evaluation was looked at",
    "hoangducanh1865/flower-tutorial": "no client trained: its strategy sends no settings",
    "shakibyzn/fl_with_dp_using_flwr": "the audit's watch of Opacus made PyTorch's scheduler fail",
    "zerroukines/FL-simulation-without-compression": "its clients shared a logger, as they would not by themselves",
    "SohaibAShah/Flower-Tutorials": "a folder of the tracker's runs was taken for its package",
    "dstripelis/aws_flwr_demo": "the first client failed without a network, the others for lack of what it loads",
    "jack139/flwr_test": "Opacus is installed, and its present version does not have that module",
    "Twinte/FL_Flower_CIFAR10": "its three clients were one and the same: the first of those that its script starts",
    "asmeerasif22/Federated-Learning-with-Flower": "drawn data lacked the column that its code names by a variable",
    "dreaminate/tft_flwr": "its modules are in the folder around the app's, and were left out",
    "QVQZZZ/HeFlwr": "its option --dataset has no default, and was not given",
    "arnogeimer/flwr-contributions": "the drawn data are fewer than those that it divides, an error of ours",
    "tranlamm/federated_learning_flower": "its clients' scripts end by a call of exit in their middle",
    "celestial-d/SplitFed_flwr": "its own changed copy of Flower has that strategy; the installed Flower is run",
    "phrp720/flower-testbed": "the address of its database is not set, and one of a server was taken",
    "tobias-zorzetto/flower-sim": "the package is its own folder, by an earlier name",
    "nymeria-42/dfanalyzer-with-flower": "options for files of settings were given numbers",
    "xiaojunxu/colink-unifed-flower": "its first argument names a file of settings, for which a number was guessed",
    "lucacorbucci/FlowerFLTemplate": "its option --dataset_name has no default, and was not given",
    "vishalsg42/flwr-monitioring-sample-app": "it opens a port, and the sandbox refused that, no file",
    "kvu228/FlwrBC": "the file is there, in a folder whose name has a capital letter",
    "IoTFedLab/flower-server": "the drawn examples left a client without any, an error of ours",
    "jafermarq/flower-fl-summer-school": "its server chose a share of three clients, which was none",
    "kim-hyeon-gi/FL_flower": "its main script calls a simulation of its own, a changed copy of Flower's",
    "adap/flower/baselines/fedprox": "EasyDict was not of the version that it asks for",
    "adap/flower/baselines/fedbn": "nothing like the pickle that it opens was drawn, an error of ours",
    "adap/flower/baselines/floco": "the drawn data are fewer than those that it divides, an error of ours",
    "adap/flower/baselines/heterofl": "the sandbox has no network, and nothing stood for the archive that it downloads",
    "adap/flower/baselines/fjord": "the script is a module of a package, an error of ours",
    "adap/flower/baselines/flanders": "the script is a module of a package, an error of ours",
    "adap/flower/baselines/dasha": "it waits for processes of its own, which fail by Python 3.11",
    "adap/flower/baselines/depthfl": "its loss has the shape (1,), an error of ours",
    "adap/flower/baselines/flwr_baselines/adaptive_federated_optimization": "the error behind Hydra's was left out",
    "BenCheng2/flowerai_llm_attempt": "its network is not here, and nothing stood for it, an error of ours",
    "cirquit/flower-quickstart": "its options have no default, and were not given",
    "mahinuralam/flower-llm-finetune-challenge": "Transformers imported TensorFlow, which the app does not use; drawn"
    " texts stood for files that packages lack, an error of ours",
    "soubihabdenour/fl_with_flower": "its strategy gets settings in place of a function; no version is why",
    "csb30/flower_client_server": "it has such scripts, which wait for a button before they start Flower",
    "Encore7/FedRRT_CD": "examples of a saved set were drawn without their columns, an error of ours",
    "PulockDas/medical_fl_pidl": "its data_root is empty, and no pictures stood for it, an error of ours",
    "hadihabibtabar/these": "the option --expid of its script of Flower has no default, and was not given",
    "IDSIA/FPLIER": "its clients' files are missing, so that none trained",
    "owkin/flower-fedeca": "an array is read-only, as tables of pandas 3 give it, and no file system",
    "CaptainLento/Federated-Learning": "the package is its own folder, by an earlier name",
    "msicilia/openmined-fl-flower": "a package that is installed imports that module, not the app",
    "Efficient-Computing-Lab/WAFL25-RobustFL": "a command of its package calls its script, and no button",
    "Miha200101/BigData_FederatedLearning": "numbers were drawn where its code reads strings, an error of ours",
    "alan-lira/flowering": "its argument names a file of settings, for which a number was guessed",
    "IagooB/federated_test": "it removes that file, which was said to be there, an error of ours",
    "thewillyan/pldp-bo": "it is written for Python 3.14, and its syntax is right there",
    "lujames13/BFL-optimistic-poison-defend-2": "the path is right; its own changed copy of Flower starts its clients",
    "WearTheClo/PiXTime": "that is a layer of its networks, and no network, an error of ours",
    "ahmayun/protoken": "the sandbox lets it write no cache of its own, and no option is why",
    "FedFlw/Federated_YOLO_training-": "the weights are missing, and what was drawn in their place was refused",
    "jesus-333/federated_experiments": "the setting is the node's own, which other versions do not give",
    "chiranthanHY/Privacy-Preserving-Cancer-Detection-using-Federated-Learning-with-Synthetic-Data-Augmentation": (
        "its folder is the package that it names, and was loaded outside of it"
    ),
    "greatoluwanifemi55-lang/plant-disease-detection-system": "its server's module is empty in any version",
    "anudeepsekhar/Federated_learning_project": "the audit refused its own figures",
    "adityak714/toyproblem-af-classification": "its data are missing, and that error comes after, in its `finally`",
}
"""Project of the last draws whose page or error names a wrong cause, by hand -> what is so."""

DRAWS = dict(
    enumerate(
        (FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH, SEVENTH, EIGHTH, NINTH, TENTH, ELEVENTH, TWELFTH, THIRTEENTH),
        start=1,
    )
)
PROJECTS = {name: told for draw in DRAWS.values() for name, told in draw.items()}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apps", type=Path, required=True, help="folder of checkouts, OWNER+NAME")
    parser.add_argument("--only", nargs="*", help="projects by OWNER/NAME")
    parser.add_argument("--draw", type=int, choices=DRAWS, default=13, help="which projects")
    parser.add_argument("--again", action="store_true", help="projects that have a row, too")
    parser.add_argument("--second", action="store_true", help="keep the first try's row, with this try beside it")
    parser.add_argument("--check", action="store_true", help="measure `audit --check` of projects that have a row")
    parser.add_argument("--out", type=Path, default=Path("first_tries"), help="folder of pages and logs")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="a Python with the apps' packages")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for an app")
    asked = parser.parse_args()
    kept = RowFile(ROWS)
    for name in asked.only or DRAWS[asked.draw]:
        first = kept.find({"example": name})
        if asked.check:
            if first is not None:
                kept.add({"example": name}, {**first, "check_seconds": checked(name, asked)})
        elif asked.again or asked.only or first is None:
            row = json.loads(PACKAGES.sub("", CELL.sub("SANDBOX", json.dumps(tried(name, asked)))))
            kept.add({"example": name}, {**first, "second": row} if asked.second and first is not None else row)
            print(f"{name}: {row.get('headline') or row.get('reason')} ({row['seconds']:.0f} s)", flush=True)


def tried(name: str, asked: Namespace) -> dict[str, Any]:
    """Audit the checkout of ``name`` and return its row."""
    commit, inner, about = PROJECTS[name]
    place, out = asked.apps.absolute() / name.replace("/", "+") / inner, asked.out.absolute() / name.replace("/", "+")
    out.mkdir(parents=True, exist_ok=True)
    started, started_at = time.perf_counter(), time.time()
    words = COMMAND.split()
    command = [str(asked.python), "-m", "fl_privacy", words[0], str(place), *words[1:], "--out", str(out)]
    status = ended(command, {**os.environ, "HF_HUB_OFFLINE": "1"}, out / "log", asked.limit)
    text = (out / "log").read_text(encoding="utf-8", errors="replace")
    row: dict[str, Any] = {
        "repository": name,
        "commit": commit,
        "about": about,
        "edited": 0,
        "data": "",
        "head": subprocess.check_output(["git", "-C", HERE, "rev-parse", "--short=8", "HEAD"], text=True).strip(),
        "traceback": bool(re.search(r"^Traceback", text, re.MULTILINE)),  # the command's, not one that an app prints
        "format": "app" if "serverapp" in _project(place) else "scripts",
        "seconds": time.perf_counter() - started,
    }
    places = {f"{place}/": "", str(place): name, str(out): "OUT"}
    records = [path for path in out.glob("audit-*/audit.json") if path.stat().st_mtime >= started_at]
    if records and status in (0, 124):
        record = json.loads(records[0].read_text(encoding="utf-8"))
        row |= {name: record[name] for name in FIELDS} | {k: record[k] for k in ("network_alone",) if k in record}
        return without_places(row | {"cut": status == 124, "uploaded": uploaded(record)}, places)
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[-1:]
    reason = "took too long where this was measured" if status == 124 else " ".join(lines)[:400]
    return without_places(row | {"reason": reason}, places)


def checked(name: str, asked: Namespace) -> float:
    """Return the processor's seconds for ``audit --check`` of the checkout of ``name``, whatever it says."""
    place = asked.apps.absolute() / name.replace("/", "+") / PROJECTS[name][1]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(asked.python), "-m", "fl_privacy", "audit", str(place), "--check"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=asked.limit, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)


def _project(place: Path) -> str:
    path = place / "pyproject.toml"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def section() -> list[str]:
    """Render the section of docs/third_party_apps.md."""
    rows = sorted(RowFile(ROWS).rows, key=lambda row: str(row["example"]).lower())
    draws = {number: [row for row in rows if row["repository"] in draw] for number, draw in DRAWS.items()}
    return [
        "## First tries",
        "",
        "Draws of further projects were audited as they were found, not a line of them edited, by"
        f" `fl-privacy {COMMAND}`. Data that were missing were drawn. The first draw was tuned to: kinds of its errors"
        " were mended. Projects of a later draw were drawn before any of them was run, nothing was tuned to them, and"
        " each was run once; kinds of its errors were mended before the next draw. Quote the last draw"
        " that has run whole; a draw has so far run as many as it states, and errors mended since are not counted."
        " Projects of draws 6, 7 and 9 ran on several versions: kinds of errors of the earlier ones were mended before"
        " the later ones ran. The file server.py of `SteGala/Flower-demo`, of draw 8, was seen in a search before;"
        " so were files of `Adityaparab25a/federated-learn-sentiment-flower` and `kampuzzle/Sistemas-Distribuidos`,"
        " of draw 11. Since draw 11 the network of a project whose clients do not train is audited alone, which counts"
        " apart.",
        "",
        *(
            f"- Draw {number}{' (tuned to)' * (number == 1)}, {len(held)} of {len(DRAWS[number])} run: {_counts(held)}."
            for number, held in draws.items()
            if held
        ),
        *(
            f"- Draw {number} at {f'`{head}`' if head else 'an earlier version'}, {len(held)} run: {_counts(held)}."
            for number, of_draw in draws.items()
            if len(heads := {row.get("head", "") for row in of_draw}) > 1
            for head in sorted(heads, key=lambda head: (*HEADS, head).index(head))
            if (held := [row for row in of_draw if row.get("head", "") == head])
        ),
        "",
        "| Project | Draw | Commit | Format | About |",
        "|---|---|---|---|---|",
        *(
            f"| `{row['repository']}` | {number} | `{row['commit']}` | {row['format']} | {row['about']} |"
            for number, held in draws.items()
            for row in held
        ),
        "",
        *lines_of(rows),
        *_times(rows),
        "Second tries of projects, with the same command, after kinds of errors of their draw were mended. They are no"
        " first tries and count in none of the figures above.",
        "",
        "| Project | Draw | First try | Second try |",
        "|---|---|---|---|",
        *(
            f"| {row['repository']} | {number} | {how_ended(row)} | {how_ended(row['second'])} |"
            for number, held in draws.items()
            for row in held
            if "second" in row
        ),
        "",
    ]


def _times(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how long checks and whole audits take, of the draws whose checks were measured."""
    checks = [row["check_seconds"] for row in rows if "check_seconds" in row]
    audits = [row["seconds"] for row in rows if "check_seconds" in row and not why_none(row)]
    if not checks or not audits:
        return []
    return [
        f"`audit --check` takes {median(checks):.1f} s of a processor in the median of {len(checks)} projects, and at"
        f" most {max(checks):.1f} s. A whole audit that ends in a page took {median(audits):.0f} s in the median of"
        f" {len(audits)}, and at most {max(audits):.0f} s, while other programs used the machine.",
        "",
    ]


def how_ended(row: Mapping[str, Any]) -> str:
    """Say in a cell how a try ended."""
    said = why_none(row) or str(row["headline"])
    measured = is_measured(row) and not is_alone(row)
    return "measured: " * measured + said.replace("|", "/").replace("\n", " ")[:240]


def is_page(row: Mapping[str, Any]) -> bool:
    """Return whether a try ended in a page on what clients upload, not on a network alone or untrained parameters."""
    untrained = re.compile(r"Not attacked: .*\b(no|before a) client trained")
    return not why_none(row) and not is_alone(row) and not untrained.match(row["headline"])


def is_alone(row: Mapping[str, Any]) -> bool:
    """Return whether a try ended in a page on the project's network alone, trained by plain SGD on drawn inputs."""
    return bool(row.get("network_alone"))


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    pages = [row for row in rows if is_page(row)]
    return (
        f"{sum(row['format'] == 'scripts' for row in rows)} without Flower's app format, {len(pages)} ended in a page"
        f" on what clients upload, {sum(map(is_measured, pages))} of them with a"
        f" measured attack, and {sum(row['traceback'] for row in rows)} in a traceback"
        + (f"; {alone} more in a page on the network alone" if (alone := sum(map(is_alone, rows))) else "")
        + (f"; {wrong} name a wrong cause" if (wrong := sum(row["repository"] in WRONG for row in rows)) else "")
    )


if __name__ == "__main__":
    main()
