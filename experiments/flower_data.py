"""Small parts of data sets under their hub names, and stand-ins where a set, or trained weights, are missing.

Not a command of its own: the data of ``flower_examples.py``.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INSTRUCTIONS = ("alpaca-gpt4", "fingpt-sentiment-train", "code-alpaca-20k", "medical-meadow-medical-flashcards")
"""Data sets of instructions, for all of which the same rows stand in."""

GENRES = ("Action", "Comedy", "Crime", "Drama", "Horror", "Musical", "Romance", "War")

LANGUAGE_MODELS = ("openlm-research/open_llama_3b_v2", "mistralai/Mistral-7B-v0.3")
"""For which a model of 231,000 parameters stands in."""


def make_mirror(data: Path, mirror: Path, *, of_others: bool = False) -> Path:
    """Write small parts of data sets, and stand-ins, under their hub names; also those that apps of others take."""
    mirror.mkdir(parents=True, exist_ok=True)
    makers: Mapping[str, Callable[[Path, Path], None]] = {
        "cifar10": lambda d, m: part(d / "cifar10_exact", m, {"train": 600, "test": 100}),
        "mnist": lambda d, m: part(d / "mnist", m, {"train": 1000, "test": 200}),
        "fashion_mnist": lambda d, m: part(d / "fashion_mnist", m, {"train": 1000, "test": 200}),
        "imdb": lambda d, m: part(d / "rotten_tomatoes", m, {"train": 600, "test": 100}),
        "oxford_flowers": flowers,
        "adult-census-income": adult,
        "scikit-learn__iris": lambda d, m: iris(m, "Id SepalLengthCm SepalWidthCm PetalLengthCm PetalWidthCm Species"),
        "hitorilabs__iris": iris_in_numbers,
        "higgs": higgs,
        "titanic-survival": titanic,
        "bert-tiny": bert,
        "speech_commands": speech,
        "measurements": measurements,
        "mednist": mednist,
        "cifar10_parts": lambda d, m: saved_parts(d / "cifar10_exact" / "train.parquet", m),
        "fashion_mnist_parts": lambda d, m: saved_parts(d / "fashion_mnist" / "train.parquet", m),
        "torch": vision_transformer,
        "hf": models,
        **dict.fromkeys(INSTRUCTIONS, instructions),
    }
    others: Mapping[str, Callable[[Path, Path], None]] = {
        "cifar100": hundred,
        "movielens": movielens,
        "medmnist": pathology,
        "flows": flows,
        "graphs": graphs,
        "distributed": distributed,
    }
    for name, make in {**makers, **(others if of_others else {})}.items():
        if not (mirror / name).is_dir():
            (mirror / f".{name}").mkdir(exist_ok=True)
            make(data, mirror / f".{name}")
            (mirror / f".{name}").rename(mirror / name)
    return mirror


def part(
    source: Path,
    into: Path,
    numbers: Mapping[str, int],
    renamed: Mapping[str, str] | None = None,
    *,
    color: bool = False,
) -> None:
    """Write the first rows of the splits of a data set."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    for file in sorted(source.glob("*.parquet")):
        split = (renamed or {}).get(file.stem, file.stem)
        if split in numbers:
            rows = pq.read_table(file)
            chosen = in_color(rows, numbers[split]) if color else list(range(min(len(rows), numbers[split])))
            pq.write_table(rows.take(chosen), into / f"{split}.parquet")


def in_color(rows: Any, number: int) -> list[int]:
    """Find the first rows whose pictures are not gray."""
    import io  # noqa: PLC0415

    from PIL import Image  # noqa: PLC0415

    found: list[int] = []
    for place, picture in enumerate(rows.column("image").to_pylist()):
        if Image.open(io.BytesIO(picture["bytes"])).mode == "RGB":
            found.append(place)
        if len(found) == number:
            break
    return found


def flowers(data: Path, into: Path) -> None:
    """Write pictures with as many classes as there are flowers."""
    part(data / "tiny_imagenet", into, {"train": 120, "test": 60}, {"valid": "test"}, color=True)
    relabeled(into, 102, "label", "label")


def hundred(data: Path, into: Path) -> None:
    """Write CIFAR-10's pictures under the columns of CIFAR-100, with a hundred classes."""
    part(data / "cifar10_exact", into, {"train": 1200, "test": 200})
    relabeled(into, 100, "label", "fine_label")


