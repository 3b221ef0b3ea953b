"""What a cache knows of who computes its contents."""

from dataclasses import replace

import pytest
import torch

from cache.identity import Identity
from kimi_mini.config import preset
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.engine import Engine
from kimi_mini.serving.identity import identity_of
from kimi_mini.serving.open_model import around
from kimi_mini.serving.text.hf_json import JsonTokenizer
from kimi_mini.serving.text.tiktoken_bpe import TiktokenTokenizer
from tests.kimi_mini.serving.text import small_tokenizers as small


def nano(seed=0, dtype="float32", backend="auto", **changes):
    config = replace(preset("nano"), **changes)
    return KimiForCausalLM.from_config(config, seed=seed, dtype=dtype, backend=backend)


def identity(**made):
    return identity_of(around(nano(**made)))


def test_the_same_model_is_the_same():
    assert identity() == identity()
    assert all(vars(identity()).values())


@pytest.mark.parametrize(
    "other", [dict(seed=1), dict(dtype="float64"), dict(rms_norm_eps=1e-4)], ids=str
)
def test_weights_dtype_and_config_are_the_model(other):
    assert identity(**other).model != identity().model


def test_one_changed_weight_is_another_model():
    model = nano()
    before = identity_of(around(model))
    with torch.no_grad():
        next(model.parameters()).view(-1)[-1] += 1e-3
    after = identity_of(around(model))
    assert after.model != before.model
    assert (after.tokenizer, after.numerics) == (before.tokenizer, before.numerics)


def test_a_saved_model_keeps_its_identity(tmp_path):
    model = nano()
    model.save_pretrained(tmp_path / "saved")
    again = KimiForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert identity_of(around(again)) == identity_of(around(model))


def test_the_backend_is_the_numerics():
    one, other = identity(backend="torch"), identity(backend="reference")
    assert one.numerics != other.numerics and one.model == other.model


def test_no_tokenizer_has_an_empty_fingerprint():
    assert identity_of(replace(around(nano()), tokenizer=None)).tokenizer == ""


def test_tokenizers_of_other_files_have_other_fingerprints(tmp_path):
    def fingerprint(kind, name):
        kind(tmp_path / name)
        return JsonTokenizer(tmp_path / name).fingerprint

    prints = [fingerprint(small.llama, "one"), fingerprint(small.word_piece, "other")]
    assert fingerprint(small.llama, "same") == prints[0] != prints[1]


def test_ranks_and_specials_are_in_the_fingerprint_of_a_tiktoken_model(tmp_path):
    pytest.importorskip("tiktoken", reason="extra 'tiktoken' is not installed")

    def fingerprint(name, more=(), **config):
        small.write_ranks(tmp_path / name, more)
        small.write_json(tmp_path / name, "tokenizer_config.json", config)
        return TiktokenTokenizer(tmp_path / name).fingerprint

    plain = fingerprint("plain")
    assert fingerprint("same") == plain
    bos = {"256": {"content": "<bos>", "special": True}}
    others = [fingerprint("more", [b"ab"]), fingerprint("specials", added_tokens_decoder=bos)]
    assert len({plain, *others}) == 3


@pytest.mark.parametrize("cache", ["radix", "blocks"])
def test_an_engine_with_reuse_gives_it_to_its_cache(cache):
    engine = Engine(nano(), prefix_cache=cache)
    assert engine.cache.identity == identity_of(engine.opened)


def test_an_engine_without_reuse_does_not_read_its_weights_for_it():
    assert Engine(nano()).cache.identity == Identity()
