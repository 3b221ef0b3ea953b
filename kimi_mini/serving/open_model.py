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

    @property
    def has_text(self) -> bool:
        """Whether tokens can be shown as text."""
        return self.tokenizer is not None

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
        opened = speaking_bytes(model)
        return replace(opened, notes=(f"{name}: random weights, seed {seed}", *opened.notes))
    folder = Path(name)
    if not name or not folder.is_dir():
        raise ConfigError(f"model {name!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    model = KimiForCausalLM.from_pretrained(folder, dtype=dtype, backend=backend)
    tokenizer, note = open_tokenizer(folder, model.config.vocab_size)
    ends = end_ids(folder, model.config.eos_token_ids)
    notes = (*model.load_report.notes, model.dispatcher.describe())
    if tokenizer is None:
        return OpenModel(model, None, ends, None, (*notes, f"token ids only: {note}"), note)
    return OpenModel(model, tokenizer, ends, None, (*notes, note) if note else notes)


def speaking_bytes(model: KimiForCausalLM) -> OpenModel:
    """A bare model with the byte tokenizer, or with none if its vocabulary is too small for it.

    Weights that were not loaded from a checkpoint are random: ids that stand for no byte are masked
    then (decision 15).
    """
    tokenizer, no_text = bytes_for(model.config.vocab_size)
    masked = tokenizer is not None and model.load_report is None
    return OpenModel(
        model,
        tokenizer,
        frozenset(model.config.eos_token_ids),
        VOCABULARY if masked else None,
        (model.dispatcher.describe(),),
        no_text,
    )