def relabeled(folder: Path, classes: int, column: str, name: str) -> None:
    """Give pictures a class by their place, and the one that they have, below ``classes``."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    for file in folder.glob("*.parquet"):
        rows = pq.read_table(file)
        labels = [(label + 10 * place) % classes for place, label in enumerate(rows.column(column).to_pylist())]
        rows = rows.drop_columns([column]).append_column(name, pa.array(labels, pa.int64()))
        pq.write_table(rows, file)


def movielens(data: Path, into: Path) -> None:
    """Draw ratings of films, in the files of MovieLens 1M."""
    import numpy as np  # noqa: PLC0415

    rng, users, films, each = np.random.default_rng(0), 6040, 3706, 6
    films_of = np.concatenate([rng.permutation(films) for _ in range(users * each // films + 1)]) + 1
    ratings = [
        f"{place // each + 1}::{film}::{rng.integers(1, 6)}::{978300000 + place}"
        for place, film in enumerate(films_of[: users * each].tolist())
    ]
    people = [
        f"{user}::{'MF'[user % 2]}::{18 + 7 * (user % 6)}::{user % 20}::0{user:04d}" for user in range(1, users + 1)
    ]
    titles = [f"{film}::Film {film} ({1950 + film % 50})::{GENRES[film % 8]}" for film in range(1, films + 1)]
    for name, lines in (("ratings", ratings), ("users", people), ("movies", titles)):
        (into / f"{name}.dat").write_text("\n".join(lines) + "\n", encoding="latin-1")


def pathology(data: Path, into: Path) -> None:
    """Write Tiny ImageNet's pictures with nine classes in place of tissue."""
    part(data / "tiny_imagenet", into, {"train": 240, "test": 60}, {"valid": "test"}, color=True)
    relabeled(into, 9, "label", "label")


FLOW_COLUMNS = [
    " Destination Port",
    " Flow Duration",
    " Total Fwd Packets",
    "Total Length of Fwd Packets",
    " Fwd Packet Length Max",
    " Fwd Packet Length Min",
    " Fwd Packet Length Mean",
    "Bwd Packet Length Max",
    " Bwd Packet Length Min",
    " Flow Packets/s",
    " Flow IAT Mean",
    " Flow IAT Std",
    " Flow IAT Min",
    " Fwd IAT Min",
    "Bwd IAT Total",
    " Bwd IAT Mean",
    " Bwd IAT Std",
    " Bwd IAT Max",
    "Fwd PSH Flags",
    " Fwd URG Flags",
    " Fwd Header Length",
    " Bwd Header Length",
    "Fwd Packets/s",
    " Bwd Packets/s",
    " Min Packet Length",
    "FIN Flag Count",
    " RST Flag Count",
    " PSH Flag Count",
    " ACK Flag Count",
    " URG Flag Count",
    " Down/Up Ratio",
    "Init_Win_bytes_forward",
    " Init_Win_bytes_backward",
    " act_data_pkt_fwd",
    " min_seg_size_forward",
    "Active Mean",
    " Active Std",
    " Active Max",
    " Idle Std",
    "Flow Bytes/s",
]
"""Of CICIDS2017, as they are spelled there."""


