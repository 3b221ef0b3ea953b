"""Small tokenizers of the kinds that checkpoints bring, written into a folder."""

import base64
import json

import pytest

SENTENCES = ["KDA keeps a state", "the state 中文 of a prefix 🙂🙂", "pages you can cut, états"]
LLAMA_WORDS = ["▁the", "▁state", "▁", "a", "b", "▁▁", "é", "\ufffd", "ate", "<0x4", "<0xZZ>"]


def library():
    return pytest.importorskip("tokenizers", reason="extra 'tokenizers' is not installed")


def byte_level_bpe(folder):
    """Trained on SENTENCES often enough that tokens hold parts of characters and whole words."""
    lib = library()
    made = lib.Tokenizer(lib.models.BPE())
    made.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(SENTENCES * 4, trainer)
    # a space and ü: no byte letters, and a letter that would be another byte
    made.add_special_tokens(["<a special>", "<ü>"])
    made.add_tokens([lib.AddedToken("<think>", special=False, normalized=False)])
    return saved(made, folder)


def llama(folder):
    """Words with a leading space, and a token for every byte that has no word."""
    lib = library()
    words = ["<s>", "</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *LLAMA_WORDS]
    ids = {word: i for i, word in enumerate(words)}
    made = lib.Tokenizer(lib.models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = lib.normalizers.Sequence(
        [lib.normalizers.Prepend("▁"), lib.normalizers.Replace(" ", "▁")]
    )
    made.decoder = lib.decoders.Sequence(
        [
            lib.decoders.Replace("▁", " "),
            lib.decoders.ByteFallback(),
            lib.decoders.Fuse(),
            lib.decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    made.post_processor = lib.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return saved(made, folder)


def metaspace(folder, prepend_scheme="always"):
    lib = library()
    words = ["<unk>", "▁the", "▁", "a", "▁▁b", "中", "🙂", "▁é", "t", "h", "e"]
    scored = [(word, -float(i)) for i, word in enumerate(words)]
    made = lib.Tokenizer(lib.models.Unigram(scored, unk_id=0))
    made.pre_tokenizer = lib.pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    made.decoder = lib.decoders.Metaspace(prepend_scheme=prepend_scheme)
    made.add_special_tokens(["<unk>"])
    return saved(made, folder)


def word_piece(folder):
    lib = library()
    words = ["[PAD]", "[UNK]", "the", "##s", "don", "##'t", "n't", ".", ",", "é", "##中"]
    made = lib.Tokenizer(
        lib.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = lib.pre_tokenizers.Whitespace()
    made.decoder = lib.decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]"])
    return saved(made, folder)


def words_without_decoder(folder):
    lib = library()
    made = lib.Tokenizer(lib.models.WordLevel({"<unk>": 0, "the": 1, "中": 2}, unk_token="<unk>"))
    made.pre_tokenizer = lib.pre_tokenizers.Whitespace()
    return saved(made, folder)


def saved(made, folder):
    """The library's own object; the folder holds it as tokenizer.json."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    return made


def write_ranks(folder, more=()):
    """A tiktoken.model: the 256 bytes, byte b as rank b, then `more`."""
    folder.mkdir(exist_ok=True)
    tokens = [*(bytes([byte]) for byte in range(256)), *more]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")


def write_json(folder, name, value):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
