"""Language models of the Hugging Face hub read texts with their own tokens, and train like any other network."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raypfl as library
from raypfl.common.errors import ConfigError
from raypfl.models import MODELS
from raypfl.models.weights import Pretrained
from tests.data.test_texts import reviews
from tests.support.runs import experiment

pytestmark = pytest.mark.thorough

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "plot", "was", "superb", "awful"]
LENGTH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has it: a small BERT of random weights, with its tokenizer; and reviews."""
    import transformers

    folder = tmp_path_factory.mktemp("hub")
    transformers.BertTokenizerFast(vocab={word: token for token, word in enumerate(WORDS)}).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes))
    bert.save_pretrained(folder)
    (folder / "reviews").mkdir()
    (folder / "reviews" / "reviews.csv").write_text("\n".join(reviews()))
    return folder


def described(folder: Path, output: Path, **changes: Any) -> library.Experiment:
    name = f"transformers:{folder}"
    data = {"name": "text_table", "root": str(folder / "reviews"), "target": "opinion", "text": "review"}
    small = {"rounds": 2, "cohort__size": 2, "partition": "{name: dirichlet, clients: 3, alpha: 1}", "model": name}
    options = json.dumps(data | {"tokens": name, "length": LENGTH})
    return experiment(output, data=options, evaluation__every=2, **small | changes)


def test_a_language_model_is_its_hidden_states_mean_and_an_output_layer(folder):
    import transformers

    name = f"transformers:{folder}"
    factory = partial(MODELS.get(name), (LENGTH,), 2, len(WORDS))
    network = Pretrained(factory, name, "pretrained")().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(["The film was superb", "awful"], padding="max_length", max_length=LENGTH, return_tensors="pt")

    bert = transformers.AutoModel.from_pretrained(folder).eval()
    states = bert(**encoded).last_hidden_state
    weights = encoded["attention_mask"][:, :, None]
    expected = network.head((states * weights).sum(1) / weights.sum(1))
    torch.testing.assert_close(network(encoded["input_ids"]), expected)
    assert "head drawn at random" in network.origin


@pytest.mark.parametrize(("method", "lora"), [("ditto", 0), ("fedsa-lora", 2)])
def test_a_run_has_the_same_bits_again_and_predicts_new_texts(folder, tmp_path, method, lora):
    changes = {"method": method, "model__weights": "pretrained"} | ({"model__lora": lora} if lora else {})
    first, second = (library.run(described(folder, tmp_path, **changes)) for _ in range(2))
    assert first.weights_hash == second.weights_hash
    assert library.trained_models(first.run_dir).outline.vocabulary == WORDS

    (tmp_path / "new.csv").write_text("review\nsuperb film\n")
    predictions = library.predict(first.run_dir, tmp_path / "new.csv", client=0)
    assert predictions.table["predicted"].to_pylist()[0] in ("good", "bad")


def test_texts_are_prepared_again_when_the_tokenizer_changes(folder, tmp_path, opened):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_bytes((folder / "config.json").read_bytes())
    table = {"root": str(folder / "reviews"), "target": "opinion", "text": "review"}
    table["tokens"] = f"transformers:{tmp_path}/hub"
    plots = []
    for words in (WORDS, [*WORDS[:5], *reversed(WORDS[5:])]):
        (tmp_path / "hub" / "vocab.txt").write_text("\n".join(words))
        data = opened("text_table", **table)
        plots.append(int((data.inputs == words.index("plot")).sum()))
    assert plots[0] == plots[1] > 0
    with pytest.raises(ConfigError, match=r"The tokenizer of transformers:.* has changed"):
        library.Experiment(data={"name": "text_table"} | table).data.reader.read_in(WORDS)


def test_networks_for_which_token_0_is_padding_refuse_the_tokens_of_models_for_which_it_is_a_word(folder, tmp_path):
    (tmp_path / "hub").mkdir()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config | {"pad_token_id": 1}))
    (tmp_path / "hub" / "vocab.txt").write_text("\n".join(["[UNK]", "[PAD]", *WORDS[2:]]))
    run = described(folder, tmp_path).override([f"data.tokens=transformers:{tmp_path}/hub", "model=fasttext"])
    with pytest.raises(ConfigError, match=r"model is 'fasttext', for which token 0 is padding, but that of .* is 1"):
        library.run(run)


def test_a_model_of_the_hub_is_refused_at_once_without_a_network(folder, tmp_path, monkeypatch):
    def unreachable(*args: object) -> bool:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_exists", unreachable)
    with pytest.raises(ConfigError, match=r"nobody/nothing is neither in .*, and could not be downloaded: no network"):
        library.run(described(folder, tmp_path).override(["data.tokens=transformers:nobody/nothing"]))


def test_other_tokens_options_and_places_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"but data\.tokens is 'words'; set data\.tokens=transformers:"):
        library.run(described(folder, tmp_path).override(["data.tokens=words"]))
    with pytest.raises(ConfigError, match=r"data\.vocabulary has no effect with the tokens of transformers:"):
        described(folder, tmp_path).override(["data.vocabulary=50"])
    with pytest.raises(ConfigError, match=r"has no 'hidden_sizes'; did you mean 'hidden_size'"):
        library.run(described(folder, tmp_path, model__hidden_sizes=8))
    with pytest.raises(ConfigError, match=r"but the model's own tokens at the ends of a text take 2"):
        library.run(described(folder, tmp_path).override(["data.length=2"]))
    with pytest.raises(ConfigError, match="is neither in the cache of the Hugging Face hub nor a folder"):
        library.run(described(folder, tmp_path).override([f"data.tokens=transformers:{tmp_path}/nothing"]))
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ConfigError, match=rf"is a folder; name it by its whole path: transformers:{folder}"):
        library.run(described(folder, tmp_path).override([f"data.tokens=transformers:{folder.name}"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers is not installed: pip install 'raypfl\[transformers\]'"):
        library.run(described(folder, tmp_path))