def flows(data: Path, into: Path) -> None:
    """Draw flows of a network, a file for each of four nodes, with the columns that the app asks for."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    rng = np.random.default_rng(0)
    (into / "data").mkdir()
    for node in range(4):
        frame = pd.DataFrame({name: rng.gamma(2.0, 10.0 + node, 400).round(3) for name in FLOW_COLUMNS})
        frame[" Label"] = np.where(rng.random(400) < 0.9, "BENIGN", "DDoS")
        frame.to_csv(into / "data" / f"node{node}.csv", index=False)


def graphs(data: Path, into: Path) -> None:
    """Draw a graph of 60 hosts and 200 flows for each of ten nodes."""
    import torch  # noqa: PLC0415
    from torch_geometric.data import Data  # noqa: PLC0415

    place = into / "data" / "graph_data" / "oneclass"
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for node in range(10):
        graph = Data(
            x=torch.randn(60, 128, generator=generator),
            edge_index=torch.randint(0, 60, (2, 200), generator=generator),
            y=torch.zeros(60, dtype=torch.long),
        )
        torch.save(graph, place / f"client_graph_{node}.pt")


def distributed(data: Path, into: Path) -> None:
    """Write pictures of Fashion-MNIST as tensors, a file for each of four nodes."""
    import io  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    frame = pd.read_parquet(data / "fashion_mnist" / "train.parquet").head(480)
    pictures = [np.asarray(Image.open(io.BytesIO(one["bytes"])), dtype=np.float32) / 255 for one in frame["image"]]
    (into / "distributed_data").mkdir()
    for node in range(4):
        own = torch.from_numpy(np.stack(pictures[node::4]))[:, None]
        labels = torch.tensor(frame["label"].tolist()[node::4])
        torch.save((own, labels), into / "distributed_data" / f"client_{node}.pt")


def adult(data: Path, into: Path) -> None:
    """Write UCI Adult under the names that the hub's copy has."""
    import pandas as pd  # noqa: PLC0415

    frame = pd.read_parquet(data / "adult" / "train.parquet").head(2000)
    names = {column: column.replace("_", ".") for column in frame.columns}
    frame = frame.rename(columns={**names, "label": "income"}).fillna("?")
    frame["income"] = frame["income"].map({0: "<=50K", 1: ">50K"})
    for column in frame.columns:
        if frame[column].dtype.kind in "iuf":
            frame[column] = frame[column].astype("int64")
    frame.to_parquet(into / "train.parquet", index=False)


def iris(into: Path, names: str) -> None:
    """Write scikit-learn's Iris under other column names."""
    import pandas as pd  # noqa: PLC0415
    from sklearn.datasets import load_iris  # noqa: PLC0415

    found = load_iris()
    frame = pd.DataFrame(found.data, columns=names.split()[1:5])
    frame.insert(0, names.split(maxsplit=1)[0], range(1, len(frame) + 1))
    frame[names.rsplit(maxsplit=1)[-1]] = [f"Iris-{found.target_names[k]}" for k in found.target]
    frame.to_parquet(into / "train.parquet", index=False)


def higgs(data: Path, into: Path) -> None:
    """Draw rows of 28 numbers in place of HIGGS."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    rng = np.random.default_rng(0)
    for split, number in (("train", 600), ("test", 100)):
        inputs = rng.normal(size=(number, 28)).astype("float32")
        labels = (inputs[:, 0] > 0).astype("float32")
        pd.DataFrame({"label": labels, "inputs": list(inputs)}).to_parquet(into / f"{split}.parquet", index=False)


def titanic(data: Path, into: Path) -> None:
    """Draw passengers in place of Titanic's."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    rng, number = np.random.default_rng(0), 600
    titles = rng.choice(["Mr", "Mrs", "Miss", "Master"], number)
    frame = {
        "Survived": rng.integers(0, 2, number),
        "Pclass": rng.integers(1, 4, number),
        "Name": [f"{title}. Passenger {k}" for k, title in enumerate(titles)],
        "Sex": rng.choice(["male", "female"], number),
        "Age": rng.integers(1, 80, number).astype(float),
        "Siblings/Spouses Aboard": rng.integers(0, 4, number),
        "Parents/Children Aboard": rng.integers(0, 3, number),
        "Fare": rng.gamma(2.0, 16.0, number).round(2),
    }
    pd.DataFrame(frame).to_parquet(into / "train.parquet", index=False)


def bert(data: Path, into: Path) -> None:
    """Write an untrained BERT of two layers of 128, with the words of the data as its vocabulary."""
    import pandas as pd  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast  # noqa: PLC0415

    texts = pd.read_parquet(data / "rotten_tomatoes" / "train.parquet")["text"].head(600)
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    (into / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
    BertTokenizerFast(str(into / "vocab.txt"), model_max_length=512).save_pretrained(into)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words) + 5,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )
    BertForSequenceClassification(config).save_pretrained(into)


def iris_in_numbers(data: Path, into: Path) -> None:
    """Write scikit-learn's Iris with its classes as numbers, in a random order."""
    import pandas as pd  # noqa: PLC0415
    from sklearn.datasets import load_iris  # noqa: PLC0415

    found = load_iris()
    frame = pd.DataFrame(found.data, columns=["sepal_length", "sepal_width", "petal_length", "petal_width"])
    frame["species"] = found.target
    frame.sample(frac=1.0, random_state=0).to_parquet(into / "train.parquet", index=False)


