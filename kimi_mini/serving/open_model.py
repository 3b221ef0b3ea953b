"""A model by name: a preset with random weights, or a checkpoint folder, and how to talk to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kimi_mini.config import PRESETS, ConfigError, preset
from kimi_mini.model import KimiForCausalLM
from kimi_mini.serving.text.byte_level import VOCABULARY
from kimi_mini.serving.text.opening import bytes_for, end_ids, open_tokenizer
from kimi_mini.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenModel:
    """A model ready to run.

    tokenizer: None if the model takes and gives token ids only; no_text then says why. end_ids: ids
    that end a sequence. sample_below: ids from here on are not sampled (random weights would
    otherwise mostly pick ids that stand for no byte). notes: lines a person may want to read.
    """

    model: KimiForCausalLM
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    sample_below: int | None
    notes: tuple[str, ...]
    no_text: str | None = None

    def encode(self, text: str) -> list[int]:
        """Prompt text → ids. ValueError if this model cannot be addressed in text."""
        if self.tokenizer is None:
            raise ValueError(f"no text for this model, use token ids: {self.no_text}")
        return self.tokenizer.encode(text)


def open_model(
    name: str, dtype: str = "float32", seed: int = 0, backend: str = "auto"
) -> OpenModel:
    """The preset or checkpoint folder called `name`.

    dtype: the name of one of `DTYPES` or "auto" (what the config says). seed: of a preset's
    random weights. Raises ConfigError, CheckpointError or ValueError, one line each, for a name,
    folder or file that is wrong.
    """
    if name in PRESETS:
        config = preset(name)
        kind = config.dtype if dtype == "auto" else dtype
        model = KimiForCausalLM.from_config(config, seed=seed, dtype=kind, backend=backend)
        opened = around(model)
        return replace(opened, notes=(f"{name}: random weights, seed {seed}", *opened.notes))
    folder = Path(name)
    if not name or not folder.is_dir():
        raise ConfigError(f"model {name!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    return around(KimiForCausalLM.from_pretrained(folder, dtype=dtype, backend=backend))


def around(model: KimiForCausalLM) -> OpenModel:
    """What belongs to a model: of the folder that it was loaded from, its own tokenizer and end
    ids; with random weights, bytes, and ids that stand for none are masked (decision 15)."""
    config, loaded = model.config, model.load_report
    notes: tuple[str, ...] = (model.dispatcher.describe(),)
    if loaded is None:
        tokenizer, note = bytes_for(config.vocab_size)
        ends = frozenset(config.eos_token_ids)
        masked = VOCABULARY if tokenizer else None
        return OpenModel(model, tokenizer, ends, masked, notes, note)
    tokenizer, note = open_tokenizer(loaded.folder, config.vocab_size)
    ends = end_ids(loaded.folder, config.eos_token_ids)
    notes = (*loaded.notes, *notes)
    if tokenizer is None:
        return OpenModel(model, None, ends, None, (*notes, f"token ids only: {note}"), note)
    return OpenModel(model, tokenizer, ends, None, (*notes, note) if note else notes)
