"""A model by name: a preset with random weights, or a checkpoint folder, and how to talk to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kimi_mini.config import PRESETS, ConfigError, preset
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.tokenizer import VOCABULARY, ByteTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")


@dataclass(frozen=True)
class OpenModel:
    """A model ready to run.

    has_text: tokens are bytes and can be shown as text. sample_below: ids from here on are not
    sampled (random weights would otherwise mostly pick ids that stand for no byte).
    notes: lines a person may want to read.
    """

    model: KimiForCausalLM
    has_text: bool
    sample_below: int | None
    notes: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Prompt text → ids. ValueError if this model cannot be addressed in text."""
        if not self.has_text:
            raise ValueError(
                "this model cannot be prompted with text yet: the byte tokenizer does not fit it; "
                "use token ids"
            )
        return ByteTokenizer().encode(text)


def open_model(
    name: str, dtype: str = "float32", seed: int = 0, backend: str = "auto"
) -> OpenModel:
    """The preset or checkpoint folder called `name`.

    dtype: the name of one of `DTYPES` or "auto" (what the config says). seed: of a preset's
    random weights. Raises ConfigError or CheckpointError for a name, folder or file that is wrong.
    """
    if name in PRESETS:
        config = preset(name)
        kind = config.dtype if dtype == "auto" else dtype
        model = KimiForCausalLM.from_config(config, seed=seed, dtype=kind, backend=backend)
        notes = (f"{name}: random weights, seed {seed}", model.dispatcher.describe())
        return OpenModel(model, True, VOCABULARY, notes)
    folder = Path(name)
    if not name or not folder.is_dir():
        raise ConfigError(f"model {name!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    model = KimiForCausalLM.from_pretrained(folder, dtype=dtype, backend=backend)
    own_tokenizer = any((folder / file).exists() for file in TOKENIZER_FILES)
    has_text = model.config.vocab_size >= VOCABULARY and not own_tokenizer
    return OpenModel(model, has_text, None, (*model.load_report.notes, model.dispatcher.describe()))