def speech(data: Path, into: Path) -> None:
    """Draw tones of 20 speakers, one second each, and 5 longer ones of noise."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    rng, rate, rows = np.random.default_rng(0), 16_000, []
    for number in range(105):
        silence = number < 5
        label = 35 if silence else int(rng.integers(0, 20))
        time = np.arange(rate * (3 if silence else 1)) / rate
        sound = rng.normal(size=len(time)) * 0.02 + (0 if silence else np.sin(2 * np.pi * (200 + 40 * label) * time))
        rows.append(
            {
                "file": f"{number}.wav",
                "audio": {"array": sound.astype("float32"), "sampling_rate": rate},
                "label": label,
                "is_unknown": 10 <= label < 35,
                "speaker_id": "noise" if silence else f"speaker{number % 20}",
                "utterance_id": number,
            }
        )
    pd.DataFrame(rows).to_parquet(into / "train.parquet", index=False)


def measurements(data: Path, into: Path) -> None:
    """Draw people, one database for each node, with the columns that the example asks for."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415
    from sqlalchemy import create_engine  # noqa: PLC0415

    rng = np.random.default_rng(0)
    for node in range(8):
        usual = {"bmi": (26, 4), "systolic_bp": (125, 15), "diastolic_bp": (80, 9), "ldl_cholesterol": (120, 30)}
        frame = pd.DataFrame({name: rng.normal(*told, 60).round(1) for name, told in usual.items()})
        frame["age"], frame["hba1c"] = rng.integers(20, 90, 60), rng.normal(5.6, 0.8, 60).round(1)
        engine = create_engine(f"sqlite:///{into}/{node}.db")
        frame.to_sql("person_measurements", engine, index=False)
        engine.dispose()


def mednist(data: Path, into: Path) -> None:
    """Write gray pictures of 64 pixels in MedNIST's six folders: faces stand in for scans."""
    import io  # noqa: PLC0415

    import pandas as pd  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    frame = pd.read_parquet(data / "olivetti" / "train.parquet")
    for number, picture in enumerate(frame["image"]):
        folder = into / "MedNIST" / ["AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT"][number % 6]
        folder.mkdir(parents=True, exist_ok=True)
        Image.open(io.BytesIO(picture["bytes"])).convert("L").resize((64, 64)).save(folder / f"{number:06d}.jpeg")


def saved_parts(source: Path, into: Path) -> None:
    """Save the parts of a data set as its example saves them for each node."""
    from datasets import load_dataset  # noqa: PLC0415

    rows = load_dataset("parquet", data_files=str(source), split="train[:800]")
    for node in range(8):
        rows.shard(8, node).train_test_split(test_size=0.2, seed=42).save_to_disk(str(into / f"part_{node}"))


def vision_transformer(data: Path, into: Path) -> None:
    """Write an untrained ViT-B/16 where torchvision looks for trained weights."""
    import torch  # noqa: PLC0415
    from torchvision.models import ViT_B_16_Weights, vit_b_16  # noqa: PLC0415

    torch.manual_seed(0)
    place = into / "hub" / "checkpoints"
    place.mkdir(parents=True)
    torch.save(vit_b_16().state_dict(), place / ViT_B_16_Weights.IMAGENET1K_V1.url.rpartition("/")[2])


def instructions(data: Path, into: Path) -> None:
    """Write rows of instruction, input and output."""
    part(data / "instructions", into, {"train": 200})


def models(data: Path, into: Path) -> None:
    """Write models by their hub names where the hub's own cache would have them."""
    import shutil  # noqa: PLC0415

    for name in LANGUAGE_MODELS:
        shutil.copytree(data / "weights" / "tiny_llama", cached(into, name), dirs_exist_ok=True)
    whisper(cached(into, "openai/whisper-tiny"))


def cached(into: Path, name: str) -> Path:
    """Make the folder of a model in the hub's cache."""
    place = into / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    found = place / "snapshots" / ("0" * 40)
    found.mkdir(parents=True)
    return found


def whisper(into: Path) -> None:
    """Write an untrained Whisper-tiny whose encoder has one layer."""
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    words = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz"]
    (into / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(words)}), encoding="utf-8")
    (into / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer = WhisperTokenizer(vocab_file=str(into / "vocab.json"), merges_file=str(into / "merges.txt"))
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(into)
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64,
        d_model=384,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    WhisperForConditionalGeneration(config).save_pretrained(into)
