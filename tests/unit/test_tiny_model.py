"""The demo's model is made once, whole, and the same each time, however many replicas want it at once."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_apps import tiny_model


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure(tmp_path_factory.mktemp("first"))


def test_replicas_that_race_get_the_same_whole_model(made: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: tiny_model.ensure(tmp_path), range(3)))
    assert folders == {tmp_path / "tiny-llama-1"}
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-1"], "nothing half-made is left behind"
    assert digest(folders.pop()) == digest(made)


def test_it_is_made_only_once(made: Path) -> None:
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert tiny_model.ensure(made.parent) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_configuration_and_weights_agree_with_the_tokenizer(made: Path) -> None:
    from safetensors import safe_open
    from tokenizers import Tokenizer

    config = json.loads((made / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert config["vocab_size"] == tokenizer.get_vocab_size() == tiny_model.VOCABULARY
    with safe_open(made / "model.safetensors", "pt") as weights:
        assert weights.get_slice("lm_head.weight").get_shape() == [tiny_model.VOCABULARY, tiny_model.HIDDEN]


def test_any_text_comes_back_from_its_tokens(made: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in ("plain words", "Grüße, 東京 🚀\n\ttabs"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_cache_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        tiny_model.ensure(blocked)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QM_CACHE", raising=False)
    assert tiny_model.cache_folder() == tmp_path / "quartermaster"
    monkeypatch.setenv("QM_CACHE", str(tmp_path / "mine"))
    assert tiny_model.cache_folder() == tmp_path / "mine"
